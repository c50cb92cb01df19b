"""Scoring of given texts: log-probability of each token, in one pass and without generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transferry.runtime.engine.preprocess import (
    EncodedRow,
    InLanguages,
    LongRows,
    WorkItem,
    check_long_rows,
    checked_pairs,
    in_languages,
    too_long,
)
from transferry.runtime.engine.result import NOT_FINITE, Results, RowError, RowResult
from transferry.runtime.engine.tasks.task import LanguageOptions, Layout, Task, columns
from transferry.runtime.errors import Option, UsageError
from transferry.runtime.settings import shown

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.ort.open_model import ServedDecoder

# Limit on the logits of a batch: 256 MB of float32.
MOST_LOGITS = 1 << 26
TOO_SHORT = RowError("too-short", "a text of one token has nothing to be scored after it")

# Source and target, or a text and None.
Pair = tuple[str | RowError | InLanguages, str | RowError | None]


@dataclass(frozen=True)
class ScoreResult(RowResult):
    """Score of one input row; `source` is the source of a pair, or the text.

    Attributes:
        target: Target of a pair; empty if the input was an error, None for a text.
        tokens: Ids of the scored tokens: of a pair the target and its end token, which a truncated
            target lacks; of a text all but the first.
        log_probabilities: That of each token given those before it, in nats.
    """

    target: str | None = None
    tokens: tuple[int, ...] = ()
    log_probabilities: tuple[float, ...] = ()

    @property
    def target_tokens(self) -> int:
        """Number of scored tokens."""
        return len(self.tokens)

    @property
    def total(self) -> float:
        """Log-probability of all tokens, in nats."""
        import numpy as np

        return float(np.sum(self.log_probabilities, dtype=np.float64))

    def _answer(self, n_best: int) -> dict[str, Any]:
        target = {} if self.target is None else {"target": self.target}
        scores = {
            "total": self.total,
            "tokens": list(self.tokens),
            "log_probabilities": list(self.log_probabilities),
        }
        return {**target, **(self._error() or scores)}


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(LanguageOptions):
    """Options of score.

    Attributes:
        target: File with the targets of the pairs, in the format of the input.
    """

    target: Path | None = None


class Score(Task):
    """Log-probabilities of texts and pairs."""

    name = command = "score"
    options = ScoreOptions
    columns = columns(target="text", total="float", tokens=["integer"], log_probabilities=["float"])
    answer = "total"
    has_canary = False
    elsewhere = frozenset({"long_rows", "target"})

    def __init__(self, engine: OpenBundle, options: ScoreOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        options.require(engine.bundle.tokenizer)
        self.chosen, self.arguments = options, {}
        if engine.decoder.has_encoder is (options.target is None):
            remedy = "name the texts to score with" if options.target is None else "leave out"
            architecture = engine.bundle.manifest.architecture
            raise UsageError(
                f"{engine.bundle.folder}: the model is {architecture}; {remedy} ", Option("target")
            )

    def given(self, row: Any) -> Any:
        return self.chosen.text_of(row), row.target


def score(
    engine: OpenBundle,
    pairs: Iterable[Pair | str],
    *,
    long_rows: LongRows = "error",
    source_language: str | None = None,
    target_language: str | None = None,
) -> Results[ScoreResult]:
    """Scores pairs or texts, in order and in bounded memory.

    Args:
        engine: Engine of an encoder-decoder bundle for pairs, of a decoder-only one for texts.
        pairs: Any number of rows, pairs or, for a decoder-only bundle, texts; an error on either
            side becomes the result of its row.
        long_rows: Treatment of texts longer than the model's positions: "error", or "truncate" to
            score their beginning.
        source_language: Language of the sources; see `Engine.generate`.
        target_language: Language of the targets. Its token is given, and not scored.

    Raises:
        ParityError: A required certificate does not cover scores.
        UsageError: The bundle is encoder-only, `long_rows` is "split", or there is no such
            language.
    """
    decoders = engine.decoders
    engine.require_task(Score.name)
    check_long_rows(long_rows, "score")
    task = _Score(engine, decoders[0].has_encoder, long_rows)
    given = checked_pairs(pairs, alone=not task.has_encoder)
    if source_language is not None or target_language is not None:
        named = source_language, target_language, engine.bundle.tokenizer.special
        in_languages((), *named)  # before the first row is read
        given = ((*in_languages([source], *named), target) for source, target in given)
    return engine.map(given, task.prepare, task.compute, decoders)


@dataclass(frozen=True)
class _ScoredRow:
    """A row with the decoder's input, and the tokens that shall follow its last tokens."""

    source: EncodedRow
    target: str | None
    given: Sequence[int]
    wanted: Sequence[int]
    truncated: bool


