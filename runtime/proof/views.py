"""Views of a report: text for people, the verdict first and the next command last; JUnit for CI."""

import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from transferry.runtime.proof.certificates.strength import is_checkpoint
from transferry.runtime.proof.compare import STAGES, Comparison
from transferry.runtime.proof.report import (
    CHOICES,
    FIRST_DIFFERENCES,
    FIRST_FAULTS,
    WORST_CHOICE,
    Difference,
    ParityReport,
    Stage,
    caught_of,
    confidence,
    setting_text,
    worst_ratio,
)
from transferry.runtime.tables import WIDTH, counted, table, wrapped

# Limits from here on say nothing in units of torch's rounding; errors are shares of them.
SHARES = 1_000
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report_text(report: ParityReport) -> str:
    """Returns the report as text: its parts, with an empty line between."""
    compared = report.settings.get("compared")  # of an audit
    parts = [
        [f"{'PASSED' if report.passed else 'FAILED'}: {report.bundle} {report.verdict}"],
        [wrapped(f"Compared: {compared}")] if compared else [],
        [] if report.origin is None else [str(report.origin)],
        [table(_stage_header(report), [_row(report, stage) for stage in report.stages()])],
        [*_faults(report), *_claims(report)],
        [_searches(report)] if report.decisions else [],
        [*_differences(report), *_metrics(report)],
        _other_runtimes(report),
        _planted(report),
        _settings(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def times_text(report: ParityReport) -> str:
    """Returns a table of the time that the checks took, the longest first."""
    times = sorted(report.times, key=lambda item: -item.cpu)
    rows = [(item.check, item.runs, f"{item.cpu:.2f}", f"{item.wall:.2f}") for item in times]
    return table(("check", "runs", "CPU s", "wall s"), rows)


def _faults(report: ParityReport) -> list[str]:
    wrong = [f"{i.case}: {i.tensor}: {i.fault}" for i in report.comparisons if i.fault]
    return [*(wrapped(line, "  ", "    ") for line in wrong[:FIRST_FAULTS]), *_more(wrong)]


def _more(found: Sequence[object], shown: int = FIRST_FAULTS) -> list[str]:
    rest = len(found) - shown
    return [f"  and {rest:,} more; --json lists them"] if rest > 0 else []


def _claims(report: ParityReport) -> list[str]:
    if not report.claims:
        return []
    wrong = [f"  {item.name}: {item.problem}" for item in report.claims if item.problem]
    open_ones = [item for item in report.claims if item.skipped and not item.problem]
    told = [f"{item.name}, not compared: {item.skipped}" for item in open_ones]
    left = [wrapped(line, "  ", "    ") for line in told]
    held = f"{len(report.claims) - len(wrong) - len(left)} of {len(report.claims)} claims"
    subject = "Manifest and files" if "variant" in report.settings else "Declarations and files"
    fits = "match the checkpoint" if is_checkpoint(report.settings.get("against")) else "hold"
    rest = f", {len(left)} not compared" if left else ""
    return [f"{subject}: {held} {fits}{rest}", *wrong, *left]


def confidence_text(decisions: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Says what the rows of a passed report prove; empty without a search."""
    most = max((item["rows"] for item in decisions), default=0)
    rows = settings.get("rows", 0)
    most -= rows - settings.get("distinct_rows", rows)  # a line proves nothing twice
    return f"{counted(most, 'row')}: {confidence(most)}" if most > 0 else ""


def _metrics(report: ParityReport) -> list[str]:
    """Returns the confidence, and the metrics that inform: choices matter where a limit is set."""
    told = confidence_text([vars(item) for item in report.decisions], report.settings)
    shown = [
        item
        for item in report.task_metrics
        if item.budget < math.inf or item.measure not in (CHOICES, WORST_CHOICE)
    ]
    return [*([told] if told and report.passed else []), *map(str, shown)]


def _other_runtimes(report: ParityReport) -> list[str]:
    if not report.cross_check:
        return []
    rows = [(i.runtime, *_row(report, stage)) for i in report.cross_check for stage in i.stages]
    absent = [f"{item.runtime}: {item.absent}" for item in report.cross_check if item.absent]
    found = table(("runtime", *_stage_header(report)), rows)
    return ["Other runtimes, which do not decide the verdict:", found, *absent]


def _settings(report: ParityReport) -> list[str]:
    shown = {
        name: value
        for name, value in report.settings.items()
        if name != "compared" and not name.endswith("_sha256")
    }
    settings = "; ".join(f"{name} {setting_text(value)}" for name, value in shown.items())
    command = _next_command(report)
    return [wrapped(f"Settings: {settings}"), *([f"Next: {command}"] if command else [])]


def _stage_header(report: ParityReport) -> tuple[str, ...]:
    unit = _limited(report, "times torch's", "of the limit")
    return "stage", "tensors", "worst error", "torch's own", unit, "result"


def _limited(report: ParityReport, unit: str, share: str) -> str:
    """Returns the heading of errors in the unit, or as shares; see `_error`."""
    factor = report.tolerance.factor
    return f"{unit} (limit {factor:g})" if factor < SHARES else share


def _error(report: ParityReport, ratio: float) -> str:
    """Returns an error in units of torch's own, or as a share of a limit far above that."""
    factor = report.tolerance.factor
    if factor < SHARES:
        return scaled(ratio)
    share = 100 * ratio / factor
    return f"{share:.2g} %" if share < 10 else f"{scaled(share)} %"


def scaled(ratio: float) -> str:
    """Returns a ratio on a human scale: 0.51, 12, 28,000."""
    if not math.isfinite(ratio) or ratio < 10:
        return f"{ratio:.2f}"
    digits = 1 - math.floor(math.log10(ratio))
    return f"{round(ratio, digits):,.0f}"


def _row(report: ParityReport, stage: Stage) -> tuple[str, ...]:
    result = f"{stage.faults:,} of {stage.tensors:,} FAILED" if stage.faults else "ok"
    errors = f"{stage.error:.1e}", f"{stage.reference_error:.1e}", _error(report, stage.ratio)
    return stage.name, f"{stage.tensors:,}", *errors, result


def _searches(report: ParityReport) -> str:
    """Returns a table of the searches, whose counts add up to the rows of each."""
    counts = []
    for item in report.decisions:
        wrong = sum(difference.wrong_score for difference in item.defects)
        same, ties, tolerated = item.identical - wrong, len(item.ties), len(item.tolerated)
        other = item.rows - item.identical - ties - tolerated
        counts.append((item.rows, same, ties, tolerated, other, wrong))
    header = ("rows", "as torch's", "ties", "tolerated", "other tokens", "wrong score")
    errors = [item.score_ratio for item in report.decisions]
    # A count that is 0 in every search has no column.
    shown = [n for n in range(len(header)) if n < 2 or any(count[n] for count in counts)]
    rows = [
        # A search without scores has no error.
        (item.search, *(f"{count[n]:,}" for n in shown), _error(report, error) if error else "")
        for item, count, error in zip(report.decisions, counts, errors, strict=True)
    ]
    unit = _limited(report, "error", "error, of the limit")
    return table(("search", *(header[n] for n in shown), unit), rows)


def _differences(report: ParityReport) -> Iterator[str]:
    """Yields the first rows whose tokens differ, defects first, with the answers side by side."""
    found = [
        (item.search, difference)
        for kind in ("defects", "tolerated", "ties")
        for item in report.decisions
        for difference in getattr(item, kind)
        if not difference.wrong_score
    ]
    for search, difference in found[:FIRST_DIFFERENCES]:
        yield from _side_by_side(search, difference)
    yield from _more(found, FIRST_DIFFERENCES)


def _side_by_side(search: str, difference: Difference) -> Iterator[str]:
    if not difference.source and not difference.expected:
        yield f"  {search}: {difference}"
        return
    verdict = difference.message.rpartition(": ")[2]
    yield f"  {search}, row {difference.row}, {verdict}:"
    sides = (
        ("source", difference.source),
        ("torch", difference.expected),
        ("graph", difference.found),
    )
    for side, text in sides:
        yield f"    {side:6}  {textwrap.shorten(text, 2 * WIDTH, placeholder=' ...')}"


def _planted(report: ParityReport) -> list[str]:
    if not report.self_test:
        return []
    caught, changing = caught_of(report.self_test)
    measured = any(item.difference is not None for item in report.self_test)
    rows = []
    for item in report.self_test:
        missed = "MISSED" if item.changes_answer else "changes no answer"
        off = "" if item.difference is None else f"{item.difference:.1e}"
        atol = {True: "passes", False: "fails", None: ""}[item.tolerated]
        rows.append([item.kind, item.caught_by or missed, *([off, atol] if measured else [])])
    columns = ["planted fault", "caught by", *(["off by", "atol"] if measured else [])]
    return [
        f"{caught} of {changing} faults that change an answer were caught",
        table(columns, rows),
        *(wrapped(f"Not caught: {i.kind}: {i.planted}") for i in report.self_test if not i.passed),
    ]


def _next_command(report: ParityReport) -> str:
    bundle, variant = shlex.quote(report.bundle), report.settings.get("variant")
    if report.passed and variant:
        reads = any(item.tensor == "hidden" for item in report.comparisons)
        task = f"--task {report.settings.get('task', 'embed')} " if reads else ""
        return f"transferry run {bundle} INPUT -o OUTPUT {task}--variant {variant}"
    # Graphs of another tool have no variant, and nothing here runs them.
    if not variant or (variant == "portable" and is_checkpoint(report.settings.get("against"))):
        return ""
    return f"transferry verify {bundle} --variant portable --checkpoint CHECKPOINT"


@dataclass(frozen=True)
class _Test:
    """A test case: its group and name, the faults that fail it, a note, and why it is skipped."""

    group: str
    name: str
    faults: Sequence[str]
    note: str = ""
    skipped: str = ""


def to_junit(report: ParityReport) -> str:
    """Returns a report as JUnit XML; the same report gives the same text.

    One test suite, with a test case for each tensor name of each stage, each claim, each search,
    each task metric and each planted fault. A test case fails exactly where the report has a fault.
    The cross-check does not decide the verdict, and is left out.
    """
    tests = list(_tests(report))
    counts = {
        "tests": str(len(tests)),
        "failures": str(sum(bool(test.faults) for test in tests)),
        "errors": "0",
    }
    root = ElementTree.Element("testsuites", {"name": "transferry verify", **counts})
    title = _text(f"transferry verify {report.bundle}")
    suite = ElementTree.SubElement(root, "testsuite", {"name": title, **counts})
    suite.set("skipped", str(sum(bool(test.skipped) for test in tests)))
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in report.settings.items():
        named = {"name": _text(name), "value": _text(setting_text(value))}
        ElementTree.SubElement(properties, "property", named)
    for test in tests:
        _add(suite, test)
    if report.origin is not None:
        ElementTree.SubElement(suite, "system-out").text = _text(str(report.origin))
    ElementTree.indent(root, " ")
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _tests(report: ParityReport) -> Iterator[_Test]:
    if not report.comparisons:
        yield _Test("tensors", "tensors compared", ["no tensor was compared"])
    for stage in STAGES:
        tensors: dict[str, list[Comparison]] = {}
        for item in report.comparisons:
            if item.stage == stage:
                tensors.setdefault(item.tensor, []).append(item)
        for tensor, items in tensors.items():
            faults = [f"{item.case}: {item.fault}" for item in items if item.fault]
            worst = worst_ratio(items, report.tolerance)
            note = f"{len(items)} cases, worst error {worst:.2f} times torch's own"
            yield _Test(f"tensors.{stage}", tensor, faults, note)
    for claim in report.claims:
        skipped = "" if claim.problem else claim.skipped
        faults = [claim.problem] if claim.problem else []
        yield _Test("claims", claim.name, faults, skipped=skipped)
    for decided in report.decisions:
        agreed = f"{decided.identical} of {decided.rows} rows agree token for token"
        # A search may fail without a defect in any single row.
        failed = [] if decided.passed else [str(line) for line in decided.defects] or [agreed]
        notes = [agreed, *map(str, [*decided.ties, *decided.tolerated])]
        yield _Test("searches", decided.search, failed, "\n".join(notes))
    for metric in report.task_metrics:
        failed = [] if metric.passed else [str(metric)]
        yield _Test("task metrics", metric.measure, failed, str(metric))
    for fault in report.self_test:
        missed = [] if fault.passed else [f"not caught: {fault.kind} ({fault.planted})"]
        change = "changes an answer" if fault.changes_answer else "changes no answer"
        caught = f"caught by {fault.caught_by}" if fault.caught_by else "caught by no check"
        yield _Test("self-test", f"{fault.kind}: {fault.planted}", missed, f"{change}, {caught}")


def _add(suite: ElementTree.Element, test: _Test) -> None:
    named = {"classname": _text(f"transferry.{test.group}"), "name": _text(test.name), "time": "0"}
    case = ElementTree.SubElement(suite, "testcase", named)
    if test.faults:
        more = f" and {len(test.faults) - 1} more" if len(test.faults) > 1 else ""
        said = {"type": "ParityError", "message": _text(test.faults[0] + more)}
        ElementTree.SubElement(case, "failure", said).text = _text("\n".join(test.faults))
    if test.skipped:
        ElementTree.SubElement(case, "skipped", {"message": _text(test.skipped)})
    if test.note:
        ElementTree.SubElement(case, "system-out").text = _text(test.note)


def _text(text: str) -> str:
    """Replaces characters that XML cannot hold, such as NUL, with U+FFFD."""
    return _NO_XML.sub("\ufffd", text)
