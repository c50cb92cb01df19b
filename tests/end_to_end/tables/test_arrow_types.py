"""Columns of any Arrow type, in any other, pass from file to file with every value and their type.

Values are compared with those that pyarrow reads from its own files, as JSON made by this module.
"""

import base64
import contextlib
import csv
import datetime
import decimal
import io
import json
import math
import random
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import THOROUGH
from tests.runtime.jobs.helpers import Echo, read_records
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions

pyarrow = pytest.importorskip("pyarrow", minversion="21", reason="pyarrow 21 has the newer types")
parquet = pytest.importorskip("pyarrow.parquet")
compute = pytest.importorskip("pyarrow.compute")

TRIALS = 2000 if THOROUGH else 60
UNITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
HALF = datetime.timezone(datetime.timedelta(hours=5.5))
ZONES = {None: datetime.UTC, "UTC": datetime.UTC, "+05:30": HALF}
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
TEXTS = ["", "a", "007", "null", "x\ny", "é\u2028", '"', " b ", "\t\r", "NaN", "[1]", "\ufeff"]
REALS = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 0.1, 65504.0, 5e-324, 1e300]
BYTES = [b"", b"\xff", b"\0", b"abc"]
# How Parquet and Arrow may be written.
WRITTEN: dict[str, list[Any]] = {
    "data_page_version": ["1.0", "2.0"],
    "version": ["1.0", "2.4", "2.6"],
    "compression": ["none", "snappy", "gzip", "brotli", "zstd", "lz4"],
    "use_dictionary": [True, False],
    "dictionary_pagesize_limit": [8, 1 << 20],
    "data_page_size": [16, 1 << 20],
    "write_batch_size": [2, 1024],
    "row_group_size": [1, 4, 99],
    **{name: [True, False] for name in ("store_schema", "write_page_index", "write_page_checksum")},
}
PACKED = [None, "lz4", "zstd"]
Draw = random.Random


def numbers(bits: int, *, signed: bool = True) -> list[int]:
    return [0, 1, 2 ** (bits - signed) - 1, -(2 ** (bits - 1)) * signed]


def decimals(precision: int, scale: int) -> list[decimal.Decimal]:
    most = 10**precision - 1
    return [decimal.Decimal((sign, tuple(map(int, str(most))), -scale)) for sign in (0, 1)]


SECONDS = [0, -1, 951_782_400, 10**9 + 1, 2 * 10**9]
# Each type with values that it holds.
SIMPLE: list[tuple[Any, list[Any]]] = [
    (pyarrow.null(), [None]),
    (pyarrow.bool_(), [True, False]),
    *((getattr(pyarrow, f"int{bits}")(), numbers(bits)) for bits in (8, 16, 32, 64)),
    *((getattr(pyarrow, f"uint{bits}")(), numbers(bits, signed=False)) for bits in (8, 16, 32, 64)),
    *((pyarrow.float16(), REALS[:8]), (pyarrow.float32(), REALS[:9]), (pyarrow.float64(), REALS)),
    (pyarrow.date32(), [-1, 0, 19_782]),
    (pyarrow.date64(), [-86_400_000, 0, 86_400_000]),
    *((pyarrow.time32(unit), [0, 86_399 * 10 ** UNITS[unit]]) for unit in ("s", "ms")),
    *((pyarrow.time64(unit), [1, 86_399 * 10 ** UNITS[unit]]) for unit in ("us", "ns")),
    *(
        (pyarrow.timestamp(unit, zone), [1, *(each * 10 ** UNITS[unit] for each in SECONDS)])
        for unit in UNITS
        for zone in ZONES
    ),
    *((pyarrow.duration(unit), [0, -1, 10**12]) for unit in UNITS),
    *((kind, TEXTS) for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())),
    *((kind, BYTES) for kind in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())),
    (pyarrow.binary(3), [b"\xff\0a"]),
    (pyarrow.decimal32(5, 2), decimals(5, 2)),
    (pyarrow.decimal64(10, 3), decimals(10, 3)),
    *((pyarrow.decimal128(20, scale), decimals(20, scale)) for scale in (4, -2)),
    (pyarrow.decimal256(60, 5), decimals(60, 5)),
    (pyarrow.month_day_nano_interval(), [pyarrow.MonthDayNano([1, -2, 3])]),
]


