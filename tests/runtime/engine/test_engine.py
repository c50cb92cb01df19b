"""Rows come out in order, each as it is answered alone; a bad row is an error of its own."""

import functools
import itertools
import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.build_model.corpus import builtin_pairs
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.decoding.hypothesis import FinishReason
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.engine.engine import PIECE, Engine
from transferry.runtime.engine.result import GenerationResult, RowError, TextHypothesis, join
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import read_lines
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.portable_decoder import PortableDecoder, PortableState
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

Tokens = tuple[int, ...]

# A random model would say one token again and again.
GREEDY = GenerationOptions(max_length=12, no_repeat_ngram=1)
BEAM = GenerationOptions(max_length=12, no_repeat_ngram=1, beam=4, n_best=4, length_penalty=0.6)
SAMPLING = GenerationOptions(max_length=12, sample=True, n_best=2, top_k=50, top_p=0.9, seed=3)

# Every kind of cut: rows alone, uneven batches, batches cut by tokens, many windows, two replicas.
CUTS = [
    (BatchOptions(rows=1), 1),
    (BatchOptions(rows=2, window=5), 2),
    (BatchOptions(rows=7, window=13), 1),
    (BatchOptions(rows=64, tokens=40), 2),
    (BatchOptions(rows=64), 1),
    (BatchOptions(rows=64, window=3), 2),
]


class Ending(PortableDecoder):
    """Makes the end token likelier with every step.

    Rows thus end, and leave their batch, at different times, as those of a trained model do.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle, bundle.variant(), SessionOptions())

    def step(
        self, tokens: NDArray[np.int64], state: PortableState, **wanted: Any
    ) -> tuple[StepOutput, PortableState]:
        output, after = super().step(tokens, state)
        logits = output.all_logits
        logits[:, :, SpecialTokens.eos_id] += 0.25 * state.past[0].shape()[2]
        return StepOutput(logits), after


@dataclass(frozen=True)
class RowStates:
    """The state of each row by itself, and how many rows a sentence has."""

    states: list[PortableState]
    width: int


class Watched(PortableDecoder):
    """Steps each row alone, and keeps what was read."""

    def __init__(self, inner: PortableDecoder) -> None:
        self.inner = inner
        self.has_encoder, self.vocabulary_size = inner.has_encoder, inner.vocabulary_size
        self.batches = inner.batches
        self.read: list[Tokens] = []

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Any:
        rows = [row[real][None] for row, real in zip(source, mask, strict=True)]
        self.read += [tuple(row[0].tolist()) for row in rows]
        return RowStates([self.inner.start(row, np.ones(row.shape, np.bool_)) for row in rows], 1)

    def step(self, tokens: NDArray[np.int64], state: Any, **wanted: Any) -> tuple[StepOutput, Any]:
        stepped = []
        for row, one in zip(tokens, state.states, strict=True):
            output, after = self.inner.step(row[None], one)
            stepped.append((output.all_logits.copy(), after))
        logits, states = zip(*stepped, strict=True)
        return StepOutput(np.concatenate(logits)), RowStates(list(states), state.width)

    def select(self, state: Any, rows: NDArray[np.int64]) -> Any:
        sentences = len(set((rows // state.width).tolist()))
        return RowStates([state.states[row] for row in rows], len(rows) // sentences)


@pytest.fixture(scope="module")
def bundle(bundle_folder: Path) -> Bundle:
    return Bundle.load(bundle_folder)


@pytest.fixture(scope="module")
def decoder(bundle: Bundle) -> PortableDecoder:
    return Ending(bundle)


@pytest.fixture(scope="module")
def engine(bundle: Bundle, decoder: PortableDecoder) -> Engine:
    return Engine(bundle, decoder, batches=BatchOptions(rows=8))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sentences of 1 to some 30 tokens, none twice."""
    pairs = builtin_pairs(60, seed=7)
    return list(dict.fromkeys(["a", "two", *(pair.source for pair in pairs)]))


