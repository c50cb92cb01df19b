"""For every task, the result of a row is the same to the bit, alone and in any batch."""

import copy
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.commands import PATIENCE
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowError, RowResult
from transferry.runtime.engine.tasks import score as scoring
from transferry.runtime.engine.tasks.embed import embed
from transferry.runtime.engine.tasks.fill_mask import fill_mask
from transferry.runtime.engine.tasks.score import score
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import ServedModel

# A random model would repeat one token. A third of the answers end before their limit.
GREEDY = GenerationOptions(max_length=24, no_repeat_ngram=1)
BEAM = GenerationOptions(max_length=12, no_repeat_ngram=1, beam=4, n_best=4, length_penalty=0.6)
SAMPLING = GenerationOptions(max_length=12, sample=True, n_best=2, top_k=50, top_p=0.9, seed=3)

PAIRS = builtin_pairs(30, seed=7)
BROKEN = RowError("undecodable", "byte 3 is not UTF-8")
LONG = " ".join(f"{pair.source.capitalize()}." for pair in PAIRS[:9])
TEXTS: list[str | RowError] = [BROKEN, "a", "two", *(pair.source for pair in PAIRS)]
TEXTS += ["", BROKEN, "word " * 5000, LONG, *TEXTS[:9]]
# Short texts, and some of several sentences that the model has no positions for.
LONG_TEXTS = [*TEXTS[:4], LONG, *TEXTS[4:6], f"{LONG} {LONG}", "", LONG.upper(), TEXTS[7]]
# They begin alike; the first is that beginning and nothing else.
BEGUN = [f"{PAIRS[0].source} {PAIRS[1].source} {text}" for text in ("", "a", *TEXTS[3:30])]
MASKED = [
    text if isinstance(text, RowError) else f"{text[:number]} [MASK]{text[number:]}"
    for number, text in enumerate(TEXTS)
]
TARGETS = [text if isinstance(text, RowError) else text[:30] for text in reversed(TEXTS)]

Ask = Callable[[Engine, Iterable[Any], int], Iterator[RowResult]]


@dataclass(frozen=True)
class Case:
    """A task: its bundle, how an engine computes rows from a number on, and rows."""

    bundle: str
    ask: Ask
    rows: Sequence[Any]
    seeded: bool = False


def generation(options: GenerationOptions, **more: Any) -> Ask:
    return lambda engine, rows, first: engine.generate(rows, options, first_row=first, **more)


def task(function: Callable[..., Iterator[RowResult]], **more: Any) -> Ask:
    return lambda engine, rows, first: function(engine, rows, **more)


one_sample = replace(SAMPLING, n_best=1)
CASES = {
    "greedy": Case("bundle_folder", generation(GREEDY), TEXTS),
    "beam": Case("bundle_folder", generation(BEAM), TEXTS),
    "sampling": Case("bundle_folder", generation(SAMPLING), TEXTS, seeded=True),
    "prompts": Case("writer_bundle_folder", generation(GREEDY), TEXTS),
    "begun": Case("writer_bundle_folder", generation(GREEDY), [*BEGUN, "", *BEGUN[:2], *TEXTS[:9]]),
    "truncated": Case("bundle_folder", generation(BEAM, long_rows="truncate"), LONG_TEXTS),
    "split": Case("bundle_folder", generation(one_sample, long_rows="split"), LONG_TEXTS, True),
    "mean": Case("reader_bundle_folder", task(embed), TEXTS),
    "first": Case(
        "reader_bundle_folder", task(embed, pooling="first", long_rows="truncate"), TEXTS
    ),
    "masks": Case("reader_bundle_folder", task(fill_mask, long_rows="truncate"), MASKED),
    "pairs": Case("bundle_folder", task(score), list(zip(TEXTS, TARGETS, strict=True))),
    "texts": Case("writer_bundle_folder", task(score), [(text, None) for text in TEXTS]),
}
# Every kind of cut: uneven batches, batches cut by tokens, many windows, replicas, devices.
CUTS = [
    (BatchOptions(rows=2, window=5), 2, 1),
    (BatchOptions(rows=7, window=13), 1, 1),
    (BatchOptions(rows=64, tokens=40), 2, 1),
    (BatchOptions(rows=64), 1, 1),
    (BatchOptions(rows=4, window=25), 1, 2),
]


