"""A parity report as JUnit XML, for CI systems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from transferry.runtime.parity.compare import STAGES, Comparison
from transferry.runtime.parity.report import ParityReport, setting_text, worst_ratio

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
