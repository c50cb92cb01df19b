"""Whatever failed is in the report, and nothing that failed can be read as passed."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from transferry.runtime.errors import ParityError
from transferry.runtime.parity.compare import Comparison, Tolerance
from transferry.runtime.parity.report import Decisions, Difference, ParityReport

TOLERANCE = Tolerance(factor=4.0, floor=1e-6)


def comparison(tensor: str = "logits", past: int = 0, **values: Any) -> Comparison:
    item = Comparison(f"batch 1, source 2, past {past}", tensor, 1e-6, 5e-7, 2e-6)
    return dataclasses.replace(item, **values)


def report(*comparisons: Comparison, decisions: tuple[Decisions, ...] = ()) -> ParityReport:
    settings = {"variant": "portable", "provider": "cpu"}
    return ParityReport("bundles/x", settings, TOLERANCE, comparisons, decisions)


AGREED = Decisions("greedy", 3, 3, 1e-7)
DEFECT = Decisions("beam 4", 3, 2, 0.0, 0.0, (), [Difference(1, "no")])
TIE = Difference(1, "a tie", 1e-9, 1e-6)


def test_report_passes_where_everything_agrees() -> None:
    agreed = report(comparison(), decisions=(AGREED,))
    assert agreed.passed
    assert agreed.faults == []
    agreed.require()
    assert agreed.to_text().endswith("PASSED")
    assert "greedy: 3 of 3 rows token for token, 0 ties, 0 defects" in agreed.to_text()
    assert "variant portable, provider cpu" in agreed.to_text()


def test_proven_ties_pass_and_are_listed() -> None:
    tied = report(comparison(), decisions=(Decisions("beam 4", 3, 2, 0.0, 0.0, [TIE]),))
    assert tied.passed
    assert "  row 1: a tie" in tied.to_text()


@pytest.mark.parametrize(
    ("failed", "fault"),
    [
        (report(decisions=(AGREED,)), "no tensor was compared"),
        (report(comparison(fault="bad")), "batch 1, source 2, past 0: logits: bad"),
        (report(comparison(), decisions=(Decisions("greedy", 0, 0, 0.0),)), "0 of 0 rows agree"),
        (report(comparison(), decisions=(Decisions("greedy", 3, 2, 0.0),)), "2 of 3 rows agree"),
        (
            report(
                comparison(),
                decisions=(Decisions("beam 4", 3, 2, 0.0, 0.0, (), [Difference(1, "no")]),),
            ),
            "beam 4: row 1: no",
        ),
    ],
)
def test_report_fails(failed: ParityReport, fault: str) -> None:
    assert not failed.passed
    (line,) = failed.faults
    assert fault in line
    assert failed.to_text().endswith("FAILED")
    assert failed.to_dict()["passed"] is False
    with pytest.raises(ParityError, match="bundles/x does not answer as torch does") as error:
        failed.require()
    assert line in str(error.value)


def test_require_names_the_first_faults_and_counts_the_rest() -> None:
    faults = [comparison(fault=f"fault {number}") for number in range(7)]
    with pytest.raises(ParityError) as error:
        report(*faults).require()
    message = str(error.value)
    assert "do not deploy it" in message
    assert [f"fault {number}" in message for number in range(7)] == [True] * 5 + [False] * 2
    assert message.endswith("and 2 more")


def test_stages_are_summed_up_by_what_gave_the_tensor() -> None:
    encoder, first, later = report(
        comparison("cross.0.keys", error=1e-6),
        comparison("cross.0.keys", past=5, error=2e-6, fault="bad"),
        comparison("logits", error=3e-7),
        comparison("past.0.keys", error=1e-7),
        comparison("logits", past=15, reference_error=2e-6, budget=8e-6),
    ).stages()
    assert (encoder.name, encoder.tensors, encoder.faults) == ("encoder", 2, 1)
    assert encoder.error == 2e-6
    assert encoder.ratio == pytest.approx(4.0), "at the budget it is the tolerance's factor"
    assert (first.name, first.tensors, first.faults, first.error) == ("first step", 2, 0, 3e-7)
    assert (later.name, later.tensors, later.reference_error) == ("later step", 1, 2e-6)
    assert later.ratio == pytest.approx(0.5)


def test_text_shows_the_faulty_stage() -> None:
    text = report(comparison(), comparison(past=3, fault="bad")).to_text().splitlines()
    assert next(line for line in text if line.startswith("first step")).endswith("ok")
    assert next(line for line in text if line.startswith("later step")).endswith("1 FAULTS")


def test_report_is_json_whatever_it_holds() -> None:
    odd = report(
        comparison(error=np.nan, fault="holds NaN or infinity"),
        comparison(error=np.inf, reference_error=np.inf, budget=np.inf, fault="bad"),
        decisions=(Decisions("greedy", 1, 1, math.inf),),
    )
    record = json.loads(json.dumps(odd.to_dict(), allow_nan=False))
    assert [item["error"] for item in record["comparisons"]] == [None, None]
    assert [item["budget"] for item in record["comparisons"]] == [2e-6, None]
    assert record["decisions"][0]["score_error"] is None
    assert record["faults"] == odd.faults
    assert record["tolerance"] == {"factor": 4.0, "floor": 1e-6}
    assert record["settings"] == {"variant": "portable", "provider": "cpu"}
    assert odd.to_text().endswith("FAILED")
