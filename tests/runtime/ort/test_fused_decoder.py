"""Properties of the cache in place alone: capacities, columns written again, memory of a thread.

That it keeps the contract of every decoder is shown in tests/export/test_conformance.py.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import GraphSpec, TensorSpec
from transferry.runtime.decoding.batching import UNIT, padded
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.ort.cache_buffers import (
    KEPT_BYTES,
    LARGEST_KEPT,
    CacheBuffers,
    FusedState,
    default_batches,
)
from transferry.runtime.ort.encoder import PASS_TOKENS
from transferry.runtime.ort.fused_decoder import (
    AHEAD_CELLS,
    SPARE_COLUMNS,
    FusedDecoder,
)
from transferry.runtime.ort.session import Device, SessionOptions

Logits = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]

SOURCES = [[9, 40, 77, 12, 2], [30, 8, 2], [5, 2], [61, 62, 63, 2]]
TARGET = np.random.default_rng(0).integers(3, 350, (4, 40))


@pytest.fixture(scope="module")
def decoder(fast_bundle_folder: Path) -> FusedDecoder:
    bundle = Bundle.load(fast_bundle_folder)
    return FusedDecoder(bundle, bundle.variant("cpu-fp32"), SessionOptions())


@pytest.mark.parametrize(
    ("d_head", "kind", "device", "rows"),
    [
        (64, "float32", "cpu", 128),
        (64, "int8", "cpu", 256),
        (16, "float32", "cpu", 256),
        (64, "bfloat16", "cuda", 1024),
    ],
)
def test_a_large_cache_has_half_the_rows(d_head: int, kind: str, device: Device, rows: int) -> None:
    shape = "batch", 4, "columns", d_head
    past, cross = TensorSpec("past", "past", kind, shape), TensorSpec("cross", "cross", kind, shape)
    graph = GraphSpec("decoder.onnx", inputs=(past, cross) * 6, outputs=())
    assert default_batches(graph, device).rows == rows


def started(decoder: FusedDecoder, sources: Sequence[Sequence[int]] = SOURCES) -> FusedState:
    return decoder.start(*pad_sources(sources, 0))


def fed(
    decoder: FusedDecoder, target: Integers, state: FusedState
) -> tuple[list[Logits], FusedState]:
    """Feeds a token at a time; returns the logits of each step."""
    logits = []
    for position in range(target.shape[1]):
        output, state = decoder.step(target[:, position : position + 1], state)
        logits.append(output.all_logits.copy())
    return logits, state


def capacity(state: FusedState) -> int:
    return int(state.past[0].buffer.shape()[2])


def test_a_cache_grows_as_long_as_it_must(decoder: FusedDecoder) -> None:
    _, state = fed(decoder, TARGET[:, :1], started(decoder))
    assert capacity(state) == padded(1 + AHEAD_CELLS // 4)
    _, state = fed(decoder, TARGET[:, 1:], state)
    assert capacity(state) == TARGET.shape[1]
    _, state = fed(decoder, TARGET.repeat(16, axis=0)[:, :1], started(decoder, SOURCES * 16))
    assert capacity(state) == UNIT, "with many rows each unused column is read often"


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_a_cache_with_few_slots_seldom_grows(decoder: FusedDecoder, slots: int) -> None:
    state, capacities = started(decoder, SOURCES[:1] * slots), []
    for position in range(40):
        _, state = decoder.step(np.full((slots, 1), position + 5), state)
        capacities.append(capacity(state))
    assert capacities == sorted(capacities), "never too long at once"
    assert len(set(capacities)) <= {1: 2, 3: 2, 16: 5}[slots]


def test_a_cache_is_no_longer_than_those_that_stay_need(fast_writer_bundle_folder: Path) -> None:
    bundle = Bundle.load(fast_writer_bundle_folder)
    writer = FusedDecoder(bundle, bundle.variant("cpu-fp32"), SessionOptions())
    _, state = fed(writer, TARGET[:2, :2], started(writer, [[5] * 55, [6] * 3]))
    assert capacity(state) >= 57
    _, state = fed(writer, TARGET[:1, :1], writer.select(state, np.array([1])))
    assert capacity(state) <= 6 + SPARE_COLUMNS


def test_the_next_batch_of_a_shape_has_the_buffers_of_the_last(decoder: FusedDecoder) -> None:
    """Whatever the last one left there, and only once no state reads them."""
    expected, before = fed(decoder, TARGET[:, :6], started(decoder))
    lease = before.lease
    assert lease is not None
    for view in lease.past:
        view.numpy()[...] = np.nan
    buffer, steps = before.past[0].buffer, len(before.calls)
    other = started(decoder)
    assert other.cross[0].buffer is not before.cross[0].buffer, "a state still reads them"
    del other, before, lease
    state = started(decoder, [source[::-1] for source in SOURCES])
    fed(decoder, TARGET[:, 6:12], state)
    del state
    state = started(decoder)
    found, after = fed(decoder, TARGET[:, :6], state)
    assert after.past[0].buffer is buffer
    assert len(after.calls) == steps, "the steps are bound already"
    again, apart = fed(decoder, TARGET[:, :6], state)
    assert apart.past[0].buffer is not buffer, "two ways from one state read one cache each"
    np.testing.assert_array_equal([found, again], [expected, expected])


def test_a_thread_keeps_few_buffers(decoder: FusedDecoder) -> None:
    for slots in range(1, 60):
        fed(decoder, TARGET[:1, :1].repeat(slots, axis=0), started(decoder, [[5] * 40] * slots))
    sizes = [size for size, *_ in decoder._buffers._own.batches.values()]
    assert sizes
    assert sum(sizes) <= KEPT_BYTES
    assert max(sizes) <= LARGEST_KEPT


def test_beams_that_change_places_move_nothing(decoder: FusedDecoder) -> None:
    state = decoder.select(started(decoder), np.arange(4).repeat(2))
    _, state = fed(decoder, np.arange(3, 27).reshape(8, 3), state)
    swapped = decoder.select(state, np.array([1, 0, 2, 2, 5, 4, 7, 7]))
    assert swapped.past is state.past
    assert swapped.cross is state.cross


@pytest.mark.parametrize("width", [2, 4])
def test_columns_that_nobody_sees_are_written_again(decoder: FusedDecoder, width: int) -> None:
    """Forty steps of random parents: few columns stay in sight, and the cache stays small."""
    rng = np.random.default_rng(width)
    state, largest = decoder.select(started(decoder), np.arange(4).repeat(width)), 0
    for _ in range(40):
        _, state = decoder.step(rng.integers(3, 350, (4 * width, 1)), state)
        parents = np.arange(4)[:, None] * width + rng.integers(0, width, (4, width))
        state = decoder.select(state, parents.ravel())
        largest = max(largest, capacity(state))
    # Beams of random parents soon share all but their last few tokens.
    assert largest < 40 + 8 * width


def test_memory_that_grew_is_where_an_older_state_goes_on(decoder: FusedDecoder) -> None:
    """A thread keeps the memory of its logits, and a larger batch makes it anew."""
    expected, _ = fed(decoder, TARGET[:, :7], started(decoder))
    found, state = fed(decoder, TARGET[:, :2], started(decoder))
    larger = started(decoder, [[5, 6, 2]] * 70)
    for first in (2, 4):
        fed(decoder, np.full((70, 1), 7), larger)
        logits, state = fed(decoder, TARGET[:, first : first + 2], state)
        found += logits
    with ThreadPoolExecutor(1) as pool:  # a thread with memory of its own
        found += pool.submit(fed, decoder, TARGET[:, 6:7], state).result()[0]
    np.testing.assert_array_equal(found, expected)


def test_an_older_state_sees_no_column_of_a_newer_one(decoder: FusedDecoder) -> None:
    _, state = fed(decoder, TARGET[:, :3], started(decoder))
    expected, _ = fed(decoder, TARGET[:, 3:6], state)
    found, _ = fed(decoder, TARGET[:, 3:6], state)
    np.testing.assert_array_equal(found, expected)


def test_more_sources_than_are_encoded_at_once(decoder: FusedDecoder) -> None:
    rng = np.random.default_rng(8)
    sources = [rng.integers(3, 350, 1 + n % 42).tolist() for n in range(67)]
    assert sum(map(len, sources)) > 2 * PASS_TOKENS["cpu"]
    ((logits,), _) = fed(decoder, np.full((67, 1), 7), started(decoder, sources))
    for row, source in enumerate(sources):
        ((alone,), _) = fed(decoder, np.full((1, 1), 7), started(decoder, [source]))
        np.testing.assert_array_equal(logits[row], alone[0])


def test_no_source_is_padded_beyond_the_positions(decoder: FusedDecoder) -> None:
    """Of 5 positions, an encoder has no 8; the columns beyond them stay zeros."""
    source, mask = pad_sources([[4, 5, 6, 7, 8], [9, 4]], 0)
    made = (CacheBuffers(decoder._runners, most).encode(source, mask, 512) for most in (5, 512))
    for short, long in zip(*made, strict=True):
        assert short.numpy().shape == long.numpy().shape
        assert not short.numpy()[..., 5:, :].any()
        np.testing.assert_allclose(short.numpy()[..., :5, :], long.numpy()[..., :5, :], atol=1e-5)
        assert long.numpy()[..., 5:, :].any()


def test_padding_beyond_the_longest_source_changes_nothing(decoder: FusedDecoder) -> None:
    source, mask = pad_sources(SOURCES, 0)
    wide = np.pad(source, ((0, 0), (0, 9))), np.pad(mask, ((0, 0), (0, 9)))
    expected, _ = fed(decoder, TARGET[:, :3], decoder.start(source, mask))
    found, _ = fed(decoder, TARGET[:, :3], decoder.start(*wide))
    assert np.array_equal(found, expected)