def answers(results: Sequence[GenerationResult]) -> list[list[Tokens]]:
    return [[output.tokens for output in result.outputs] for result in results]


Alone = Callable[[Sequence[str], GenerationOptions], list[list[Tokens]]]


@pytest.fixture(scope="module")
def alone(bundle: Bundle, decoder: PortableDecoder) -> Alone:
    """What the search finds for each text in a batch of one, without an engine."""
    tokenizer = bundle.tokenizer

    @functools.cache
    def answer(row: int, text: str, options: GenerationOptions) -> list[Tokens]:
        (hypotheses,) = search(
            decoder,
            [[*tokenizer.encode(text), tokenizer.special.eos_id]],
            options,
            tokenizer.special,
            row_ids=[row],
        )
        return [hypothesis.tokens for hypothesis in hypotheses]

    return lambda texts, options: [answer(*item, options) for item in enumerate(texts)]


def test_results_tell_everything_about_their_row(
    bundle: Bundle, engine: Engine, texts: list[str]
) -> None:
    results = list(engine.generate(texts, BEAM))
    assert [result.source for result in results] == texts
    special = bundle.tokenizer.special
    reasons = set()
    for text, result in zip(texts, results, strict=True):
        assert result.error is None
        assert result.source_tokens == len(bundle.tokenizer.encode(text)) + 1
        assert 1 <= len(result.outputs) <= 4
        assert result.text == result.outputs[0].text
        scores = [output.score for output in result.outputs]
        assert scores == sorted(scores, reverse=True)
        for output in result.outputs:
            assert output.text == bundle.tokenizer.decode(output.tokens)
            assert not {special.bos_id, special.eos_id} & set(output.tokens)
            length = len(output.tokens) + (output.finish_reason == "end")
            assert output.score == pytest.approx(output.log_probability / length**0.6)
            reasons.add(output.finish_reason)
    assert reasons == {"end", "length"}


@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
def test_a_row_is_answered_as_it_is_alone(
    bundle: Bundle,
    decoder: PortableDecoder,
    alone: Alone,
    texts: list[str],
    options: GenerationOptions,
) -> None:
    expected = alone(texts, options)
    assert len({row[0] for row in expected}) > len(texts) / 2, "the answers must tell rows apart"
    for batches, replicas in CUTS:
        engine = Engine(bundle, decoder, replicas=replicas, batches=batches)
        assert answers(list(engine.generate(texts, options))) == expected, (batches, replicas)


@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
@pytest.mark.parametrize(("batches", "replicas"), CUTS[1:])
def test_a_row_that_takes_the_place_of_another_is_answered_as_it_is_alone(
    bundle: Bundle,
    decoder: PortableDecoder,
    alone: Alone,
    texts: list[str],
    options: GenerationOptions,
    batches: BatchOptions,
    replicas: int,
) -> None:
    watched = Watched(decoder)
    engine = Engine(bundle, watched, replicas=replicas, batches=batches)
    assert answers(list(engine.generate(texts, options))) == alone(texts, options)
    assert len(watched.read) == len(texts)


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_equal_texts_of_a_window_are_read_once(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str], options: GenerationOptions
) -> None:
    repeated = [*texts[:5], *texts[3:8], "", *texts[:2], "", *texts[:3]]
    alone = Engine(bundle, decoder)
    expected = {text: next(alone.generate([text], options)) for text in set(repeated)}
    watched = Watched(decoder)
    results = list(Engine(bundle, watched).generate(repeated, options))
    assert results == [expected[text] for text in repeated]
    assert len(watched.read) == len(set(watched.read)) == 8


