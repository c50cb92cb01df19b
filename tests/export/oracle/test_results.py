"""Second implementations agree with the runtime's results, and with no others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from transferry.export.oracle.results import RESULTS, VECTORS, Inputs, Row
from transferry.runtime.bundle.head import Aggregation, HeadSettings
from transferry.runtime.engine.tasks import classify, fill_mask, rank, tag
from transferry.runtime.engine.tasks.heads import probabilities
from transferry.runtime.engine.tasks.tag import tags_of
from transferry.runtime.tokenizer.special_tokens import Place, SpecialTokens

TEXT = "abcdefghijkl"
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
PLACES = [Place(n, n + 1, n % 3 == 2) for n in range(len(TEXT))]


def inputs_of(head: HeadSettings) -> Any:
    tokenizer = SimpleNamespace(places=lambda text: PLACES)
    return SimpleNamespace(head=head, special=SpecialTokens(before=(1,)), tokenizer=tokenizer)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("seed", range(5))
def test_tags(aggregation: Aggregation, seed: int) -> None:
    scores = 2 * np.random.default_rng(seed).normal(size=(1, len(TEXT) + 2, len(LABELS)))
    head, row = HeadSettings("tag", LABELS), Row((TEXT,), tuple(range(len(TEXT) + 2)))
    own = probabilities(scores[0, 1:-1], "softmax")
    tags = tags_of(TEXT, PLACES, own, LABELS, aggregation)
    result = tag.TaggedResult(TEXT, len(row.ids), tags)

    def agrees(found: tag.TaggedResult, by: Aggregation = aggregation) -> bool:
        tensors = {"head": scores.astype(np.float64)}
        return RESULTS["tag"](inputs_of(head), row, found, tensors, aggregation=by)

    assert agrees(result)
    assert not agrees(replace(result, tags=tags[1:]))
    wrong = replace(tags[0], score=tags[0].score * 1.0001), replace(tags[0], label="I-X")
    assert not any(agrees(replace(result, tags=(each, *tags[1:]))) for each in wrong)


def test_the_unit_of_a_mean_is_the_size_of_what_is_summed() -> None:
    """A channel of a mean that cancels is no unit: float32 rounds its terms."""
    hidden = {"hidden": np.array([[[1e4, 1.0], [-1e4, 1.0]]])}
    inputs: Any = SimpleNamespace(embeds=False)
    assert Inputs.units(inputs, hidden, 1e9) == {"vector": 1e4, "probabilities": 1.0}
    inputs = SimpleNamespace(embeds=True, head=HeadSettings("embed"))
    assert Inputs.units(inputs, {"head": np.array([[-3.0, 2.0]])}, 5.0)["vector"] == 5.0


@pytest.mark.parametrize("seed", range(20))
def test_fillings(seed: int) -> None:
    """Also of a token whose log-probability is next to 0, less than the error of its logarithm."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(1, 3, 4000)).astype(np.float32)
    scores[0, 1, 7] = scores[0].max() + seed
    scores *= 1000.0 if seed % 5 == 4 else 1.0  # most probabilities are 0
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    call: Any = SimpleNamespace(tokenizer=tokenizer, mask_id=2, top=2)
    row, encoded = Row((TEXT,), (1, 2, 3)), SimpleNamespace(ids=[1, 2, 3])
    part = fill_mask._Call.part(call, encoded, scores[0])  # type: ignore[arg-type]
    named = fill_mask._Call.answer(call, encoded, part)  # type: ignore[arg-type]
    result = fill_mask.FilledMaskResult(TEXT, 3, **named)
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, special=SpecialTokens(mask_id=2))
    agrees = RESULTS["fill-mask"]
    assert agrees(inputs, row, result, {"logits": scores}, top=2)
    assert not agrees(inputs, row, result, {"logits": np.roll(scores, 1, 1)}, top=2)
    ((best, second),) = result.candidates
    apart = 1e-5 * max(1.0, np.abs(scores).max() / 4)
    moved = replace(best, log_probability=best.log_probability - apart)
    assert not agrees(
        inputs, row, replace(result, candidates=((moved, second),)), {"logits": scores}, top=2
    )


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "none"])
def test_labels_and_ranks(kind: Any) -> None:
    scores, row = np.array([[0.3, -2.0, 1.5]]), Row((TEXT,), (1, 2))
    head = HeadSettings("classify", ("a", "b", "a"), kind, "sigmoid")
    call: Any = SimpleNamespace(head=head)
    named = classify._Call.answer(call, row, scores[0])
    result = classify.ClassifiedResult(TEXT, 2, **named)
    # Labels of one name have columns of their own.
    cells, own = result.cells(), [each.score for each in result.scores]
    assert [cells[f"score_{name}"] for name in ("a", "b", "a_")] == own
    assert cells.get("score", max(own)) == max(own)
    agrees = RESULTS["classify"]
    assert agrees(inputs_of(head), row, result, {"head": scores})
    assert not agrees(inputs_of(head), row, replace(result, label="b"), {"head": scores})
    assert not agrees(inputs_of(head), row, result, {"head": scores * 1.0001})
    ranked = rank.RankedResult(TEXT, 2, TEXT, **rank._Call.answer(call, row, scores[0, :1]))
    assert RESULTS["rank"](inputs_of(head), row, ranked, {"head": scores[:, :1]})
    assert not RESULTS["rank"](inputs_of(head), row, ranked, {"head": scores[:, 1:2]})


@pytest.mark.parametrize("score", [-2510.7, -744.5, -720.0, -95.0, 40.0, 2510.7])
def test_a_rank_too_small_for_a_number(score: float) -> None:
    scores, row = np.array([[score]]), Row((TEXT,), (1, 2))
    head = HeadSettings("classify", ("a",), "none", "sigmoid")
    call: Any = SimpleNamespace(head=head)
    ranked = rank.RankedResult(TEXT, 2, TEXT, **rank._Call.answer(call, row, scores[0]))
    assert RESULTS["rank"](inputs_of(head), row, ranked, {"head": scores})


@pytest.mark.parametrize("kind", VECTORS)
def test_vectors_of_another_kind_follow_from_no_tensors(kind: Any) -> None:
    """As a bundle gives them whose manifest names another kind."""
    inputs: Any = SimpleNamespace(head=HeadSettings("embed", vectors=kind), embeds=True)
    for name in {*VECTORS.values()} - {VECTORS[kind]}:
        result = SimpleNamespace(**{name: np.ones(3)})
        tensors = {"head": np.ones((1, 3))}
        assert not RESULTS["embed"](inputs, Row((TEXT,), (1, 2)), result, tensors)
