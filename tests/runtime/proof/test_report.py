"""Whatever failed is in the report and its views, and nothing that failed can be read as passed."""

import dataclasses
import json
import math
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from transferry.runtime.errors import ParityError
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
from transferry.runtime.proof.views import report_text, to_junit

TOLERANCE = Tolerance(factor=4.0, floor=1e-6)


def comparison(tensor: str = "logits", stage: str = "first step", **values: Any) -> Comparison:
    item = Comparison("batch 1", tensor, stage, 1e-6, 5e-7, 2e-6)
    return dataclasses.replace(item, **values)


def report(*comparisons: Comparison, **values: Any) -> ParityReport:
    settings = {"variant": "portable", "provider": "cpu", "instruction_sets": ["avx2", "fma"]}
    return ParityReport("bundles/x", settings, TOLERANCE, comparisons, **values)


AGREED = Decisions("greedy", 3000, 3000, 1e-7, 0.5)
TIE = Difference(1, "a tie", 1e-9, 1e-6)
DEFECT = Difference(2, "a defect", 1.0, 1e-6)
LATER = [comparison(stage="later step", case=f"past {past}") for past in (1, 9)]


def passed(**changes: Any) -> ParityReport:
    """A report with results of every kind."""
    made = report(
        comparison(case="past 0"),
        *LATER,
        decisions=[Decisions("greedy", 3, 2, 1e-7, 0.1, [TIE])],
        task_metrics=[TaskMetric("token agreement", 1.0, 1.0, 0.0, np.inf)],
        self_test=[
            PlantedFault("mask dropped", "encoder", True, "encoder"),
            PlantedFault("unused weight", "row 0", False, ""),
        ],
    )
    return replace(made, **changes)


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


def test_report_passes_where_everything_agrees() -> None:
    tied = Decisions("beam 4", 3, 2, 0.0, 0.0, [TIE])
    agreed = report(comparison(), decisions=(AGREED, tied))
    assert agreed.passed
    assert agreed.faults == []
    agreed.require()
    assert report_text(agreed) == (
        "PASSED: bundles/x answers as torch does\n"
        "\n"
        "stage       tensors  worst error  torch's own  times torch's (limit 4)  result\n"
        "----------  -------  -----------  -----------  -----------------------  ------\n"
        "first step  1        1.0e-06      5.0e-07      2.00                     ok\n"
        "\n"
        "search  rows   as torch's  ties  error (limit 4)\n"
        "------  -----  ----------  ----  ---------------\n"
        "greedy  3,000  3,000       0     0.50\n"
        "beam 4  3      2           1\n"
        "\n"
        "  beam 4: row 1: a tie\n"
        "3,000 rows: with 95 % confidence, under 0.1 % of rows like these are wrong\n"
        "\n"
        "Settings: variant portable; provider cpu; instruction_sets avx2, fma\n"
        "Next: transferry run bundles/x INPUT -o OUTPUT --variant portable"
    )