def test_equal_texts_are_sampled_each_for_itself(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> None:
    watched = Watched(decoder)
    list(Engine(bundle, watched).generate([texts[0]] * 5, SAMPLING))
    assert len(watched.read) == 5


def test_answers_without_scores_are_the_same(engine: Engine, texts: list[str]) -> None:
    scored = list(engine.generate(texts, GREEDY))
    unscored = list(engine.generate(texts, replace(GREEDY, scores=False)))
    assert answers(unscored) == answers(scored)
    outputs = [output for result in unscored for output in result.outputs]
    assert all(math.isnan(item.score) and math.isnan(item.log_probability) for item in outputs)


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_a_row_is_answered_the_same_wherever_it_stands(
    engine: Engine, texts: list[str], options: GenerationOptions
) -> None:
    expected = dict(zip(texts, answers(list(engine.generate(texts, options))), strict=True))
    for seed in range(3):
        shuffled = random.Random(seed).sample(texts, len(texts))
        results = list(engine.generate(shuffled, options))
        assert [result.source for result in results] == shuffled
        assert answers(results) == [expected[text] for text in shuffled]


@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
def test_scores_are_the_same_bit_for_bit_in_any_batch(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str], options: GenerationOptions
) -> None:
    """Alone, among a few, among many; and whatever the others' lengths."""
    found = []
    for seed, rows in enumerate((64, 7, 1)):
        order = list(range(len(texts)))
        if not options.sample:
            random.Random(seed).shuffle(order)
        engine = Engine(bundle, decoder, batches=BatchOptions(rows=rows, window=[40, 9, 5][seed]))
        results = engine.generate((texts[index] for index in order), options)
        found.append(dict(zip(order, results, strict=True)))
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert len({len(bundle.tokenizer.encode(text)) % 4 for text in texts}) == 4


def test_samples_of_a_row_depend_on_its_place(engine: Engine, texts: list[str]) -> None:
    """So that a text that occurs twice is not answered twice alike."""
    results = list(engine.generate([texts[9]] * 8, SAMPLING))
    assert len({output.tokens for result in results for output in result.outputs}) > 8


@pytest.fixture(scope="module")
def real_texts(corpus_dir: Path) -> list[str]:
    """A thousand sentences, cut where the small test model has no positions left."""
    lines = list(read_lines(corpus_dir / "multi30k" / "test_2016_flickr.en.gz"))
    assert len(lines) == 1000
    return [line[:40] for line in lines]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (GenerationOptions(max_length=8, min_length=5, no_repeat_ngram=1), (1, 7, 64)),
        (GenerationOptions(max_length=8, min_length=5, no_repeat_ngram=1, beam=2), (8, 64)),
        (GenerationOptions(max_length=8, sample=True), (2, 64)),
    ],
    ids=["greedy", "beam", "sampling"],
)
def test_a_thousand_real_rows(
    bundle: Bundle,
    decoder: PortableDecoder,
    real_texts: list[str],
    options: GenerationOptions,
    rows: tuple[int, ...],
) -> None:
    expected: dict[int, list[Tokens]] = {}
    for seed, count in enumerate(rows):
        order = list(range(len(real_texts)))
        if not options.sample:
            random.Random(seed).shuffle(order)
        engine = Engine(bundle, decoder, replicas=2, batches=BatchOptions(rows=count, window=300))
        results = list(engine.generate((real_texts[index] for index in order), options))
        assert [result.source for result in results] == [real_texts[index] for index in order]
        assert not any(result.error for result in results)
        found = dict(zip(order, answers(results), strict=True))
        expected = expected or found
        different = [index for index in order if found[index] != expected[index]]
        assert not different, f"{len(different)} rows change with {count} rows a batch"
    assert len({row[0] for row in expected.values()}) > 100, "the answers must tell rows apart"


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(max_length=8, min_length=5, no_repeat_ngram=1),
        GenerationOptions(max_length=8, scores=False),
        GenerationOptions(max_length=8, min_length=5, no_repeat_ngram=1, beam=4, n_best=4),
    ],
    ids=["greedy", "greedy without scores", "beam"],
)
def test_a_thousand_real_rows_in_place_are_the_same_bit_for_bit(
    fast_bundle_folder: Path, real_texts: list[str], options: GenerationOptions
) -> None:
    """Scores as well, whether a row is alone or among many; tokens as the portable variant's."""
    found = []
    order = list(range(len(real_texts)))
    for number, (variant, rows) in enumerate(
        [("cpu-fp32", 64), ("cpu-fp32", 1), ("portable", 64), ("portable", 7)]
    ):
        random.Random(number).shuffle(order)
        engine = Engine.load(fast_bundle_folder, variant=variant, replicas=1)
        engine.batches = BatchOptions(rows=rows * options.beam, window=300)
        results = engine.generate((real_texts[index] for index in order), options)
        found.append(dict(zip(order, results, strict=True)))
    many, alone, portable, few = found
    # As text: a score that is not asked for is NaN, which equals nothing.
    assert [i for i in order if repr(many[i]) != repr(alone[i])] == []
    assert [i for i in order if repr(portable[i]) != repr(few[i])] == []
    tokens = [answers([each[i] for i in range(len(order))]) for each in (many, portable)]
    assert tokens[0] == tokens[1]
    assert len({row[0] for row in tokens[0]}) > 100, "the answers must tell rows apart"


