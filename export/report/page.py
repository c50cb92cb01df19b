"""A parity report as one HTML page, without network, scripts or other files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from transferry.export.report import figures
from transferry.runtime.errors import InputError
from transferry.runtime.parity.report import FIRST_FAULTS, SCHEMA, setting_text

WORST = 20
MOST_FAILED = 100
# Tensors of one layer's cache; no other tensor belongs to a layer.
_LAYER = re.compile(r"(cross|past)\.(\d+)\.(?:keys|values)")
_CACHES = {"cross": "cross-attention", "past": "self-attention"}


@dataclass(frozen=True)
class Figure:
    """A figure with a description.

    Attributes:
        name: Its id in the page.
        title: Its title.
        svg: The drawing.
        text: Description with the numbers.
    """

    name: str
    title: str
    svg: str
    text: str


def render_page(record: Mapping[str, Any]) -> str:
    """Returns a report as a page; the same record gives the same text.

    Args:
        record: Result of `ParityReport.to_dict`, optionally with "date" and "certificate".

    Raises:
        InputError: The record is of another schema.
    """
    if record.get("schema") != SCHEMA:
        raise InputError(
            f"expected the record of a parity report of schema {SCHEMA}, found schema "
            f"{record.get('schema')!r}; verify again with this version"
        )
    ties = [
        {**tie, "search": item["search"]} for item in record["decisions"] for tie in item["ties"]
    ]
    tolerated = sum(len(item["tolerated"]) for item in record["decisions"])
    drawn = [_ratios(record), _layers(record), _growth(record), _margins(record, ties)]
    page = _environment().get_template("report.html.jinja")
    text = page.render(
        record=record,
        factor=f"{record['tolerance']['factor']:g}",
        first_faults=FIRST_FAULTS,
        most=MOST_FAILED,
        summary=_summary(record, ties, tolerated),
        figures={item.name: item for item in drawn if isinstance(item, Figure)},
        absent=[item for item in drawn if isinstance(item, str)] + _absent(record),
        worst=sorted(record["comparisons"], key=_share, reverse=True)[:WORST],
        failed=[item for item in record["comparisons"] if item["fault"]],
        ties=ties,
        defects=[
            {**defect, "search": item["search"]}
            for item in record["decisions"]
            for defect in item["defects"]
        ],
        detection=_detection(record["self_test"]),
        ratio=lambda item: _ratio(_share(item) * record["tolerance"]["factor"]),
    )
    # The name of a folder may hold bytes that are not UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        scientific=_scientific, ratio=_ratio, plain=_plain, setting=setting_text, prose=_prose
    )
    return environment


def _scientific(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _ratio(value: float | None) -> str:
    if value is None or not np.isfinite(value):
        return "not finite"
    return f"{value:.2f}" if value < 1e4 else f"{value:.1e}"


def _plain(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _prose(text: str) -> Markup:
    """Keeps a number such as 1.2e-07 on one line."""
    whole = re.sub(r"[\d.]+e-\d+", r'<span class="whole">\g<0></span>', str(escape(text)))
    return Markup(whole)


def _share(comparison: Mapping[str, Any]) -> float:
    """Error over budget of a comparison; infinity where the error is null."""
    error, budget = comparison["error"], comparison["budget"]
    return float("inf") if error is None or not budget else float(error / budget)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _summary(
    record: Mapping[str, Any], ties: Sequence[Mapping[str, Any]], tolerated: int
) -> list[tuple[str, str, bool]]:
    """The numbers at the top: value, meaning, and whether it failed."""
    numbers = []
    if comparisons := record["comparisons"]:
        worst, factor = max(map(_share, comparisons)), record["tolerance"]["factor"]
        tensors = _count(len(comparisons), "tensor")
        label = f"times torch’s own error at the worst of {tensors}; {factor:g} passes"
        if not np.isfinite(worst):
            label = f"the worst error of {tensors}"
        failed = any(item["fault"] for item in comparisons)
        numbers.append((_ratio(worst * factor), label, failed))
    if decisions := record["decisions"]:
        rows = sum(item["rows"] for item in decisions)
        identical = sum(item["identical"] for item in decisions)
        defects = sum(len(item["defects"]) for item in decisions)
        failed = not all(item["passed"] for item in decisions)
        label = f"rows token for token; {_count(len(ties), 'tie')}, {_count(defects, 'defect')}"
        if tolerated:
            label += f", {tolerated:,} within the precision’s tolerance"
        numbers.append((f"{identical:,} of {rows:,}", label, failed))
    if record["self_test"]:
        caught, changing = _detection(record["self_test"])
        label = "planted faults that change an answer were caught"
        numbers.append((f"{caught} of {changing}", label, caught < changing))
    return numbers


def _detection(faults: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    changing = [item for item in faults if item["changes_answer"]]
    return sum(bool(item["caught_by"]) for item in changing), len(changing)


def _ratios(record: Mapping[str, Any]) -> Figure | str:
    comparisons, factor = record["comparisons"], record["tolerance"]["factor"]
    shares = [share for item in comparisons if np.isfinite(share := _share(item))]
    if not shares:
        return "Error ratios: no tensor with a finite error was compared."
    middle, most, largest = (
        _ratio(value) for value in np.quantile(shares, [0.5, 0.99, 1.0]) * factor
    )
    text = (
        f"Of {_count(len(shares), 'tensor')}, the median is {middle} times torch’s own error, 99 "
        f"of 100 lie within {most} and the largest is {largest}; {factor:g} passes."
    )
    if beyond := sum(share > 1 for share in shares):
        text += f" {beyond:,} beyond the limit."
    if gaps := len(comparisons) - len(shares):
        text += f" {gaps:,} without a finite error, not drawn."
    return Figure("ratios", "How far from the limit", figures.ratios(shares, factor), text)


def _layers(record: Mapping[str, Any]) -> Figure | str:
    worst: dict[str, dict[int, tuple[float, float]]] = {}
    for item in record["comparisons"]:
        if (match := _LAYER.fullmatch(item["tensor"])) and item["error"] is not None:
            layers, layer = worst.setdefault(_CACHES[match[1]], {}), int(match[2])
            error, own = layers.get(layer, (0.0, 0.0))
            layers[layer] = max(error, item["error"]), max(own, item["reference_error"] or 0.0)
    points = {
        name: [(layer, *layers[layer]) for layer in sorted(layers)]
        for name, layers in worst.items()
    }
    if not points:
        return "Error over layers: no cache was compared; an encoder-only model has none."
    largest = [
        f"{name} {error:.2e} in layer {layer} (torch’s own {own:.2e})"
        for name, layers_of in points.items()
        for layer, error, own in [max(layers_of, key=lambda point: point[1])]
    ]
    text = f"Largest error of the cache’s keys and values: {'; '.join(largest)}."
    return Figure("layers", "Error over layers", figures.layers(points), text)


def _growth(record: Mapping[str, Any]) -> Figure | str:
    known = [place for place in record["growth"] if place["error"] is not None]
    if not any(place["error"] for place in known):
        return "Error over decoding steps: no text was given, or no logit was off."
    worst, last = max(known, key=lambda place: float(place["error"])), known[-1]
    own = [_scientific(place["reference_error"]) for place in (worst, last)]
    # An encoder-only model fills in hidden tokens, in no order of steps.
    filled = any(item["search"] == "fill-mask" for item in record["decisions"])
    title = "Error over hidden tokens" if filled else "Error over decoding steps"
    fed = "" if filled else ", each after the tokens that torch chose or was given"
    text = (
        f"Over {_count(len(known), 'position')}{fed}: the largest error of a logit is "
        f"{worst['error']:.2e} after {_count(worst['step'], 'token')}, torch’s own there {own[0]}; "
        f"at the last position {last['error']:.2e}, torch’s own {own[1]}."
    )
    if gaps := len(record["growth"]) - len(known):
        text += f" {_count(gaps, 'position')} without a finite error, not drawn."
    axis = f"{'hidden ' if filled else ''}tokens before the position"
    return Figure("growth", title, figures.growth(known, axis), text)


def _margins(record: Mapping[str, Any], ties: Sequence[Mapping[str, Any]]) -> Figure | str:
    margins = record["margins"]
    if margins is None:
        return "Token margins: no text was given, so no token was chosen."
    counts, edges, error = margins["counts"], margins["edges"], margins["error"]
    closest = _scientific(margins["smallest"])
    text = f"{_count(sum(counts), 'choice')}; the closest is {closest} nats. "
    if error is None:
        text += "A logit is not finite, so nothing limits what rounding could decide."
    else:
        reached = sum(count for count, edge in zip(counts, edges, strict=False) if edge < 2 * error)
        text += (
            f"Logits are off by up to {error:.2e} nats, so rounding could decide below "
            f"{2 * error:.2e}: {_count(reached, 'choice')} in the bins that reach so low."
        )
    marked = [tie["margin"] for tie in ties if tie["margin"] is not None]
    text += f" {_count(len(marked), 'proven tie')} marked." if marked else " No ties."
    return Figure("margins", "How clear the choices were", figures.margins(margins, marked), text)


def _absent(record: Mapping[str, Any]) -> list[str]:
    """A line for each optional part that this report lacks."""
    reasons = {
        "decisions": "Tokens: no search was run.",
        "task_metrics": "Task metrics: none was computed.",
        "cross_check": "Other runtimes: none was run.",
        "self_test": "Self-test: no fault was planted.",
        "origin": "Origin of the fault: not searched for.",
        "certificate": "Certificate: none was issued.",
    }
    return [
        reason
        for name, reason in reasons.items()
        # A report that passed has no fault to search for.
        if not record.get(name) and not (name == "origin" and record["passed"])
    ]
