"""Scores are torch's log-probabilities, whatever the batch, and no generation is needed."""

import math
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import torch

from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.score import ScoreResult, score
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.portable_decoder import PortableDecoder

PAIRS = builtin_pairs(30, seed=4)


@pytest.fixture(scope="module")
def translator(bundle_folder: Path) -> Engine:
    return Engine(bundle_folder, replicas=2)


@pytest.fixture(scope="module")
def writer(writer_bundle_folder: Path) -> Engine:
    return Engine(writer_bundle_folder, replicas=2)


def test_pairs_have_the_log_probabilities_of_torch(translator: Engine, run_folder: Path) -> None:
    checkpoint = load_checkpoint(run_folder)
    model, tokenizer = checkpoint.model.double(), checkpoint.tokenizer
    rows: list[tuple[str, str | None]] = [(pair.source, pair.target) for pair in PAIRS]
    for pair, found in zip(PAIRS, score(translator, rows), strict=True):
        source = torch.tensor([tokenizer.special.wrap(tokenizer.encode(pair.source))])
        target = [*tokenizer.encode(pair.target), tokenizer.special.eos_id]
        given = torch.tensor([[tokenizer.special.bos_id, *target[:-1]]])
        with torch.inference_mode():
            logits = model(source, torch.ones_like(source, dtype=torch.bool), given)
        wanted = torch.log_softmax(logits[0], dim=-1)[range(len(target)), target]
        assert found.tokens == tuple(target)
        np.testing.assert_allclose(found.log_probabilities, wanted.numpy(), atol=1e-4)
        assert found.total == pytest.approx(wanted.sum().item(), abs=1e-4)
        assert (found.source, found.target, found.error) == (pair.source, pair.target, None)
        assert found.source_tokens == source.shape[1]


def test_a_text_has_the_log_probabilities_of_torch(writer: Engine, writer_run_folder: Path) -> None:
    checkpoint = load_checkpoint(writer_run_folder)
    model, tokenizer = checkpoint.model.double(), checkpoint.tokenizer
    for pair, found in zip(PAIRS, score(writer, [(p.source, None) for p in PAIRS]), strict=True):
        ids = tokenizer.encode(pair.source)
        text = torch.tensor([ids])
        with torch.inference_mode():
            logits = model(text[:, :0], text[:, :0].bool(), text)
        wanted = torch.log_softmax(logits[0], dim=-1)[range(len(ids) - 1), ids[1:]]
        assert found.tokens == tuple(ids[1:])
        np.testing.assert_allclose(found.log_probabilities, wanted.numpy(), atol=1e-4)
        assert "target" not in found.record()


def test_a_single_token_is_never_read_alone(
    writer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some decoders have other kernels for it, and its neighbours may be longer."""
    tokenizer = writer.bundle.tokenizer
    texts = [first + second for first in ascii_letters for second in ascii_letters]
    text = next(each for each in texts if len(tokenizer.encode(each)) == 2)
    read: list[int] = []
    step = PortableDecoder.step

    def watched(self: PortableDecoder, tokens: Any, state: Any) -> Any:
        read.append(tokens.shape[1])
        return step(self, tokens, state)

    monkeypatch.setattr(PortableDecoder, "step", watched)
    (alone,) = score(writer, [text])
    beside = list(score(writer, [(text, None), (text * 4, None)]))
    assert read == [2, len(tokenizer.encode(text * 4)) - 1]
    assert beside[0] == alone
    assert len(alone.tokens) == 1


def test_bad_rows_are_errors_of_their_own(translator: Engine, writer: Engine) -> None:
    long = "a " * 99
    kinds = [
        row.error and row.error.kind
        for row in score(translator, [("a", "b"), ("", "b"), ("a", " "), (long, "b"), ("a", long)])
    ]
    assert kinds == [None, "empty", "empty", "too-long", "too-long"]
    kinds = [row.error and row.error.kind for row in score(writer, [("a", None), ("a b", None)])]
    assert kinds == ["too-short", None]
    with pytest.raises(UsageError, match="scores texts without a target, found 'b'; leave it out"):
        list(score(writer, [("a b", None), ("a", "b")]))


def test_long_rows_are_cut_short_and_say_so(translator: Engine, writer: Engine) -> None:
    """A text that goes on has not ended, so no end token is scored."""
    tokenizer = translator.bundle.tokenizer
    long = "one two " * 60
    pairs: list[tuple[str, str | None]] = [("a", long), (long, "b"), (long, long), ("a", "b")]
    rows = list(score(translator, pairs, long_rows="truncate"))
    assert [row.truncated for row in rows] == [True, True, True, False]
    ids = tuple(tokenizer.encode(long)[:63])
    assert (rows[0].tokens, rows[2].tokens) == (ids, ids)
    assert rows[1].tokens == (*tokenizer.encode("b"), tokenizer.special.eos_id)
    assert [row.source_tokens for row in rows] == [2, 64, 64, 2]
    beginning = tokenizer.decode(ids[:-1])
    (shorter,) = score(translator, [("a", beginning)])
    np.testing.assert_allclose(
        rows[0].log_probabilities[:62], shorter.log_probabilities[:62], atol=1e-5
    )
    (text,) = score(writer, [(long, None)], long_rows="truncate")
    assert text.tokens == tuple(writer.bundle.tokenizer.encode(long)[1:64])
    assert text.truncated
    with pytest.raises(UsageError, match="long_rows=split and score exclude each other"):
        score(translator, [], long_rows="split")


def test_an_error_on_either_side_comes_out_in_its_place(translator: Engine, writer: Engine) -> None:
    left, right = RowError("no-text", "no source"), RowError("no-text", "no target")
    rows = list(score(translator, [(left, "b"), ("a", right), (left, right), ("a", "b")]))
    assert [(row.source, row.target, row.error) for row in rows] == [
        ("", "b", left),
        ("a", "", right),
        ("", "", left),
        ("a", "b", None),
    ]
    error, scored = score(writer, [(left, None), ("a b", None)])
    assert (error.source, error.target, error.error, scored.error) == ("", None, left, None)


def test_record() -> None:
    record = ScoreResult("a", 2, "b", (5, 2), (-0.25, -1.5000000004)).record()
    assert record == {
        "source": "a",
        "target": "b",
        "total": -1.7500000004,
        "tokens": [5, 2],
        "log_probabilities": [-0.25, -1.5000000004],
    }
    assert math.isclose(ScoreResult("a", 1).total, 0.0)
