"""A parity report as one HTML page, without network, scripts or other files."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from transferry.export.report import figures
from transferry.export.report.figures import LAYER
from transferry.runtime.engine.tasks.fill_mask import FillMask
from transferry.runtime.errors import InputError
from transferry.runtime.proof.certificates.strength import is_checkpoint
from transferry.runtime.proof.report import FIRST_DIFFERENCES, FIRST_FAULTS, SCHEMA, setting_text
from transferry.runtime.proof.views import confidence_text
from transferry.runtime.tables import counted

WORST = 20
MOST_FAILED = 100
_CACHES = {"cross": "cross-attention", "past": "self-attention"}
BEFORE, AFTER = 200, 160  # characters shown around a difference
NOTHING = "(nothing)"


@dataclass(frozen=True)
class Figure:
    """A figure with a description."""

    name: str
    title: str
    svg: str
    text: str


def render_page(*records: Mapping[str, Any]) -> str:
    """Returns reports as one page; the same records give the same text.

    Several reports, such as one of each variant of a bundle, get a table that compares them.

    Raises:
        InputError: A record is of another schema.
    """
    for record in records:
        if record.get("schema") != SCHEMA:
            raise InputError(
                f"expected the record of a parity report of schema {SCHEMA}, found schema "
                f"{record.get('schema')!r}; verify again with this version"
            )
    several = len(records) > 1
    views = [
        _view(record, name, f"r{number}-" if several else "")
        for number, (record, name) in enumerate(zip(records, _names(records), strict=True), 1)
    ]
    page = _environment().get_template("report.html.jinja")
    text = page.render(
        views=views,
        passed=sum(record["passed"] for record in records),
        overview=_overview(records, [view["name"] for view in views]) if several else [],
        first_faults=FIRST_FAULTS,
        first_answers=FIRST_DIFFERENCES,
        most=MOST_FAILED,
    )
    # The name of a folder may hold bytes that are not UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _view(record: Mapping[str, Any], name: str, prefix: str) -> dict[str, Any]:
    """Returns the template's values of one report; `prefix` makes its ids unique."""
    listed = {
        kind: [
            {**item, "search": decisions["search"]}
            for decisions in record["decisions"]
            for item in decisions[kind]
        ]
        for kind in ("ties", "defects")
    }
    wrong = [item for item in listed["defects"] if not item["wrong_score"]]
    drawn = [
        _heat_map(record),
        _ratios(record),
        _layers(record),
        _growth(record),
        _margins(record, listed["ties"]),
    ]
    return {
        "record": record,
        "prefix": prefix,
        "name": name,
        "factor": f"{record['tolerance']['factor']:g}",
        "summary": _summary(record, listed["ties"], wrong),
        "figures": {item.name: _unique(item, prefix) for item in drawn if isinstance(item, Figure)},
        "absent": [item for item in drawn if isinstance(item, str)] + _absent(record),
        "confidence": confidence_text(record["decisions"], record["settings"]),
        # Wrong weights leave no origin to search for.
        "explained": any(item["verdict"] and not record["origin"] for item in record["claims"]),
        "first_layer": None if record["passed"] else _first_layer(record),
        # Only a verification of the portable graphs against the checkpoint searches for an origin.
        "searchable": record["settings"].get("variant") != "portable"
        or not is_checkpoint(record["settings"].get("against")),
        "worst": sorted(record["comparisons"], key=_share, reverse=True)[:WORST],
        "failed": [item for item in record["comparisons"] if item["fault"]],
        "ties": listed["ties"],
        "wrong": wrong,
        "scores": [item for item in listed["defects"] if item["wrong_score"]],
        "answers": side_by_side(wrong),
        "tied": side_by_side(listed["ties"])[:FIRST_DIFFERENCES],
        "detection": _detection(record["self_test"]),
        "ratio": lambda item: _ratio(_share(item) * record["tolerance"]["factor"]),
    }


def _names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names each report: variant and provider, and the bundle too where these occur twice."""
    names = []
    for record in records:
        settings = record["settings"]
        provider = settings.get("provider", "cpu")
        variant = str(settings.get("variant", "bundle"))
        names.append(variant if provider == "cpu" else f"{variant} on {provider}")
    return [
        name if names.count(name) == 1 else f"{name} of {record['bundle']}"
        for name, record in zip(names, records, strict=True)
    ]


def _unique(figure: Figure, prefix: str) -> Figure:
    if not prefix:
        return figure
    own = re.compile(r'(\bid="|labelledby="|describedby="|url\(#|href="#)')
    return replace(figure, svg=own.sub(rf"\g<1>{prefix}", figure.svg))


def _first_layer(record: Mapping[str, Any]) -> str:
    """Says which layer's numbers are the first that are wrong; empty if no tensor is."""
    failed = [item for item in record["comparisons"] if item["fault"]]
    layers = [match for item in failed if (match := LAYER.fullmatch(item["tensor"]))]
    if any(match[1] == "cross" for match in layers):
        return "The output of the encoder is wrong, and with it all that follows."
    if layers:
        layer = min(int(match[2]) for match in layers)
        before = "" if not layer else f"; {counted(layer, 'layer')} before it agree with torch"
        cell = any(match[3] == "cell" for match in layers)
        what = "the state that it carries" if cell else "keys and values of its cache"
        return f"First failing layer: decoder layer {layer}, {what}{before}."
    if failed and any(LAYER.fullmatch(item["tensor"]) for item in record["comparisons"]):
        return (
            "The keys and values of every layer agree with torch; only what follows the last "
            "layer’s attention is wrong."
        )
    return ""


