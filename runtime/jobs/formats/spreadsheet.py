"""Rows of a sheet of Excel, read as they stream in."""

from __future__ import annotations

import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, Option, from_extra
from transferry.runtime.io.whole import unreadable
from transferry.runtime.jobs.formats.cells import decoded, to_json
from transferry.runtime.jobs.formats.detection import Dialect
from transferry.runtime.jobs.formats.remote_file import Source
from transferry.runtime.jobs.formats.rows import Fields, InputRow, RowReader, layout_of, unique
from transferry.runtime.jobs.formats.sources import Steady
from transferry.runtime.jobs.job_options import InputFormat

# Texts of all sheets, which Excel stores once and a reader holds, in bytes.
_TEXTS, _MOST_TEXTS = "xl/sharedStrings.xml", 256 << 20
# Errors of openpyxl and zipfile for a damaged file.
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, SyntaxError),
    *(LookupError, ValueError, TypeError, AttributeError),
)
# Cell and number of a warning.
_NO_DATE = re.compile(r"Cell (\w+) is marked as a date but the serial value (\S+) is outside")
# Characters that XML cannot hold, as Excel writes them.
_ESCAPED = re.compile("(_x[0-9A-Fa-f]{4}_)+")


class SpreadsheetReader(RowReader):
    """Reads a sheet whose first row holds the names of the columns."""

    def __init__(
        self, path: Source, format: InputFormat, column: str | None, dialect: Dialect
    ) -> None:
        self.file, self._steady, self._sheet = path, Steady(path), dialect.sheet
        with self._rows() as rows:
            header = next(rows, ())
        if (error := _fault(header)) is not None:
            raise InputError(f"{path}: the header cannot be read: {error.message}")
        self._names = ["" if name is None else str(name) for name in header]
        self.layout = layout_of(path, format, unique(self._names, path), column)

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        """Streams rows first to last - 1; drops empty rows at the end."""
        with self._rows() as rows:
            for number, cells in islice(enumerate(islice(rows, 1, None)), first, last):
                raw = to_json(cells).encode(errors="surrogatepass")
                yield self._row(number, self._fields(cells), raw)

    def _fields(self, cells: Sequence[Any]) -> Fields | RowError:
        width = len(self._names)
        if len(cells) > width:
            return RowError("malformed", f"expected {width} columns, found {len(cells)}")
        filled = zip(self._names, (*cells, *[None] * (width - len(cells))), strict=True)
        return _fault(cells) or dict(filled)

    @contextmanager
    def _rows(self) -> Iterator[Iterator[Sequence[Any]]]:
        """Opens the sheet; gives the cells of each row, the header included."""
        read = _import_openpyxl()
        recorded = warnings.catch_warnings(record=True)
        with recorded as warned, _opened(self._steady) as file:
            warnings.simplefilter("always")
            with zipfile.ZipFile(file) as packed:
                sizes = {each.filename: each.file_size for each in packed.infolist()}
            if sizes.get(_TEXTS, 0) > _MOST_TEXTS:
                raise InputError(
                    f"{self.file}: expected at most {_MOST_TEXTS >> 20} MiB of texts, found more; "
                    "save the sheet as CSV"
                )
            book = read(file)
            for sheet in book:
                sheet.reset_dimensions()  # some programs store a smaller size than the sheet has
            yield _filled(self._chosen(book).iter_rows(), warned)

    def _chosen(self, book: Any) -> Any:
        named = {sheet.title: sheet for sheet in book}
        if self._sheet in named:
            return named[self._sheet]
        visible = [sheet for sheet in book if sheet.sheet_state == "visible"]
        filled = [each for each in visible if next(_filled(each.iter_rows(), []), None)]
        if self._sheet is None and len(filled) == 1:
            return filled[0]
        if not named:
            raise InputError(f"{self.file}: expected a sheet with rows, found no sheet")
        visible_one = "expected one visible sheet with rows"
        problem = visible_one if self._sheet is None else "no such sheet"
        known = f" ({', '.join(named)})"
        raise InputError(f"{self.file}: {problem}; choose one with ", Option("sheet"), known)


