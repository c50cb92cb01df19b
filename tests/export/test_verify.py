"""The true bundle passes verification, and each fault that a bundle may have is caught by it."""

import copy
import dataclasses
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.export.conftest import opened, verified
from tests.traced import TRACES
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.corpus import builtin_pairs
from transferry.build_model.train.vocabulary import train_bpe
from transferry.export.checks.check import prove
from transferry.export.checks.numbers import compare_cases
from transferry.export.checks.texts import readings
from transferry.export.checks.weights import WEIGHTS
from transferry.export.oracle.cases import random_case, sizes
from transferry.export.oracle.effort import Effort
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.subject import OpenedModel
from transferry.export.torch_model import TorchDecoder, TorchEncoder
from transferry.export.verify import Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import InputError
from transferry.runtime.proof.certificates.strength import GRAPHS
from transferry.runtime.proof.compare import Case, Comparison, Tolerance
from transferry.runtime.proof.report import Decisions
from transferry.runtime.tokenizer.byte_pair import PROMPTS, SpecialTokens

Array = NDArray[Any]
BRIEF = Effort(8, vocabulary=False, batch_rows=4, most_cases=1)


@pytest.fixture(scope="module")
def case(checkpoint: Checkpoint) -> Case:
    return random_case(checkpoint.model.config, 7, 13, 9, seed=0)


def faults(comparisons: list[Comparison]) -> set[str]:
    """The tensors that are wrong."""
    return {item.tensor for item in comparisons if item.fault}


def size(case: Case) -> tuple[int, int, int]:
    return len(case.source), case.source.shape[1], case.past


