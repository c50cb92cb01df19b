"""The files of a parity report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.outputs import foreign_junit, foreign_page, require_own
from transferry.runtime.proof.certificates.certificate import Certificate
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.proof.views import to_junit

MOST_JSON = 256 << 20  # bytes: some hundred for each tensor of each case
REMEDY = "write it again with `transferry verify --json`"


def write_report(
    report: ParityReport,
    *,
    page: Path | None,
    junit: Path | None,
    date: str | None,
    certificate: Certificate | None,
) -> None:
    """Writes the report as HTML page and as JUnit XML; a file of None is not written.

    The page shows the date of the verification and the certificate that it earned.

    Raises:
        InputError: A file cannot be written.
        UsageError: A file exists that no verification wrote.
    """
    for path, foreign in ((junit, foreign_junit), (page, foreign_page)):
        if path is not None:
            require_own(path, foreign)
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


def write_page(records: Sequence[Path], page: Path) -> list[Path]:
    """Writes reports, files of `verify --json`, side by side on one HTML page.

    Returns:
        The files whose report failed.

    Raises:
        InputError: A file is missing or no whole report, or the page cannot be written.
    """
    from jinja2 import UndefinedError

    from transferry.export.report.page import render_page

    read = [read_document(path, dict[str, Any], REMEDY, most=MOST_JSON) for path in records]
    for path, record in zip(records, read, strict=True):
        try:
            text = render_page(record)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a whole report; {REMEDY}") from error
        except UndefinedError as error:
            raise InputError(f"{path} is not a whole report: {error.message}; {REMEDY}") from error
    if len(read) > 1:
        text = render_page(*read)
    with atomic_file(page) as file:
        file.write(text.encode())
    return [path for path, record in zip(records, read, strict=True) if not record["passed"]]