def _overview(
    records: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Rows of the table that compares several reports: each a label, and values with a verdict."""

    def tensors(record: Mapping[str, Any]) -> tuple[str, bool]:
        worst = max(map(_share, record["comparisons"]), default=math.inf)
        factor = record["tolerance"]["factor"]
        if 1 < worst < math.inf:
            return f"{_human(worst)} × the limit", False
        return f"{_ratio(worst * factor)} of {factor:g}", worst <= 1

    def compared(
        kind: str, key: str, suffix: str, value: Callable[[Mapping[str, Any]], str]
    ) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
        for label in dict.fromkeys(item[key] for r in records for item in r[kind]):
            found = [next((i for i in r[kind] if i[key] == label), None) for r in records]
            yield (
                f"{label}{suffix}",
                [("–", True) if i is None else (value(i), i["passed"]) for i in found],
            )

    return [
        ("", [(name, True) for name in names]),
        ("verdict", [("PASSED" if r["passed"] else "FAILED", r["passed"]) for r in records]),
        ("worst tensor, times torch’s own error", [tensors(record) for record in records]),
        *compared("decisions", "search", ", rows token for token", _agreement),
        *compared("task_metrics", "measure", "", lambda item: _plain(item["found"])),
    ]


def _agreement(search: Mapping[str, Any]) -> str:
    """Returns how many rows of a search have torch's tokens, and how many a wrong score."""
    wrong = sum(item["wrong_score"] for item in search["defects"])
    scores = f", {counted(wrong, 'wrong score')}" if wrong else ""
    return f"{search['identical']:,} of {search['rows']:,}{scores}"


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


def _summary(
    record: Mapping[str, Any], ties: Sequence[Mapping[str, Any]], wrong: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, bool]]:
    """The numbers at the top: value, meaning, and whether it failed."""
    numbers = []
    if comparisons := record["comparisons"]:
        worst, factor = max(map(_share, comparisons)), record["tolerance"]["factor"]
        tensors = counted(len(comparisons), "tensor")
        value, label = f"{_ratio(worst * factor)} of {factor:g}", "allowed: the worst"
        if not np.isfinite(worst):
            value, label = "not finite", "the worst"
        elif worst > 1:
            value, label = f"{_human(worst)} ×", "the limit: the worst"
        label += f" of {tensors}, in units of torch’s own float32 error"
        numbers.append((value, label, any(item["fault"] for item in comparisons)))
    if decisions := record["decisions"]:
        rows = sum(item["rows"] for item in decisions)
        identical = sum(item["identical"] for item in decisions)
        tolerated = sum(len(item["tolerated"]) for item in decisions)
        scores = sum(item["wrong_score"] for each in decisions for item in each["defects"])
        label = f"rows token for token; {counted(len(ties), 'tie')}, {len(wrong):,} wrong"
        if tolerated:
            label += f", {tolerated:,} within the precision’s tolerance"
        if scores:
            label += f". {counted(scores, 'row')} with the right tokens and a wrong score"
        failed = not all(item["passed"] for item in decisions)
        numbers.append((f"{identical:,} of {rows:,}", label, failed))
    if record["self_test"]:
        caught, changing = _detection(record["self_test"])
        label = "planted faults that change an answer were caught"
        numbers.append((f"{caught} of {changing}", label, caught < changing))
    return numbers


def _human(value: float) -> str:
    return f"{float(f'{value:.1e}'):,.10g}"