@pytest.mark.parametrize(
    ("changes", "line", "case", "told"),
    [
        ({"comparisons": []}, "{}", "tensors compared", "no tensor was compared"),
        (
            {"comparisons": [LATER[0], replace(LATER[1], fault="bad")]},
            *("past 9: logits: bad", "logits", "past 9: bad"),
        ),
        (
            {"decisions": [Decisions("greedy", 3, 2, 0.0, 0.0, (), [DEFECT])]},
            *("greedy: {}", "greedy", "row 2: a defect"),
        ),
        (
            {"decisions": [Decisions("greedy", 3, 2, 0.0)]},
            *("greedy: 2 of 3 rows agree", "greedy", "2 of 3 rows agree token for token"),
        ),
        (
            {"decisions": [Decisions("greedy", 0, 0, 0.0)]},
            *("greedy: 0 of 0 rows agree", "greedy", "0 of 0 rows agree token for token"),
        ),
        (
            {"task_metrics": [TaskMetric("perplexity", 4.0, 5.0, 0.25, 0.01)]},
            *("{}", "perplexity", "perplexity 5, torch 4, change 25 % (limit 1 %)"),
        ),
        (
            {"self_test": [PlantedFault("shift", "positions", True, "")]},
            *("self-test: {}", "shift: positions", "not caught: shift (positions)"),
        ),
    ],
)
def test_each_fault_fails_the_report_and_its_test_case(
    changes: dict[str, Any], line: str, case: str, told: str
) -> None:
    failed, line = passed(**changes), line.format(told)
    assert (failed.passed, failed.faults) == (False, [line])
    verdict = "does not answer as torch does; do not deploy it"
    if case == "perplexity":  # a loss alone is not called a wrong answer
        verdict = "computes portable as intended, but rounding costs too much (perplexity): choose"
    text = report_text(failed)
    assert text.startswith(f"FAILED: bundles/x {verdict}")
    assert "confidence" not in text
    assert text.endswith(
        "Next: transferry verify bundles/x --variant portable --checkpoint CHECKPOINT"
    )
    assert failed.to_dict()["passed"] is False
    with pytest.raises(ParityError, match=re.escape(f"bundles/x {verdict}")) as error:
        failed.require()
    assert line in str(error.value)
    found = suite(failed)
    assert failures(found) == {case: told}
    assert found.get("failures") == "1"
    assert [failure.get("message") for failure in found.iter("failure")] == [told]


def test_a_loss_beside_a_fault_is_not_the_verdict() -> None:
    lossy = TaskMetric("equivalent choices", 1.0, 0.9, 0.1, 0.02)
    failed = passed(comparisons=[comparison(fault="bad")], task_metrics=[lossy])
    assert "does not answer as torch" in report_text(failed).partition("\n")[0]


def test_require_names_the_first_faults_and_counts_the_rest() -> None:
    faults = [comparison(fault=f"fault {number}") for number in range(7)]
    with pytest.raises(ParityError) as error:
        report(*faults).require()
    message = str(error.value)
    assert [f"fault {number}" in message for number in range(7)] == [True] * 5 + [False] * 2
    assert message.endswith("and 2 more")


def test_text_shows_what_failed_and_how_to_see_it_again() -> None:
    """Faults count by stage, and the next command is the last line."""
    failed = report(
        comparison(),
        comparison(stage="later step", fault="bad"),
        cross_check=[
            CrossCheck("a", [Stage("text", 3, 1.0, 1e-7, 9.0, 2)]),
            CrossCheck("b", absent="gone"),
        ],
        self_test=[
            PlantedFault("mask dropped", "encoder", True, "encoder"),
            PlantedFault("shift", "positions", True, ""),
            PlantedFault("unused weight", "row 0", False, ""),
        ],
        origin=Origin("decoder", "a case", "val_1", "decoder.0", "a.py:1", "Add", "far"),
    )
    text = report_text(failed)
    assert text.index("the fault begins in decoder.0 (a.py:1)") < text.index("first step")
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["first step"].endswith("ok")
    assert lines["later step"].endswith("1 of 1 FAILED")
    assert lines["a"].endswith("2 of 3 FAILED")
    assert "b: gone" in lines
    assert "1 of 2 faults that change an answer were caught" in lines
    caught = [
        lines[kind].split("  ")[-1].strip() for kind in ("mask dropped", "shift", "unused weight")
    ]
    assert caught == ["encoder", "MISSED", "changes no answer"]
    assert "Not caught: shift: positions" in text


@pytest.mark.parametrize(
    ("share", "shown"),
    [(2.5e-5, "0.0025"), (0.0421, "4.2"), (0.42, "42"), (8.4, "840"), (math.inf, "inf")],
)
def test_errors_are_shares_of_a_limit_far_above_rounding(share: float, shown: str) -> None:
    wide = replace(report(comparison(error=share * 2e-6)), tolerance=Tolerance(2.0**20))
    text = report_text(wide)
    assert "of the limit" in text
    assert "times torch's" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("first step"))
    assert line.split()[-3:-1] == [shown, "%"]


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (("token agreement", 1.0, 1.0, 0.0, math.inf), "Token agreement 100 %"),
        (("token agreement", 1.0, 0.97, 0.03, 0.02), "Token agreement 97 % (at least 98 %)"),
        (
            ("sacreBLEU greedy", 38.21, 38.14, 0.07, 0.3),
            "sacreBLEU greedy 38.14, torch 38.21, change 0.07 points (limit 0.3 points)",
        ),
        (("perplexity", 4.0, 5.0, 0.25, 0.01), "perplexity 5, torch 4, change 25 % (limit 1 %)"),
    ],
)
def test_metrics_are_on_a_human_scale(metric: Any, text: str) -> None:
    assert str(TaskMetric(*metric)).startswith(text)


