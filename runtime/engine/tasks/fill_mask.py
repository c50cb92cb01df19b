"""Filling of masks: the likeliest tokens in the place of each mask of a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from transferry.runtime.engine.preprocess import EncodedRow, LongRows, checked_texts
from transferry.runtime.engine.result import Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import EncoderCall
from transferry.runtime.engine.tasks.task import (
    LINES,
    Bounds,
    Difference,
    Layout,
    Page,
    Task,
    TopOptions,
    columns,
)
from transferry.runtime.errors import UsageError

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores

MASK = "[MASK]"
TOP = 5  # candidates


@dataclass(frozen=True)
class Candidate:
    """A token for the place of a mask, with its text.

    Its log-probability is in nats, over the whole vocabulary.
    """

    text: str
    token: int
    log_probability: float


@dataclass(frozen=True)
class FilledMaskResult(RowResult):
    """Filled masks of one input row.

    Attributes:
        text: The text that was read, with the likeliest token in the place of each mask.
        candidates: The likeliest tokens for each mask, best first.
    """

    text: str = ""
    candidates: tuple[tuple[Candidate, ...], ...] = ()

    @property
    def target_tokens(self) -> int:
        """Number of masks that were filled."""
        return len(self.candidates)

    def _answer(self, n_best: int) -> dict[str, Any]:
        masks = [
            [{"text": one.text, "log_probability": one.log_probability} for one in candidates]
            for candidates in self.candidates
        ]
        return {"text": self.text, **(self._error() or {"masks": masks})}


@dataclass(frozen=True, kw_only=True)
class FillMaskOptions(TopOptions):
    """Options of fill-mask.

    Attributes:
        mask: Text that stands for a masked token.
    """

    mask: Annotated[str, Meta(min_length=1, description="text that is not empty")] = MASK


class FillMask(Task):
    """Likeliest tokens for masks."""

    name = "fill-mask"
    options = FillMaskOptions
    columns = columns(text="text", masks=[[{"text": "text", "log_probability": "float"}]])
    formats = LINES
    default_format = "text"
    page = Page("Fill in", f"Text with {MASK} for each hidden word", f"The {MASK} shines.")

    def __init__(self, engine: OpenBundle, options: FillMaskOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        self.settings["top"] = TOP if options.top is None else options.top
        _ = engine.encoder  # refuses other architectures before anything is opened

    def same(self, row: Any, again: Any, bounds: Bounds) -> Difference:
        """Compares the best token of each mask, and its log-probability."""
        ties = 0
        pairs = zip(row.candidates, again.candidates, strict=True)
        for place, (found, wanted) in enumerate(pairs, start=1):
            known = {candidate.token: candidate.log_probability for candidate in wanted}
            best = found[0]
            margin = wanted[0].log_probability - known.get(best.token, -math.inf)
            error = abs(best.log_probability - known.get(best.token, math.inf))
            if not max(margin, error) <= bounds.log_probability:
                return f"mask {place} is {best.text!r}, but {wanted[0].text!r}", 0
            ties += best.token != wanted[0].token
        return "", ties


def fill_mask(
    engine: OpenBundle,
    texts: Iterable[str | RowError],
    *,
    mask: str = MASK,
    top: int | None = None,
    long_rows: LongRows = "error",
) -> Results[FilledMaskResult]:
    """Fills the masks of texts, in order; each mask as if the others stayed.

    Args:
        engine: Engine of an encoder-only bundle.
        texts: Any number of texts; an error becomes the result of its row.
        mask: The mask as the texts spell it. The tokenizer's mask decides which blanks belong
            to it (`lstrip`, `rstrip`); without one, a single blank before, as to any word.
        top: Number of candidates for each mask. Default: 5.
        long_rows: Treatment of texts longer than the model's positions: "error", or "truncate" to
            fill the masks of their beginning.

    Raises:
        UsageError: The bundle is not encoder-only, its tokenizer has no mask, `long_rows` is
            "split", or an option is out of range.
    """
    encoders = engine.encoders
    call = _Call(engine, FillMaskOptions(mask=mask, top=top, long_rows=long_rows))
    return engine.map(checked_texts(texts), call.prepare, call.compute, encoders)


class _Call(EncoderCall):
    task, kind, output = FillMask.name, FilledMaskResult, "logits"

    def __init__(self, engine: OpenBundle, options: FillMaskOptions) -> None:
        super().__init__(engine, options)
        self.tokenizer = engine.bundle.tokenizer
        if self.special.mask_id is None:
            raise UsageError(
                f"the tokenizer of {engine.bundle.folder} has no mask, so nothing is hidden"
            )
        self.mask_id, self.mask, self.top = self.special.mask_id, options.mask, options.top or TOP
        longest = engine.preprocessor.longest_token
        self.preprocessor = replace(
            engine.preprocessor,
            encode_batch=self._encode_masked,
            longest_token=longest and max(longest, len(self.mask) + 1),
        )

    def _encode_masked(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenizer.encode_masked(text.split(self.mask)) for text in texts]

    def encoded(self, rows: list[str | RowError]) -> list[EncodedRow]:
        return list(map(self._with_mask, super().encoded(rows)))

    def _with_mask(self, row: EncodedRow) -> EncodedRow:
        if row.error is not None or self.mask_id in row.ids:
            return row
        side = "last" if self.special.keeps_end else "first"
        where = f" among the {side} {len(row.ids)} tokens" if row.truncated else ""
        return replace(row, error=RowError("no-mask", f"there is no {self.mask} to fill in{where}"))

    def part(self, row: EncodedRow, found: Scores) -> Scores:
        return found[[place for place, token in enumerate(row.ids) if token == self.mask_id]]

    def answer(self, row: EncodedRow, scores: Scores) -> Mapping[str, Any]:
        from transferry.runtime.decoding.logits import log_sum_exp, top_k

        values, tokens = top_k(scores, min(self.top, scores.shape[1]))
        values = values - log_sum_exp(scores)[:, None]
        candidates = tuple(
            tuple(
                Candidate(self.tokenizer.decode([token]), token, value)
                for token, value in zip(*mask, strict=True)
            )
            for mask in zip(tokens.tolist(), values.tolist(), strict=True)
        )
        best = iter(tokens[:, 0].tolist())
        filled = [next(best) if token == self.mask_id else token for token in row.ids]
        return {"text": self.tokenizer.decode(filled), "candidates": candidates}
