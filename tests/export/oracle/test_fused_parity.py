"""Verification passes the fused variants, and catches a weight of theirs that is off."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tests.export.conftest import verified
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.faults.graph_faults import double_from_row
from transferry.export.oracle.effort import Effort
from transferry.export.subject.bundle_copy import BundleCopy, Change
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import UsageError

pytestmark = pytest.mark.usefixtures("screened")


THOROUGH = pytest.mark.thorough


@pytest.fixture
def unblamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the module at fault traces the model anew; blame/test_localise.py does."""
    monkeypatch.setattr("transferry.export.verify.localise", lambda *_: None)


@pytest.mark.parametrize("name", ["cpu-fp32", "cpu-int8", pytest.param("cpu-int4", marks=THOROUGH)])
def test_true_variant_passes(
    calm: Checkpoint, all_variants: Bundle, texts: list[str], name: str
) -> None:
    report = verified(calm, all_variants, texts[:4], name)
    report.require()
    screened = ["greedy, screened"] if name == "cpu-fp32" else []
    assert [item.search for item in report.decisions] == [
        *("greedy", "beam 4", "sampling of every 4th row"),
        *("top-k and top-p sampling of every 4th row", "constrained beam 2 of every 4th row"),
        *screened,
        "plain search",
    ]
    assert len(report.comparisons) > 38 * 9
    if screened:
        assert [item.identical for item in report.decisions] == [4, 4, 1, 1, 1, 4, 4]


def one_percent(weight: NDArray[Any]) -> NDArray[Any]:
    weight.flat[np.abs(weight).argmax()] *= 1.01
    return weight


def one_row_gone(weight: NDArray[Any]) -> NDArray[Any]:
    weight[np.abs(weight.astype(int)).sum(axis=1).argmax()] = 0
    return weight


@pytest.mark.parametrize(
    ("name", "weight", "change"),
    [
        pytest.param(
            *("cpu-fp32", "decoder.1.feed_forward.outer.weight", one_percent), marks=THOROUGH
        ),
        ("cpu-fp32", "encoder.0.self_attention.value.weight", one_percent),
        ("cpu-int8", "decoder.1.cross_attention.key.weight.int8", one_row_gone),
    ],
)
def test_a_weight_that_is_off_is_caught(
    calm: Checkpoint,
    all_variants: Bundle,
    tmp_path: Path,
    unblamed: None,
    name: str,
    weight: str,
    change: Change,
) -> None:
    copy = BundleCopy(all_variants, all_variants.variant(name), tmp_path / "copy")
    edit(copy, weight, change)
    copy.seal()
    faulty = Bundle.load(copy.folder)
    report = verified(calm, faulty, [], name, effort=Effort(16, vocabulary=False, most_cases=8))
    assert not report.passed
    assert {item.stage for item in report.comparisons if item.fault}
    # Another variant's files are unchanged.
    for spec in faulty.variant("portable").graphs.values():
        assert faulty.manifest.files[spec.file] == all_variants.manifest.files[spec.file]


def edit(copy: BundleCopy, weight: str, change: Change) -> None:
    """Changes a weight in every graph; one in 8 bits has no name among torch's."""
    for model in copy.graphs.values():
        for name in (weight, f"model.{weight}"):
            if (value := model.graph.initializers.get(name)) is not None:
                assert value.const_value is not None
                value.const_value = ir.Tensor(change(value.const_value.numpy().copy()), name=name)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *(pytest.param(*each, marks=THOROUGH) for each in (("portable", 63), ("cpu-fp32", 64))),
        ("cpu-fp32", 255),
    ],
)
def test_rows_of_the_largest_batch_are_verified(
    calm: Checkpoint,
    all_variants: Bundle,
    texts: list[str],
    tmp_path: Path,
    unblamed: None,
    name: str,
    first: int,
) -> None:
    """By the tensors of a case, and by the answers of the path that serves."""
    copy = BundleCopy(all_variants, all_variants.variant(name), tmp_path / "copy")
    double_from_row(copy, first)
    copy.seal()
    faulty = Bundle.load(copy.folder)
    report = verified(calm, faulty, texts[:2], name)
    most = 64 if name == "portable" else 256
    shown = {f"batch {most}, source 2, past 1", f"batches of 1 to {most}"}
    found = {item.case for item in report.comparisons if item.fault}
    assert shown <= found <= {*shown, f"batch {most}, source 2, past 1, rows leave"}
    assert not report.decisions[0].passed


def test_the_cross_check_needs_the_portable_graphs(calm: Checkpoint, all_variants: Bundle) -> None:
    with pytest.raises(UsageError, match="not cpu-fp32: add --variant portable"):
        verified(calm, all_variants, [], "cpu-fp32", cross_check=True)
