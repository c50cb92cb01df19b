"""Views of a report: text for people, verdict first and next command last; JUnit XML for CI."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from transferry.runtime.proof.compare import STAGES, Comparison
from transferry.runtime.proof.report import (
    FIRST_DIFFERENCES,
    FIRST_FAULTS,
    Difference,
    ParityReport,
    Stage,
    confidence,
    setting_text,
    worst_ratio,
)
from transferry.runtime.tables import WIDTH, table, wrapped

# Limits from here on say nothing in units of torch's rounding; errors are shares of them.
SHARES = 1_000
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report_text(report: ParityReport) -> str:
    """Returns the report as text, verdict first and the next command last."""
    return "\n".join(_lines(report))


def _lines(report: ParityReport) -> Iterator[str]:
    verdict = "answers as torch does"
    if not report.passed:
        verdict = "does not answer as torch does; do not deploy it"
    yield f"{'PASSED' if report.passed else 'FAILED'}: {report.bundle} {verdict}"
    yield ""
    if report.origin is not None:
        yield from (str(report.origin), "")
    unit = _limited(report, "times torch's", "of the limit")
    header = ("stage", "tensors", "worst error", "torch's own", unit, "result")
    yield from (table(header, [_row(report, stage) for stage in report.stages()]), "")
    wrong = [f"{i.case}: {i.tensor}: {i.fault}" for i in report.comparisons if i.fault]
    yield from (wrapped(line, "  ", "    ") for line in wrong[:FIRST_FAULTS])
    if (rest := len(wrong) - FIRST_FAULTS) > 0:
        yield f"  and {rest:,} more; --json lists them"
    if report.claims:
        wrong = [f"  {item.name}: {item.problem}" for item in report.claims if item.problem]
        held = f"{len(report.claims) - len(wrong)} of {len(report.claims)}"
        told = "What the bundle says of itself", "as the run has it"
        if "variant" not in report.settings:  # graphs of another tool
            told = "What the files declare", "so"
        yield f"{told[0]}: {held} {told[1]}"
        yield from wrong
    if report.decisions:
        if report.claims or any(item.fault for item in report.comparisons):
            yield ""
        yield from (_searches(report), "")
    yield from _differences(report)
    if report.passed and (most := max((item.rows for item in report.decisions), default=0)):
        yield f"{most:,} rows: {confidence(most)}"
    yield from map(str, report.task_metrics)
    if report.cross_check:
        yield from ("", "Other runtimes, which do not decide the verdict:")
        rows = [(i.runtime, *_row(report, stage)) for i in report.cross_check for stage in i.stages]
        yield table(("runtime", *header), rows)
        yield from (f"{item.runtime}: {item.absent}" for item in report.cross_check if item.absent)
    if report.self_test:
        yield ""
        yield from _planted(report)
    shown = {k: v for k, v in report.settings.items() if not k.endswith("_sha256")}
    settings = "; ".join(f"{name} {setting_text(value)}" for name, value in shown.items())
    yield from ("", wrapped(f"Settings: {settings}"))
    if command := _next_command(report):
        yield f"Next: {command}"


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
    # What happened in no search has no column.
    shown = [n for n in range(len(header)) if n < 2 or any(count[n] for count in counts)]
    rows = [
        # A search without scores has no error of them.
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
    if (rest := len(found) - FIRST_DIFFERENCES) > 0:
        yield f"  and {rest:,} more; --json lists them"


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


def _planted(report: ParityReport) -> Iterator[str]:
    changing = [item for item in report.self_test if item.changes_answer]
    caught = sum(bool(item.caught_by) for item in changing)
    yield f"{caught} of {len(changing)} faults that change an answer were caught"
    measured = any(item.difference is not None for item in report.self_test)
    columns = ["planted fault", "caught by"]
    if measured:
        columns += ["off by", "atol"]
    rows = []
    for item in report.self_test:
        missed = "MISSED" if item.changes_answer else "changes no answer"
        row = [item.kind, item.caught_by or missed]
        if measured:
            told = "" if item.difference is None else f"{item.difference:.1e}"
            row += [told, {True: "passes", False: "fails", None: ""}[item.tolerated]]
        rows.append(row)
    yield table(columns, rows)
    for item in report.self_test:
        if not item.passed:
            yield wrapped(f"Not caught: {item.kind}: {item.planted}")


def _next_command(report: ParityReport) -> str:
    bundle, variant = shlex.quote(report.bundle), report.settings.get("variant")
    if report.passed and variant:
        reads = any(item.tensor == "hidden" for item in report.comparisons)
        task = f"--task {report.settings.get('task', 'embed')} " if reads else ""
        return f"transferry run {bundle} INPUT -o OUTPUT {task}--variant {variant}"
    # Graphs of another tool have no variant, and nothing here runs them.
    if not variant or (variant == "portable" and report.settings.get("against") == "the run"):
        return ""
    return f"transferry verify {bundle} --variant portable --checkpoint RUN"


def to_junit(report: ParityReport) -> str:
    """Returns a report as JUnit XML; the same report gives the same text.

    One test suite, with a test case for each tensor name of each stage, each claim, each search,
    each task metric and each planted fault. A test case fails exactly where the report has a fault.
    The cross-check does not decide the verdict, and is left out.
    """
    root = ElementTree.Element("testsuites", {"name": "transferry verify"})
    suite = ElementTree.SubElement(root, "testsuite")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in report.settings.items():
        ElementTree.SubElement(
            properties, "property", name=_text(name), value=_text(setting_text(value))
        )
    if not report.comparisons:
        _test(suite, "tensors", "tensors compared", ["no tensor was compared"])
    for stage in STAGES:
        tensors: dict[str, list[Comparison]] = {}
        for item in report.comparisons:
            if item.stage == stage:
                tensors.setdefault(item.tensor, []).append(item)
        for tensor, items in tensors.items():
            worst = worst_ratio(items, report.tolerance)
            _test(
                suite,
                f"tensors.{stage}",
                tensor,
                [f"{item.case}: {item.fault}" for item in items if item.fault],
                f"{len(items)} cases, worst error {worst:.2f} times torch's own",
            )
    for claim in report.claims:
        _test(suite, "claims", claim.name, [claim.problem] if claim.problem else [])
    for decided in report.decisions:
        agreed = f"{decided.identical} of {decided.rows} rows agree token for token"
        # A search may fail without a defect in any single row.
        failed = [str(line) for line in decided.defects] or [agreed]
        notes = [agreed, *map(str, [*decided.ties, *decided.tolerated])]
        _test(suite, "searches", decided.search, [] if decided.passed else failed, "\n".join(notes))
    for metric in report.task_metrics:
        failed = [] if metric.passed else [str(metric)]
        _test(suite, "task metrics", metric.measure, failed, str(metric))
    for fault in report.self_test:
        missed = [] if fault.passed else [f"not caught: {fault.kind} ({fault.planted})"]
        change = "changes an answer" if fault.changes_answer else "changes no answer"
        caught = f"caught by {fault.caught_by}" if fault.caught_by else "caught by no check"
        _test(suite, "self-test", f"{fault.kind}: {fault.planted}", missed, f"{change}, {caught}")
    if report.origin is not None:
        ElementTree.SubElement(suite, "system-out").text = _text(str(report.origin))
    counts = {
        "tests": str(len(suite.findall("testcase"))),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": "0",
    }
    root.attrib.update(counts)
    suite.attrib.update({"name": _text(f"transferry verify {report.bundle}"), **counts})
    ElementTree.indent(root, " ")
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _test(
    suite: ElementTree.Element, group: str, name: str, faults: Sequence[str], found: str = ""
) -> None:
    """Adds a test case, which fails if there are faults."""
    test = ElementTree.SubElement(
        suite, "testcase", classname=_text(f"transferry.{group}"), name=_text(name), time="0"
    )
    if faults:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        failure = ElementTree.SubElement(
            test, "failure", type="ParityError", message=_text(faults[0] + more)
        )
        failure.text = _text("\n".join(faults))
    if found:
        ElementTree.SubElement(test, "system-out").text = _text(found)


def _text(text: str) -> str:
    """Replaces characters that XML cannot hold, such as NUL, with U+FFFD."""
    return _NO_XML.sub("\ufffd", text)
