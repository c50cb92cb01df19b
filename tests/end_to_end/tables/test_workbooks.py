"""Sheets of Excel give the cells that openpyxl and the XML have; damaged workbooks are refused."""

import io
import json
import random
import re
import zipfile
from pathlib import Path

import pytest

from tests.conftest import THOROUGH
from tests.end_to_end.test_reading import TEXTS, answers, as_frame, as_jsonl
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError
from transferry.runtime.jobs.formats.readers import open_reader

pandas = pytest.importorskip("pandas")
openpyxl = pytest.importorskip("openpyxl")


def test_a_sheet_of_excel_is_read(bundle_folder: Path, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text and "\x01" not in text and text[0] != "="]
    as_frame(texts).to_excel(tmp_path / "in.xlsx", index=False)
    (tmp_path / "in.jsonl").write_text(as_jsonl(texts), encoding="utf-8")
    wanted = answers(bundle_folder, tmp_path / "in.jsonl")
    assert answers(bundle_folder, tmp_path / "in.xlsx") == wanted
    book = openpyxl.load_workbook(tmp_path / "in.xlsx")
    sheet = book.create_sheet("More")
    sheet["A3"], sheet["B3"], sheet["C3"] = "text", "id", "day"
    sheet["A4"], sheet["B4"], sheet["C4"] = "one", 7, pandas.Timestamp("2024-02-29").to_pydatetime()
    sheet["A6"], sheet["B6"], sheet["B9"].number_format = "_x0009_two", "007", "0.00"
    sheet["A7"], sheet["D7"] = "#N/A", "beyond"
    book.save(tmp_path / "two.xlsx")
    (first, empty, last, beyond) = open_reader(tmp_path / "two.xlsx", sheet="More").rows()
    assert (first.text, first.id, first.fields) == ("one", 7, {"day": "2024-02-29T00:00:00"})
    assert (last.text, last.id) == ("\ttwo", "007")
    assert isinstance(empty.text, RowError)
    assert beyond.text == RowError("malformed", "expected 3 columns, found 4")
    for name in (None, "more"):
        with pytest.raises(InputError, match=r"choose one with sheet \(Sheet1, More\)"):
            open_reader(tmp_path / "two.xlsx", sheet=name)
    sheet["B3"] = "_xD800_"
    book.save(tmp_path / "two.xlsx")
    with pytest.raises(InputError, match="the header cannot be read: half of a surrogate pair"):
        open_reader(tmp_path / "two.xlsx", sheet="More")


