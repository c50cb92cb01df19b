"""Masks are filled with torch's likeliest tokens; only the mask word itself is a mask."""

from pathlib import Path

import numpy as np
import pytest
import torch

from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.fill_mask import fill_mask
from transferry.runtime.errors import UsageError

TEXTS = [
    f"{' '.join(words[:place])} [MASK] {' '.join(words[place + 1 :])}".strip()
    for number, words in enumerate(pair.source.split() for pair in builtin_pairs(20, seed=8))
    for place in [number % len(words)]
]


@pytest.fixture(scope="module")
def engine(reader_bundle_folder: Path) -> Engine:
    return Engine(reader_bundle_folder, replicas=2)


def test_candidates_are_torch_s(engine: Engine, reader_run_folder: Path) -> None:
    checkpoint = load_checkpoint(reader_run_folder)
    tokenizer, model = checkpoint.tokenizer, checkpoint.model.double()
    for text, row in zip(TEXTS, fill_mask(engine, TEXTS, top=3), strict=True):
        before, after = text.split("[MASK]")
        ids = [*tokenizer.encode(before.removesuffix(" ")), 3, *tokenizer.encode(after)]
        source = torch.tensor([tokenizer.special.wrap(ids)])
        with torch.inference_mode():
            scores = model(source, torch.ones_like(source, dtype=torch.bool), source)[0]
        place = tokenizer.special.wrap(ids).index(3)
        wanted = torch.log_softmax(scores[place], dim=-1).topk(3)
        (candidates,) = row.candidates
        assert [item.token for item in candidates] == wanted.indices.tolist()
        found = [item.log_probability for item in candidates]
        np.testing.assert_allclose(found, wanted.values.numpy(), atol=1e-4)
        assert [item.text for item in candidates] == [
            tokenizer.decode([token]) for token in wanted.indices.tolist()
        ]
        ids[ids.index(3)] = candidates[0].token
        assert row.text == tokenizer.decode(ids)
        assert row.target_tokens == 1


def test_several_masks_and_another_word_for_them(engine: Engine) -> None:
    (row,) = fill_mask(engine, ["a ___ b ___"], mask="___", top=2)
    assert [len(candidates) for candidates in row.candidates] == [2, 2]
    record = row.record()
    assert len(record["masks"]) == 2
    assert record["text"] == row.text
    (same,) = fill_mask(engine, ["a [MASK] b [MASK]"], top=2)
    assert same.candidates == row.candidates


def test_bad_rows_are_errors_of_their_own(engine: Engine) -> None:
    broken = RowError("malformed", "3 columns, expected 2")
    rows = list(fill_mask(engine, [broken, "", "no mask", "[MASK]", "[MASK] " * 99]))
    kinds = [row.error and row.error.kind for row in rows]
    assert kinds == ["malformed", "empty", "no-mask", None, "too-long"]
    assert rows[0].record() == {"source": "", "text": "", "error": broken.record()}


def test_long_rows_are_cut_short_and_say_so(engine: Engine) -> None:
    tokenizer = engine.bundle.tokenizer
    text = "a [MASK] b" + " a b" * 99
    ids = [*tokenizer.encode("a"), 3, *tokenizer.encode(" b" + " a b" * 99)][:62]
    beginning = "a [MASK]" + tokenizer.decode(ids[2:])
    cut, whole, late = fill_mask(
        engine, [text, beginning, "a b " * 99 + "[MASK]"], long_rows="truncate"
    )
    assert (cut.source, cut.source_tokens, cut.truncated) == (text, 64, True)
    assert (cut.text, cut.candidates) == (whole.text, whole.candidates)
    assert (whole.truncated, late.error) == (
        False,
        RowError("no-mask", "there is no [MASK] to fill in among the first 64 tokens"),
    )
    with pytest.raises(UsageError, match="long_rows=split and task fill-mask exclude each other"):
        fill_mask(engine, [], long_rows="split")
    with pytest.raises(UsageError, match="top must be a whole number of at least 1, found 0"):
        fill_mask(engine, [], top=0)


def test_a_long_word_for_a_mask_makes_no_text_too_long(engine: Engine) -> None:
    mask = "[" + "MASK" * 300 + "]"
    (row,) = fill_mask(engine, [f"a {mask} b {mask}"], mask=mask)
    (same,) = fill_mask(engine, ["a [MASK] b [MASK]"])
    assert (row.error, row.candidates) == (None, same.candidates)
