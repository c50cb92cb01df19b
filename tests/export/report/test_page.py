"""The page shows the record, holds nothing from outside, and a browser shows it."""

import dataclasses
import functools
import json
import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from tests.commands import PATIENCE
from tests.js.chromium import CHROMIUM
from transferry.export.report import figures
from transferry.export.report.page import AFTER, BEFORE, render_page, side_by_side
from transferry.export.report.write import write_page
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Comparison, Tolerance
from transferry.runtime.proof.report import (
    CrossCheck,
    Decisions,
    Difference,
    Growth,
    Margins,
    Origin,
    ParityReport,
    PlantedFault,
    Stage,
    TaskMetric,
)

TOLERANCE = Tolerance()
HOSTILE = "bundles/<script>alert('x')</script>&\"</style>"
TIE = Difference(35, "step 7: a tie", 1.36e-6, 5.06e-6)
DEFECT = Difference(
    *(17, "step 3: <b>a defect</b>", 0.31, 5.06e-6, 5.06e-6),
    *("A <i>black</i> dog", "Ein schwarzer <u>Hund</u>.", "Ein schwarzes <u>Hund</u>."),
)
SCORE = Difference(18, "a score is 1e-2 nats from the oracle's", wrong_score=True)
# A void element has no end tag.
VOID = {"meta", "link", "img", "br", "hr", "input", "base", "source", "embed"}


def comparison(tensor: str, error: float, past: int = 0, fault: str = "") -> Comparison:
    stage = "encoder" if tensor[0] in "ch" else "later step" if past else "first step"
    budget = TOLERANCE.budget(5e-7)
    return Comparison("a case", tensor, stage, error, 5e-7, budget, fault, past)


def passed(**changes: Any) -> ParityReport:
    report = ParityReport(
        "bundles/ende",
        {"variant": "portable", "instruction_sets": ["avx2", "fma"], "onnxruntime": "1.31.1"},
        TOLERANCE,
        [
            comparison("cross.0.keys", 4e-7),
            comparison("cross.1.values", 6e-7),
            comparison("past.0.keys", 3e-7),
            comparison("past.1.keys", 9e-7, past=1),
            comparison("logits", 1.5e-6, past=1),
        ],
        [Decisions("greedy", 50, 50, 2e-7, 0.4), Decisions("sampling", 50, 49, 3e-7, 0.5, [TIE])],
        [TaskMetric("token agreement", 1.0, 0.999, 0.001, np.inf)],
        [Growth(step, 1e-6 + step * 1e-8, 9e-7) for step in range(40)],
        Margins([1e-6, 1e-4, 1e-2, 1.0], [1, 40, 900], 3.1e-5, 1.2e-5),
    )
    return dataclasses.replace(report, **changes)


def failed() -> ParityReport:
    faults = [
        comparison(f"past.{layer}.keys", 1e-3 * (1 + layer), past=9, fault=f"fault {layer} is bad")
        for layer in range(6)
    ]
    return passed(
        bundle=HOSTILE,
        comparisons=[*passed().comparisons, *faults],
        decisions=[Decisions("greedy", 50, 48, 1e-2, 99.0, [TIE], [DEFECT, SCORE])],
        task_metrics=[TaskMetric("perplexity", 4.8, 5.9, 0.23, 0.001)],
        cross_check=[
            CrossCheck(
                "onnxruntime as served", [Stage("later step", 90, 3.2e-3, 4.5e-7, 7104.2, 31)]
            ),
            CrossCheck("OpenVINO", absent="not installed"),
        ],
        origin=Origin(
            *("decoder", "batch 1, past 9", "val_7", "decoder.2.rotary"),
            *("build_model/model/transformer.py:214", "Cos", "off by 3e-3"),
            code="angles = table[positions]",
        ),
        self_test=[
            PlantedFault("mask dropped", "decoder: Where_12", True, "later step"),
            PlantedFault("position shifted", "positions", True, ""),
            PlantedFault("unused weight", "row 0", False, ""),
        ],
    )


@functools.cache
def failed_html() -> str:
    return render_page(failed().to_dict())


