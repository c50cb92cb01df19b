"""A vector is torch's hidden states pooled over the row's own tokens, whatever the batch."""

import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.corpus import builtin_pairs
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.embed import embed
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.encoder import EncoderModel

TEXTS = ["a", *(pair.source for pair in builtin_pairs(25, seed=6))]


@pytest.fixture(scope="module")
def engine(reader_bundle_folder: Path) -> Engine:
    return Engine.load(reader_bundle_folder, replicas=2)


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("normalise", [False, True])
def test_vectors_are_torch_s(
    engine: Engine, reader_run_folder: Path, pooling: Literal["mean", "first"], normalise: bool
) -> None:
    checkpoint = load_checkpoint(reader_run_folder)
    tokenizer, model = checkpoint.tokenizer, checkpoint.model.double()
    found = list(embed(engine, TEXTS, pooling=pooling, normalise=normalise))
    assert [row.source for row in found] == TEXTS
    for text, row in zip(TEXTS, found, strict=True):
        ids = tokenizer.special.wrap(tokenizer.encode(text))
        assert (ids[0], ids[-1]) == (1, 2)
        source = torch.tensor([ids])
        with torch.inference_mode():
            states = model.encode(source, torch.ones_like(source, dtype=torch.bool))[0]
        vector = states.mean(dim=0) if pooling == "mean" else states[0]
        if normalise:
            vector = vector / vector.norm()
        assert row.vector.dtype == np.float32
        assert row.source_tokens == len(ids)
        np.testing.assert_allclose(row.vector, vector.numpy(), atol=1e-5)


def test_a_vector_does_not_depend_on_the_batch(engine: Engine) -> None:
    alone = [next(iter(embed(engine, [text]))).vector for text in TEXTS]
    for rows, tokens in ((1, 4096), (5, 60), (64, 4096)):
        batches = BatchOptions(rows=rows, tokens=tokens, window=11)
        cut = Engine(engine.bundle, engine.model, batches=batches)
        for left, right in zip(alone, embed(cut, TEXTS), strict=True):
            np.testing.assert_array_equal(left, right.vector)


def test_bad_rows_are_nan_and_say_why(engine: Engine) -> None:
    empty, good, long = embed(engine, [" ", "a", "a " * 99])
    assert empty.error is not None
    assert long.error is not None
    assert (empty.error.kind, good.error, long.error.kind) == ("empty", None, "too-long")
    assert np.isnan(empty.vector).all()
    assert empty.vector.shape == good.vector.shape
    assert empty.record()["error"]["kind"] == "empty"
    assert len(good.record()["vector"]) == 32


def test_several_devices_share_the_rows(
    engine: Engine, reader_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [row.vector for row in embed(engine, TEXTS)]
    devices = [Engine.load(reader_bundle_folder).encoder for _ in range(2)]
    meeting, encode = threading.Barrier(2), EncoderModel.encode
    at_work = []

    def together(self: EncoderModel, *arguments: Any) -> Any:
        if self not in at_work:
            at_work.append(self)
            meeting.wait(60)
        return encode(self, *arguments)

    monkeypatch.setattr(EncoderModel, "encode", together)
    shared = Engine(engine.bundle, *devices, batches=BatchOptions(rows=4))
    for vector, row in zip(expected, embed(shared, TEXTS), strict=True):
        np.testing.assert_array_equal(row.vector, vector)
    assert len(at_work) == 2


def test_long_rows_are_cut_short_and_say_so(engine: Engine) -> None:
    tokenizer = engine.bundle.tokenizer
    text = "a b " * 99
    beginning = tokenizer.decode(tokenizer.encode(text)[:62])
    cut, whole = embed(engine, [text, beginning], long_rows="truncate")
    assert (cut.source, cut.source_tokens, cut.truncated, cut.error) == (text, 64, True, None)
    assert whole.truncated is False
    np.testing.assert_array_equal(cut.vector, whole.vector)
    with pytest.raises(UsageError, match="long_rows=split and task embed exclude each other"):
        embed(engine, [], long_rows="split")


def test_an_error_that_came_in_comes_out_in_its_place(engine: Engine) -> None:
    broken = RowError("undecodable", "byte 3 is no UTF-8")
    rows = list(embed(engine, [broken, "a", broken, "b"]))
    assert [(row.source, row.error) for row in rows] == [
        ("", broken),
        ("a", None),
        ("", broken),
        ("b", None),
    ]
    assert np.isnan(rows[2].vector).all()
    np.testing.assert_array_equal(rows[3].vector, next(embed(engine, ["b"])).vector)


def test_a_decoder_embeds_nothing(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="encoder-decoder, which neither embeds nor fills in"):
        embed(Engine.load(bundle_folder), ["a"])