def test_bad_rows_are_errors_of_their_own(engine: Engine, alone: Alone, texts: list[str]) -> None:
    good = texts[:4]
    mixed = ["", good[0], " \t\u3000", good[1], good[2], "word " * 5000, good[3]]
    results = list(engine.generate(mixed, GREEDY))
    assert [result.source for result in results] == mixed
    kinds = [result.error.kind if result.error else None for result in results]
    assert kinds == ["empty", None, "empty", None, None, "too-long", None]
    assert answers([results[index] for index in (1, 3, 4, 6)]) == alone(good, GREEDY)
    for result in results:
        if result.error is not None:
            assert result.outputs == ()
            assert result.text == ""
    long = results[5]
    assert long.error is not None
    expected = (
        f"at least {long.source_tokens} tokens, but the model has 64 positions; shorten or split "
        "the text"
    )
    assert long.error.message == expected


def test_an_error_that_came_in_comes_out_in_its_place(
    bundle: Bundle, decoder: PortableDecoder, alone: Alone, texts: list[str]
) -> None:
    broken = RowError("undecodable", "byte 3 is no UTF-8")
    strange = RowError("no-text", "there is no such field")
    mixed: list[str | RowError] = [
        broken,
        texts[0],
        strange,
        texts[1],
        broken,
        *texts[2:4],
        strange,
    ]
    watched = Watched(decoder)
    engine = Engine(bundle, watched, replicas=2, batches=BatchOptions(rows=4, window=3))
    for options in (GREEDY, SAMPLING):
        results = list(engine.generate(mixed, options))
        assert len(results) == len(mixed)
        for item, result in zip(mixed, results, strict=True):
            if isinstance(item, RowError):
                assert result == GenerationResult("", 0, (), item)
            else:
                assert (result.source, result.error) == (item, None)
    found = [row for row in engine.generate(mixed, GREEDY) if row.error is None]
    assert answers(found) == alone(texts[:4], GREEDY)
    assert len(watched.read) == 3 * 4, "errors never reach the model"


