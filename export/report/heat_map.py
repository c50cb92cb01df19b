"""Error by layer and step, as a grid of cells in SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import escape

# Tensors of one layer's cache; no other tensor belongs to a layer.
LAYER = re.compile(r"(cross|past)\.(\d+)\.(keys|values|cell)")
ENCODER, TEXT, LOGITS = "encoder", "text", "logits"
MOST_COLUMNS = 12
_WIDTH, _LEFT, _TOP, _BOTTOM = 381, 52, 4, 34  # as wide as the figures of matplotlib, in points

Cells = dict[tuple[str, str], float]


def cells(
    comparisons: Sequence[Mapping[str, Any]], factor: float
) -> tuple[list[str], list[str], Cells]:
    """Sorts comparisons into rows by layer and columns by step.

    Args:
        comparisons: Records of `Comparison`.
        factor: The limit in units of torch's own error.

    Returns:
        The names of the rows and of the columns, and the worst error of each cell in units of
        torch's own; infinity where an error is not finite. No rows without a decoder's cache.
    """
    columns = _columns(sorted({item["past"] for item in comparisons}))
    worst: Cells = {}
    layers: set[int] = set()
    named: set[str] = set()
    for item in comparisons:
        match = LAYER.fullmatch(item["tensor"])
        if match is None and item["tensor"] != LOGITS:
            continue
        row = f"layer {match[2]}" if match else LOGITS
        if match:
            layers.add(int(match[2]))
        if match and match[1] == "cross":
            column = ENCODER
        elif item["stage"] == TEXT:
            column = TEXT
        else:
            column = columns[item["past"]]
        error, budget = item["error"], item["budget"]
        share = math.inf if error is None or not budget else error / budget * factor
        worst[row, column] = max(worst.get((row, column), 0.0), share)
        named.add(column)
    ordered = [ENCODER, *dict.fromkeys(columns.values()), TEXT]
    rows = [*(f"layer {number}" for number in sorted(layers)), LOGITS] if layers else []
    return rows, [name for name in ordered if name in named], worst


def place_name(column: str) -> str:
    """Returns the words for a column: the encoder, the text, or a number of tokens."""
    named = {ENCODER: "from the encoder", TEXT: "on text", "1": "after 1 token"}
    return named.get(column, f"after {column} tokens")


def _columns(pasts: Sequence[int]) -> dict[int, str]:
    """Groups lengths of the cache, so that few columns are left; returns the name of each."""
    first = [past for past in pasts if past < 2]  # the first steps stay apart
    rest = [past for past in pasts if past >= 2]
    size = max(1, math.ceil(len(rest) / (MOST_COLUMNS - 2 - len(first))))
    names = {past: str(past) for past in first}
    for start in range(0, len(rest), size):
        group = rest[start : start + size]
        names |= dict.fromkeys(group, str(group[0]) if len(group) == 1 else f"{group[0]}+")
    return names


def draw(name: str, rows: Sequence[str], columns: Sequence[str], worst: Cells, limit: float) -> str:
    """Draws the cells; those beyond the limit in the colour of faults."""
    width = (_WIDTH - _LEFT) / len(columns)
    height = 24 if len(rows) <= 12 else 15
    bottom = _TOP + height * len(rows)
    parts = [
        f'<svg role="img" aria-labelledby="{name}-title" aria-describedby="{name}-text" '
        f'viewBox="0 0 {_WIDTH} {bottom + _BOTTOM}" font-size="9.5">'
    ]
    for number, row in enumerate(rows):
        middle = _TOP + height * (number + 0.5)
        parts.append(_text(_LEFT - 6, middle, row, "end"))
        for place, column in enumerate(columns):
            if (row, column) in worst:
                share = worst[row, column]
                colour, opacity = _shade(share / limit)
                left, top = _LEFT + width * place, _TOP + height * number
                told = f"{share:,.3g}" if math.isfinite(share) else "not finite, no number of"
                parts.append(
                    f"<g><title>{row}, {place_name(column)}: {told} times torch’s own</title>"
                    f'<rect x="{left + 0.75:.2f}" y="{top + 0.75:.2f}" width="{width - 1.5:.2f}" '
                    f'height="{height - 1.5}" rx="2" fill="var(--{colour})" '
                    f'fill-opacity="{opacity:.2f}"/>'
                )
                parts.append(_text(left + width / 2, middle, _short(share), "middle", 8.5) + "</g>")
    for place, column in enumerate(columns):
        parts.append(_text(_LEFT + width * (place + 0.5), bottom + 10, column, "middle", 8.5))
    parts.append(_text(_LEFT + (_WIDTH - _LEFT) / 2, bottom + 25, "tokens in the cache", "middle"))
    return "".join([*parts, "</svg>"])


def _shade(share: float) -> tuple[str, float]:
    """Returns the colour and the opacity of an error over its limit, on a logarithmic scale."""
    if share > 1:
        return "fault", 0.45 + 0.05 * min(3.0, math.log10(share))
    return "bundle", max(0.06, 0.4 + 0.17 * math.log10(max(share, 1e-2)))


def _text(x: float, y: float, text: str, anchor: str, size: float | None = None) -> str:
    font = "" if size is None else f' font-size="{size}"'
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" dy="0.35em" text-anchor="{anchor}" '
        f'fill="var(--ink)"{font}>{escape(text)}</text>'
    )


def _short(share: float) -> str:
    if not math.isfinite(share):
        return "NaN"
    if share >= 1000:
        return f"{share:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{share:.2g}" if share < 10 else f"{share:.0f}"