def column(draw: Draw, rows: int, depth: int = 2) -> Any:
    """An array of a drawn type."""
    shape, absent = draw.randrange(10), draw.random() < 0.7
    mask = pyarrow.array([absent and draw.random() < 0.2 for _ in range(rows)], "bool")
    if shape < 4 or not depth:
        kind, values = draw.choice(SIMPLE)
        given = [None if gone else draw.choice(values) for gone in mask.to_pylist()]
        return pyarrow.array(given, kind)
    if shape == 4:
        # Arrow 26 writes wrong numbers of 16 bits in a dictionary in a list.
        held = [each for each in SIMPLE[1:] if not re.search("view|half", str(each[0]))]
        kind, values = draw.choice(held)
        places = pyarrow.array([draw.randrange(len(values)) for _ in range(rows)], "int8")
        places = compute.if_else(mask, None, places)
        return pyarrow.DictionaryArray.from_arrays(places, pyarrow.array(values, kind))
    if shape == 5:
        kinds: dict[Any, list[Any]] = {
            pyarrow.uuid(): [b"\xff" * 16],
            pyarrow.json_(): TEXTS,
            pyarrow.bool8(): [0, 1],
        }
        kind, values = draw.choice(list(kinds.items()))
        stored = [None if gone else draw.choice(values) for gone in mask.to_pylist()]
        return pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(stored, kind.storage_type))
    if shape == 6:
        values = column(draw, max(1, rows // 2), 0)
        ends = [*range(2, rows, 2), rows][: len(values)] if rows else []
        ends = pyarrow.array(ends, pyarrow.int32())
        return pyarrow.RunEndEncodedArray.from_arrays(ends, values[: len(ends)])
    inner = column(draw, 2 * rows, depth - 1)
    narrow = pyarrow.array(range(0, 2 * rows + 1, 2), pyarrow.int32())
    wide, named = narrow.cast(pyarrow.int64()), {"mask": mask}
    match draw.randrange(7):
        case 0:
            return pyarrow.ListArray.from_arrays(narrow, inner, **named)
        case 1:
            return pyarrow.LargeListArray.from_arrays(wide, inner, **named)
        case 2:
            sizes = pyarrow.array([2] * rows, "int32")
            return pyarrow.ListViewArray.from_arrays(narrow[:-1], sizes, inner, **named)
        case 3:
            sizes = pyarrow.array([2] * rows, "int64")
            return pyarrow.LargeListViewArray.from_arrays(wide[:-1], sizes, inner, **named)
        case 4 if draw.random() < 0.2:
            empty: list[Any] = [None if gone else [] for gone in mask.to_pylist()]
            return pyarrow.array(empty, pyarrow.list_(pyarrow.int8(), 0))
        case 4:
            return pyarrow.FixedSizeListArray.from_arrays(inner, 2, **named)
        case 5:
            keys = pyarrow.array(["k", "l"] * rows, "string")
            return pyarrow.MapArray.from_arrays(narrow, keys, inner, **named)
    names = ["a", draw.choice(["", "a"])]
    return pyarrow.StructArray.from_arrays([inner[:rows], mask], names, **named)


def plain(value: Any) -> Any:
    """An Arrow scalar as the JSON value that docs/formats.md promises."""
    kind, types = value.type, pyarrow.types
    if not value.is_valid:
        return None
    if isinstance(value, pyarrow.ExtensionScalar):
        storage = value.value.as_py()
        named: dict[str, Any] = {
            "arrow.uuid": lambda it: str(uuid.UUID(bytes=it)),
            "arrow.bool8": bool,
        }
        return named.get(kind.extension_name, str)(storage)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain(value.value)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        values = [plain(value[place]) for place in range(len(names))]
        if len(set(names)) < len(names):
            return [
                {"key": name, "value": value} for name, value in zip(names, values, strict=True)
            ]
        return dict(zip(names, values, strict=True))
    if types.is_nested(kind):
        return [plain(each) for each in value.values]
    if types.is_floating(kind):
        return float(value.as_py()) if math.isfinite(value.as_py()) else None
    if types.is_decimal(kind):
        return str(value.as_py())
    if types.is_duration(kind):
        return value.value
    if types.is_date(kind):
        return value.as_py().isoformat()
    if types.is_interval(kind):
        return [*value.as_py()]
    if types.is_time(kind) or types.is_timestamp(kind):
        digits = UNITS[kind.unit]
        seconds, part = divmod(value.value, 10**digits)
        zone = kind.tz if types.is_timestamp(kind) else None
        at = (EPOCH + datetime.timedelta(seconds=seconds)).astimezone(ZONES[zone])
        text = f"{at:%H:%M:%S}" if types.is_time(kind) else f"{at:%Y-%m-%dT%H:%M:%S}"
        text += f".{part:0{digits}}" if digits else ""
        return text + {None: "", "UTC": "Z", "+05:30": "+05:30"}[zone]
    found = value.as_py()
    return base64.b64encode(found).decode() if isinstance(found, bytes) else found


def written(path: Path, draw: Draw) -> Any:
    """Writes a table of drawn columns; returns it as pyarrow reads it."""
    rows = draw.randrange(12)
    columns = {name: column(draw, rows) for name in draw.sample(["n", "score", "ä b", ""], 2)}
    texts = pyarrow.array([draw.choice([*TEXTS, None]) for _ in range(rows)], pyarrow.string())
    table = pyarrow.table({"text": texts, **columns}).replace_schema_metadata({"of": "theirs"})
    if path.suffix == ".parquet":
        options = {name: draw.choice(values) for name, values in WRITTEN.items()}
        parquet.write_table(table, path, **options)
        return parquet.read_table(path)
    kind = draw.choice([pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
    packed = pyarrow.ipc.IpcWriteOptions(compression=draw.choice(PACKED))
    with kind(str(path), table.schema, options=packed) as file:
        file.write_table(table, max_chunksize=draw.choice([1, 3, 99]))
    return table


def again(table: Any) -> Any:
    """The table as pyarrow reads it from its own Parquet."""
    file = io.BytesIO()
    parquet.write_table(table, file)
    return parquet.read_table(file)


def cells(table: Any) -> list[list[Any]]:
    return [[json.dumps(plain(value)) for value in column] for column in table.columns]


def require_same(table: Any, out: Path) -> None:
    if out.suffix == ".parquet":
        expected, found = again(table), parquet.read_table(out).select(range(table.num_columns))
        assert found.schema.equals(expected.schema, check_metadata=True)
        assert cells(found) == cells(expected)
        return
    if out.suffix == ".jsonl":
        for place, record in enumerate(read_records(out)):
            for name in table.column_names:
                if name != "text":
                    assert json.dumps(record[name]) == json.dumps(plain(table[name][place]))
        return
    with out.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[: table.num_columns] == table.column_names
    for place, row in enumerate(rows):
        for name, cell in zip(table.column_names, row, strict=False):
            wanted = plain(value := table[name][place])
            if pyarrow.types.is_floating(value.type) and value.is_valid and wanted is None:
                assert str(float(cell)) == str(float(value.as_py()))
            elif isinstance(wanted, str) or wanted is None:
                assert cell == (wanted or "")
            else:
                assert json.dumps(json.loads(cell)) == json.dumps(wanted)


def test_columns_of_any_type(tmp_path: Path) -> None:
    draw, passed = random.Random(0), 0
    for trial in range(TRIALS):
        path = tmp_path / f"{trial}.{draw.choice(['parquet', 'arrow'])}"
        try:
            table = written(path, draw)
        except (pyarrow.ArrowException, OSError):  # a type in another that Arrow cannot write
            continue
        out = path.with_suffix(draw.choice([".out.parquet", ".jsonl", ".csv"]))
        options = JobOptions(chunk_rows=draw.choice([1, 3, 99]), column=("text",))
        try:
            job = Job(Echo(), path, out, options)
        except UsageError as error:
            assert out.suffix == ".parquet", error
            continue
        try:
            job.run()
        except UsageError as error:  # a column that Arrow slices when it writes
            assert out.suffix == ".parquet" and "Slicing not implemented" in str(error), error
            continue
        passed += 1
        require_same(table, out)
    assert passed > TRIALS / 2


def near(draw: Draw, kinds: list[tuple[Any, list[Any]]]) -> Any:
    """A table of one row, often unlike another one only in a value, its type or its metadata."""
    kind, values = draw.choice(kinds)
    held = pyarrow.array([draw.choice([*values, None])], kind)
    if draw.random() < 0.7:
        held = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1], "int32"), held)
    nullable = held.null_count > 0 or draw.random() < 0.9
    fields = [("text", pyarrow.string()), pyarrow.field("n", held.type, nullable=nullable)]
    metadata = {"of": draw.choice("aaaaaaab")}
    return pyarrow.table([["x"], held], schema=pyarrow.schema(fields, metadata))


def test_another_table_is_noticed(tmp_path: Path) -> None:
    """The output is of the table that is there, or the job says that it has changed."""
    draw, told = random.Random(3), 0
    for trial in range(TRIALS):
        source = tmp_path / f"{trial}.parquet"
        out = source.with_suffix(draw.choice([".out.parquet", ".jsonl"]))
        known = [*SIMPLE[10:30], *[(pyarrow.float64(), [math.nan])] * 20]
        kinds = [draw.choice(known)] * 5 + draw.sample(known, 1)
        for _ in range(2):
            parquet.write_table(near(draw, kinds), source)
            with contextlib.suppress(UsageError):
                Job(Echo(), source, out, JobOptions(column=("text",))).run()
                continue
            told += 1
            out.unlink()
            Job(Echo(), source, out, JobOptions(column=("text",), force=True)).run()
        fresh = source.with_name(f"fresh{out.suffix}")
        Job(Echo(), source, fresh, JobOptions(column=("text",), force=True)).run()
        assert out.read_bytes() == fresh.read_bytes()
        fresh.unlink()
    assert TRIALS > told > TRIALS / 3


def test_fields_of_one_name_stay(tmp_path: Path) -> None:
    twice = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array(["b"])], ["a", "a"])
    parquet.write_table(pyarrow.table({"text": ["x"], "n": twice}), tmp_path / "in.parquet")
    Job(Echo(), tmp_path / "in.parquet", tmp_path / "out.jsonl", JobOptions(column=("text",))).run()
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record["n"] == [{"key": "a", "value": 1}, {"key": "a", "value": "b"}]


