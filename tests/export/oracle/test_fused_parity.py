"""Verification passes the fused variants, and catches a weight of theirs that is off."""

from pathlib import Path

import pytest

from tests.export.conftest import verified
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.faults.graph_faults import double_from_row
from transferry.export.subject.bundle_copy import BundleCopy
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
