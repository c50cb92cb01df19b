"""The files of a parity report."""

from __future__ import annotations

from pathlib import Path

from transferry.runtime.files import atomic_file
from transferry.runtime.outputs import foreign_junit, foreign_page, require_own
from transferry.runtime.parity.certificate import Certificate
from transferry.runtime.parity.junit import to_junit
from transferry.runtime.parity.report import ParityReport


def write_report(
    report: ParityReport,
    *,
    page: Path | None,
    junit: Path | None,
    date: str | None,
    certificate: Certificate | None,
) -> None:
    """Writes the report as HTML page and as JUnit XML.

    Args:
        report: The report.
        page: File of the page; None writes none.
        junit: File of the XML; None writes none.
        date: Date of the verification, shown on the page.
        certificate: The certificate that the report earned, shown on the page.

    Raises:
        InputError: A file cannot be written.
        UsageError: A file exists that no verification wrote.
    """
    if junit is not None:
        require_own(junit, foreign_junit)
    if page is not None:
        require_own(page, foreign_page)
    if junit is not None:
        with atomic_file(junit) as file:
            file.write(to_junit(report).encode())
    if page is not None:
        # Needs jinja2 and matplotlib, which a host without torch may lack.
        from transferry.export.report.page import render_page

        shown = certificate.summary() if certificate else None
        record = {**report.to_dict(), "date": date, "certificate": shown}
        with atomic_file(page) as file:
            file.write(render_page(record).encode())
