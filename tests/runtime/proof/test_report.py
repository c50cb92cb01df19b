"""Whatever failed is in the report, and nothing that failed can be read as passed."""

import dataclasses
import json
import math
import re
from dataclasses import replace
from typing import Any

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
from transferry.runtime.proof.views import report_text

TOLERANCE = Tolerance(factor=4.0, floor=1e-6)


def comparison(tensor: str = "logits", stage: str = "first step", **values: Any) -> Comparison:
    item = Comparison("batch 1", tensor, stage, 1e-6, 5e-7, 2e-6)
    return dataclasses.replace(item, **values)


def report(*comparisons: Comparison, **values: Any) -> ParityReport:
    settings = {"variant": "portable", "provider": "cpu", "instruction_sets": ["avx2", "fma"]}
    return ParityReport("bundles/x", settings, TOLERANCE, comparisons, **values)


AGREED = Decisions("greedy", 3000, 3000, 1e-7, 0.5)
TIE = Difference(1, "a tie", 1e-9, 1e-6)
DEFECT = Difference(1, "no")


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
    ("failed", "fault"),
    [
        (report(decisions=(AGREED,)), "no tensor was compared"),
        (report(comparison(fault="bad")), "batch 1: logits: bad"),
        (report(comparison(), decisions=(Decisions("greedy", 0, 0, 0.0),)), "0 of 0 rows agree"),
        (report(comparison(), decisions=(Decisions("greedy", 3, 2, 0.0),)), "2 of 3 rows agree"),
        (
            report(comparison(), decisions=(Decisions("beam 4", 3, 2, 0.0, 0.0, (), [DEFECT]),)),
            "beam 4: row 1: no",
        ),
    ],
)
def test_report_fails(failed: ParityReport, fault: str) -> None:
    assert not failed.passed
    (line,) = failed.faults
    assert fault in line
    text = report_text(failed)
    assert text.startswith("FAILED: bundles/x does not answer as torch does; do not deploy it\n")
    assert "confidence" not in text
    assert text.endswith(
        "Next: transferry verify bundles/x --variant portable --checkpoint CHECKPOINT"
    )
    assert failed.to_dict()["passed"] is False
    with pytest.raises(ParityError, match="bundles/x does not answer as torch does") as error:
        failed.require()
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("also", "verdict"),
    [({}, "(equivalent choices): choose another"), ({"fault": "bad"}, "does not answer as torch")],
)
def test_a_loss_alone_is_not_called_a_wrong_answer(also: dict[str, str], verdict: str) -> None:
    lossy = TaskMetric("equivalent choices", 1.0, 0.9, 0.1, 0.02)
    failed = report(comparison(**also), task_metrics=[lossy])
    assert verdict in report_text(failed).partition("\n")[0]
    with pytest.raises(ParityError, match=re.escape(verdict)):
        failed.require()


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
