"""onnx's own evaluator gives torch's answers too, and would not if the graph were wrong."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from transferry.export.backends.backends import ReferenceBackend
from transferry.export.backends.plain_decoder import PlainDecoder
from transferry.export.graphs.external_data import WEIGHTS
from transferry.export.parity.oracle import Oracle
from transferry.runtime.bundle import REFERENCE, Bundle
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.parity.recorded import Reference, check_reference
from transferry.runtime.tokenizer.byte_pair import SOURCES

OPTIONS = GenerationOptions(max_length=6, beam=2, n_best=2)


@pytest.fixture(scope="module")
def evaluator(bundle: Bundle) -> PlainDecoder:
    return PlainDecoder(bundle.variant(), ReferenceBackend(bundle, bundle.variant()))


@pytest.fixture(scope="module")
def cases(bundle: Bundle) -> Reference:
    recorded = Reference.load(bundle.folder / REFERENCE)
    return Reference(recorded.cases, (), ())


def test_agrees_on_what_is_recorded(evaluator: PlainDecoder, cases: Reference) -> None:
    comparisons, _ = check_reference(cases, evaluator, SOURCES, Tolerance())
    assert not [item for item in comparisons if item.fault]
    # Logits, and keys and values of cross and past in each of two layers.
    assert len(comparisons) == len(cases.cases) * 9


def test_sees_a_weight_that_is_wrong(bundle: Bundle, cases: Reference, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    path = folder / bundle.variant().name / WEIGHTS
    weights = np.fromfile(path, np.float32)
    weights[: weights.size // 2] *= np.float32(1.01)
    weights.tofile(path)
    evaluator = PlainDecoder(
        bundle.variant(),
        ReferenceBackend(dataclasses.replace(bundle, folder=folder), bundle.variant()),
    )
    comparisons, _ = check_reference(cases, evaluator, SOURCES, Tolerance())
    assert [item for item in comparisons if item.fault]


def test_beams_are_those_of_torch(
    evaluator: PlainDecoder, oracle: Oracle, sources: list[list[int]]
) -> None:
    """Beams change places at every step, which `select` must follow."""
    assert oracle.decisions(evaluator, "beam 2", sources[:2], OPTIONS).identical == 2


def test_selects_the_rows_that_onnxruntime_selects(
    evaluator: PlainDecoder, decoder: PortableDecoder, cases: Reference
) -> None:
    case, _ = cases.cases[-1]
    rows = np.array([3, 0, 0, 5])
    found = evaluator.tensors(evaluator.select(evaluator.start(case.source, case.mask), rows))
    wanted = decoder.tensors(decoder.select(decoder.start(case.source, case.mask), rows))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=1e-5)
        assert found[name].dtype == tensor.dtype
