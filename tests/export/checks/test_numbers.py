"""Every position is compared one token a step, and a wrong one becomes the failing case."""

from typing import Any

import numpy as np
import pytest

from transferry.export.checks.check import Findings, prove
from transferry.export.checks.numbers import BLOCK, positions
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.subject import OpenedModel
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.ort.portable_decoder import PortableDecoder


def walked(oracle: Oracle, decoder: PortableDecoder) -> Findings:
    return prove([positions(OpenedModel(decoder), oracle)])


def test_walk_reaches_the_last_position(oracle: Oracle, decoder: PortableDecoder) -> None:
    walk = walked(oracle, decoder)
    found = walk.comparisons
    most = oracle.config.max_positions
    assert len(found) == -(-most // BLOCK)
    assert found[-1].case == f"positions {(len(found) - 1) * BLOCK} to {most - 1}"
    assert not any(item.fault for item in found)
    assert not walk.failing


@pytest.mark.parametrize("wrong", [3, 41])
def test_one_wrong_position_is_named(
    oracle: Oracle, decoder: PortableDecoder, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    step, calls = PortableDecoder.step, iter(range(10_000))

    def spoiled(self: PortableDecoder, tokens: Any, state: Any, **wanted: Any) -> Any:
        output, later = step(self, tokens, state, **wanted)
        factor = np.float32(1.01 if next(calls) == wrong else 1.0)
        return StepOutput(output.all_logits * factor), later

    monkeypatch.setattr(PortableDecoder, "step", spoiled)
    walk = walked(oracle, decoder)
    found = walk.comparisons
    assert [bool(item.fault) for item in found].count(True) == 1
    (case,) = walk.failing
    assert (case.name, case.past, case.target.shape[1]) == (f"position {wrong}", wrong, wrong + 1)
