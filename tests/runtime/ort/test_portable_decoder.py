"""The graphs as a decoder: the cache is a value, and it always belongs to the right rows."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

from tests.commands import python
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import InputError
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions

Logits = NDArray[np.floating[Any]]

SOURCE = np.array([[9, 40, 77, 12, 2], [30, 8, 2, 0, 0], [5, 2, 0, 0, 0], [61, 62, 63, 2, 0]])
MASK = SOURCE != 0
TARGET = np.array([[1, 20, 33, 7], [1, 5, 5, 90], [1, 64, 3, 18], [1, 71, 16, 44]])


@pytest.fixture(scope="module")
def decoder(bundle_folder: Path) -> PortableDecoder:
    bundle = Bundle.load(bundle_folder)
    return PortableDecoder(bundle, bundle.variant(), SessionOptions())


def test_shapes(decoder: PortableDecoder) -> None:
    state = decoder.start(SOURCE, MASK)
    assert len(state.cross) == len(state.past) == 4, "keys and values of two layers"
    assert {tuple(value.shape()) for value in state.cross} == {(4, 2, 8, 16)}, "a multiple of 4"
    assert {tuple(value.shape()) for value in state.past} == {(4, 2, 0, 16)}
    output, state = decoder.step(TARGET[:, :3], state)
    logits = output.all_logits
    assert logits.shape == (4, 3, decoder.vocabulary_size)
    assert logits.dtype == np.float32
    assert {tuple(value.shape()) for value in state.past} == {(4, 2, 3, 16)}


def test_beams_change_places_without_a_copy_of_the_cross(decoder: PortableDecoder) -> None:
    beams = decoder.select(decoder.start(SOURCE[:2], MASK[:2]), np.array([0, 0, 1, 1]))
    _, beams = decoder.step(TARGET[:, :1], beams)
    swapped = decoder.select(beams, np.array([1, 1, 3, 2]))
    assert swapped.cross is beams.cross
    assert swapped.mask is beams.mask
    for after, before in zip(swapped.past, beams.past, strict=True):
        np.testing.assert_array_equal(after.numpy(), before.numpy()[[1, 1, 3, 2]])
    crossed = decoder.select(beams, np.array([0, 2, 1, 3]))
    for after, before in zip(crossed.cross, beams.cross, strict=True):
        np.testing.assert_array_equal(after.numpy(), before.numpy()[[0, 2, 1, 3]])


def test_tensors_are_copies_by_name(decoder: PortableDecoder) -> None:
    _, state = decoder.step(TARGET[:, :2], decoder.start(SOURCE, MASK))
    tensors = decoder.tensors(state)
    parts = [f"{layer}.{part}" for layer in range(2) for part in ("keys", "values")]
    assert list(tensors) == [f"{role}.{part}" for role in ("cross", "past") for part in parts]
    assert all(tensor.shape[2] == 5 for name, tensor in tensors.items() if "cross" in name)
    assert all(tensor.shape[2] == 2 for name, tensor in tensors.items() if "past" in name)
    kept = tensors["past.0.keys"].copy()
    tensors["past.0.keys"].fill(0)
    np.testing.assert_array_equal(decoder.tensors(state)["past.0.keys"], kept)


def test_describes_what_decides_the_numbers(decoder: PortableDecoder) -> None:
    found = decoder.describe()
    assert found["variant"] == "portable"
    assert (found["provider"], found["threads"], found["optimisation"]) == ("cpu", 1, "all")
    (nodes,) = found["nodes"]
    name, count = nodes.split()
    assert name == "CPUExecutionProvider"
    assert int(count) > 20


def test_a_process_that_may_have_no_more_memory_is_told_so(bundle_folder: Path) -> None:
    script = f"""
import resource
from pathlib import Path
import numpy as np
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import AllocationError
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions

bundle = Bundle.load(Path({str(bundle_folder)!r}))
decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions())
source = np.full((1 << 17, 60), 5)
mask = np.ones(source.shape, np.bool_)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
room = used + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    decoder.start(source, mask)  # the embeddings alone take 1 GB
except AllocationError as error:
    print(error)
decoder.start(source[:9], mask[:9])
"""
    done = python("-c", script)
    assert done.stdout.startswith("there is not enough memory to run portable/encoder.onnx: Error")
    assert done.stdout.endswith("Make batches smaller\n")


@pytest.mark.parametrize(
    ("kind", "said", "short"),
    [
        (native.RuntimeException, "BFCArena: Failed to allocate memory for requested buffer", True),
        (native.Fail, "Available memory of 4 is smaller than requested bytes of 8", True),
        (native.EPFail, "CUDA failure 2: out of memory ; GPU=0", True),
        (RuntimeError, "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED", True),
        (native.RuntimeException, "std::bad_alloc", True),
        (native.Fail, "bad allocation", True),
        (native.Fail, "indices element out of data bounds", False),
    ],
)
def test_what_onnxruntime_says_of_memory_is_understood(
    decoder: PortableDecoder,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    said: str,
    short: bool,
) -> None:
    class Failing:
        def __init__(self, session: Any) -> None:
            self.io_binding = session.io_binding

        def run_with_iobinding(self, binding: Any, options: Any) -> None:
            raise kind(said)

    runner: Any = decoder._runners["encoder"]
    monkeypatch.setattr(runner, "session", Failing(runner.session))
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        decoder.start(SOURCE, MASK)
    assert isinstance(caught.value, MemoryError) is short
    assert isinstance(caught.value.__cause__, kind)


def test_graph_that_cannot_run_is_named(decoder: PortableDecoder) -> None:
    source = np.full((1, 2), decoder.vocabulary_size)
    with pytest.raises(InputError, match=r"expected portable/encoder.onnx to run, found: .*export"):
        decoder.start(source, np.ones((1, 2), np.bool_))
