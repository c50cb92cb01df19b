"""A test case fails in the XML exactly where the report has a fault."""

import dataclasses
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from transferry.runtime.proof.compare import Comparison, Tolerance
from transferry.runtime.proof.report import (
    CrossCheck,
    Decisions,
    Difference,
    Origin,
    ParityReport,
    PlantedFault,
    Stage,
    TaskMetric,
)
from transferry.runtime.proof.views import to_junit

TIE = Difference(1, "a tie", 1e-9, 1e-6)
DEFECT = Difference(2, "a defect", 1.0, 1e-6)


def comparison(tensor: str, past: int, fault: str = "", error: float = 1e-6) -> Comparison:
    stage = "later step" if past else "first step"
    return Comparison(f"past {past}", tensor, stage, error, 5e-7, 4e-6, fault)


def passed(**changes: Any) -> ParityReport:
    report = ParityReport(
        "bundles/x",
        {"variant": "portable", "instruction_sets": ["avx2", "fma"]},
        Tolerance(),
        [comparison("logits", 0), comparison("logits", 1), comparison("logits", 9)],
        [Decisions("greedy", 3, 2, 1e-7, 0.1, [TIE])],
        [TaskMetric("token agreement", 1.0, 1.0, 0.0, np.inf)],
        self_test=[
            PlantedFault("mask dropped", "encoder", True, "encoder"),
            PlantedFault("unused weight", "row 0", False, ""),
        ],
    )
    return dataclasses.replace(report, **changes)


def suite(report: ParityReport) -> ElementTree.Element:
    root = ElementTree.fromstring(to_junit(report).encode("utf-8"))
    assert root.tag == "testsuites"
    (found,) = root
    for name in ("tests", "failures", "errors"):
        assert root.get(name) == found.get(name)
    return found


def failures(found: ElementTree.Element) -> dict[str | None, str | None]:
    return {
        test.get("name"): failure.text
        for test in found.iter("testcase")
        for failure in test.iter("failure")
    }


def test_everything_that_was_verified_is_a_test_case() -> None:
    found = suite(passed())
    assert found.get("name") == "transferry verify bundles/x"
    assert (found.get("tests"), found.get("failures"), found.get("errors")) == ("6", "0", "0")
    assert [(test.get("classname"), test.get("name")) for test in found.iter("testcase")] == [
        ("transferry.tensors.first step", "logits"),
        ("transferry.tensors.later step", "logits"),
        ("transferry.searches", "greedy"),
        ("transferry.task metrics", "token agreement"),
        ("transferry.self-test", "mask dropped: encoder"),
        ("transferry.self-test", "unused weight: row 0"),
    ]
    assert [item.attrib for item in found.iter("property")] == [
        {"name": "variant", "value": "portable"},
        {"name": "instruction_sets", "value": "avx2, fma"},
    ]
    notes = [note.text for note in found.iter("system-out")]
    assert notes[1] == "2 cases, worst error 2.00 times torch's own"
    assert notes[2] == "2 of 3 rows agree token for token\nrow 1: a tie"
    assert notes[4:] == [
        "changes an answer, caught by encoder",
        "changes no answer, caught by no check",
    ]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (passed(comparisons=[]), {"tensors compared": "no tensor was compared"}),
        (
            passed(comparisons=[comparison("logits", 1), comparison("logits", 9, "bad")]),
            {"logits": "past 9: bad"},
        ),
        (
            passed(decisions=[Decisions("greedy", 3, 2, 0.0, 0.0, (), [DEFECT])]),
            {"greedy": "row 2: a defect"},
        ),
        (
            passed(decisions=[Decisions("greedy", 3, 2, 0.0)]),
            {"greedy": "2 of 3 rows agree token for token"},
        ),
        (
            passed(decisions=[Decisions("greedy", 0, 0, 0.0)]),
            {"greedy": "0 of 0 rows agree token for token"},
        ),
        (
            passed(task_metrics=[TaskMetric("perplexity", 4.0, 5.0, 0.25, 0.01)]),
            {"perplexity": "perplexity 5, torch 4, change 25 % (limit 1 %)"},
        ),
        (
            passed(self_test=[PlantedFault("shift", "positions", True, "")]),
            {"shift: positions": "not caught: shift (positions)"},
        ),
    ],
)
def test_a_fault_of_the_report_fails_its_test_case(
    report: ParityReport, told: dict[str, str]
) -> None:
    assert not report.passed
    found = suite(report)
    assert failures(found) == told
    assert found.get("failures") == "1"
    assert [failure.get("message") for failure in found.iter("failure")] == [*told.values()]


def test_a_failure_lists_its_cases() -> None:
    faults = [comparison("logits", past, f"fault {past}") for past in (1, 2, 3)]
    found = suite(passed(comparisons=faults))
    (failure,) = found.iter("failure")
    assert failure.get("message") == "past 1: fault 1 and 2 more"
    assert (failure.text or "").splitlines() == [f"{item.case}: {item.fault}" for item in faults]


def test_the_cross_check_fails_nothing_and_the_same_report_gives_the_same_text() -> None:
    row = CrossCheck("another", [Stage("encoder", 3, 1.0, 1e-7, 999.0, 3)])
    assert to_junit(passed(cross_check=[row])) == to_junit(passed())
    assert to_junit(passed()).startswith('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites ')


def test_what_xml_cannot_hold_is_replaced() -> None:
    odd = "a\x00\x1b[31m\ud800\uffff<&\"'>\tb\nü🙂"
    found = suite(
        passed(
            bundle=odd,
            settings={odd: odd},
            comparisons=[comparison("logits", 1, odd, np.nan)],
            task_metrics=[TaskMetric(odd, 1.0, np.nan, np.nan, 0.1)],
        )
    )
    whole = odd
    for character in "\x00\x1b\ud800\uffff":
        whole = whole.replace(character, "\ufffd")
    assert found.get("name") == f"transferry verify {whole}"
    assert [item.attrib for item in found.iter("property")] == [{"name": whole, "value": whole}]
    assert failures(found)["logits"] == f"past 1: {whole}"
    assert whole in failures(found)


def test_only_what_the_common_schema_knows_is_written() -> None:
    """As Jenkins and GitLab read it: elements in their order, with these attributes."""
    report = passed(
        comparisons=[comparison("logits", 1, "bad")],
        origin=Origin("decoder", "case", "val_1", "decoder.0", "a.py:1", "Add", "far off"),
    )
    root = ElementTree.fromstring(to_junit(report))
    attributes = {
        "testsuites": {"name", "tests", "failures", "errors"},
        "testsuite": {"name", "tests", "failures", "errors", "skipped"},
        "skipped": {"message"},
        "properties": set(),
        "property": {"name", "value"},
        "testcase": {"classname", "name", "time"},
        "failure": {"type", "message"},
        "system-out": set(),
    }
    for element in root.iter():
        assert set(element.attrib) == attributes[element.tag]
    inside = [element.tag for element in root[0]]
    assert inside == ["properties", *["testcase"] * 5, "system-out"]
    assert [element.tag for element in root[0][1]] == ["failure", "system-out"]
    assert root[0][-1].text == str(report.origin)
    tests = [(test.get("classname"), test.get("name")) for test in root.iter("testcase")]
    assert len(tests) == len(set(tests)), "GitLab drops what has the name of another"