def test_a_hidden_sheet_is_offered(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.active.append(["text"])
    book.active.sheet_state = "hidden"
    book.create_sheet("Empty")
    book.save(tmp_path / "in.xlsx")
    with pytest.raises(InputError, match=r"one visible sheet .* sheet \(Sheet, Empty\)"):
        open_reader(tmp_path / "in.xlsx")
    assert open_reader(tmp_path / "in.xlsx", sheet="Sheet").layout.names == ("text",)


def test_durations_of_a_sheet_are_written_as_by_pandas(tmp_path: Path) -> None:
    durations = [pandas.Timedelta(seconds=each) for each in (0, 108_000, -18_000, 2.25, 61)]
    book = openpyxl.Workbook()
    for line in ["text", "took"], *(["a", each.to_pytimedelta()] for each in durations):
        book.active.append(line)
    book.save(tmp_path / "in.xlsx")
    found = [row.fields["took"] for row in open_reader(tmp_path / "in.xlsx").rows()]
    assert found == [each.isoformat() for each in durations]


UNITS = ["a", "_x0041_", "_x005F_", "x005F_", "x000D_", "_xD83D_", "_xDE00_", "_xDE00_b", "_x000A_"]


def share_texts(members: dict[str, bytes]) -> None:
    """Stores the texts of a sheet apart from its cells, as Excel does, and openpyxl does not."""
    sheet, texts = "xl/worksheets/sheet1.xml", "xl/sharedStrings.xml"
    inline, found = rb't="inlineStr"><is>(.*?)</is>', list[bytes]()

    def shared(cell: re.Match[bytes]) -> bytes:
        found.append(b"<si>" + cell[1] + b"</si>")
        return b't="s"><v>%d</v>' % (len(found) - 1)

    members[sheet] = re.sub(inline, shared, members[sheet])
    kind = b"application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    part = b'<Override PartName="/%b" ContentType="%b"/></Types>' % (texts.encode(), kind)
    listed = "[Content_Types].xml"
    members[listed] = members[listed].replace(b"</Types>", part)
    space = b'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    members[texts] = b"<sst %b>%b</sst>" % (space, b"".join(found))


@pytest.mark.parametrize("size", ["A1", "A1:A2", "B3:C9", "A1:XFD1048576", None])
def test_every_cell_of_a_sheet_is_read(tmp_path: Path, size: str | None) -> None:
    """Whatever size the sheet says it has; a half of a surrogate pair is its row's error."""
    draw, path = random.Random(size), tmp_path / "in.xlsx"
    cells = ["".join(draw.choices(UNITS, k=3)) for _ in range(40)]
    book = openpyxl.Workbook()
    for line in ("text", "n"), *((cell, number) for number, cell in enumerate(cells)):
        book.active.append(line)
    book.save(path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    told = b"" if size is None else f'<dimension ref="{size}"/>'.encode()
    if draw.random() < 0.6:
        share_texts(members)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, re.sub(rb"<dimension[^>]*>", told, content))
    rows = list(open_reader(path, column="text").rows())
    assert [row.number for row in rows] == [*range(40)]
    for cell, row in zip(cells, rows, strict=True):
        # A JSON string with the same escapes, which the json module joins to pairs.
        text = json.loads('"' + re.sub("_x(....)_", r"\\u\1", cell) + '"')
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            assert isinstance(row.text, RowError)
            assert row.text.kind == "undecodable"
        else:
            assert (row.text, row.fields) == (text, {"n": row.number})


def test_a_text_may_look_like_a_failed_formula(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    for text in ("text", "#N/A", "#REF!", "#N/A"):
        book.active.append([text])
    for cell in book.active["A"][:3]:
        cell.data_type = "s"
    book.save(tmp_path / "in.xlsx")
    book.active.append(["more"])
    book.save(tmp_path / "more.xlsx")
    found = [row.text for row in open_reader(tmp_path / "more.xlsx").rows()]
    assert (found[:2], found[3]) == (["#N/A", "#REF!"], "more")
    assert isinstance(found[2], RowError)


def test_numbers_that_are_no_dates_stay_numbers(tmp_path: Path) -> None:
    """Whatever the format of their cells; openpyxl makes #VALUE! of them."""
    numbers, book = [10**9, -5, 3e6, 1e20, 12.5, 2_958_466, 4711], openpyxl.Workbook()
    formats = ["yyyy-mm-dd", "h:mm", "[h]:mm", "0"]
    book.active.append(["text", *formats])
    for number in numbers:
        book.active.append(["a", *[number] * len(formats)])
        for cell, form in zip(book.active[book.active.max_row][1:], formats, strict=True):
            cell.number_format = form
    book.active.append(["a", "#VALUE!", *[1] * 3])
    book.save(tmp_path / "in.xlsx")
    *rows, failed = open_reader(tmp_path / "in.xlsx", column="text").rows()
    for number, row in zip(numbers, rows, strict=True):
        for form in formats:
            found = row.fields[form]
            assert isinstance(found, str) or found == number, (number, form)
            assert form == "0" or number > 1e6 or isinstance(found, str)
    assert failed.fields == {"yyyy-mm-dd": None, "h:mm": 1, "[h]:mm": 1, "0": 1}


WRONG = [
    "",
    "-1",
    "999999999999",
    "x",
    "1e400",
    "A0",
    "ZZZZ1",
    "&#0;",
    *"sedbn",
    "str",
    "inlineStr",
]


def damaged(draw: random.Random, members: dict[str, bytes]) -> bytes:
    """A workbook without a member, with another tag or value in one, or with other bytes."""
    members, file = dict(members), io.BytesIO()
    name, kind = draw.choice([*members]), draw.randrange(4)
    content = members.pop(name).decode()
    if kind:
        found = re.findall(r"<[^>]+>" if kind == 1 else r'"[^"]*"|>[^<]+<', content) or ["<"]
        old = draw.choice(found)
        new = (
            draw.choice(["", old * 2, "<x>"])
            if kind == 1
            else old[0] + draw.choice(WRONG) + old[-1]
        )
        members[name] = (content.replace(old, new, 1) if kind < 3 else content).encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in members.items():
            packed.writestr(name, text)
    whole = bytearray(file.getvalue())
    for _ in range(draw.randrange(1, 6) if kind == 3 else 0):
        whole[draw.randrange(len(whole))] = draw.randrange(256)
    return bytes(whole)


def with_chart(path: Path) -> dict[str, bytes]:
    """Writes a workbook with a sheet and a chart; returns its members."""
    chart, book = openpyxl.chart.BarChart(), openpyxl.Workbook()
    for line in (["text", "n"], ["a", 1], ["b", 2]):
        book.active.append(line)
    chart.add_data(openpyxl.chart.Reference(book.active, 2, 1, 2, 3))
    book.create_chartsheet().add_chart(chart)
    book.save(path)
    with zipfile.ZipFile(path) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def test_damage_beside_the_sheets_does_not_matter(tmp_path: Path) -> None:
    members, path = with_chart(tmp_path / "in.xlsx"), tmp_path / "in.xlsx"
    beside = [name for name in members if re.search("chart|drawing|theme|docProps", name)]
    for name in beside:
        with zipfile.ZipFile(path, "w") as packed:
            for each, content in members.items():
                packed.writestr(each, b"<x" if each == name else content)
        assert [row.text for row in open_reader(path, column="text").rows()] == ["a", "b"]
    assert len(beside) > 4


def test_a_damaged_workbook_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.xlsx"
    members, draw, refused = with_chart(path), random.Random(0), 0
    for _ in range(2000 if THOROUGH else 60):
        path.write_bytes(damaged(draw, members))
        try:
            list(open_reader(path, column="text").rows())
        except InputError:
            refused += 1
    assert refused > 10