@pytest.fixture(scope="module")
def long_texts(texts: list[str]) -> list[str]:
    """Some short texts, and some of several sentences that no model position is left for."""
    generator = random.Random(5)
    long = [
        " ".join(f"{text.capitalize()}." for text in generator.sample(texts, count))
        for count in (9, 20, 5, 40)
    ]
    return [texts[3], long[0], long[1], texts[4], "", long[2], long[3], texts[5]]


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_long_rows_are_cut_short_and_say_so(
    bundle: Bundle, engine: Engine, long_texts: list[str], options: GenerationOptions
) -> None:
    plain = list(engine.generate(long_texts, options))
    results = list(engine.generate(long_texts, options, long_rows="truncate"))
    special, tokenizer = bundle.tokenizer.special, bundle.tokenizer
    cut = 0
    for text, one, result in zip(long_texts, plain, results, strict=True):
        if one.error is None or one.error.kind != "too-long":
            assert result == one
            continue
        source = [*tokenizer.encode(text)[:63], special.eos_id]
        (hypotheses,) = search(engine.decoder, [source], options, special)
        assert answers([result]) == [[hypothesis.tokens for hypothesis in hypotheses]]
        assert (result.source, result.source_tokens, result.truncated) == (text, 64, True)
        assert result.error is None
        cut += 1
    assert cut == 4


@pytest.mark.parametrize(
    "options", [GREEDY, replace(BEAM, n_best=1), replace(SAMPLING, n_best=1)], ids=str
)
@pytest.mark.parametrize(("batches", "replicas"), CUTS[::2])
def test_long_rows_are_answered_in_pieces(
    bundle: Bundle,
    decoder: PortableDecoder,
    long_texts: list[str],
    options: GenerationOptions,
    batches: BatchOptions,
    replicas: int,
) -> None:
    engine = Engine(bundle, decoder, replicas=replicas, batches=batches)
    results = list(engine.generate(long_texts, options, long_rows="split", first_row=7))
    assert [result.source for result in results] == long_texts
    reasons = set()
    for number, (text, result) in enumerate(zip(long_texts, results, strict=True), start=7):
        pieces = engine.reader.pieces(text) or [text]
        parts = [
            next(engine.generate([piece], options, first_row=number + place * PIECE))
            for place, piece in enumerate(pieces)
        ]
        assert result.source_tokens == sum(part.source_tokens for part in parts)
        if len(pieces) == 1:
            assert result == parts[0]
            continue
        assert (result.error, result.truncated) == (None, False)
        (joined,), outputs = result.outputs, [part.outputs[0] for part in parts]
        assert joined.text == " ".join(output.text for output in outputs if output.text)
        assert joined.tokens == tuple(token for output in outputs for token in output.tokens)
        total = sum(output.log_probability for output in outputs)
        assert joined.log_probability == pytest.approx(total)
        ends = [output.finish_reason == "end" for output in outputs]
        length = len(joined.tokens) + sum(ends)
        assert joined.score == pytest.approx(total / length**options.length_penalty)
        assert joined.finish_reason == ("end" if all(ends) else "length")
        reasons.add(joined.finish_reason)
    assert sum(len(engine.reader.pieces(text)) > 1 for text in long_texts) == 4
    assert "length" in reasons


def test_pieces_are_sampled_each_for_itself(engine: Engine, texts: list[str]) -> None:
    """A sentence three times as long as it may be, of equal sentences."""
    text = f"{texts[3]} " * 3
    assert engine.reader.pieces(text) == [texts[3]] * 3
    options = replace(SAMPLING, n_best=1)
    (result,) = engine.generate([text], options, long_rows="split")
    tokens = result.outputs[0].tokens
    third = len(tokens) // 3
    assert tokens[:third] != tokens[third : 2 * third]


def piece(text: str, reason: FinishReason, *tokens: int) -> GenerationResult:
    return GenerationResult("x", 3, (TextHypothesis(text, tokens, -0.5, -1.5, reason),))


def test_pieces_that_ended_join_to_an_answer_that_ended() -> None:
    ended, cut = piece("b", "end", 7, 8), piece("c", "length", 9)
    assert join("x y", [ended, ended], 1.0) == GenerationResult(
        "x y", 6, (TextHypothesis("b b", (7, 8, 7, 8), -3.0 / 6, -3.0, "end"),)
    )
    assert join("x y", [cut, ended, piece("", "end")], 0.0) == GenerationResult(
        "x y", 9, (TextHypothesis("c b", (9, 7, 8), -4.5, -4.5, "length"),)
    )
    failed = GenerationResult("x", 3, (), RowError("not-finite", "NaN"))
    assert join("x y", [ended, failed, failed], 1.0) == GenerationResult(
        "x y", 9, (), RowError("not-finite", "piece 2 of 3: NaN")
    )


