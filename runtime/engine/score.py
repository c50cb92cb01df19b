"""How likely a model finds given text: token by token, in one pass and without generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, check_long_rows
from transferry.runtime.engine.result import NOT_FINITE, RowError
from transferry.runtime.engine.worker_pool import WorkItem
from transferry.runtime.ort.open_model import ServedDecoder

# Most logits of a batch: 256 MB of float32.
MOST_LOGITS = 1 << 26


@dataclass(frozen=True)
class ScoreResult:
    """What became of one row.

    Attributes:
        source: The text that came in; of a pair the source. Nothing where an error came in.
        target: The target of a pair, likewise; else None.
        source_tokens: Tokens that were read; on an error how many there are, or at least are.
        tokens: Ids of the tokens that were scored: of a pair the target's and the end token, of a
            text all that follow its first token.
        log_probabilities: Of each of them after those before it, in nats.
        error: None where there is a score.
        truncated: Whether a text was cut short; what goes on has no end token to be scored.
    """

    source: str
    target: str | None
    source_tokens: int
    tokens: tuple[int, ...] = ()
    log_probabilities: tuple[float, ...] = ()
    error: RowError | None = None
    truncated: bool = False

    @property
    def target_tokens(self) -> int:
        """How many tokens were scored."""
        return len(self.tokens)

    @property
    def total(self) -> float:
        """Log-probability of all of them, in nats."""
        return float(np.sum(self.log_probabilities, dtype=np.float64))

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        texts = {"source": self.source}
        if self.target is not None:
            texts["target"] = self.target
        if self.error is not None:
            return {**texts, "error": self.error.record()}
        return {
            **texts,
            "total": round(self.total, 6),
            "tokens": list(self.tokens),
            "log_probabilities": [round(value, 6) for value in self.log_probabilities],
        }


@dataclass(frozen=True)
class _Row:
    source: str
    target: str | None
    read: Sequence[int]
    given: Sequence[int]
    wanted: Sequence[int]
    truncated: bool


def score(
    engine: Engine,
    rows: Iterable[tuple[str | RowError, str | RowError | None]],
    *,
    long_rows: LongRows = "error",
) -> Iterator[ScoreResult]:
    """Scores each row, in order, in bounded memory; a row never depends on its neighbours.

    Args:
        engine: Of an encoder-decoder bundle for pairs, of a decoder-only one for texts.
        rows: Source and target, or a text and None; any iterable, however long. An error on either
            side is the result of its own row.
        long_rows: What becomes of texts of more tokens than the model has positions: an "error",
            or "truncate", which scores their beginning.

    Raises:
        UsageError: The bundle holds an encoder alone, or long rows are to be split.
    """
    decoders, tokenizer = engine.decoders, engine.bundle.tokenizer
    special = tokenizer.special

    check_long_rows(long_rows, "score")
    targets = replace(
        engine.reader,
        encode_batch=lambda texts: [tokenizer.encode_target(text) for text in texts],
        special=replace(special, before=(), after=(special.eos_id,)),
    )

    def prepare(
        first: int, rows: list[tuple[str | RowError, str | RowError | None]]
    ) -> list[WorkItem[_Row] | ScoreResult]:
        sources = engine.reader.read([source for source, _ in rows], long_rows)
        if not decoders[0].has_encoder:
            return [_of_text(row) for row in sources]
        wanted = targets.read(["" if target is None else target for _, target in rows], long_rows)
        return [_of_pair(*pair) for pair in zip(sources, wanted, strict=True)]

    def _of_pair(source: EncodedRow, target: EncodedRow) -> WorkItem[_Row] | ScoreResult:
        error = source.error or target.error
        if error is not None:
            return ScoreResult(source.text, target.text, source.tokens, error=error)
        wanted = target.ids[:-1] if target.truncated else target.ids
        given = [special.bos_id, *wanted[:-1]]
        truncated = source.truncated or target.truncated
        return WorkItem(
            _Row(source.text, target.text, source.ids, given, wanted, truncated),
            max(len(source.ids), len(wanted)),
        )

    def _of_text(row: EncodedRow) -> WorkItem[_Row] | ScoreResult:
        error = row.error
        if error is None and len(row.ids) == 1:
            error = RowError("too-short", "a text of one token has nothing to be scored after it")
        if error is not None:
            return ScoreResult(row.text, None, row.tokens, error=error)
        given, wanted = row.ids[:-1], row.ids[1:]
        return WorkItem(_Row(row.text, None, (), given, wanted, row.truncated), len(row.ids))

    def compute(decoder: ServedDecoder, rows: list[_Row]) -> list[ScoreResult]:
        scores: list[ScoreResult] = []
        longest = max(len(row.given) for row in rows)
        most = max(1, MOST_LOGITS // (longest * decoder.vocabulary_size))
        for first in range(0, len(rows), most):
            scores += _compute(decoder, rows[first : first + most])
        return scores

    def _compute(decoder: ServedDecoder, rows: Sequence[_Row]) -> list[ScoreResult]:
        state = decoder.start(*pad_sources([row.read for row in rows], special.pad_id))
        # What is padded lies behind what is scored, and the state is not used again.
        given, _ = pad_sources([row.given for row in rows], special.pad_id)
        if given.shape[1] == 1:
            # A decoder may read a single token by other kernels than several, and which it is shall
            # not depend on the rows beside it.
            given = np.pad(given, ((0, 0), (0, 1)), constant_values=special.pad_id)
        output, _ = decoder.step(given, state)
        scores = []
        for row, found in zip(rows, output.all_logits, strict=True):
            chosen = found[: len(row.wanted)]
            places = np.arange(len(row.wanted)), row.wanted
            values = chosen[places] - log_sum_exp(chosen)
            finite = bool(np.isfinite(values).all())
            scores.append(
                ScoreResult(
                    row.source,
                    row.target,
                    len(row.read) or len(row.given) + 1,
                    tuple(row.wanted) if finite else (),
                    tuple(values.tolist()) if finite else (),
                    None if finite else NOT_FINITE,
                    row.truncated,
                )
            )
        return scores

    return engine.map(rows, prepare, compute, decoders)