class _Score:
    def __init__(self, engine: OpenBundle, has_encoder: bool, long_rows: LongRows) -> None:
        self.tokenizer, self.has_encoder = engine.bundle.tokenizer, has_encoder
        self.special = self.tokenizer.special
        self.sources, self.long_rows = engine.preprocessor, long_rows
        self.targets = replace(
            self.sources,
            encode_batch=self._encode_targets,
            special=replace(
                self.special, before=(), after=(self.special.eos_id,), longest=0, keeps_end=False
            ),
        )

    def _encode_targets(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenizer.encode_target(text) for text in texts]

    def prepare(self, pairs: list[Pair]) -> list[WorkItem[_ScoredRow] | ScoreResult]:
        sources = self.sources.encode([source for source, _ in pairs], self.long_rows)
        if not self.has_encoder:
            if found := [target for _, target in pairs if target is not None]:
                told = "the bundle scores texts without a target, found "
                raise UsageError(f"{told}{shown(found[0])}; leave it out")
            return [self._text(row) for row in sources]
        texts = ["" if target is None else target for _, target in pairs]
        targets = self.targets.encode(texts, self.long_rows)
        return [self._pair(*pair) for pair in zip(sources, targets, strict=True)]

    def _pair(self, source: EncodedRow, target: EncodedRow) -> WorkItem[_ScoredRow] | ScoreResult:
        if error := source.error or target.error:
            return ScoreResult(source.text, source.tokens, target.text, error=error)
        wanted = target.ids[:-1] if target.truncated else target.ids
        begin = [self.special.bos_id]
        if (language := source.target) is not None:
            begin = [language] if self.special.begins_with_language else [*begin, language]
        given = [*begin, *wanted[:-1]]
        truncated = source.truncated or target.truncated
        if len(given) > (positions := self.sources.positions):
            error = too_long(len(given), positions)
            return ScoreResult(source.text, source.tokens, target.text, error=error)
        row = _ScoredRow(source, target.text, given, wanted, truncated)
        return WorkItem(row, max(len(source.ids), len(given)))

    def _text(self, row: EncodedRow) -> WorkItem[_ScoredRow] | ScoreResult:
        error = row.error
        if error is None and len(row.ids) == 1:
            error = TOO_SHORT
        if error is not None:
            return ScoreResult(row.text, row.tokens, error=error)
        scored = _ScoredRow(row, None, row.ids[:-1], row.ids[1:], row.truncated)
        return WorkItem(scored, len(row.ids))

    def compute(self, decoder: ServedDecoder, rows: list[_ScoredRow]) -> list[ScoreResult]:
        longest = max(len(row.given) for row in rows)
        most = max(1, MOST_LOGITS // (longest * decoder.vocabulary_size))
        blocks = (rows[first : first + most] for first in range(0, len(rows), most))
        return [result for block in blocks for result in self._block(decoder, block)]

    def _block(self, decoder: ServedDecoder, rows: Sequence[_ScoredRow]) -> list[ScoreResult]:
        import numpy as np

        from transferry.runtime.decoding.logits import log_sum_exp
        from transferry.runtime.decoding.search import pad_sources

        pad_id = self.special.pad_id
        sources = [row.source.ids if self.has_encoder else () for row in rows]
        state = decoder.start(*pad_sources(sources, pad_id))
        # Padding comes after the tokens to be scored, and the state is not used again.
        given, _ = pad_sources([row.given for row in rows], pad_id)
        if given.shape[1] == 1:
            # A decoder may have other kernels for a single token than for several; which of them
            # computes a row must not depend on the other rows.
            given = np.pad(given, ((0, 0), (0, 1)), constant_values=pad_id)
        output, _ = decoder.step(given, state)
        results = []
        for row, logits in zip(rows, output.all_logits, strict=True):
            first, last = len(row.given) - len(row.wanted), len(row.given)
            scored = logits[first:last]
            values = scored[np.arange(len(scored)), row.wanted] - log_sum_exp(scored)
            found = ScoreResult(
                *(row.source.text, len(row.source.ids), row.target),
                *(tuple(row.wanted), tuple(values.tolist())),
                truncated=row.truncated,
            )
            if not np.isfinite(values).all():
                found = replace(found, tokens=(), log_probabilities=(), error=NOT_FINITE)
            results.append(found)
        return results
