"""Less is checked of a larger model, in each respect, and everything of a small one."""

import dataclasses
from typing import Any

import pytest
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.oracle import effort
from transferry.export.oracle.cases import vocabulary
from transferry.export.oracle.effort import (
    LONGEST_ANSWER,
    RECORDED_LENGTH,
    RECORDED_SOURCES,
    Effort,
    first_short,
    parameters,
    recorded_length,
    recorded_sources,
)
from transferry.runtime.decoding.batching import BatchOptions

BATCHES = BatchOptions(256)
SIZES = ("positions", "longest", "rows", "batch_rows")


def large(layers: int) -> Transformer:
    """A model without weights of 12.6 million parameters a layer."""
    shape: dict[str, Any] = dict(d_model=1024, heads=16, d_ff=4096, encoder_layers=0)
    limits: dict[str, Any] = dict(vocabulary_size=8_000, max_positions=2048)
    with torch.device("meta"):
        return Transformer(
            ModelConfig(architecture="decoder-only", decoder_layers=layers, **shape, **limits)
        )


def test_of_a_small_model_everything_is_checked(checkpoint: Checkpoint) -> None:
    found = Effort.at_export(checkpoint.model, BATCHES)
    whole = Effort(checkpoint.model.config.max_positions, batch_rows=256, anew=False)
    assert dataclasses.replace(found, most_cases=None) == whole
    config = checkpoint.model.config
    cases = [each.cases(config, [[1] * 9], 256, True) for each in (found, whole)]
    assert [case.name for case in cases[0]] == [case.name for case in cases[1]]
    assert recorded_length(checkpoint.model) == RECORDED_LENGTH


def test_the_larger_the_model_the_less_is_checked() -> None:
    models = [large(layers) for layers in (1, 8, 24, 96)]
    efforts = [Effort.at_export(model, BATCHES) for model in models]
    for name in SIZES:
        values = [getattr(each, name) for each in efforts]
        assert values == sorted(values, reverse=True), name
        assert values[-1] >= 4, name
    assert efforts[0].longest > 16
    assert efforts[-1].longest < LONGEST_ANSWER
    assert not efforts[-1].vocabulary
    assert not efforts[-1].loss
    fewest = efforts[-1].cases(models[-1].config, [], 16, True)
    assert len(fewest) == efforts[-1].most_cases
    assert 8 <= len({case.name for case in fewest}) == len(fewest) < 20
    assert fewest[-1].name.startswith("single token")
    lengths = [recorded_length(model) for model in models]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 8


def test_no_token_is_left_out_where_cases_are(checkpoint: Checkpoint) -> None:
    config = checkpoint.model.config
    few = Effort(most_cases=8).cases(config, [], 16, True)
    every = vocabulary(config)
    assert few[8:]
    assert [case.name for case in few[8:]] == [case.name for case in every]


def test_what_is_checked_takes_about_the_same_work() -> None:
    """Tokens of the cases, of both steps, times parameters."""
    for layers in (8, 24):
        model = large(layers)
        found = Effort.at_export(model, BATCHES)
        rows = found.batch_rows or 0
        cases = found.cases(model.config, [[1] * 9], rows, True)
        tokens = sum(case.source.size + case.target.size for case in cases)
        assert tokens * parameters(model) < 2.5 * effort.JUDGED_WORK


def test_short_texts_come_first_and_the_shortest_where_all_are_long(checkpoint: Checkpoint) -> None:
    assert first_short("abcd", [9, 2, 3, 1], 3, 2) == ["b", "c"]
    assert first_short("abcd", [9, 7, 8, 6], 3, 2) == ["d", "b"]
    sources = [[1] * 500, [2] * 4, [3] * 16]
    model, short = large(24), [(2,) * 4, (3,) * 16]
    assert recorded_sources(model, sources)[:2] == short
    found = recorded_sources(checkpoint.model, [*sources, *sources])
    assert found[:3] == [(1,) * 500, *short]
    assert len(found) == RECORDED_SOURCES  # with random ones


def test_texts_that_do_not_fit_are_left_out(checkpoint: Checkpoint, texts: list[str]) -> None:
    found = Effort(rows=3).texts(checkpoint, ["", "x" * 1000, *texts])
    assert found == texts[:3]


@pytest.mark.parametrize("positions", [None, 16])
def test_no_case_is_longer_than_the_positions(
    positions: int | None, checkpoint: Checkpoint
) -> None:
    config = checkpoint.model.config
    found = list(Effort(positions, vocabulary=False).cases(config, [[1] * 99], 4, False))
    longest = max(max(case.source.shape[1], case.target.shape[1]) for case in found)
    assert longest == (positions or config.max_positions)