def _detection(faults: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    changing = [item for item in faults if item["changes_answer"]]
    return sum(bool(item["caught_by"]) for item in changing), len(changing)


def _heat_map(record: Mapping[str, Any]) -> Figure | str:
    factor = record["tolerance"]["factor"]
    rows, columns, worst = figures.heat_cells(record["comparisons"], factor)
    if not rows:
        return "Error by layer and step: no cache was compared; an encoder-only model has none."
    (row, column), largest = max(worst.items(), key=lambda item: item[1])
    beyond = sum(value > factor for value in worst.values())
    text = (
        "Worst error of the keys and values of each layer’s cache and of the logits, in units of "
        f"torch’s own; {factor:g} passes. The largest is {_ratio(largest)}: {row}, "
        f"{figures.place_name(column)}."
    )
    if beyond:
        text += f" {counted(beyond, 'cell')} of {len(worst)} beyond the limit."
    svg = figures.draw_heat_map("heat-map", rows, columns, worst, factor)
    return Figure("heat-map", "Error by layer and step", svg, text)


def _ratios(record: Mapping[str, Any]) -> Figure | str:
    comparisons, factor = record["comparisons"], record["tolerance"]["factor"]
    shares = [share for item in comparisons if np.isfinite(share := _share(item))]
    if not shares:
        return "Error ratios: no tensor with a finite error was compared."
    middle, most, largest = (
        _ratio(value) for value in np.quantile(shares, [0.5, 0.99, 1.0]) * factor
    )
    text = (
        f"Of {counted(len(shares), 'tensor')}, the median is {middle} times torch’s own error, 99 "
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
        if (match := LAYER.fullmatch(item["tensor"])) and item["error"] is not None:
            kind = "recurrent state" if match[3] == "cell" else _CACHES[match[1]]
            layers, layer = worst.setdefault(kind, {}), int(match[2])
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
    filled = any(item["search"] == FillMask.name for item in record["decisions"])
    title = "Error over hidden tokens" if filled else "Error over decoding steps"
    fed = "" if filled else ", each after the tokens that torch chose or was given"
    text = (
        f"Over {counted(len(known), 'position')}{fed}: the largest error of a logit is "
        f"{worst['error']:.2e} after {counted(worst['step'], 'token')}, torch’s own there "
        f"{own[0]}; at the last position {last['error']:.2e}, torch’s own {own[1]}."
    )
    if gaps := len(record["growth"]) - len(known):
        text += f" {counted(gaps, 'position')} without a finite error, not drawn."
    axis = f"{'hidden ' if filled else ''}tokens before the position"
    return Figure("growth", title, figures.growth(known, axis), text)


def _margins(record: Mapping[str, Any], ties: Sequence[Mapping[str, Any]]) -> Figure | str:
    margins = record["margins"]
    if margins is None:
        return "Token margins: no text was given, so no token was chosen."
    counts, edges, error = margins["counts"], margins["edges"], margins["error"]
    closest = _scientific(margins["smallest"])
    text = f"{counted(sum(counts), 'choice')}; the closest is {closest} nats. "
    if error is None:
        text += "A logit is not finite, so nothing limits what rounding could decide."
    else:
        reached = sum(count for count, edge in zip(counts, edges, strict=False) if edge < 2 * error)
        text += (
            f"Logits are off by up to {error:.2e} nats, so rounding could decide below "
            f"{2 * error:.2e}: {counted(reached, 'choice')} in the bins that reach so low."
        )
    marked = [tie["margin"] for tie in ties if tie["margin"] is not None]
    text += f" {counted(len(marked), 'proven tie')} marked." if marked else " No ties."
    return Figure("margins", "How clear the choices were", figures.margins(margins, marked), text)


def _absent(record: Mapping[str, Any]) -> list[str]:
    """A line for each claim that was not compared, and each optional part that is missing."""
    reasons = {
        "decisions": "Tokens: no search was run.",
        "task_metrics": "Task metrics: none was computed.",
        "cross_check": "Other runtimes: no cross-check was run.",
        "self_test": "Self-test: no fault was planted.",
        "certificate": "Certificate: none was issued.",
    }
    skipped = [
        f"Claim {claim['name']}, not compared: {claim['skipped']}."
        for claim in record.get("claims", ())
        if claim.get("skipped")
    ]
    return [*skipped, *(reason for name, reason in reasons.items() if not record.get(name))]


@dataclass(frozen=True)
class Side:
    """One answer: the text before the first word that differs, that word, and the rest."""

    before: str
    word: str
    after: str


@dataclass(frozen=True)
class Answers:
    """The answers of torch and of the bundle to one row, and how they came to differ."""

    title: str
    source: str
    expected: Side
    found: Side
    message: str


def side_by_side(differences: Iterable[Mapping[str, Any]]) -> list[Answers]:
    """Returns the answers of differences with texts; searches with the same answers share one."""
    groups: dict[tuple[int, str, str, str], list[Mapping[str, Any]]] = {}
    for item in differences:
        texts = item["source"], item["expected"], item["found"]
        if any(texts):
            groups.setdefault((item["row"], *texts), []).append(item)
    return [
        Answers(
            f"row {row}, {' and '.join(item['search'] for item in items)}",
            _cut(source, len(source)),
            *_sides(expected, found),
            items[0]["message"],
        )
        for (row, source, expected, found), items in groups.items()
    ]


def _sides(expected: str, found: str) -> tuple[Side, Side]:
    pairs = enumerate(zip(expected, found, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    start = max(expected.rfind(mark, 0, shared) for mark in (" ", "\n")) + 1
    if not any(text[shared : shared + 1].strip() for text in (expected, found)):
        start = shared  # the word before is whole on both sides
    return _side(expected, start), _side(found, start)


def _side(text: str, start: int) -> Side:
    word = "".join(text[start:].split(maxsplit=1)[:1])
    place = text.find(word, start)
    before, after = text[:place], text[place + len(word) :]
    if len(before) > BEFORE:
        before = f"… {before[-BEFORE:]}"
    return Side(before, word or NOTHING, _cut(after, AFTER))


def _cut(text: str, most: int) -> str:
    most = min(most, BEFORE + AFTER)
    return text if len(text) <= most else f"{text[:most]} …"
