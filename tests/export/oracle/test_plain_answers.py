"""The plain search tells an engine that breaks a rule of the search from an honest one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.plain_answers import PlainAnswers
from transferry.export.oracle.plain_search import OUTSIDE, PLAIN
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance

Results = Iterable[GenerationResult]
OWN = GenerationOptions(max_length=6, beam=2, n_best=2, stop=("e",))


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Engine:
    return Engine.of(bundle, open_model(bundle, bundle.variant(), SessionOptions()))


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint, oracle: Oracle, engine: Engine, texts: list[str]) -> PlainAnswers:
    return PlainAnswers.of(oracle, engine.decoder, checkpoint.tokenizer, texts)


def test_every_option_has_a_plain_rule_or_is_named_as_outside() -> None:
    assert {field.name for field in fields(GenerationOptions)} == PLAIN | OUTSIDE
    assert not PLAIN & OUTSIDE


def test_an_honest_engine_passes(pair: tuple[Checkpoint, Bundle], texts: list[str]) -> None:
    checkpoint, bundle = pair
    if not checkpoint.model.decoder:
        return
    model: Any = open_model(bundle, bundle.variant(), SessionOptions())
    tokenizer = checkpoint.tokenizer
    oracle = Oracle.of(checkpoint.model, tokenizer.special, Tolerance())
    plain = PlainAnswers.of(oracle, model, tokenizer, texts)
    found = plain.compare({"own": OWN}, Engine.of(bundle, model).generate)
    assert found.passed, found.defects
    assert found.rows == found.identical == len(plain.texts)
    assert 0 < found.score_ratio < 8


def without(**changed: Any) -> Callable[[Engine, Sequence[str], GenerationOptions], Results]:
    """An engine that ignores some options, where they are set."""

    def generate(engine: Engine, texts: Sequence[str], options: GenerationOptions) -> Results:
        return engine.generate(texts, replace(options, **changed))

    return generate


def changing(change: Callable[[list[GenerationResult]], Results]) -> Any:
    """An engine whose results are changed."""

    def generate(engine: Engine, texts: Sequence[str], options: GenerationOptions) -> Results:
        return change(list(engine.generate(texts, options)))

    return generate


def each(**changes: Callable[[Any], Any]) -> Any:
    """An engine whose hypotheses are changed."""

    def changed(one: Any) -> Any:
        return replace(one, **{name: change(one) for name, change in changes.items()})

    return changing(
        lambda found: [
            replace(row, hypotheses=tuple(map(changed, row.hypotheses))) for row in found
        ]
    )


WRONG: dict[str, Any] = {
    **{
        name: without(**{name: getattr(GenerationOptions(), name)})
        for name in (
            "forced_end",
            "length_penalty",
            "no_repeat_ngram",
            "prefix",
            "renormalise",
            "repetition_penalty",
            "seed",
            "stop",
            "suppress",
            "temperature",
            "top_k",
        )
    },
    "fewer answers": without(n_best=1),
    "another row's number": lambda engine, texts, options: engine.generate(
        texts, options, first_row=1
    ),
    "order": changing(lambda found: found[::-1]),
    "a row less": changing(lambda found: found[:-1]),
    "the best last": changing(
        lambda found: [replace(row, hypotheses=row.hypotheses[::-1]) for row in found]
    ),
    "text": each(text=lambda one: one.text + " "),
    "finish reason": each(finish_reason=lambda one: "length"),
    "score": each(score=lambda one: one.score * (1 + 1e-3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_rule_is_seen(name: str, plain: PlainAnswers, engine: Engine) -> None:
    found = plain.compare({"own": OWN}, lambda *asked: WRONG[name](engine, *asked))
    assert not found.passed
    assert all(": " in str(defect) for defect in found.defects)
