"""An encoder reads a batch in blocks of a limited number of tokens, and each row as if alone."""

from pathlib import Path

import numpy as np
import pytest

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.ort.encoder import PASS_TOKENS, EncoderModel
from transferry.runtime.ort.graph_runner import GraphRunner
from transferry.runtime.ort.session import SessionOptions


def test_rows_of_many_blocks_are_those_of_each_alone(
    reader_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(reader_bundle_folder)
    model = EncoderModel(bundle, bundle.manifest.variants["portable"], SessionOptions())
    rng = np.random.default_rng(3)
    sources = [rng.integers(5, 90, 4 * rng.integers(1, 8)).tolist() for _ in range(60)]
    source, mask = pad_sources(sources, 0)
    runs: list[int] = []
    run = GraphRunner.run

    def counted(runner: GraphRunner, inputs: dict[str, list[object]], *outputs: str) -> object:
        runs.append(inputs["source"][0].shape()[0])  # type: ignore[attr-defined]
        return run(runner, inputs, *outputs)

    with monkeypatch.context() as patch:
        patch.setattr(GraphRunner, "run", counted)
        found = model.encode(source, mask)
    assert sum(runs) == 60
    assert len(runs) > 2
    assert max(runs) * 4 <= PASS_TOKENS["cpu"]
    assert set(found) == set(model.outputs)
    for row, tokens in enumerate(sources):
        alone = model.encode(*pad_sources([tokens], 0))
        for name, values in found.items():
            one = values[row, : len(tokens)] if values.ndim == 3 else values[row]
            np.testing.assert_array_equal(one, alone[name][0])
