"""Every position is compared one token a step, and a wrong one becomes the failing case."""

from typing import Any

import numpy as np
import pytest

from transferry.export.checks.positions import BLOCK, walk
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.ort.portable_decoder import PortableDecoder


def test_walk_reaches_the_last_position(
    oracle: Oracle, decoder: PortableDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "failed", [])  # other tests share the oracle
    found = walk(oracle, decoder)
    most = oracle.config.max_positions
    assert len(found) == -(-most // BLOCK)
    assert found[-1].case == f"positions {(len(found) - 1) * BLOCK} to {most - 1}"
    assert not any(item.fault for item in found)
    assert not oracle.failed


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
    monkeypatch.setattr(oracle, "failed", [])
    found = walk(oracle, decoder)
    assert [bool(item.fault) for item in found].count(True) == 1
    (case,) = oracle.failed
    assert (case.name, case.past, case.target.shape[1]) == (f"position {wrong}", wrong, wrong + 1)