def _fault(cells: Sequence[Any]) -> RowError | None:
    """Returns the error of a text that UTF-8 cannot hold, or with a NUL."""
    texts = (cell.encode(errors="surrogatepass") for cell in cells if isinstance(cell, str))
    return next((found for found in map(decoded, texts) if isinstance(found, RowError)), None)


@contextmanager
def _opened(file: Steady) -> Iterator[Any]:
    """Opens a workbook; converts exceptions of openpyxl and of reading to our errors."""
    try:
        with file.opened() as opened:
            try:
                yield opened
            except _DAMAGES as error:  # elsewhere a ValueError would tell of the URL
                raise InputError(f"{file}: cannot be read as a workbook: {error}") from error
    except OSError as error:
        raise unreadable(file.source, error) from error


def _filled(rows: Iterator[Sequence[Any]], warned: list[Any]) -> Iterator[Sequence[Any]]:
    """Yields values of rows of cells, without empty ones at the end of a row.

    Drops the first and last empty rows; a formula that failed leaves an empty cell. `warned` has
    the warnings of openpyxl: its only sign of a number that is no date in a cell for dates.
    """
    begun, empty = False, 0
    for row in rows:
        found = (_NO_DATE.match(str(warning.message)) for warning in warned)
        numbers = {each[1]: float(each[2]) for each in found if each}
        warned.clear()
        cells = [
            _plain(numbers.get(cell.coordinate) if cell.data_type == "e" else cell.value)
            for cell in row
        ]
        while cells and cells[-1] is None:
            cells.pop()
        if not cells:
            empty += begun
            continue
        yield from ([] for _ in range(empty))
        begun, empty = True, 0
        yield cells


def _plain(cell: Any) -> Any:
    """Returns a value as a JSON value; dates, times and durations as in ISO 8601."""
    if isinstance(cell, str):
        return _ESCAPED.sub(_unescaped, cell)
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 1 << 53:
        return int(cell)
    if cell is None or isinstance(cell, bool | int | float):
        return cell
    if isinstance(cell, timedelta):  # as in pandas: P1DT6H0M0S
        (minutes, seconds), part = divmod(cell.seconds, 60), cell.microseconds
        seconds_text = f"{seconds}.{part:06}".rstrip("0") if part else seconds
        return f"P{cell.days}DT{minutes // 60}H{minutes % 60}M{seconds_text}S"
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


def _unescaped(found: re.Match[str]) -> str:
    units = found[0].replace("_x", "").replace("_", "")
    return bytes.fromhex(units).decode("utf-16-be", "surrogatepass")


def _import_openpyxl() -> Callable[[Any], Any]:
    """Returns a function that opens a workbook to read its values."""
    with from_extra("jobs", ".xlsx needs openpyxl", instead=", or save the sheet as CSV"):
        from openpyxl.cell.text import Text
        from openpyxl.reader import excel
        from openpyxl.xml.functions import iterparse

    class Reader(excel.ExcelReader):  # type: ignore[misc]
        """Reads sheets, texts and styles alone: damage in charts or properties does not matter."""

        def read_strings(self) -> None:
            """Reads the texts of all sheets; openpyxl itself drops `x005F_` from them."""
            part = self.package.find(excel.SHARED_STRINGS)
            if part is not None:
                with self.archive.open(part.PartName[1:]) as file:
                    for _, node in iterparse(file):
                        if node.tag.endswith("}si"):
                            self.shared_strings.append(Text.from_tree(node).content)
                            node.clear()

        def _nothing(self, *parts: Any) -> None:
            """Leaves a part out."""

        read_chartsheet = read_properties = read_custom = read_theme = _nothing

    def read(file: Any) -> Any:
        reader = Reader(file, read_only=True, data_only=True, keep_links=False)
        reader.read()
        return reader.wb

    return read
