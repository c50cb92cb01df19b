"""Options, output and exit code 4 of commands that end in a parity report."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from transferry.runtime.console.fields import together
from transferry.runtime.console.group import FilePath
from transferry.runtime.console.progress import say, show, show_verdict
from transferry.runtime.console.shared_options import option
from transferry.runtime.errors import InputError, ParityError
from transferry.runtime.io.atomic import require_writable
from transferry.runtime.io.outputs import foreign_junit, foreign_page

if TYPE_CHECKING:
    from transferry.runtime.proof.report import ParityReport

PAGE = FilePath("", foreign=foreign_page)
JUNIT = FilePath("", foreign=foreign_junit)
REPORT = "Report"


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses an output file in a missing folder with InputError, before any work is done."""
    if path is not None:
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path}: cannot be written: there is no such folder; name another")
        require_writable(path)
    return path


def page_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses a page that cannot be made or written before any work is done.

    Raises ModuleNotFoundError where a package that pages need is not installed.
    """
    if path is not None:
        import_module("transferry.export.report.page")
    return writable(context, parameter, path)


# The pages of a verification.
report_options = together(
    option(
        *("--report", "page"),
        panel=REPORT,
        type=PAGE,
        callback=page_file,
        help="Write the report as an HTML file.",
    ),
    option(
        "--junit",
        panel=REPORT,
        type=JUNIT,
        callback=writable,
        help="Write the report as JUnit XML.",
    ),
    option(
        *("--json", "as_json"),
        panel=REPORT,
        is_flag=True,
        help="Print the whole report as JSON on stdout.",
    ),
    option("--verbose", is_flag=True, help="Print the time of each check on stderr."),
)


def show_report(report: ParityReport, *, as_json: bool, verbose: bool) -> None:
    """Prints a report, as text or as JSON; with `verbose` the time of each check too."""
    from transferry.runtime.proof.views import report_text, times_text

    if verbose and report.times:
        say(times_text(report))
    if as_json:
        show(json.dumps(report.to_dict(), indent=1))
    else:
        show_verdict(report_text(report))


def require_passed(report: ParityReport, *, as_json: bool) -> None:
    """Raises ParityError for a report that failed; its text has already shown the faults."""
    if not report.passed and not as_json:
        raise ParityError(f"{report.bundle} {report.verdict}")
    report.require()
