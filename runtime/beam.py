"""Beam search: what ranks. Numpy over all sentences at once, Python only where one ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoder import Decoder, State
from transferry.runtime.hypothesis import FAILED, FinishReason, Hypothesis, length_normalised
from transferry.runtime.logits import log_sum_exp, top_k
from transferry.runtime.options import GenerationOptions
from transferry.runtime.processors import LogitsProcessor, restrict


def beam_search(
    decoder: Decoder[State],
    state: State,
    first: NDArray[np.int64],
    options: GenerationOptions,
    processors: Sequence[LogitsProcessor],
    eos_id: int,
) -> list[list[Hypothesis]]:
    """Keeps the `beam` likeliest beginnings of each sentence, step by step.

    Of the `2 * beam` best candidates of a step, in the order of their log-probability and then of
    beam and token, those that end among the first `beam` are outputs; the first `beam` that do
    not end go on. There are always enough of those, since each beam has one way to end. This is
    CTranslate2's rule.

    A beam that does not exist (the first step has one, a forced prefix leaves one) has the
    log-probability minus infinity, and so has everything that follows from it.

    Args:
        decoder: scores the tokens.
        state: after `Decoder.start`, one row a sentence.
        first: the token that the outputs of each sentence follow `[sentences]`.
        options: beam, n_best, lengths, length penalty and early stopping are used.
        processors: what filters.
        eos_id: the token that ends an output.

    Returns:
        At most `n_best` hypotheses a sentence, best first.
    """
    beam, sentences = options.beam, len(first)
    paths = Paths(options.max_length, sentences, beam)
    ended = Ended(sentences, options)
    failed = np.zeros(sentences, np.bool_)
    # What is still in the batch: sentences `[live]`, their beams `[live, width]`.
    live = np.arange(sentences)
    totals = np.zeros((sentences, 1))
    tokens = first[:, None]

    for step in range(options.max_length):
        logits, state = decoder.step(tokens.reshape(-1, 1), state)
        last = logits[:, -1]
        width = tokens.shape[1]
        rows = np.arange(len(live) * width)
        owners = live[rows // width]
        active = [processor for processor in processors if processor.active(step)]
        allowed = last
        if active:
            allowed = restrict(last, active, owners, paths.read(step, owners, rows % width))
        normaliser = log_sum_exp(last)
        failed[live] |= (np.isnan(normaliser.reshape(-1, width)) & (totals > -np.inf)).any(axis=1)
        totals, parents, tokens = best_candidates(last, allowed, normaliser, totals, 2 * beam)

        exists = totals > -np.inf
        ends = exists & (tokens == eos_id)
        at_limit = step + 1 == options.max_length
        for row, rank in np.argwhere((exists if at_limit else ends)[:, :beam]):
            ended.add(
                live[row],
                parent=parents[row, rank],
                length=step,
                token=None if ends[row, rank] else int(tokens[row, rank]),
                log_probability=totals[row, rank],
            )

        going_on = np.argsort(ends, axis=1, kind="stable")[:, :beam]
        totals = np.take_along_axis(totals, going_on, axis=1)
        parents = np.take_along_axis(parents, going_on, axis=1)
        tokens = np.take_along_axis(tokens, going_on, axis=1)
        paths.extend(step, live, parents, tokens)
        done = failed[live] | ended.settled(live, totals.max(axis=1))
        if at_limit or done.all():
            break
        chosen = (np.arange(len(live))[:, None] * width + parents)[~done].ravel()
        if not np.array_equal(chosen, rows):
            state = decoder.select(state, chosen)
        live, totals, tokens = live[~done], totals[~done], tokens[~done]

    outputs = ended.read(paths)
    return [[FAILED] if failed[i] or not outputs[i] else outputs[i] for i in range(sentences)]


def best_candidates(
    logits: NDArray[np.floating[Any]],
    allowed: NDArray[np.floating[Any]],
    normaliser: NDArray[np.float64],
    totals: NDArray[np.float64],
    count: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The best ways to lengthen the beams of each sentence by one token.

    The best `count` of a sentence are among the best `count` of each of its beams, so that only
    those are normalised and compared, in float64, and never `beam * vocabulary` of them.

    Args:
        logits: of the next token, as the model gave them `[sentences * width, vocabulary]`.
        allowed: the same after the processors.
        normaliser: `log_sum_exp` of the logits `[sentences * width]`.
        totals: log-probabilities of the beams `[sentences, width]`.
        count: candidates wanted of each sentence.

    Returns:
        Log-probabilities, parent beams and tokens `[sentences, count]`, the likeliest first, then
        the lower beam, then the lower token; minus infinity where there are fewer candidates.
    """
    sentences = len(totals)
    values, tokens = top_k(allowed, count)
    candidates = np.take_along_axis(logits, tokens, axis=1) - normaliser[:, None]
    candidates += totals.reshape(-1, 1)
    # NaN, from failed sentences and from beams that do not exist, sorts behind minus infinity.
    candidates[np.isneginf(values)] = -np.inf
    candidates, tokens = candidates.reshape(sentences, -1), tokens.reshape(sentences, -1)
    order = np.argsort(-candidates, axis=1, kind="stable")[:, :count]
    return (
        np.take_along_axis(candidates, order, axis=1),
        order // count,
        np.take_along_axis(tokens, order, axis=1),
    )


