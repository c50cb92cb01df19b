"""An SSRU decoder: the step and the whole sequence agree, and each variant is torch's model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.export.conftest import opened, verified
from tests.export.faults.bundles import bundle_test
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.recurrence import SSRU, CellState, scanned
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.vocabulary import train_bpe
from transferry.export.checks.numbers import compare_cases
from transferry.export.oracle.cases import random_case
from transferry.export.oracle.effort import Effort
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import UsageError
from transferry.runtime.proof.views import report_text

TOKENIZER = train_bpe(["the cat sat on the mat", "die Katze saß auf der Matte"], 280)
VARIANTS = ("portable", "cpu-fp32", "cpu-int8", "cpu-int4")
SHAPE: dict[str, Any] = dict(
    d_model=16, heads=2, encoder_layers=2, decoder_layers=2, d_ff=32, dropout=0.1, max_positions=40
)


def model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = TOKENIZER.vocabulary_size
    config = ModelConfig(**{"vocabulary_size": size, "decoder_cell": "ssru", **SHAPE, **changes})
    return Transformer(config).eval()


def side(request: pytest.FixtureRequest, variant: str) -> tuple[Checkpoint, Bundle]:
    """The run of a variant and the bundle that has it."""
    calm = "calm_" if variant in ("cpu-int8", "cpu-int4") else ""
    return (
        request.getfixturevalue(f"{calm}recurrent"),
        request.getfixturevalue(f"{calm}recurrent_variants"),
    )


def test_the_cell_is_the_papers_formula() -> None:
    torch.manual_seed(1)
    cell = SSRU(model().config).double()
    x, before = torch.randn(3, 11, 16).double(), torch.randn(3, 1, 1, 16).double()
    outputs, state = cell(x, CellState(before))
    c, expected = before[:, 0, 0], []
    for t in range(11):
        forget = torch.sigmoid(x[:, t] @ cell.forget.weight.T + cell.forget.bias)
        c = forget * c + (1 - forget) * (x[:, t] @ cell.input.weight.T)
        expected.append(c.relu())
    torch.testing.assert_close(outputs, torch.stack(expected, 1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state.cell[:, 0, 0], c, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [-60.0, 0.0, 60.0])
def test_the_scan_neither_overflows_nor_cancels(size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    gate = torch.sigmoid(size + torch.randn(2, 500, 4, generator=generator, dtype=torch.float64))
    given = torch.randn(2, 500, 4, generator=generator, dtype=torch.float64)
    gate.requires_grad_()
    _, cells = scanned(gate, given, 500)
    c = torch.zeros(2, 4, dtype=torch.float64)
    for t in range(500):
        c = gate[:, t] * c + given[:, t]
        torch.testing.assert_close(cells[:, t], c, rtol=1e-12, atol=1e-12)
    cells.sum().backward()  # type: ignore[no-untyped-call]
    assert gate.grad is not None
    assert gate.grad.isfinite().all()


@pytest.mark.usefixtures("screened")
@pytest.mark.parametrize(
    "variant",  # test_conformance.py has int4
    ["portable", "cpu-fp32", pytest.param("cpu-int8", marks=pytest.mark.thorough)],
)
def test_every_variant_is_torchs_model(
    request: pytest.FixtureRequest, texts: list[str], variant: str
) -> None:
    checkpoint, bundle = side(request, variant)
    report = verified(checkpoint, bundle, texts[:4], variant, effort=Effort(batch_rows=4))
    assert report.passed, report_text(report)
    assert "gather" not in bundle.variant(variant).graphs, "a state has no columns"
    if variant in ("portable", "cpu-fp32"):
        assert [item.identical for item in report.decisions][:2] == [4, 4]
    assert {"past.0.cell", "past.1.cell"} < {item.tensor for item in report.comparisons}
    searches = [item.search for item in report.decisions]
    assert ("greedy, screened" in searches) == (variant == "cpu-fp32")
    one = "greedy, in one graph" in searches
    assert one == (variant == "portable")


@pytest.mark.usefixtures("screened")
@pytest.mark.parametrize("variant", ["cpu-fp32", "cpu-int8"])
def test_a_wrong_state_is_caught(
    request: pytest.FixtureRequest, tmp_path: Path, variant: str
) -> None:
    """By its numbers alone; the comparison with graphs exported anew would find it too."""
    checkpoint, bundle = side(request, variant)
    copy = BundleCopy(bundle, bundle.variant(variant), tmp_path / "copy")
    graph = copy.graphs["decoder"].graph
    # The state before is taken from another row.
    (rows,) = (value for value in graph.inputs if value.name == "rows")
    nothing = constant(rows, 0)
    replace(rows, lambda value: add(value, "Mul", value, nothing))
    copy.seal()
    served = opened(Bundle.load(copy.folder), variant)
    oracle = bundle_test((checkpoint, bundle, []), variant=variant).oracle
    cases = [random_case(checkpoint.model.config, 3, 5, 2, seed=seed) for seed in range(3)]
    wrong = {item.tensor for item in compare_cases(oracle, served, cases) if item.fault}
    assert {"past.0.cell", "logits"} <= wrong
    assert "cross.0.keys" not in wrong


def test_a_selection_moves_no_state(recurrent_variants: Bundle) -> None:
    decoder: Any = opened(recurrent_variants, "cpu-fp32")
    source, mask = np.arange(4, 16).reshape(3, 4), np.ones((3, 4), np.bool_)
    _, state = decoder.step(np.array([[1], [5], [9]]), decoder.start(source, mask))
    for rows in ([0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 4, 5], [4, 5, 2, 3]):
        selected = decoder.select(state, np.array(rows))
        assert selected.past is state.past
        moved = selected.cross is not state.cross
        assert moved == (len(selected.rows) < len(state.rows))
        state = selected
    # Two sets of buffers serve all steps of as many rows.
    seen = set()
    for token in range(6):
        _, state = decoder.step(np.full((4, 1), 7 + token), state)
        seen.add(id(state.past[0].buffer))
    assert len(seen) == 2
    assert len(state.calls) == 2


def test_what_it_cannot_be_is_refused_by_name() -> None:
    for changes in ({"positions": "rotary"}, {"architecture": "decoder-only", "encoder_layers": 0}):
        with pytest.raises(UsageError, match="decoder_cell"):
            model(**changes)
