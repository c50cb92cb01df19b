"""A verification as a text for people: verdict, origin, results, differences, next command."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator

from transferry.runtime.parity.report import (
    FIRST_DIFFERENCES,
    Decisions,
    Difference,
    ParityReport,
    Stage,
    confidence,
    setting_text,
)
from transferry.runtime.tables import table

WIDTH = 100


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
    header = ("stage", "tensors", "worst error", "torch's own", _times(report), "result")
    yield from (table(header, [_row(stage) for stage in report.stages()]), "")
    if report.claims:
        wrong = [f"  {item.name}: {item.problem}" for item in report.claims if item.problem]
        held = f"{len(report.claims) - len(wrong)} of {len(report.claims)}"
        told = "What the bundle says of itself", "as the run has it"
        if "variant" not in report.settings:  # graphs of another tool
            told = "What the files declare", "so"
        yield f"{told[0]}: {held} {told[1]}"
        yield from wrong
    for item in report.decisions:
        yield _search(item, report)
    yield from _differences(report)
    if report.passed and (most := max((item.rows for item in report.decisions), default=0)):
        yield f"{most:,} rows: {confidence(most)}"
    yield from map(str, report.task_metrics)
    if report.cross_check:
        yield from ("", "Other runtimes, which do not decide the verdict:")
        rows = [(i.runtime, *_row(stage)) for i in report.cross_check for stage in i.stages]
        yield table(("runtime", *header), rows)
        yield from (f"{item.runtime}: {item.absent}" for item in report.cross_check if item.absent)
    if report.self_test:
        yield ""
        yield from _planted(report)
    shown = {k: v for k, v in report.settings.items() if not k.endswith("_sha256")}
    settings = "; ".join(f"{name} {setting_text(value)}" for name, value in shown.items())
    yield from ("", textwrap.fill(f"Settings: {settings}", WIDTH, subsequent_indent="  "))
    if command := _next_command(report):
        yield f"Next: {command}"


def _times(report: ParityReport) -> str:
    return f"times torch's (limit {report.tolerance.factor:g})"


def scaled(ratio: float) -> str:
    """Returns a ratio on a human scale: 0.51, 12, 28,000."""
    if not math.isfinite(ratio) or ratio < 10:
        return f"{ratio:.2f}"
    digits = 1 - math.floor(math.log10(ratio))
    return f"{round(ratio, digits):,.0f}"


def _row(stage: Stage) -> tuple[str, ...]:
    result = f"{stage.faults:,} of {stage.tensors:,} FAILED" if stage.faults else "ok"
    errors = f"{stage.error:.1e}", f"{stage.reference_error:.1e}", scaled(stage.ratio)
    return stage.name, f"{stage.tensors:,}", *errors, result


def _search(item: Decisions, report: ParityReport) -> str:
    """Returns counts that add up to the rows."""
    differing = item.rows - item.identical - len(item.ties) - len(item.tolerated)
    wrong = sum(difference.wrong_score for difference in item.defects)
    right = item.identical - wrong
    counts = [f"{item.search}: {right:,} of {item.rows:,} rows as torch's"]
    if item.ties:
        counts.append(f"{len(item.ties):,} tie{'s' if len(item.ties) > 1 else ''}")
    if item.tolerated:
        counts.append(f"{len(item.tolerated):,} within the precision's tolerance")
    if differing:
        counts.append(f"{differing:,} with other tokens")
    if wrong:
        counts.append(f"{wrong:,} with its tokens and a wrong score")
    if item.score_ratio:
        limit = f"{report.tolerance.factor:g}"
        counts.append(f"score error {scaled(item.score_ratio)} times torch's own (limit {limit})")
    return ", ".join(counts)


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
    rows = [
        (
            item.kind,
            item.planted,
            "yes" if item.changes_answer else "no",
            item.caught_by or ("MISSED" if item.changes_answer else "passes"),
        )
        for item in report.self_test
    ]
    yield table(("planted fault", "where", "changes an answer", "caught by"), rows)


def _next_command(report: ParityReport) -> str:
    bundle, variant = shlex.quote(report.bundle), report.settings.get("variant")
    if report.passed and variant:
        reads = any(item.tensor == "hidden" for item in report.comparisons)
        task = f"--task {report.settings.get('task', 'embed')} " if reads else ""
        return f"transferry run {bundle} INPUT -o OUTPUT {task}--variant {variant}"
    if report.origin is not None and report.origin.replay:
        return f"transferry replay {shlex.quote(report.origin.replay)}"
    # Graphs of another tool have no variant, and nothing here runs them.
    if not variant or (variant == "portable" and report.settings.get("against") == "the run"):
        return ""
    return f"transferry verify {bundle} --variant portable --checkpoint RUN"