def test_what_cannot_be_joined_is_not_split(engine: Engine, writer_bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="long_rows=split and n_best=4 exclude each other"):
        engine.generate([], BEAM, long_rows="split")
    with pytest.raises(UsageError, match="long_rows=split and a decoder-only bundle exclude"):
        Engine.load(writer_bundle_folder).generate([], GREEDY, long_rows="split")


def test_a_row_may_fill_every_position(bundle: Bundle, engine: Engine) -> None:
    text = "a"
    while len(bundle.tokenizer.encode(text)) < 63:
        text += " q"
    fits, longer = engine.generate([text, text + " q"], GREEDY)
    assert (fits.source_tokens, fits.error) == (64, None)
    assert longer.source_tokens > 64
    assert longer.error is not None
    assert longer.error.kind == "too-long"


def test_no_rows_in_no_rows_out(engine: Engine) -> None:
    assert list(engine.generate([], GREEDY)) == []
    assert len(list(engine.generate(["", ""], GREEDY))) == 2


class Overflowing(Ending):
    """Gives NaN or infinity for sources of one length, from the second target token on."""

    def __init__(self, bundle: Bundle, length: int, value: float) -> None:
        super().__init__(bundle)
        self.length = length
        self.value = value

    def step(
        self, tokens: NDArray[np.int64], state: PortableState, **wanted: Any
    ) -> tuple[StepOutput, PortableState]:
        output, after = super().step(tokens, state)
        logits = output.all_logits
        if state.past[0].shape()[2]:
            logits[state.host_mask.sum(axis=1) == self.length] = self.value
        return StepOutput(logits), after


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
def test_nan_is_never_an_answer(
    bundle: Bundle, alone: Alone, texts: list[str], options: GenerationOptions, value: float
) -> None:
    expected = alone(texts, options)
    lengths = [len(bundle.tokenizer.encode(text)) + 1 for text in texts]
    # An answer that is complete after one token never sees the overflow.
    length = next(
        length
        for length, row in zip(lengths, expected, strict=True)
        if length > 5 and min(map(len, row)) > 1
    )
    engine = Engine(bundle, Overflowing(bundle, length, value), batches=BatchOptions(rows=16))
    results = list(engine.generate(texts, options))
    failed = [index for index, result in enumerate(results) if result.error]
    assert failed
    assert {lengths[index] for index in failed} == {length}
    for index, result in enumerate(results):
        if result.error is not None:
            assert result.error.kind == "not-finite"
            assert result.outputs == ()
        elif lengths[index] != length:
            assert answers([result]) == [expected[index]]


class Scarce(Watched):
    """Has memory for so many rows at a time, whatever they are."""

    def __init__(self, inner: PortableDecoder, most: int) -> None:
        super().__init__(inner)
        self.most = most
        self.failures = 0

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Any:
        self.check(len(source))
        return super().start(source, mask)

    def step(self, tokens: NDArray[np.int64], state: Any, **wanted: Any) -> tuple[StepOutput, Any]:
        self.check(len(tokens))
        return super().step(tokens, state)

    def check(self, rows: int) -> None:
        if rows > self.most:
            self.failures += 1
            raise MemoryError(f"no room for {rows} rows")


class ScarceBatches(Ending):
    """Likewise, but each batch ends before the next begins; and it runs out in the middle."""

    def __init__(self, bundle: Bundle, most: int) -> None:
        super().__init__(bundle)
        self.most = most
        self.failures = 0

    def step(
        self, tokens: NDArray[np.int64], state: PortableState, **wanted: Any
    ) -> tuple[StepOutput, PortableState]:
        if len(tokens) > self.most and state.past[0].shape()[2] == 3:
            self.failures += 1
            raise MemoryError(f"no room for {len(tokens)} rows")
        return super().step(tokens, state)


