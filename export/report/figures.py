"""Figures of a parity report: SVG with the colours and fonts of the page around it."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from transferry.build_model.train.metrics import PLOT_STYLE

# matplotlib knows no CSS: it draws in unique colours, which are then replaced.
_PLACEHOLDERS = {
    "#010203": "var(--ink)",
    "#010204": "var(--muted)",
    "#010205": "var(--rule)",
    "#010206": "var(--bundle)",
    "#010207": "var(--torch)",
    "#010208": "var(--fault)",
    "#010209": "var(--second)",
}
_INK, _MUTED, _RULE, _BUNDLE, _TORCH, _FAULT, _SECOND = _PLACEHOLDERS
_style = style.context(
    [
        "default",
        PLOT_STYLE,
        {
            "axes.edgecolor": _MUTED,
            "axes.labelcolor": _INK,
            "grid.color": _RULE,
            "legend.labelcolor": _INK,
            "svg.fonttype": "none",  # text stays text: searchable, and in the font of the page
            "text.color": _INK,
            "xtick.color": _MUTED,
            "xtick.labelcolor": _INK,
            "ytick.color": _MUTED,
            "ytick.labelcolor": _INK,
        },
    ]
)
_SIZE = (5.3, 3.0)  # inches: narrow, so that a phone need not shrink the text
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Tensors of one layer's cache; no other tensor belongs to a layer.
LAYER = re.compile(r"(cross|past)\.(\d+)\.(keys|values|cell)")
ENCODER, TEXT, LOGITS = "encoder", "text", "logits"
MOST_COLUMNS = 12
_WIDTH, _LEFT, _TOP, _BOTTOM = 381, 52, 4, 34  # as wide as the figures of matplotlib, in points
Cells = dict[tuple[str, str], float]


@_style
def ratios(shares: Sequence[float], factor: float) -> str:
    """Draws a histogram of error over budget; the factor is the budget in torch's own errors."""
    values = np.asarray(shares, np.float64)
    exponents = np.log10(values[values > 0]) if (values > 0).any() else np.zeros(1)
    # The limit is a border, so that no bar holds both passing and failing tensors.
    per_decade = 8 if exponents.max() - exponents.min() < 4 else 3
    first = min(-per_decade, int(np.ceil(exponents.min() * per_decade)) - 1)
    last = max(1, int(np.ceil(exponents.max() * per_decade)))
    edges = 10.0 ** (np.arange(first, last + 1) / per_decade)
    # A bin includes its upper border: an error equal to its budget passes.
    bins = np.clip(np.searchsorted(edges, values, side="left") - 1, 0, len(edges) - 2)
    counts = np.bincount(bins, minlength=len(edges) - 1)
    figure, axes = _canvas()
    beyond = edges[:-1] >= 1.0
    lefts, widths = edges[:-1] * factor, np.diff(edges) * factor * 0.94
    for chosen, colour in ((~beyond, _BUNDLE), (beyond, _FAULT)):
        bar = lefts[chosen], counts[chosen], widths[chosen]
        bars = axes.bar(*bar, align="edge", color=colour)
    # The bar of one fault among hundreds of tensors is too low to see, hence the number.
    labels = [str(count) if count else "" for count in counts[beyond]]
    axes.bar_label(bars, labels, padding=1, color=_FAULT)
    axes.axvline(factor, color=_FAULT, lw=1.4, label=f"limit {factor:g}")
    _log_axis(axes, "x")
    axes.set_xlabel("error, in units of torch’s own float32 error")
    axes.set_ylabel("tensors")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legend(figure)
    return _svg(figure, "ratios")


@_style
def layers(errors: Mapping[str, Sequence[tuple[int, float, float]]]) -> str:
    """Draws the worst error of each layer: by cache its number, error and torch's own."""
    figure, axes = _canvas()
    styles = ((_BUNDLE, "o"), (_SECOND, "s"))
    for (name, points), (colour, marker) in zip(errors.items(), styles, strict=False):
        numbers, found, own = zip(*points, strict=True)
        axes.plot(numbers, _drawable(found), marker, ls="-", color=colour, label=name)
        label = f"{name}, torch"
        axes.plot(numbers, _drawable(own), marker, ls="--", color=colour, mfc="none", label=label)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return _errors(figure, axes, "layers")