def test_stages_are_summed_up() -> None:
    encoder, first, later = report(
        comparison("cross.0.keys", "encoder", error=1e-6),
        comparison("cross.0.keys", "encoder", error=2e-6, fault="bad"),
        comparison("logits", "later step", reference_error=2e-6, budget=8e-6),
        comparison("logits", error=3e-7),
        comparison("past.0.keys", error=1e-7),
    ).stages()
    assert (encoder.name, encoder.tensors, encoder.faults) == ("encoder", 2, 1)
    assert encoder.error == 2e-6
    assert encoder.ratio == pytest.approx(4.0), "at the budget it is the tolerance's factor"
    assert (first.name, first.tensors, first.faults, first.error) == ("first step", 2, 0, 3e-7)
    assert (later.name, later.tensors, later.reference_error) == ("later step", 1, 2e-6)
    assert later.ratio == pytest.approx(0.5)


def test_report_is_json_whatever_it_holds() -> None:
    odd = report(
        comparison(error=np.nan, fault="holds NaN or infinity"),
        comparison(error=np.inf, reference_error=np.inf, budget=np.inf, fault="bad"),
        decisions=(Decisions("greedy", 1, 1, math.inf),),
    )
    record = json.loads(json.dumps(odd.to_dict(), allow_nan=False))
    assert [item["error"] for item in record["comparisons"]] == [None, None]
    assert [item["budget"] for item in record["comparisons"]] == [2e-6, None]
    assert [item["stage"] for item in record["comparisons"]] == ["first step"] * 2
    assert record["decisions"][0]["score_error"] is None
    assert record["faults"] == odd.faults
    assert record["tolerance"] == {"factor": 4.0, "floor": 1e-6, "most": 2.0**-6, "crossed": None}
    assert report_text(odd).startswith("FAILED")


def test_counts_of_a_search_add_up() -> None:
    wrong = [Difference(row, "far", wrong_score=True) for row in range(5)]
    other = Difference(7, "step 1: torch prefers [1], the graph [2]: a defect")
    spoken = replace(other, row=8, source="a dog", expected="ein Hund", found="ein Kind")
    found = Decisions("greedy", 10, 7, 1.0, 28015.3, [TIE], [*wrong, other, spoken])
    text = report_text(report(comparison(), decisions=(found,)))
    assert (
        "search  rows  as torch's  ties  other tokens  wrong score  error (limit 4)\n"
        "------  ----  ----------  ----  ------------  -----------  ---------------\n"
        "greedy  10    2           1     2             5            28,000\n"
        "\n"
        "  greedy: row 7: step 1: torch prefers [1], the graph [2]: a defect\n"
        "  greedy, row 8, a defect:\n"
        "    source  a dog\n"
        "    torch   ein Hund\n"
        "    graph   ein Kind\n"
        "  greedy: row 1: a tie\n"
    ) in text


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
        {"name": "provider", "value": "cpu"},
        {"name": "instruction_sets", "value": "avx2, fma"},
    ]
    notes = [note.text for note in found.iter("system-out")]
    assert notes[1] == "2 cases, worst error 2.00 times torch's own"
    assert notes[2] == "2 of 3 rows agree token for token\nrow 1: a tie"
    assert notes[4:] == [
        "changes an answer, caught by encoder",
        "changes no answer, caught by no check",
    ]


def test_a_failure_lists_its_cases() -> None:
    faults = [comparison(case=f"past {past}", fault=f"fault {past}") for past in (1, 2, 3)]
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
            comparisons=[comparison(case="past 1", fault=odd, error=np.nan)],
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
        comparisons=[comparison(fault="bad")],
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
