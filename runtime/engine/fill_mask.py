"""Text with hidden tokens in, the likeliest tokens for each of them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transferry.runtime.decoding.logits import log_sum_exp, top_k
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, check_long_rows
from transferry.runtime.engine.result import NOT_FINITE, RowError
from transferry.runtime.engine.worker_pool import WorkItem
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.encoder import EncoderModel

MASK = "[MASK]"


@dataclass(frozen=True)
class Candidate:
    """A token that may stand in the place of a mask.

    Attributes:
        text: The token as text.
        token: Its id.
        log_probability: In nats, among all tokens.
    """

    text: str
    token: int
    log_probability: float


@dataclass(frozen=True)
class FilledMaskResult:
    """What became of one row.

    Attributes:
        source: The text that came in; nothing where an error came in.
        source_tokens: How much of it was read, the tokens that wrap it included; on an error its
            length, or at least so much of it.
        text: The text, as far as it was read, with the likeliest token in the place of each mask.
        candidates: For each mask the likeliest tokens, best first.
        error: None where the masks are filled.
        truncated: Whether the text was cut short.
    """

    source: str
    source_tokens: int
    text: str = ""
    candidates: tuple[tuple[Candidate, ...], ...] = ()
    error: RowError | None = None
    truncated: bool = False

    @property
    def target_tokens(self) -> int:
        """How many masks were filled."""
        return len(self.candidates)

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        if self.error is not None:
            return {"source": self.source, "text": "", "error": self.error.record()}
        masks = [
            [
                {"text": item.text, "log_probability": round(item.log_probability, 6)}
                for item in candidates
            ]
            for candidates in self.candidates
        ]
        return {"source": self.source, "text": self.text, "masks": masks}


def fill_masks(
    engine: Engine,
    items: Iterable[str | RowError],
    *,
    mask: str = MASK,
    top: int = 5,
    long_rows: LongRows = "error",
) -> Iterator[FilledMaskResult]:
    """Fills the masks of each text, in order; each mask is filled as if the others stayed.

    Args:
        engine: Of an encoder-only bundle.
        items: Any iterable, however long, of texts; an error is the result of its own row.
        mask: What stands for a hidden token in the texts. One blank before it belongs to it: words
            have their blank in front.
        top: How many candidates are given for each mask.
        long_rows: What becomes of texts of more tokens than the model has positions: an "error",
            or "truncate", which fills the masks of their beginning.

    Raises:
        UsageError: The bundle holds no encoder-only model, its tokenizer has no mask, or long rows
            are to be split.
    """
    encoders, tokenizer = engine.encoders, engine.bundle.tokenizer
    special = tokenizer.special
    mask_id = special.mask_id
    if mask_id is None:
        raise UsageError(
            f"the tokenizer of {engine.bundle.folder} has no mask, so nothing is hidden"
        )
    check_long_rows(long_rows, "task fill-mask")
    if top < 1:
        raise UsageError(f"top must be at least 1, not {top}")

    def encode(text: str) -> list[int]:
        parts = text.split(mask)
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number:
                ids.append(mask_id)
            ids += tokenizer.encode(part if number == len(parts) - 1 else part.removesuffix(" "))
        return ids

    longest = engine.reader.longest_token
    reader = replace(
        engine.reader,
        encode_batch=lambda texts: [encode(text) for text in texts],
        longest_token=longest and max(longest, len(mask) + 1),
    )

    def prepare(
        first: int, items: list[str | RowError]
    ) -> list[WorkItem[EncodedRow] | FilledMaskResult]:
        rows: list[WorkItem[EncodedRow] | FilledMaskResult] = []
        for row in reader.read(items, long_rows):
            error = row.error
            if error is None and mask_id not in row.ids:
                where = f" among the first {len(row.ids)} tokens" if row.truncated else ""
                error = RowError("no-mask", f"there is no {mask} to fill in{where}")
            if error is None:
                rows.append(WorkItem(row, len(row.ids)))
            else:
                rows.append(FilledMaskResult(row.text, row.tokens, error=error))
        return rows

    def compute(encoder: EncoderModel, rows: list[EncodedRow]) -> list[FilledMaskResult]:
        sources = [row.ids for row in rows]
        found = encoder.encode(*pad_sources(sources, special.pad_id), ("logits",))
        return [_fill(row, logits) for row, logits in zip(rows, found["logits"], strict=True)]

    def _fill(row: EncodedRow, logits: np.ndarray[Any, Any]) -> FilledMaskResult:
        text, source = row.text, row.ids
        places = np.flatnonzero(np.array(source) == mask_id)
        scores = logits[places]
        if not np.isfinite(scores).all():
            return FilledMaskResult(text, len(source), error=NOT_FINITE, truncated=row.truncated)
        values, tokens = top_k(scores, min(top, scores.shape[1]))
        values = values - log_sum_exp(scores)[:, None]
        candidates = tuple(
            tuple(
                Candidate(tokenizer.decode([token]), token, value)
                for token, value in zip(row, numbers, strict=True)
            )
            for row, numbers in zip(tokens.tolist(), values.tolist(), strict=True)
        )
        whole = np.array(source)
        whole[places] = tokens[:, 0]
        filled = tokenizer.decode(whole.tolist())
        return FilledMaskResult(text, len(source), filled, candidates, truncated=row.truncated)

    return engine.map(items, prepare, compute, encoders)
