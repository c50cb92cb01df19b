"""Types and values of tables in Parquet, read back by pyarrow."""

import datetime
import decimal
import gc
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.jobs.formats.records import records, writer_of
from transferry.runtime.engine.tasks.generate import GenerationResult, TextHypothesis
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.formats.columnar import with_schema
from transferry.runtime.jobs.formats.readers import open_reader
from transferry.runtime.jobs.formats.records import Record
from transferry.runtime.jobs.formats.writers import open_writer

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
parquet = pytest.importorskip("pyarrow.parquet")


def test_a_refused_job_leaves_no_complaint_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destructor would print a traceback beside the error."""

    def refused() -> Iterator[Record]:
        yield from records(2)
        raise UsageError("no such task")

    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    writer = writer_of(tmp_path / "out.parquet", n_best=2)
    with pytest.raises(UsageError), (tmp_path / "out.parquet").open("wb") as file:
        writer.write(refused(), file)
    gc.collect()
    assert not complaints


ANSWER = TextHypothesis((5,), -0.5, -0.25, "end", text="x")


def passed_through(folder: Path, table: Any, name: str) -> Path:
    """A job from a table to a file that repeats its fields."""
    parquet.write_table(table, folder / "in.parquet", row_group_size=2)
    reader = open_reader(folder / "in.parquet")
    writer = open_writer(folder / name, rows=reader.layout)
    rows = [
        writer.record(row, GenerationResult(str(row.text), 3, (ANSWER,)))
        for row in map(writer.admit, reader.rows())
    ]
    parts = [folder / f"{number}.part" for number in range(2)]
    for part, some in zip(parts, (rows[:1], rows[1:]), strict=True):
        with part.open("wb") as file:
            writer.write(some, file)
    with (folder / name).open("wb") as file:
        writer.join(parts, file)
    return folder / name


TYPED = {
    "at": pyarrow.array([1, None, 2], pyarrow.timestamp("ns", "UTC")),
    "day": pyarrow.array([1, None, 2], pyarrow.date32()),
    "price": pyarrow.array(["1.10", None, "2.00"]).cast(pyarrow.decimal128(5, 2)),
    "bytes": pyarrow.array([b"\xff", None, b""]),
    "list": pyarrow.array([[{"x": 1.5}], None, []]),
    "map": pyarrow.array([[("k", 1)], None, []], pyarrow.map_("string", "int8")),
    "big": pyarrow.array(["a", None, "b"], pyarrow.large_string()),
    "half": pyarrow.array([0.5, None, float("inf")], pyarrow.float16()),
    "small": pyarrow.array([1, None, -2], pyarrow.int8()),
    "waited": pyarrow.array([5, None, 6], pyarrow.duration("s")),
    "share": pyarrow.array([0.1, None, float("inf")], pyarrow.float32()),
    "yes": pyarrow.array([True, None, False]),
}


def test_parquet_to_jsonl_and_csv(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b", "c"], **TYPED})
    lines = passed_through(tmp_path, table, "out.jsonl").read_text(encoding="utf-8").splitlines()
    expected: dict[str, tuple[Any, Any]] = {
        "at": ("1970-01-01T00:00:00.000000001Z", "1970-01-01T00:00:00.000000002Z"),
        "day": ("1970-01-02", "1970-01-03"),
        "price": ("1.10", "2.00"),
        "bytes": ("/w==", ""),
        "list": ([{"x": 1.5}], []),
        "map": ([{"key": "k", "value": 1}], []),
        "big": ("a", "b"),
        "half": (0.5, None),
        "small": (1, -2),
        "waited": (5, 6),
        "share": (float(np.float32(0.1)), None),
        "yes": (True, False),
    }
    for number, line in enumerate(lines):
        fields = {name: (first, None, last)[number] for name, (first, last) in expected.items()}
        found = json.loads(line)
        assert {name: found[name] for name in fields} == fields
        assert (found["id"], found["source"], found["text"]) == (number, "abc"[number], "x")
        assert list(found)[: 1 + len(fields)] == ["id", *fields]
    assert number == 2
    path = passed_through(tmp_path, table, "out.csv")
    (row, _, _) = open_reader(path, column="text").rows()
    assert row.fields["at"] == "1970-01-01T00:00:00.000000001Z"
    assert row.fields["list"] == '[{"x": 1.5}]'
    assert (row.fields["yes"], row.fields["price"]) == ("true", "1.10")


def test_metadata_that_stays_true_is_kept(tmp_path: Path) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())], {"of": "the schema"})
    with parquet.ParquetWriter(tmp_path / "in.parquet", schema) as file:
        stale = "org.apache.spark.sql.parquet.row.metadata"  # Spark would see no other column
        file.add_key_value_metadata({"geo": "of the file alone", stale: "{}"})
    reader = open_reader(tmp_path / "in.parquet")
    path = tmp_path / "out.parquet"
    with path.open("wb") as out:
        open_writer(path, rows=reader.layout).write([], out)
    kept = {b"of": b"the schema", b"geo": b"of the file alone"}
    assert parquet.read_schema(path).metadata == kept


@pytest.mark.parametrize("plain", [True, False])
def test_encrypted_columns_are_refused(tmp_path: Path, plain: bool) -> None:
    """pyarrow would end the process over their sizes where the footer is plain."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[name-defined, misc]
        def __init__(self, _: object) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, _: str) -> bytes:
            return key.hex().encode()

    factory, connection = encryption.CryptoFactory(Keys), encryption.KmsConnectionConfig()
    settings = {"footer_key": "a", "column_keys": {"b": ["text"]}, "plaintext_footer": plain}
    configuration = encryption.EncryptionConfiguration(**settings)
    keys = factory.file_encryption_properties(connection, configuration)
    table = pyarrow.table({"n": [1], "text": ["a"]})
    parquet.write_table(table, tmp_path / "in.parquet", encryption_properties=keys)
    with pytest.raises(InputError, match="encrypted"):
        open_reader(tmp_path / "in.parquet", column="text")