@pytest.mark.parametrize("most", [4, 13])
@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
def test_where_memory_runs_out_the_answers_are_the_same(
    bundle: Bundle,
    decoder: PortableDecoder,
    texts: list[str],
    options: GenerationOptions,
    most: int,
) -> None:
    expected = list(Engine(bundle, decoder).generate(texts, options))
    kinds: list[Scarce | ScarceBatches] = [Scarce(decoder, most), ScarceBatches(bundle, most)]
    for scarce in kinds:
        batches = BatchOptions(rows=64, window=30)
        engine = Engine(bundle, scarce, replicas=2, batches=batches)
        assert list(engine.generate(texts, options)) == expected
        assert scarce.failures > 0


def test_no_memory_for_a_single_row_is_an_error(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> None:
    engine = Engine(bundle, Scarce(decoder, 3), batches=BatchOptions(rows=64))
    with pytest.raises(
        InputError, match=r"not enough memory for a single row \(no room for 4 rows\)"
    ):
        list(engine.generate(texts, BEAM))
    assert not replica_threads()


def test_where_onnxruntime_has_no_more_memory_the_answers_are_the_same(
    bundle_folder: Path, texts: list[str]
) -> None:
    """A process in which onnxruntime may not have what a large batch takes, and says so itself."""
    script = f"""
import json, sys
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native
from transferry.runtime.ort import session
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.worker_pool import Supply

rows, limit = map(int, sys.argv[1:])
if limit:
    kind, place = native.OrtAllocatorType.ORT_ARENA_ALLOCATOR, native.OrtMemType.DEFAULT
    arena = native.OrtArenaCfg({{"max_mem": limit, "arena_extend_strategy": 1}})
    onnxruntime.create_and_register_allocator(native.OrtMemoryInfo("Cpu", kind, 0, place), arena)
    session._share_arena = lambda: None  # this one is shared

back, give_back = [], Supply.give_back

def told(supply, todos):
    back.append(len(todos))
    give_back(supply, todos)

Supply.give_back = told
texts = json.load(sys.stdin)
texts = [f"{{number}} {{text}}" for number in range(10) for text in texts]
batches = BatchOptions(rows=rows, tokens=1 << 24)
engine = Engine.load({str(bundle_folder)!r}, replicas=2, batches=batches)
results = engine.generate(texts, GenerationOptions(max_length=4))
print(json.dumps([back, [repr(result.outputs) for result in results]]))
"""

    def answered(rows: int, limit: int) -> tuple[list[int], list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", script, str(rows), str(limit)],
            input=json.dumps(texts),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        back, outputs = json.loads(done.stdout)
        return back, outputs

    never, expected = answered(32, 0)
    back, found = answered(1000, 10_000_000)
    assert (never, found) == ([], expected)
    assert len(back) > 0, "memory ran out"


def replica_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_an_endless_stream_is_read_two_windows_ahead(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> None:
    window = 5
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for text in itertools.cycle(texts):
            read += 1
            yield text

    engine = Engine(bundle, decoder, replicas=2, batches=BatchOptions(rows=4, window=window))
    stream = engine.generate(endless(), GREEDY)
    assert read == 0
    for given, text in enumerate(itertools.islice(itertools.cycle(texts), 32)):
        assert next(stream).source == text
        begun = given // window
        assert read <= (begun + 2) * window
    assert replica_threads()
    stream.close()  # type: ignore[attr-defined]
    assert not replica_threads()


def test_an_error_of_the_source_ends_the_threads(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> None:
    def broken() -> Iterator[str]:
        yield from texts[:7]
        raise OSError("the cable was pulled")

    engine = Engine(bundle, decoder, replicas=2, batches=BatchOptions(rows=4, window=3))
    results = []
    with pytest.raises(OSError, match="cable"):
        for result in engine.generate(broken(), GREEDY):
            results.append(result.source)
    assert results == texts[: len(results)]
    assert not replica_threads()


def test_an_error_of_the_decoder_reaches_the_caller(
    bundle: Bundle, decoder: PortableDecoder, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tokens: object, state: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(decoder, "step", fail)
    engine = Engine(bundle, decoder, replicas=2, batches=BatchOptions(rows=4, window=8))
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(engine.generate(texts, GREEDY))
    assert not replica_threads()


def test_more_positions_than_the_model_has_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(UsageError, match="max_length is 65, but the model has 64 positions"):
        engine.generate(["a"], GenerationOptions(max_length=65))
    assert len(list(engine.generate(["a"], GenerationOptions(max_length=64)))) == 1


class Meeting(Watched):
    """Begins only when another is at work at the same time."""

    def __init__(self, inner: PortableDecoder, meeting: threading.Barrier) -> None:
        super().__init__(inner)
        self.meeting, self.met, self.door = meeting, False, threading.Lock()

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Any:
        with self.door:  # of several replicas the first meets the other device's
            if not self.met:
                self.meeting.wait(60)
            self.met = True
        return super().start(source, mask)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])
def test_several_devices_share_the_rows(
    bundle: Bundle,
    decoder: PortableDecoder,
    alone: Alone,
    texts: list[str],
    options: GenerationOptions,
    replicas: int,
) -> None:
    meeting = threading.Barrier(2)
    devices = [Meeting(decoder, meeting), Meeting(decoder, meeting)]
    batches = BatchOptions(rows=4, window=25)
    engine = Engine(bundle, *devices, replicas=replicas, batches=batches)
    results = list(engine.generate(texts, options))
    assert [result.source for result in results] == texts
    assert answers(results) == alone(texts, options)
    assert all(device.read for device in devices)
    assert sum(len(device.read) for device in devices) == len(texts), "each row once"


def test_every_device_is_opened(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_here(bundle: Bundle, variant: Variant, options: SessionOptions) -> PortableDecoder:
        opened.append((options.provider, options.device_id))
        return PortableDecoder(bundle, variant, SessionOptions())

    monkeypatch.setattr("transferry.runtime.engine.engine.open_model", open_here)
    engine = Engine.load(bundle_folder, provider="cuda", device_ids=[2, 0])
    assert opened == [("cuda", 2), ("cuda", 0)]
    assert (engine.describe()["devices"], engine.replicas) == (2, 1)
    assert len(list(engine.generate(["a", "two"]))) == 2


def test_load_opens_what_is_asked_for(bundle_folder: Path) -> None:
    engine = Engine.load(str(bundle_folder), threads=1)
    assert engine.replicas == usable_cores()
    assert engine.batches == BatchOptions()
    assert engine.default_options() == GenerationOptions(max_length=64)
    assert next(engine.generate(["two"])).text
    found = engine.describe()
    assert found.keys() >= {"transferry", "manifest_sha256", "replicas", "onnxruntime", "nodes"}
    assert (found["variant"], found["provider"]) == ("portable", "cpu")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda folder: Engine.load(folder, replicas=0), "replicas must be at least 1, not 0"),
        (lambda folder: Engine.load(folder, variant="int8"), "no variant 'int8'; it has portable"),
        (lambda folder: Engine.load(folder, threads=0), "threads must be 1 or more"),
        (lambda folder: Engine.load(folder, device_ids=[]), r"each of them once, found \[\]"),
        (lambda folder: Engine.load(folder, device_ids=[1, 1]), r"once, found \[1, 1\]"),
        (lambda folder: Engine.load(folder, device_ids=[0, 1]), "provider cpu is one device"),
    ],
)
def test_load_refuses(bundle_folder: Path, load: Callable[[Path], Engine], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(bundle_folder)