class Paths:
    """The tokens of all beams as a tree of back-pointers.

    A step writes one token and one parent a beam, and no step copies what came before; an output
    is read off backwards once it is wanted.
    """

    def __init__(self, steps: int, sentences: int, beam: int) -> None:
        self.tokens = np.empty((steps, sentences, beam), np.int64)
        self.parents = np.empty((steps, sentences, beam), np.int64)

    def extend(
        self,
        step: int,
        sentences: NDArray[np.int64],
        parents: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> None:
        """Adds a token to the beams of some sentences.

        Args:
            step: tokens that the beams have so far.
            sentences: which sentences `[sentences]`.
            parents: the beam of the step before that each beam goes on from `[sentences, beam]`.
            tokens: the tokens `[sentences, beam]`.
        """
        self.tokens[step, sentences] = tokens
        self.parents[step, sentences] = parents

    def read(
        self,
        lengths: NDArray[np.int64] | int,
        sentences: NDArray[np.int64],
        beams: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Walks back from the ends of paths to their beginnings.

        Args:
            lengths: tokens of each path `[paths]`, or of all.
            sentences: the sentence of each path `[paths]`.
            beams: the beam of each path's last token `[paths]`.

        Returns:
            Tokens `[paths, longest]`, without meaning beyond a path's length.
        """
        longest = int(np.max(lengths, initial=0))
        result = np.empty((len(sentences), longest), np.int64)
        for step in reversed(range(longest)):
            result[:, step] = self.tokens[step, sentences, beams]
            beams = np.where(step < lengths, self.parents[step, sentences, beams], beams)
        return result


@dataclass(frozen=True)
class EndedPath:
    """A hypothesis that has ended: `length` tokens of a path, and one more at the length limit."""

    score: float
    log_probability: float
    parent: int
    length: int
    token: int | None


class Ended:
    """The best `beam` hypotheses of each sentence that have ended, and whether more may come."""

    def __init__(self, sentences: int, options: GenerationOptions) -> None:
        self.options = options
        self.best: list[list[EndedPath]] = [[] for _ in range(sentences)]
        # Minus infinity until `beam` hypotheses have ended `[sentences]`.
        self.worst_score = np.full(sentences, -np.inf)

    def add(
        self, sentence: int, *, parent: int, length: int, token: int | None, log_probability: float
    ) -> None:
        """Adds a hypothesis, whose last token is `token` or, where that is None, the end token."""
        score = length_normalised(log_probability, length + 1, self.options.length_penalty)
        best = self.best[sentence]
        best.append(EndedPath(score, float(log_probability), parent, length, token))
        best.sort(key=lambda path: -path.score)
        del best[self.options.beam :]
        if len(best) == self.options.beam:
            self.worst_score[sentence] = best[-1].score

    def settled(
        self, sentences: NDArray[np.int64], log_probability: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which sentences are done `[sentences]`.

        Args:
            sentences: the sentences asked about `[sentences]`.
            log_probability: of the best live beam of each `[sentences]`.
        """
        worst = self.worst_score[sentences]
        settled: NDArray[np.bool_]
        if self.options.early_stopping:
            settled = (log_probability == -np.inf) | (worst > -np.inf)
            return settled
        # A log-probability is negative and only falls, and division by a power of the length
        # raises it: no continuation scores above what the beam would at the greatest length.
        longest = self.options.max_length**self.options.length_penalty
        settled = log_probability / longest <= worst
        return settled

    def read(self, paths: Paths) -> list[list[Hypothesis]]:
        """The best `n_best` hypotheses of each sentence, best first."""
        chosen = [
            (sentence, path)
            for sentence, best in enumerate(self.best)
            for path in best[: self.options.n_best]
        ]
        tokens = paths.read(
            np.array([path.length for _, path in chosen], np.int64),
            np.array([sentence for sentence, _ in chosen], np.int64),
            np.array([path.parent for _, path in chosen], np.int64),
        )
        outputs: list[list[Hypothesis]] = [[] for _ in self.best]
        for (sentence, path), row in zip(chosen, tokens.tolist(), strict=True):
            reason: FinishReason = "end" if path.token is None else "length"
            last = () if path.token is None else (path.token,)
            outputs[sentence].append(
                Hypothesis((*row[: path.length], *last), path.log_probability, path.score, reason)
            )
        return outputs
