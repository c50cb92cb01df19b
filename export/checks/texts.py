"""Text fed whole: given answers to a decoder, scores of texts, passages to an encoder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.checks.check import Check, Findings
from transferry.export.checks.searches import Text
from transferry.export.oracle.oracle import SHAKES, Oracle
from transferry.export.oracle.teacher_forcing import TeacherForcing, chosen_from
from transferry.export.rewrite.calibration import misfit
from transferry.export.subject.bundle import BundleSubject
from transferry.export.subject.subject import Subject
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.decoding.logits import BLOCK_ENTRIES, log_sum_exp
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.fill_mask import FillMask
from transferry.runtime.engine.tasks.score import TOO_SHORT, Pair, score
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, limited, observe
from transferry.runtime.proof.divergence import Divergence, RankErrors
from transferry.runtime.proof.report import Claim, Difference
from transferry.runtime.proof.tally import Tally
from transferry.runtime.proof.units import logit_errors
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

CALIBRATED = "calibration"
CALIBRATED_ROWS = 32
HIDE_EVERY = 7  # tokens of a text, for an encoder-only model to fill in
TEXT = "text"
SCORED_ROWS = 64  # by the oracle at once
# Source and target of each row to feed, given the findings so far; the last token is predicted.
Fed = Callable[[Findings], Sequence[tuple[Sequence[int], Sequence[int]]]]


def feeding(
    text: Text, special: SpecialTokens, so_far: Findings
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Returns source and target of each row to feed, by default torch's greedy answers."""
    encodes, most = text.config.encoder_layers, text.config.max_positions + 1
    if text.fed is not None:
        rows = zip(text.sources, text.fed, strict=True)
        return [(source if encodes else [], target[:most]) for source, target in rows]
    if (best := so_far.best.get("greedy")) is None:  # of another tool's graphs that do not run
        return []
    return [
        (source, [special.bos_id, *wanted.scored_tokens][:most])
        if encodes
        else (source[:1], [*source[1:], *wanted.scored_tokens])
        for source, (wanted, _) in zip(text.sources, best, strict=True)
    ]


def given_answers(
    subject: Subject[Any], oracle: Oracle, fed: Fed, rows: int, name: str = TEXT
) -> Check:
    """Returns the check of every tensor where the target of each row is fed after its source."""
    return Check(name, partial(_given_answers, subject, oracle, fed), rows)