@_style
def growth(places: Sequence[Mapping[str, Any]], axis: str) -> str:
    """Draws the error of the logits by position, from records of `report.Growth`."""
    figure, axes = _canvas()
    steps = [place["step"] for place in places]
    marker = "o" if len(places) < 30 else None
    for name, label, colour, dash in (
        ("error", "this bundle", _BUNDLE, "-"),
        ("reference_error", "torch", _TORCH, "--"),
    ):
        values = _drawable([place[name] for place in places])
        axes.plot(steps, values, marker=marker, ls=dash, color=colour, label=label)
    axes.set_xlabel(axis)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return _errors(figure, axes, "growth")


@_style
def margins(record: Mapping[str, Any], ties: Sequence[float]) -> str:
    """Draws `report.Margins`, and the oracle's margin of each tie in nats."""
    edges, counts = np.asarray(record["edges"]), np.asarray(record["counts"])
    zone = 2 * (record["error"] or 0.0)
    (full,) = np.nonzero(counts)
    drawn = [edges[full.min()], edges[full.max() + 1]] if len(full) else [edges[0], edges[-1]]
    marked = [value for value in (zone, *ties) if value > 0]
    figure, axes = _canvas()
    low, high = min([*drawn, *marked]) / 3, max([*drawn, *marked])
    if zone > low:
        axes.axvspan(low, zone, color=_FAULT, alpha=0.13, lw=0, label="rounding could decide")
        axes.axvline(zone, color=_FAULT, lw=1)
    axes.bar(edges[:-1], counts, np.diff(edges) * 0.94, align="edge", color=_BUNDLE)
    if positive := [value for value in ties if value > 0]:
        heights = np.full(len(positive), counts.max(initial=1) * 0.04)
        axes.plot(positive, heights, "v", color=_TORCH, label="ties", clip_on=False)
    _log_axis(axes, "x")
    axes.set_xlim(low, high * 1.2)
    axes.set_xlabel("distance of the two best tokens, nats")
    axes.set_ylabel("choices")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axes.get_legend_handles_labels()[0]:
        _legend(figure)
    return _svg(figure, "margins")


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(_SIZE, layout="constrained")
    return figure, figure.add_subplot()


def _drawable(values: Sequence[float | None]) -> list[float]:
    """Replaces zero and None, which a logarithmic axis cannot show, with a gap."""
    return [value if value else np.nan for value in values]


def _errors(figure: Figure, axes: Axes, name: str) -> str:
    # Whole decades: a tight axis would exaggerate small differences.
    drawn = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
    low, high = np.log10([np.nanmin(drawn), np.nanmax(drawn)])
    axes.set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high + 1e-9))
    _log_axis(axes, "y")
    axes.set_ylabel("error / unit of the entry")
    _legend(figure)
    return _svg(figure, name)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper left", ncols=2, handlelength=2.4, borderaxespad=0.2)


def _log_axis(axes: Axes, name: str) -> None:
    """Makes an axis logarithmic, with labels between decades if there are few."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
    for between in ((1,), (1, 2, 5)):
        ticks = LogLocator(subs=between).tick_values(low, high)
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) > 2:
            break
    shown = shown[:: -(-len(shown) // 7)]
    axis.set_major_locator(FixedLocator(shown))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: _power(value))


def _power(value: float) -> str:
    digit, exponent = f"{value:.0e}".split("e")
    if -2 <= int(exponent) <= 3:
        return f"{value:g}"
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    return power if digit == "1" else f"{digit}·{power}"


def _svg(figure: Figure, name: str) -> str:
    """Returns a figure as an element of a page, with ids made unique by the name.

    Without dates, versions and random ids: the same figure has the same bytes.
    """
    drawn = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    for placeholder, colour in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, colour)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    svg = re.sub(r" <defs>\s*<style.*?</style>\s*</defs>\n", "", svg)
    # Groups are numbered from 1 in each figure, and nothing refers to them.
    svg = re.sub(r' id="[\w.]*_\d+"', "", svg)
    head = f'<svg role="img" aria-labelledby="{name}-title" aria-describedby="{name}-text"'
    return re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'{head} viewBox="\1">', svg).strip()


def heat_cells(
    comparisons: Sequence[Mapping[str, Any]], factor: float
) -> tuple[list[str], list[str], Cells]:
    """Sorts comparisons into rows by layer and columns by step.

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


def draw_heat_map(
    name: str, rows: Sequence[str], columns: Sequence[str], worst: Cells, limit: float
) -> str:
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