@pytest.mark.parametrize("kind", ["timestamp", "string", "dictionary", "null", "float"])
def test_ids_of_parquet(tmp_path: Path, kind: str) -> None:
    ids = {
        "timestamp": (pyarrow.array([1000], pyarrow.timestamp("ms")), "1970-01-01T00:00:01.000"),
        "string": (pyarrow.array(["x"]), "x"),
        "dictionary": (pyarrow.array(["x"]).dictionary_encode(), "x"),
        "null": (pyarrow.array([None], pyarrow.int32()), 0),
        "float": (pyarrow.array([1.5]), 1.5),
    }
    column, id = ids[kind]
    path = passed_through(tmp_path, pyarrow.table({"text": ["a"], "id": column}), "out.jsonl")
    assert json.loads(path.read_text())["id"] == id


STAMP = datetime.datetime(2024, 1, 1, 12)
KINDS: list[tuple[Any, str]] = [
    *((1, "int8 int64 float32 float64 duration[s]"), (2**63, "uint64"), (0.1, "float32 float64")),
    *((1e300, "float64"), (math.inf, "float64"), (True, "bool"), ("1", "string"), (b"1", "binary")),
    *(("007", "string large_string binary"), (STAMP.date(), "date32")),
    (STAMP.time(), "time64[us] time64[ns]"),
]
STAMPS = [pyarrow.timestamp(*kind) for kind in (["ms"], ["ns"], ["us", "UTC"], ["ns", "+03:00"])]
FIELDS: list[Any] = [1, 1.5, "1", "007", True, None, STAMP, decimal.Decimal("1.50")]
# A value with its type; each may come in a later file than any other.
CELLS: list[tuple[Any, Any]] = [
    *((value, kind) for value, kinds in KINDS for kind in kinds.split()),
    *((STAMP, kind) for kind in STAMPS),
    *((value, None) for value in FIELDS),
    *(([value], None) for value in FIELDS),
    *(({"a": value}, None) for value in FIELDS),
    ({"b": 2, "a": 1}, None),
    *(([("k", 1)], pyarrow.map_("string", kind)) for kind in ("int8", "double")),
]


def same(before: Any, after: Any) -> bool:
    """Whether a value means what it meant; a number may have become its text."""
    if isinstance(before, dict):
        return all(same(before.get(name), after.get(name)) for name in {**before, **after})
    if isinstance(before, list | tuple):
        return all(itertools.starmap(same, zip(before, after, strict=True)))
    numbers = int, float, decimal.Decimal
    if type(before) in numbers and type(after) in (*numbers, str):
        return math.isclose(float(before), float(after), rel_tol=1e-7 * (type(after) is str))
    alike = type(before) is type(after) or isinstance(before, datetime.datetime)
    return alike and bool(before == after)


def test_a_column_of_a_later_file_keeps_its_values_or_is_refused() -> None:
    columns, kept = [pyarrow.array([value, None], kind) for value, kind in CELLS], 0
    for given, wanted in itertools.product(columns, columns):
        batch = pyarrow.record_batch({"n": given})
        try:
            found = with_schema(batch, pyarrow.schema({"n": wanted.type})).column(0)
        except InputError:
            assert given.type != wanted.type
            continue
        kept += 1
        assert same(given.to_pylist(), found.to_pylist()), (given.type, wanted.type)
    assert kept > 300
