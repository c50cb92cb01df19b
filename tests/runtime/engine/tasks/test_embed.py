"""A vector is torch's hidden states pooled over the row's own tokens, whatever the batch."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.embed import embed
from transferry.runtime.errors import UsageError

TEXTS = ["a", *(pair.source for pair in builtin_pairs(25, seed=6))]


@pytest.fixture(scope="module")
def engine(reader_bundle_folder: Path) -> Engine:
    return Engine(reader_bundle_folder, replicas=2)


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


def test_bad_rows_are_nan_and_say_why(engine: Engine) -> None:
    broken = RowError("undecodable", "byte 3 is no UTF-8")
    *bad, good = embed(engine, [broken, " ", "a " * 99, "a"])
    assert [row.error and row.error.kind for row in bad] == ["undecodable", "empty", "too-long"]
    assert (good.error, good.vector.shape) == (None, (32,))
    assert good.record() == {"source": "a", "vector": good.vector}
    for row in bad:
        assert row.error is not None
        assert np.isnan(row.vector).all()
        assert row.vector.shape == good.vector.shape
        assert row.record() == {"source": row.source, "error": row.error.record()}


def test_equal_vectors_are_equal_results(engine: Engine) -> None:
    """Of errors too, whose vectors are NaN."""
    texts = ["a dog", "a cat", ""]
    first, again = (list(embed(engine, texts)) for _ in range(2))
    assert first == again
    assert len([one for one in first for other in first if one == other]) == 3


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