def exact(result: RowResult) -> dict[str, Any]:
    return {
        name: value.tobytes() if isinstance(value, np.ndarray) else value
        for name, value in vars(result).items()
        # Depends on the other rows, and declares it.
        if name not in ("repeated", "shared_prompt_tokens")
    }


def devices(model: ServedModel, count: int) -> list[ServedModel]:
    """Copies of a model; each begins only when the others are at work as well."""
    meeting = threading.Barrier(count)

    def device() -> ServedModel:
        one = copy.copy(model)
        name = "encode" if isinstance(model, EncoderModel) else "start"
        compute, waited = getattr(model, name), threading.Event()

        def begin(*arguments: Any) -> Any:
            if not waited.is_set():
                waited.set()
                meeting.wait(PATIENCE)
            return compute(*arguments)

        vars(one)[name] = begin
        return one

    return [device() for _ in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_the_same_alone_and_in_any_batch(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    engine = Engine(request.getfixturevalue(case.bundle), replicas=1)
    expected = [next(case.ask(engine, [row], number)) for number, row in enumerate(case.rows)]
    for row, result in zip(case.rows, expected, strict=True):
        sides = row if isinstance(row, tuple) else (row,)
        assert result.source == ("" if sides[0] == BROKEN else sides[0])
        assert (result.error == BROKEN) == (BROKEN in sides)
    good = [result for result in expected if result.error is None]
    assert len(good) > len(case.rows) / 2
    assert len({str(exact(result)) for result in good}) > len(good) / 2, "results tell rows apart"
    for seed, (batches, replicas, count) in enumerate(CUTS):
        order = list(range(len(case.rows)))
        if not case.seeded:
            random.Random(seed).shuffle(order)
        # Scoring cuts its batches once more.
        monkeypatch.setattr(scoring, "MOST_LOGITS", [1, 20_000, 1 << 26][seed % 3])
        models = devices(engine.model, count)
        cut = Engine.of(engine.bundle, *models, replicas=replicas, batches=batches)
        found = case.ask(cut, (case.rows[number] for number in order), 0)
        different = [
            number
            for number, result in zip(order, found, strict=True)
            if exact(result) != exact(expected[number])
        ]
        assert not different, (batches, replicas, count)


@pytest.fixture(scope="module")
def in_other(request: pytest.FixtureRequest) -> Callable[[str], Engine]:
    """Engines by bundle, whose batches are all computed in another process."""

    @cache
    def opened(bundle: str) -> Engine:
        folder, batches = request.getfixturevalue(bundle), BatchOptions(rows=7, window=13)
        engine = Engine(folder, replicas=2, processes=2, batches=batches)
        engine.replicas = 1
        return engine

    return opened


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_the_same_in_another_process(
    name: str, request: pytest.FixtureRequest, in_other: Callable[[str], Engine]
) -> None:
    case = CASES[name]
    expected = case.ask(Engine(request.getfixturevalue(case.bundle)), case.rows, 0)
    found = case.ask(in_other(case.bundle), case.rows, 0)
    assert list(map(exact, found)) == list(map(exact, expected))


@pytest.mark.parametrize("name", ["greedy", "beam", "sampling", "mean", "masks", "pairs"])
def test_a_row_with_nan_is_an_error_and_no_other(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row of the batch, which is the longest, at the first step of a search."""
    case = CASES[name]
    engine = Engine(request.getfixturevalue(case.bundle), replicas=1)
    rows = [row for row in case.rows if not next(case.ask(engine, [row], 0)).error][:8]
    expected = list(case.ask(engine, rows, 0))
    lengths = [max(result.source_tokens, result.target_tokens) for result in expected]
    longest = lengths.index(max(lengths))
    kind = "encode" if isinstance(engine.model, EncoderModel) else "step"
    compute = getattr(engine.model, kind)

    def overflow(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(engine.model, kind, compute)
        found = compute(*arguments, **named)
        for logits in found.values() if kind == "encode" else [found[0].all_logits]:
            first = 2 if name == "sampling" else 1
            logits[:first, -1 if name == "mean" else slice(None)] = np.nan
        return found

    monkeypatch.setattr(engine.model, kind, overflow)
    results = list(case.ask(engine, rows, 0))
    failed = results.pop(longest)
    assert failed.error is not None
    assert (failed.error.kind, failed.target_tokens) == ("not-finite", 0)
    assert failed.source_tokens == expected.pop(longest).source_tokens
    assert list(map(exact, results)) == list(map(exact, expected))