OFFSETS = pyarrow.array([0, 1, 2, 3], pyarrow.int32())


def coded(texts: Any) -> Any:
    """The same texts as a dictionary."""
    places = pyarrow.array([0, 1, 2], "int8")
    return pyarrow.DictionaryArray.from_arrays(places, texts, safe=False)


# Makes a column of three texts; the cell without nulls that replaces a wrong text.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "text": (lambda texts: texts, ""),
    "list": (lambda texts: pyarrow.ListArray.from_arrays(OFFSETS, texts), []),
    "list of one": (lambda texts: pyarrow.FixedSizeListArray.from_arrays(texts, 1), [None]),
    "struct": (lambda texts: pyarrow.StructArray.from_arrays([texts], ["a"]), {"a": None}),
    "map": (lambda texts: pyarrow.MapArray.from_arrays(OFFSETS, texts, texts), []),
}
HOLDERS["list in a struct"] = (
    lambda texts: HOLDERS["struct"][0](HOLDERS["list"][0](texts)),
    {"a": None},
)


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("is_coded", [True, False])
@pytest.mark.parametrize("name", HOLDERS)
def test_cells_that_are_no_text_are_emptied_alone(
    tmp_path: Path, nullable: bool, is_coded: bool, name: str
) -> None:
    """Other cells of the row stay; a column without nulls gets none."""
    holder, empty = HOLDERS[name]
    texts = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    wrong = holder(coded(texts) if is_coded else texts)
    first, last = wrong[0].as_py(), wrong[2].as_py()
    arrays = {"id": pyarrow.array([5, 6, 7]), "text": pyarrow.array([*"xyz"]), "n": wrong}
    fields = [pyarrow.field(name, arrays[name].type, nullable=nullable) for name in arrays]
    table = pyarrow.table(list(arrays.values()), schema=pyarrow.schema(fields))
    source = tmp_path / f"in.{'arrow' if is_coded else 'parquet'}"
    if source.suffix == ".parquet":
        parquet.write_table(table, source)
    else:  # Arrow writes no such Parquet
        with pyarrow.ipc.new_file(str(source), table.schema) as file:
            file.write_table(table)
    options = JobOptions(column=("text",), chunk_rows=2)
    Job(Echo(), source, tmp_path / "out.parquet", options).run()
    found = parquet.read_table(tmp_path / "out.parquet")
    assert [found.schema.field(name).nullable for name in arrays] == [nullable] * 3
    rows = found.to_pydict()
    assert (rows["id"], rows["text"]) == ([5, 6, 7], [*"xyz"])
    assert rows["n"] == [first, None if nullable else empty, last]
    assert rows["error_kind"] == [None, "undecodable", None]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pyarrow.decimal128(5, -2), decimal.Decimal(100)),
        (pyarrow.list_(pyarrow.int8(), 0), []),
        (pyarrow.struct([("a", pyarrow.list_view(pyarrow.timestamp("s")))]), {"a": [1]}),
    ],
)
def test_what_parquet_cannot_hold_is_refused(tmp_path: Path, kind: Any, value: Any) -> None:
    """Before a row is computed, also what Arrow writes and cannot read."""
    table = pyarrow.table({"text": ["a"], "n": pyarrow.array([value], kind)})
    with pyarrow.ipc.new_file(str(tmp_path / "in.arrow"), table.schema) as file:
        file.write_table(table)
    with pytest.raises(UsageError, match=r"cannot hold the column n: .*leave it out with drop"):
        Job(Echo(), tmp_path / "in.arrow", tmp_path / "out.parquet", JobOptions(column=("text",)))
