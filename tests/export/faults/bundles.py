"""A bundle of each architecture beside its checkpoint, and the self-test of one."""

from collections.abc import Callable

import pytest

from tests.export.conftest import opened
from tests.traced import TRACES
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.checks.graphs import fresh_graphs
from transferry.export.faults.self_test import BundleTest, self_test
from transferry.export.oracle.cases import source_of
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.bundle import BundleSubject
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import PlantedFault

Side = tuple[Checkpoint, Bundle, list[list[int]]]


def side_of(request: pytest.FixtureRequest, run: str, bundle: str, texts: list[str]) -> Side:
    """The checkpoint and the bundle of two fixtures, and texts as sources."""
    checkpoint = load_checkpoint(request.getfixturevalue(run))
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    texts = texts or load_samples(request.getfixturevalue(run))[:2]
    sources = [source_of(text, tokenizer, config, number) for number, text in enumerate(texts)]
    return checkpoint, Bundle.load(request.getfixturevalue(bundle)), sources


def bundle_test(
    side: Side, tolerance: Tolerance | None = None, variant: str = "portable"
) -> BundleTest:
    """The checks of the self-test of a variant."""
    checkpoint, bundle, sources = side
    model = opened(bundle, variant)
    subject = BundleSubject.of(checkpoint, bundle, model)
    oracle = Oracle.of(
        checkpoint.model,
        checkpoint.tokenizer.special,
        tolerance or Tolerance.of(subject.precision.name),
        precision=subject.precision,
        calibration=subject.calibration,
    ).remembering()
    fresh = fresh_graphs(checkpoint.model, bundle, model.variant, subject.calibration, TRACES)
    return BundleTest(subject, oracle, sources, fresh)


def self_tested(
    side: Side,
    tolerance: Tolerance | None = None,
    *,
    stored: bool = True,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, PlantedFault]:
    """Results of the self-test by kind; without `stored`, graphs are not compared."""
    test = bundle_test(side, tolerance)
    fresh = test.fresh if stored else None
    found = self_test(test.honest, test.oracle, test.sources, fresh, done)
    return {item.kind: item for item in found}