def _given_answers(
    subject: Subject[Any], oracle: Oracle, fed: Fed, so_far: Findings
) -> Iterator[Findings]:
    pairs, forcing = [pair for pair in fed(so_far) if len(pair[1]) > 1], TeacherForcing()
    pad_id = oracle.special.pad_id
    for batch in oracle.batches([max(map(len, pair)) for pair in pairs]):
        source, mask = pad_sources([pairs[row][0] for row in batch], pad_id)
        # Padding follows the target, and is the same for both sides.
        target, _ = pad_sources([pairs[row][1][:-1] for row in batch], pad_id)
        name = f"text, rows {', '.join(map(str, batch[:3]))}{' ...' if len(batch) > 3 else ''}"
        case = Case(name, source, mask, target, 0, stage=TEXT)
        (sides, _), found = oracle.sides(case), observe(subject.model, case)
        compared = oracle.compared(case, found, subject.tensors, oracle.judged(case, sides))
        # The loss of an int8 variant is its loss against the model as trained.
        trained = observe(oracle.trained, case) if oracle.rounds else sides[1]
        predicted = [pairs[row][1][1:] for row in batch]
        tokens = np.concatenate(predicted)
        rows, places = np.nonzero(np.arange(target.shape[1]) < [[len(each)] for each in predicted])
        # A few at once: of a large vocabulary the logits of a batch take 128 MB.
        step = max(1, BLOCK_ENTRIES // oracle.config.vocabulary_size)
        for first in range(0, len(tokens), step):
            part = slice(first, first + step)
            at = rows[part], places[part]
            logits = (tensors["logits"][at] for tensors in (*sides[:2], found, trained))
            forcing.add([0, *tokens[part]], *logits, places=places[part])
        failing = [case] if any(item.fault for item in compared) else []
        yield Findings(comparisons=compared, failing=failing, steps=len(batch))
    yield Findings(forcing=forcing)


def calibrated(
    subject: BundleSubject, oracle: Oracle, fed: Fed, texts: Sequence[Sequence[int]]
) -> Check:
    """Returns the check that the ranges of an int8 variant fit the text.

    Both sides of all other comparisons round with the bundle's ranges.
    """

    def run(so_far: Findings) -> Iterator[Findings]:
        assert subject.calibration is not None
        rows = fed(so_far) if subject.decodes and texts else [(text, text) for text in texts]
        # The last token of a target is predicted, and not fed.
        given = [(source, target[:-1]) for source, target in rows if len(target) > 1]
        problem = misfit(oracle.trained.model, subject.calibration, given[:CALIBRATED_ROWS])
        yield Findings(claims=[Claim(CALIBRATED, problem)])

    return Check(CALIBRATED, run)


def passage(row: int, text: Sequence[int]) -> Case:
    """Returns the case of a text alone."""
    tokens = np.array([text], np.int64)
    nothing = np.zeros((1, 0), np.int64)
    return Case(f"text, row {row}", tokens, np.ones_like(tokens, np.bool_), nothing, 0, stage=TEXT)


def readings(
    subject: Subject[Any],
    oracle: Oracle,
    texts: Sequence[Sequence[int]],
    head: HeadSettings | None = None,
) -> Check:
    """Returns the check of an encoder-only model: every tensor, and the choices made by them.

    The model chooses tokens for some that are hidden, or the labels of a head. The check raises
    InputError if tokens are to be filled in and the tokenizer has no mask.
    """
    return Check(TEXT, partial(_readings, subject, oracle, texts, head), len(texts))


def _readings(
    subject: Subject[Any],
    oracle: Oracle,
    texts: Sequence[Sequence[int]],
    head: HeadSettings | None,
    so_far: Findings,
) -> Iterator[Findings]:
    config, special = oracle.config, oracle.special
    fills, mask_id = config.lm_head and not config.has_head, special.mask_id
    if fills and mask_id is None:
        raise InputError("expected a tokenizer with a mask, found none; verify without --text")
    found, forcing = Findings(), TeacherForcing()
    tally = Tally(FillMask.name if fills or head is None else head.task, oracle.tolerance)
    for row, text in enumerate(texts):
        case = passage(row, text)
        places = np.arange(len(special.before), len(text), HIDE_EVERY)
        if fills and mask_id is not None:
            case.source[:, places] = mask_id
        (sides, least), given = oracle.sides(case), observe(subject.model, case)
        expected = oracle.judged(case, sides, least)
        found.comparisons += oracle.compared(case, given, subject.tensors, expected)
        trained = observe(oracle.trained.encoder, case) if oracle.rounds else sides[1]
        yield Findings(steps=1)
        choices = [
            tensors["logits"][0, places] if fills else chosen_from(tensors, head)
            for tensors in (*sides, given, trained)
        ]
        if not choices[0].size:  # numbers and vectors, without a choice
            continue
        exact, left, *others, right, meant = (each.astype(np.float64) for each in choices)
        forcing.add([0, *left.argmax(axis=1)], exact, left, right, meant)
        where = places if fills else np.arange(len(left))
        Choices(exact, left, others, right, least, where, oracle).count(row, tally)
    yield Findings(comparisons=found.comparisons, forcing=forcing)
    if forcing.tokens:
        yield Findings(decisions=[tally.decisions()])


@dataclass(frozen=True)
class Choices:
    """Scores among which one text's tokens or labels are chosen.

    Attributes:
        exact: Those of the oracle `[choices, options]` float64; all others likewise.
        left: Those of torch in float32.
        others: Those of torch with other roundings.
        right: Those of the model.
        least: Lower bound of the unit of their errors.
        where: Place of each choice, for the report `[choices]`.
    """

    exact: NDArray[np.float64]
    left: NDArray[np.float64]
    others: Sequence[NDArray[np.float64]]
    right: NDArray[np.float64]
    least: float
    where: NDArray[np.int64]
    oracle: Oracle

    def count(self, row: int, tally: Tally) -> None:
        """Counts the choices of a text as equal, tied or different."""
        exact, right, tolerance = self.exact, self.right, self.oracle.tolerance
        borders = bool(self.oracle.others)
        wanted, found = self.left.argmax(axis=1), right.argmax(axis=1)
        units, sides = logit_errors(exact, self.left, *self.others)
        floor = tolerance.floor * np.maximum(units, self.least)
        own = RankErrors(units * np.max(sides, axis=0), floor, borders)
        # Rounding alone crosses no border.
        few = replace(own, each=own.floor if borders else own.each, borders=False)
        divergences, errors = [], []
        for n, (one, other) in enumerate(zip(wanted, found, strict=True)):
            # Either score may be off.
            allowed = 2 * own.allowed(tolerance, slice(n, n + 1))
            rounding = min(allowed, 2 * few.allowed(Tolerance(), slice(n, n + 1)))
            if one != other or not np.isfinite(exact[n]).all():
                margin = float(np.abs(exact[n, one] - exact[n, other]))
                given = int(self.where[n]), (int(one),), (int(other),)
                divergences.append(Divergence(*given, margin, allowed, rounding))
            scores = (side[n, one] - log_sum_exp(side[n : n + 1])[0] for side in (exact, right))
            errors.append((float(np.abs(np.subtract(*scores))), allowed / tolerance.factor))
        if not np.isfinite(right).all():
            tally.differ(Difference(row, "the graph gave NaN or infinity"), False)
        elif divergences:
            worst = max(divergences, key=lambda item: item.margin - item.allowed)
            tally.differ(*worst.difference(row))
        else:
            tally.agree(row, errors)


def scores(oracle: Oracle, engine: Engine, pairs: Sequence[Pair]) -> Check:
    """Returns the check of the log-probability of each token, in units of the logits there.

    Of each batch of the oracle's it finds the token nearest to its limit, or beyond it.
    """
    return Check("scores", partial(_scores, oracle, engine, pairs))


def _scores(
    oracle: Oracle, engine: Engine, pairs: Sequence[Pair], so_far: Findings
) -> Iterator[Findings]:
    rows = list(enumerate(score(engine, pairs, long_rows="truncate")))
    found = [(number, row) for number, row in rows if row.error is None]
    for first in range(0, len(found), SCORED_ROWS):
        batch = found[first : first + SCORED_ROWS]
        name = f"text, scores of rows {batch[0][0]} to {batch[-1][0]}"
        encoded = engine.preprocessor.encode([row.source for _, row in batch], "truncate")
        # Of a text all tokens but the first are scored.
        read = None if oracle.config.encoder_layers else 1
        sources, answers = [row.ids[:read] for row in encoded], [row.tokens for _, row in batch]
        for shakes in (0, SHAKES):  # see `Oracle.compared`
            worst: list[tuple[float, float]] = []
            judged_rows = oracle.errors(sources, answers, shakes=shakes)
            for (one, own), (_, row) in zip(judged_rows, batch, strict=True):
                errors = np.abs(row.log_probabilities - one.log_probabilities)
                units = own.floor / oracle.tolerance.floor
                parts = [slice(n, n + 1) for n in range(len(errors))]
                allowed = [own.allowed(oracle.tolerance, part) for part in parts]
                worst += zip((errors / units).tolist(), (allowed / units).tolist(), strict=True)
            # Unlike max(), argmax finds NaN.
            error, budget = worst[int(np.argmax([error / allowed for error, allowed in worst]))]
            own_error = budget / oracle.tolerance.factor
            judged = limited(name, "scores", "text", error, own_error, budget)
            if not judged.fault:
                break
        yield Findings(comparisons=[judged])
    failed = [(number, row.error) for number, row in rows if row.error not in (None, TOO_SHORT)]
    if failed:
        fault = f"row {failed[0][0]} and {len(failed) - 1} more were not scored: {failed[0][1]}"
        broken = Comparison("text", "scores", "text", np.inf, 0.0, 0.0, fault)
        yield Findings(comparisons=[broken])
