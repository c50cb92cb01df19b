"""Rows in padded batches beside the same rows alone: no answer may depend on its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.subject.decoder import ForeignDecoder, Padding
from transferry.export.subject.model import Model
from transferry.export.subject.session import ForeignGraph
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Comparison, Tolerance, limited, relative_error
from transferry.runtime.proof.report import Claim

BATCH = 8  # rows of a batch that is compared with the same rows alone


def batch_independence(
    model: Model,
    rows: Sequence[Sequence[int]],
    pad_id: int,
    sides: Sequence[Padding],
    own: float,
) -> Iterator[list[Comparison]]:
    """Compares rows of text in padded batches with the same rows alone.

    The limit is that of float32, whatever the precision of the graphs.

    Args:
        model: The model.
        rows: Token ids of each text.
        pad_id: The token id that pads.
        sides: Sides on which batches are padded.
        own: torch's worst error in float32.
    """
    for side in sides if rows else ():
        worst: dict[str, tuple[float, int]] = {}
        for first in range(0, len(rows), BATCH):
            batch = rows[first : first + BATCH]
            try:
                together = _read(model, batch, pad_id, side)
                alone = [_read(model, [row], pad_id, side)[0] for row in batch]
            except InputError as error:
                shown = f"rows {first} to {first + len(batch) - 1}, batches padded {side}"
                yield [failed(shown, "text", error)]
                continue
            for number, (one, other) in enumerate(zip(alone, together, strict=True)):
                for name, wanted in one.items():
                    everywhere = np.ones(wanted.shape, np.bool_)
                    distance = relative_error(other[name], wanted, everywhere)
                    if not distance <= worst.get(name, (-1.0, 0))[0]:
                        worst[name] = (distance, first + number)
        budget = Tolerance().budget(own)
        yield [
            limited(
                f"row {row} alone and in batches padded {side}",
                *(name, "text", distance, own, budget),
            )
            for name, (distance, row) in worst.items()
        ]


def failed(case: str, stage: str, error: InputError) -> Comparison:
    """Returns the comparison of a case that does not run."""
    return Comparison(case, "outputs", stage, np.inf, 0.0, Tolerance().budget(0.0), str(error))


def _read(
    model: Model, rows: Sequence[Sequence[int]], pad_id: int, side: Padding
) -> list[dict[str, NDArray[Any]]]:
    """Returns what a batch of texts gives, without padding, a row each."""
    if isinstance(model, ForeignDecoder):
        return [{"logits": row} for row in _logits(model.padded(side), rows, pad_id)]
    ids, mask = pad_sources(rows, pad_id)
    if side == "left":
        ids, mask = pad_sources([row[::-1] for row in rows], pad_id)
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    found = model.encode(ids, mask)
    return [
        {
            name: value[row][mask[row]] if value.ndim > 2 else value[row]
            for name, value in found.items()
        }
        for row in range(len(rows))
    ]


def _logits(decoder: Any, rows: Sequence[Sequence[int]], pad_id: int) -> NDArray[Any]:
    """Returns the logits after each text, and where there is no encoder those of a later step."""
    if decoder.has_encoder:
        state = decoder.start(*pad_sources(rows, pad_id))
        first = np.zeros((len(rows), 1), np.int64)
        logits: NDArray[Any] = decoder.step(first, state)[0].all_logits
        return logits
    state = decoder.start(*pad_sources([row[:-1] for row in rows], pad_id))
    tokens = np.array([[row[-1]] for row in rows])
    output, state = decoder.step(tokens, state)
    later = decoder.step(tokens, state)[0].all_logits
    return np.concatenate([output.all_logits, later], axis=1)


def declared(graphs: Sequence[ForeignGraph]) -> Claim:
    """Returns what the graphs declare of their outputs that no run has shown."""
    found = [
        f"{graph.graph.path.name}: {name} {problem}"
        for graph in graphs
        for name, problem in graph.lies.items()
    ]
    return Claim("declared types and shapes", "; ".join(found))