class Page(HTMLParser):
    """Content of a page: headings, visible text, tables and references."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.scopeless = 0
        self.feed(html)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on"), "a handler is a script"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset"):
                self.references.append(value or "")
        self.scopeless += tag == "th" and "scope" not in dict(attrs)
        if tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.text += data
        if {"h1", "h2", "h3"} & set(self.open):
            self.headings[-1] += data.strip()


def page(report: ParityReport, **more: Any) -> Page:
    return Page(render_page({**report.to_dict(), **more}))


def assert_linked(html: str, shown: Page) -> None:
    """Ids are unique, and every reference within the page has its target."""
    assert len(shown.ids) == len(set(shown.ids))
    named = re.findall(r'aria-(?:labelledby|describedby)="([^"]*)"', html)
    links = re.findall(r'(?:href="#|url\(#)([^")]*)', html)
    assert links
    assert {*" ".join(named).split(), *links} <= set(shown.ids)


def assert_told(shown: Page, *told: str) -> None:
    joined = re.sub(r"\s*\n\s*", "", shown.text)
    assert [each for each in told if each not in joined] == []


def test_a_passed_report_says_so_and_shows_its_figures() -> None:
    shown = page(passed(), date="2025-11-21")
    assert shown.headings == [
        *("✓PASSED", "Numbers", "Tokens", "Task metrics", "What was verified", "Not in this report")
    ]
    assert shown.tags["svg"] == shown.tags["figcaption"] == 5
    assert "FAILED" not in shown.text
    assert_told(
        shown,
        *("bundles/ende", "2025-11-21", "avx2, fma", "1.31.1", "99 of 100"),
        "allowed: the worst of 5 tensors, in units of torch’s own float32 error3.00 of 8",
        "The largest is 3.00: logits, after 1 token.",
        "Of 5 tensors, the median is 1.20 times torch’s own error",
        "self-attention 9.00e-07 in layer 1 (torch’s own 5.00e-07)",
        "the largest error of a logit is 1.39e-06 after 39 tokens",
        "941 choices; the closest is 3.10e-05 nats",
        "rounding could decide below 2.40e-05: 1 choice in the bins that reach so low",
        *("1 proven tie marked", "1 row is a proven tie"),
        "Other runtimes: no cross-check was run.",
    )


def test_a_failed_report_shows_everything() -> None:
    shown = page(failed(), certificate={"report_sha256": "9f" * 32, "signed by": "<someone>"})
    assert shown.headings == [
        *("✗FAILED", "Where the fault begins", "Both answers", "Numbers", "Tokens"),
        *("Task metrics", "Other runtimes", "Self-test", "What was verified", "Certificate"),
    ]
    assert_told(
        shown,
        *("do not deploy it", "fault 0 is bad", "and 5 more", "6 of 11 tensors failed"),
        *("decoder.2.rotary", "build_model/model/transformer.py:214"),
        *("angles = table[positions]", "10 checks failed", "1,500 ×", "decoder layer 0"),
        *("48 of 50", "1 tie, 1 wrong", "1 row with the right tokens and a wrong score"),
        *("1 row has wrong tokens", "1 row has the right tokens with a wrong score"),
        *("row 17, greedy", "A <i>black</i> dog", "schwarzer <u>Hund</u>.", "3.10e-01"),
        *("absent: not installed", "31 failed", "7104.20"),
        "1 of 2 planted faults that change an answer were caught (50%)",
        *("MISSED", "nothing to catch", "9f" * 32, "<someone>"),
    )


@pytest.mark.parametrize(
    ("expected", "found", "marked"),
    [
        ("a b c", "a b d", ("c", "d")),
        ("a b", "a b c", ("(nothing)", "c")),
        ("", "a", ("(nothing)", "a")),
        ("same", "same", ("(nothing)", "(nothing)")),
        ("Mann geht", "Männer", ("Mann", "Männer")),
        ("x " * 300 + "one", "x " * 300 + "two " + "y " * 300, ("one", "two")),
    ],
)
def test_the_first_difference_of_two_answers(
    expected: str, found: str, marked: tuple[str, str]
) -> None:
    difference = dataclasses.asdict(Difference(0, "", source="s", expected=expected, found=found))
    (answers,) = side_by_side([{**difference, "search": "greedy"}])
    sides = answers.expected, answers.found
    assert tuple(side.word for side in sides) == marked
    for side, text in zip(sides, (expected, found), strict=True):
        assert len(side.before) <= BEFORE + 2
        assert len(side.after) <= AFTER + 2
        if len(text) < BEFORE:
            assert side.before + side.word.replace("(nothing)", "") + side.after == text


def test_searches_with_the_same_answers_are_shown_once() -> None:
    difference = {**dataclasses.asdict(DEFECT), "search": "greedy"}
    (answers,) = side_by_side([difference, {**difference, "search": "beam 4"}])
    assert answers.title == "row 17, greedy and beam 4"


def test_cells_hold_the_worst_error_of_layer_and_step() -> None:
    comparisons = [
        comparison("cross.0.keys", 5e-7),
        comparison("past.0.keys", 1e-6),
        comparison("past.0.values", 2e-6),
        comparison("past.1.keys", np.nan, past=9),
        comparison("hidden", 1.0),
        *(comparison("logits", 5e-7, past=past) for past in (0, 1, *range(9, 400, 2))),
    ]
    record = passed(comparisons=comparisons).to_dict()
    rows, columns, worst = figures.heat_cells(record["comparisons"], 8.0)
    assert rows == ["layer 0", "layer 1", "logits"]
    assert columns[:4] == ["encoder", "0", "1", "9+"]
    assert len(columns) <= figures.MOST_COLUMNS
    assert worst["layer 0", "encoder"] == pytest.approx(1.0)
    assert worst["layer 0", "0"] == pytest.approx(4.0)
    assert worst["layer 1", "9+"] == np.inf
    drawn = figures.draw_heat_map("h", rows, columns, worst, 8.0)
    assert drawn.count("<rect") == len(worst)
    assert drawn.count("var(--fault)") == 1


def test_variants_stand_side_by_side() -> None:
    other = passed(settings={"variant": "cpu-int8", "provider": "cuda"})
    html = render_page(passed().to_dict(), other.to_dict(), failed().to_dict())
    shown = Page(html)
    assert shown.headings[:2] == ["✗FAILED: 1 of 3 reports", "Side by side"]
    assert {"cpu-int8 on cuda", "portable of bundles/ende"} <= set(shown.headings)
    (details,) = re.findall(r'<details class="variant"( open)?>', html)[:1]
    assert details == " open", "what failed comes first"
    assert_linked(html, shown)


@pytest.mark.parametrize(
    ("variant", "told"),
    [
        ("cpu-fp32", "--variant portable --checkpoint CHECKPOINT"),
        ("portable", "no number or answer is wrong"),
    ],
)
def test_a_report_without_an_origin_says_so(variant: str, told: str) -> None:
    report = passed(settings={"variant": variant, "against": "the checkpoint"}, comparisons=[])
    shown = page(report)
    assert "No origin was searched for" in shown.text
    assert told in shown.text
    assert "No origin found" in page(dataclasses.replace(report, origin=Origin.none_found(3))).text


def test_the_page_is_linked_within_and_can_be_read_aloud() -> None:
    """Each table and figure is named, and nothing comes from outside."""
    html = failed_html()
    shown = Page(html)
    assert shown.tags["table"] >= 8
    assert shown.scopeless == 0
    assert_linked(html, shown)
    assert len(re.findall('<svg role="img" aria-labelledby="', html)) == shown.tags["svg"]
    assert all(reference.startswith("#") for reference in shown.references)
    assert not {"script", "link", "img", "iframe", "object"} & set(shown.tags)
    assert shown.tags["style"] == 1
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?(.)", html))
    # "#0102" would be left of a placeholder of a colour.
    assert [word for word in ("@import", "#0102", "DejaVu") if word in html] == []


def test_what_users_write_is_text_but_for_marks_where_answers_differ() -> None:
    assert re.findall("<mark>(.*?)</mark>", failed_html()) == ["schwarzer", "schwarzes"]
    assert "Ein <mark>schwarzer</mark> &lt;u&gt;Hund" in failed_html()
    html = render_page(
        {**failed().to_dict(), "certificate": {"<i>": "<i>"}, "settings": {"<u>": ["<u>"]}}
    )
    shown = Page(html)
    assert HOSTILE in shown.text
    assert "<b>a defect</b>" in shown.text
    assert not {"script", "b", "i", "u"} & set(shown.tags)
    assert b"bundles/?" in render_page(passed(bundle="bundles/\udcff").to_dict()).encode()


def test_the_same_record_gives_the_same_page() -> None:
    record = failed().to_dict()
    with matplotlib.rc_context({"xtick.direction": "in", "axes.labelsize": 30}):
        assert render_page(json.loads(json.dumps(record))) == failed_html(), (
            "a user's style is left out"
        )


def test_an_empty_report_fails_and_has_no_figures() -> None:
    shown = page(ParityReport("bundles/ende", {}, TOLERANCE, []))
    assert shown.headings == [
        *("✗FAILED", "Where the fault begins", "Numbers", "What was verified"),
        "Not in this report",
    ]
    assert shown.tags["svg"] == shown.tags["figure"] == 0
    assert_told(
        shown,
        *("no tensor was compared", "Token margins: no", "No origin was searched for"),
        *("Error ratios: no", "Error over layers: no", "Error over decoding steps: no"),
    )


def test_what_is_not_finite_is_told_and_not_drawn() -> None:
    report = passed(
        comparisons=[comparison("past.0.keys", np.nan, fault="holds NaN"), *passed().comparisons],
        decisions=[Decisions("greedy", 1, 0, np.nan, np.nan, (), [Difference(0, "alone", np.inf)])],
        task_metrics=[TaskMetric("perplexity", 4.8, np.nan, np.nan, 0.001)],
        growth=[Growth(0, 1e-6, 1e-6), Growth(1, np.nan, np.inf), Growth(2, 0.0, 1e-6)],
        margins=Margins([1e-6, 1.0], [0], np.inf, np.nan),
    )
    html = render_page(report.to_dict())
    assert_told(
        Page(html),
        "the worst of 6 tensors, in units of torch’s own float32 errornot finite",
        "1 without a finite error, not drawn",
        "Over 2 positions",
        "1 position without a finite error, not drawn",
        "A logit is not finite, so nothing limits what rounding could decide",
        "not finite nats",
    )
    drawings = re.findall("<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) == 5
    assert not re.search(r"\b(nan|inf)\b", "".join(drawings))


@pytest.mark.parametrize(
    "report",
    [
        passed(comparisons=[comparison("logits", 0.0)]),
        passed(comparisons=[comparison("logits", TOLERANCE.budget(5e-7))]),
        passed(tolerance=Tolerance(65536.0)),
        passed(growth=[Growth(0, 0.0, 0.0)]),
        passed(growth=[Growth(0, 1e-6, 1e-6)]),
        passed(margins=Margins([1e-6, 1.0], [0], 0.5, 0.0)),
        passed(margins=Margins([1e-6, 1.0], [3], 0.0, 0.7)),
    ],
)
def test_figures_of_odd_numbers_are_drawn(report: ParityReport) -> None:
    shown = page(report)
    assert shown.headings[0] == "✓PASSED"
    assert shown.tags["svg"] >= 3


def test_an_error_at_its_budget_is_drawn_as_one_that_passes() -> None:
    found = []
    for times in (1, 1.001):
        report = passed(comparisons=[comparison("logits", TOLERANCE.budget(5e-7) * times)])
        html = render_page(report.to_dict())
        (bars,) = re.findall(r'aria-labelledby="ratios.*?</svg>', html, re.DOTALL)
        found.append(bars.count("fill: var(--fault)"))
    assert found[0] < found[1]


def test_an_encoder_alone_has_no_layers_and_no_steps() -> None:
    comparisons = [comparison("hidden", 3e-7), comparison("logits", 3e-7)]
    decisions = [Decisions("fill-mask", 8, 8, 1e-7)]
    shown = page(passed(comparisons=comparisons, decisions=decisions))
    assert "Error over layers: no cache was compared" in shown.text
    assert "Error over hidden tokens" in shown.text
    assert shown.tags["svg"] == 3


def test_many_failures_are_cut_and_the_rest_is_counted() -> None:
    faults = [comparison(f"past.{number}.keys", 1.0, fault="bad") for number in range(130)]
    shown = page(passed(comparisons=faults))
    assert "130 of 130 tensors failed" in shown.text
    assert "and 30 more, which the record has" in shown.text


def test_records_that_are_no_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of schema 5, found schema 1; verify again"):
        render_page({**passed().to_dict(), "schema": 1})
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(passed().to_dict()))
    assert write_page([good], tmp_path / "page.html") == []
    record = failed().to_dict()
    bad.write_text(json.dumps(record))
    assert write_page([good, bad], tmp_path / "page.html") == [bad]
    again = r"bad\.json.*(again|whole)"
    for spoiled, message in (
        ({**record, "schema": 3}, again),
        ({key: value for key, value in record.items() if key != "decisions"}, again),
        ({key: value for key, value in record.items() if key != "self_test"}, again),
        ({**record, "comparisons": [7]}, again),
        ({**record, "comparisons": [{**record["comparisons"][0], "error": "x"}]}, again),
        ({**record, "tolerance": None}, again),
        ([], r"bad\.json: Expected .*; write it again with"),
    ):
        bad.write_text(json.dumps(spoiled))
        with pytest.raises(InputError, match=message):
            write_page([bad], tmp_path / "page.html")


@pytest.mark.optional("chromium")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    path, picture = tmp_path / "report.html", tmp_path / "page.png"
    path.write_text(failed_html(), encoding="utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--no-first-run", "--disable-background-networking"),
        *("--host-resolver-rules=MAP * 0.0.0.0", "--window-size=1000,1400"),
        "--blink-settings=preferredColorScheme=1",
        *(f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", "--dump-dom"),
    ]
    shown = subprocess.run(
        [*command, path.as_uri()], check=True, timeout=PATIENCE, capture_output=True
    )
    seen = shown.stdout.decode("utf-8")
    assert "FAILED</h1>" in seen
    assert seen.count("<table>") == Page(failed_html()).tags["table"]
    assert seen.count("<svg") == seen.count("</svg>") == 5
    assert "<script" not in seen
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape == (1400, 1000, 3)
    colours = {tuple(colour) for colour in pixels.reshape(-1, 3).tolist()}
    # The page, the verdict's tone and tint, the bars within the limit.
    assert {(0xFB, 0xFB, 0xF9), (0xB3, 0x26, 0x1E), (0xFB, 0xE9, 0xE7)} <= colours
    assert (0x25, 0x63, 0xA8) in colours, "the variables of the page colour the figures"