def combinations(sources: tuple[int, ...], pasts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """All but the longest pasts in batches of 7, which one source has alone."""
    found = product((1, 2, 7), sources, pasts)
    return [one for one in found if one[0] < 7 or one[2] < 2 or one[1] == 13]


def test_sweep_has_every_combination(checkpoint: Checkpoint) -> None:
    config = checkpoint.model.config
    most = config.max_positions
    cases = list(sizes(config))
    assert [size(case) for case in cases] == combinations((1, 2, 13, most), (0, 1, most - 1))
    assert len(cases) == 33
    assert len({case.name for case in cases}) == len(cases)
    # torch encodes a source once for all lengths of the past.
    assert len({case.source.tobytes() for case in cases}) == 12
    assert len({case.target.tobytes() for case in cases}) == len(cases)
    again = list(sizes(config))[-1]
    assert again.target.tobytes() == cases[-1].target.tobytes(), "cases follow from the seed"
    for case in cases:
        assert case.mask[0].all()
        assert case.mask.shape == case.source.shape
        assert (np.diff(case.mask.astype(int)) <= 0).all()
        new = case.target.shape[1] - case.past
        assert new == min(3, most - case.past)
        assert case.source.max() < config.vocabulary_size > case.target.max()
    # Special ids are tokens like others, so that the mask alone tells padding.
    for part in ("source", "target"):
        tokens = np.concatenate([getattr(case, part).ravel() for case in cases])
        assert (tokens.min(), tokens.max()) == (0, config.vocabulary_size - 1)
    # Rows end at different lengths, or padding would not be tried.
    assert sum(not case.mask.all() for case in cases) > 10


@pytest.mark.parametrize(
    ("most", "sources", "pasts"), [(8, (1, 2, 8), (0, 1, 7)), (2, (1, 2), (0, 1)), (1, (1,), (0,))]
)
def test_sweep_of_a_short_model(
    checkpoint: Checkpoint, most: int, sources: tuple[int, ...], pasts: tuple[int, ...]
) -> None:
    config = dataclasses.replace(checkpoint.model.config, max_positions=most)
    cases = list(sizes(config))
    assert [size(case) for case in cases] == combinations(sources, pasts)


def parameter_names() -> list[str]:
    config = ModelConfig(
        vocabulary_size=4, d_model=2, heads=1, encoder_layers=1, decoder_layers=2, d_ff=2
    )
    return [name for name, _ in Transformer(config).named_parameters()]


@pytest.mark.parametrize(
    "name",
    # softmax(q (k + b)) = softmax(q k + q b): the same is added to every score, so that nothing
    # depends on the bias of an encoder's keys; a decoder's keys are compared themselves.
    [name for name in parameter_names() if name != "encoder.0.self_attention.key.bias"],
)
def test_one_weight_one_percent_off_is_caught(oracle: Oracle, case: Case, name: str) -> None:
    model = copy.deepcopy(oracle.reference.model)
    with torch.no_grad():
        weight = model.get_parameter(name).view(-1)
        weight[weight.abs().argmax()] *= 1.01
    assert faults(compare_cases(oracle, TorchDecoder(model), [case]))


class TestVerifyAgainst:
    """A bundle against the checkpoint that it came from."""

    def test_true_bundle_passes(
        self, checkpoint: Checkpoint, bundle: Bundle, texts: list[str]
    ) -> None:
        progress: list[tuple[str, int, int]] = []
        report = verify_against(
            *(checkpoint, bundle, opened(bundle), Request(texts[:5])),
            traces=TRACES,
            done=lambda *state: progress.append(state),
        )
        report.require()
        assert [(item.search, item.identical) for item in report.decisions] == [
            ("greedy", 5),
            ("beam 4", 5),
            ("sampling of every 4th row", 2),
            ("top-k and top-p sampling of every 4th row", 2),
            ("constrained beam 2 of every 4th row", 2),
            ("plain search", 4),
        ]
        assert all(0 < item.score_ratio < 8 for item in report.decisions)
        # 37 cases and 64 lengths; five texts searched greedily, with a beam and fed whole, and
        # two in each of the other searches.
        assert progress[0] == ("verifying", 1, 122)
        assert progress[-1] == ("verifying", 122, 122)
        assert progress == sorted(progress)

        record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert record["passed"] is True
        selected = 15  # a later step of several rows
        assert {stage["name"]: stage["tensors"] for stage in record["stages"]} == {
            "encoder": 102 * 4,  # the last in batches of every size, as of the later steps
            "first step": 78 * 5,
            "later step": 24 * 5 + selected + 1,  # the last walks
            "text": 9 + 1,  # the last is of scores
        }
        settings = {"provider": "cpu", "against": "the checkpoint", "torch": torch.__version__}
        assert settings.items() <= record["settings"].items()

    def test_on_demand_it_asks_other_runtimes(
        self, checkpoint: Checkpoint, bundle: Bundle, texts: list[str]
    ) -> None:
        report = verified(checkpoint, bundle, texts[:1], cross_check=True, effort=BRIEF)
        report.require()
        runtimes = {item.runtime.partition(" ")[0] for item in report.cross_check}
        assert runtimes >= {"onnxruntime", "onnx.reference"}

    def test_files_can_be_left_to_the_answers(self, checkpoint: Checkpoint, bundle: Bundle) -> None:
        """Without texts, numbers alone are compared."""
        for stored in (True, False):
            effort = dataclasses.replace(BRIEF, stored=stored)
            report = verified(checkpoint, bundle, [], effort=effort)
            names = {claim.name for claim in report.claims if not claim.skipped}
            assert report.passed
            assert not report.decisions
            assert "recorded answers" in names
            assert ({WEIGHTS, GRAPHS} <= names, bool({WEIGHTS, GRAPHS} & names)) == (stored, stored)

    def test_another_run_is_refused(
        self, checkpoint: Checkpoint, bundle: Bundle, texts: list[str]
    ) -> None:
        config = dataclasses.replace(checkpoint.model.config, d_ff=64)
        others = (
            (
                {"model": Transformer(config)},
                "d_ff is 48, the checkpoint has 64; give the checkpoint",
            ),
            (
                {"tokenizer": train_bpe([text[::-1] for text in texts], 300)},
                "not have the same tokenizer; give the checkpoint",
            ),
        )
        for changes, message in others:
            other: Checkpoint = dataclasses.replace(checkpoint, **changes)
            with pytest.raises(InputError, match=message):
                verified(other, bundle, [])

    def test_lines_that_cannot_be_searched_are_named(
        self, checkpoint: Checkpoint, bundle: Bundle, texts: list[str]
    ) -> None:
        """The longest that fits has one token less than positions: the end token needs one."""
        most = checkpoint.model.config.max_positions
        word = next(word for word in "abcdef" if len(checkpoint.tokenizer.encode(word * 9)) == 9)
        report = verified(checkpoint, bundle, [word * (most - 1)], effort=BRIEF)
        assert report.decisions[0].rows == 1
        for lines, message in (
            ([texts[0], word * most], f"line 2 has {most + 1} tokens.*{most}"),
            ([*texts[:2], ""], "line 3 is empty"),
            ([*texts[:2], "  \t"], "line 3 is empty"),
        ):
            with pytest.raises(InputError, match=message):
                verified(checkpoint, bundle, lines)


class TestFillings:
    """An encoder-only model fills in hidden tokens."""

    @pytest.fixture
    def reader(self, reader_run_folder: Path) -> Checkpoint:
        return load_checkpoint(reader_run_folder)

    def fillings(
        self, reader: Checkpoint, nudge: float, token: int = 7, special: SpecialTokens | None = None
    ) -> Decisions:
        """Compares torch's own encoder, with one token made likelier."""

        class Nudged(TorchEncoder):
            def encode(self, source: Array, mask: Array) -> dict[str, Array]:
                found = super().encode(source, mask)
                found["logits"][..., token] += nudge
                return found

        tokenizer = reader.tokenizer
        oracle = Oracle.of(reader.model, special or tokenizer.special, Tolerance())
        texts = [pair.source for pair in builtin_pairs(300, seed=0)[:8]]
        sources = [tokenizer.special.wrap(tokenizer.encode(text)) for text in texts]
        subject = OpenedModel(Nudged(reader.model))
        (decisions,) = prove([readings(subject, oracle, sources)]).decisions
        return decisions

    def test_the_same_encoder_passes(self, reader: Checkpoint) -> None:
        decisions = self.fillings(reader, 0.0)
        assert (decisions.passed, decisions.identical) == (True, 8)
        assert decisions.score_error > 0, "of torch itself, against the oracle"

    @pytest.mark.parametrize(
        ("nudge", "told"), [(50.0, ".*a defect"), (np.nan, "the graph gave NaN or infinity")]
    )
    def test_another_token_and_nan_are_defects(
        self, reader: Checkpoint, nudge: float, told: str
    ) -> None:
        decisions = self.fillings(reader, nudge)
        assert not decisions.passed
        assert [item.row for item in decisions.defects] == list(range(8))
        assert all(re.fullmatch(told, item.message) for item in decisions.defects)

    def test_another_probability_of_the_same_token_fails(self, reader: Checkpoint) -> None:
        decisions = self.fillings(reader, -50.0, token=3)
        assert (decisions.passed, decisions.identical) == (False, 8)

    def test_a_twin_of_the_likeliest_token_is_a_tie(self, reader: Checkpoint) -> None:
        model = copy.deepcopy(reader.model)
        with torch.no_grad():
            model.embedding.weight[9] = model.embedding.weight[7]
            assert model.output_bias is not None
            # Apart by four epsilons, as in test_divergence.py; twice that turns every choice.
            model.output_bias[7], model.output_bias[9] = 60.0, 60.0 * (1 - 2.0**-21)
        other = dataclasses.replace(reader, model=model)
        decisions = self.fillings(other, 60.0 * 2.0**-20, token=9)
        assert decisions.passed
        assert len(decisions.ties) == 8

    def test_without_a_mask_nothing_is_filled_in(self, reader: Checkpoint) -> None:
        with pytest.raises(InputError, match="expected a tokenizer with a mask"):
            self.fillings(reader, 0.0, special=PROMPTS)
