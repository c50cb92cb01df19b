"""A report as JUnit XML, for CI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from transferry.runtime.proof.compare import STAGES, Comparison
from transferry.runtime.proof.report import ParityReport, setting_text, worst_ratio

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
