"""An SSRU decoder: the step and the whole sequence agree, and its bundle is torch's model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transferry import Engine
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.config import ModelConfig
from transferry.build_model.recurrence import SSRU, CellState, scanned
from transferry.build_model.transformer import Transformer, greedy
from transferry.build_model.vocabulary import train_bpe
from transferry.export.bundle import export_bundle
from transferry.export.verify import verify_against
from transferry.runtime.bundle import Bundle
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.report_views import report_text

TOKENIZER = train_bpe(["the cat sat on the mat", "die Katze saß auf der Matte"], 280)
TEXTS = ["the cat", "the mat sat on the cat", "a", "on the mat the cat sat on the mat"]
SHAPE: dict[str, Any] = dict(
    d_model=16, heads=2, encoder_layers=2, decoder_layers=2, d_ff=32, dropout=0.1, max_positions=40
)


def model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    size = TOKENIZER.vocabulary_size
    config = ModelConfig(**{"vocabulary_size": size, "decoder_cell": "ssru", **SHAPE, **changes})
    return Transformer(config).eval()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    checkpoint = Checkpoint(model(), None, TOKENIZER)
    folder = tmp_path_factory.mktemp("ssru") / "bundle"
    return export_bundle(checkpoint, folder, texts=TEXTS, one_graph=1)


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


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_step_and_whole_sequence_are_the_same(cut: int) -> None:
    one = model().double()
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.randint(4, 99, (3, size), generator=generator) for size in (7, 19))
    mask = torch.ones(3, 7, dtype=torch.bool)
    whole = one(source, mask, target)
    cross, past, found = one.cross(one.encode(source, mask)), one.empty_past(3), []
    for first in range(0, 19, cut):
        logits, past = one.decode(target[:, first : first + cut], mask, cross, past)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-12, atol=1e-12)


def test_padding_behind_the_target_changes_nothing() -> None:
    one = model()
    source, mask = torch.arange(4, 9)[None], torch.ones(1, 5, dtype=torch.bool)
    target = torch.arange(5, 12)[None]
    longer = torch.nn.functional.pad(target, (0, 3))
    torch.testing.assert_close(one(source, mask, longer)[:, :7], one(source, mask, target))


def test_the_bundle_is_torchs_model(bundle: Bundle) -> None:
    checkpoint = Checkpoint(model(), None, TOKENIZER)
    opened = open_model(bundle, bundle.variant(), SessionOptions())
    report = verify_against(checkpoint, bundle, opened, TEXTS)
    assert report.passed, report_text(report)
    assert "greedy, in one graph" in [item.search for item in report.decisions]
    past = bundle.variant().graphs["decoder"].tensor("past")
    assert past.shape == ("batch", 1, 1, 16)
    assert len(bundle.variant().graphs["decoder"].names("past")) == 2


def test_answers_are_torchs_and_independent_of_the_batch(bundle: Bundle) -> None:
    one, special = model(), TOKENIZER.special
    with Engine.load(bundle.folder) as engine:

        def answers(texts: list[str], beam: int) -> list[tuple[int, ...]]:
            results = engine.generate(texts, beam=beam, max_length=12)
            return [result.hypotheses[0].tokens for result in results]

        together, beams = answers(TEXTS, 1), answers(TEXTS, 4)
        alone = [answers([text], 1)[0] for text in TEXTS]
        single = [answers([text], 4)[0] for text in TEXTS]
    assert together == alone
    assert beams == single
    for text, tokens in zip(TEXTS, together, strict=True):
        source = torch.tensor([special.wrap(TOKENIZER.encode(text))])
        wanted = greedy(
            one,
            source,
            source >= 0,
            bos_id=special.bos_id,
            eos_id=special.eos_id,
            max_length=12,
            use_cache=False,
        )
        assert list(tokens) == wanted[0]


def test_rows_of_the_state_are_selected(bundle: Bundle) -> None:
    decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions())
    source, mask = np.arange(4, 16).reshape(3, 4), np.ones((3, 4), np.bool_)
    _, state = decoder.step(np.array([[1], [5], [9]]), decoder.start(source, mask))
    chosen = np.array([2, 0, 2])
    before, after = decoder.tensors(state), decoder.tensors(decoder.select(state, chosen))
    for name in ("past.0.cell", "past.1.cell", "cross.0.keys"):
        assert np.array_equal(after[name], before[name][chosen])


def test_what_it_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    for changes in ({"positions": "rotary"}, {"architecture": "decoder-only", "encoder_layers": 0}):
        with pytest.raises(UsageError, match="decoder_cell"):
            model(**changes)
    checkpoint = Checkpoint(model(), None, TOKENIZER)
    with pytest.raises(UsageError, match="cpu-fp32 needs decoder_cell attention"):
        export_bundle(checkpoint, tmp_path / "out", variants=["cpu-fp32"])
    assert not (tmp_path / "out").exists()
