"""The user's table with the answers after it, as csv, pandas and pyarrow read it."""

import csv
import decimal
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call
from tests.end_to_end.ways import Ways
from tests.runtime.jobs.helpers import Echo
from transferry import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.formats.cells import json_value
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.merge import merge

pandas = pytest.importorskip("pandas", reason="pandas is an optional extra")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
parquet = pytest.importorskip("pyarrow.parquet")

OWN = ["text", "score", "finish_reason", "target_tokens", "source_tokens", "truncated"]
OWN += ["error_kind", "error_message"]
HARD = [
    "007",
    " a ",
    'say "b, c"',
    "",
    "two\nlines",
    "tail\r",
    "NA",
    "1e5",
    "Ä\u2028b",
    "'",
    "=1+1",
]


def run(source: Path, out: Path, **options: Any) -> None:
    """A job on an engine that answers in capitals."""
    Job(Echo(), source, out, JobOptions(**{"chunk_rows": 3, **options})).run()


def merged(source: Path, whole: Path, count: int = 2, **options: Any) -> bytes:
    """Bytes to which the partitions of a job are joined, beside the whole output."""
    parts = [whole.with_name(f"{number}{whole.suffix}") for number in range(1, count + 1)]
    for number, part in enumerate(parts, start=1):
        run(source, part, partition=f"{number}/{count}", **options)
    out = whole.with_name(f"merged{whole.suffix}")
    merge(parts, out)
    return out.read_bytes()


def cells(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows as csv reads them; of TSV as lines split at tabs."""
    if path.suffix == ".tsv":
        lines = path.read_bytes().decode().split("\n")[:-1]
        header, *rows = [line.split("\t") for line in lines]
    else:
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
    return header, [dict(zip(header, row, strict=True)) for row in rows]


def frame() -> Any:
    """A table with columns of every kind, and a named index."""
    count = 7
    price = decimal.Decimal("1.10")
    columns: Mapping[str, Any] = {
        "text": ["one", "two\nlines", "", None, "fünf", "two\nlines", "x"],
        "id": pandas.array([3, 2, 1, 0, 9, 8, 7], "uint16"),
        "score": [0.1, float("nan"), 1e-300, -0.0, 5, 6, 7],
        "kind": pandas.Categorical([*"babb", None, "a", "b"], list("zba"), ordered=True),
        "at": pandas.date_range("2020-03-28 23:00", periods=count, freq="h", tz="Europe/Berlin"),
        "month": pandas.period_range("2020", periods=count, freq="M"),
        "span": pandas.interval_range(0, count),
        "whole": pandas.array([1, None, 3, 4, 5, 6, 7], "Int16"),
        "flag": pandas.array([True, None, False, True, True, True, True], "boolean"),
        "price": [price, None, price, price, price, price, price],
        "list": [[1, 2], None, [], [3], [4], [5], [6]],
        "nested": [{"a": [1.5], "b": None}] * count,
        "bytes": [b"\xff", None, b"", b"a", b"b", b"c", b"d"],
        "error_kind": ["theirs"] * count,
    }
    index = pandas.Index([f"k{number}" for number in range(count)], name="key")
    return pandas.DataFrame(columns, index=index)


def indexed(kind: str) -> Any:
    """The table with another index."""
    table = frame()
    if kind == "range":
        return table.reset_index(drop=True)
    if kind == "several":
        return table.set_index(["kind", "at"])
    return table


@pytest.mark.parametrize("kind", ["named", "range", "several"])
def test_pandas_reads_its_own_frame_back(tmp_path: Path, kind: str) -> None:
    table = indexed(kind)
    table.to_parquet(tmp_path / "in.parquet", row_group_size=2)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = pandas.read_parquet(tmp_path / "out.parquet")
    pandas.testing.assert_frame_equal(
        found[list(table.columns)], pandas.read_parquet(tmp_path / "in.parquet")
    )
    flat = [
        name for name in table.columns if name not in ("list", "nested")
    ]  # arrays after reading
    pandas.testing.assert_frame_equal(found[flat], table[flat], check_exact=True)
    before, after = (parquet.read_schema(tmp_path / f"{name}.parquet") for name in ("in", "out"))
    assert after.names[: len(before.names)] == before.names
    taken = {"text", "score", "error_kind"}
    own = [f"transferry_{name}" if name in taken else name for name in OWN]
    assert after.names[len(before.names) :] == own
    for name in before.names:
        assert after.field(name).equals(before.field(name), check_metadata=True)
    assert after.metadata == before.metadata
    for text, answer, error in zip(
        table["text"], found["transferry_text"], found["transferry_error_kind"], strict=True
    ):
        missing = not isinstance(text, str) or not text
        assert answer == ("" if missing else text.upper())
        assert (error in ("empty", "no-text")) == missing


def test_partitions_chunks_and_row_groups_do_not_show(tmp_path: Path) -> None:
    table = pandas.concat([frame(), frame(), frame()])
    source, whole = tmp_path / "in.parquet", tmp_path / "whole.parquet"
    table.to_parquet(source, row_group_size=4)
    run(source, whole, chunk_rows=100)
    assert merged(source, whole, 3, chunk_rows=2) == whole.read_bytes()


def test_fields_keep_types_nulls_and_metadata(tmp_path: Path) -> None:
    """Columns that pandas does not write: without null, with metadata, of other types."""
    schema = pyarrow.schema(
        [
            pyarrow.field("title", pyarrow.large_string(), nullable=False, metadata={"a": "b"}),
            pyarrow.field("tensor", pyarrow.fixed_shape_tensor(pyarrow.float32(), [2])),
            pyarrow.field("codes", pyarrow.list_(pyarrow.dictionary("int8", "string"))),
            pyarrow.field("map", pyarrow.map_("string", "int8")),
            pyarrow.field("view", pyarrow.string_view()),
            pyarrow.field("half", pyarrow.float16()),
        ],
        metadata={"huggingface": "{}"},
    )
    tensor = pyarrow.ExtensionArray.from_storage(
        schema.field("tensor").type,
        pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.float32(), 2)),
    )
    plain = [[["x", "y"], None], [[("k", 1)], []], ["v", None], [0.5, None]]
    arrays = [["a", "b"], tensor, *plain]
    table = pyarrow.table(
        [
            array if array is tensor else pyarrow.array(array, field.type)
            for array, field in zip(arrays, schema, strict=True)
        ],
        schema=schema,
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    with pyarrow.ipc.new_file(tmp_path / "in.arrow", schema) as file:
        file.write_table(table)
    before = parquet.read_table(tmp_path / "in.parquet")
    for name in ("in.parquet", "in.arrow"):
        out = tmp_path / f"{name}.out.parquet"
        run(tmp_path / name, out, column="title")
        found = parquet.read_table(out)
        assert found.select(schema.names).equals(before, check_metadata=True), name
        assert found["text"].to_pylist() == ["A", "B"]


def test_files_of_other_types(tmp_path: Path) -> None:
    """As pandas writes a column without values; but no text becomes a number."""
    for name, values in (("a", [1, 2]), ("b", [None, None]), ("c", ["007", "8"])):
        table = pyarrow.table({"text": ["x", "y"], "n": values})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    sources, out = [tmp_path / f"{name}.parquet" for name in "abc"], tmp_path / "out.parquet"
    Job(Echo(), sources[:2], out, JobOptions()).run()
    assert parquet.read_table(out)["n"].to_pylist() == [1, 2, None, None]
    with pytest.raises(InputError, match=r"n is int64 in the first .* add drop n, or run a job"):
        Job(Echo(), sources, out, JobOptions(force=True)).run()
    Job(Echo(), sources, out, JobOptions(force=True, drop=("n",))).run()
    assert "n" not in parquet.read_schema(out).names
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2), "n": [1, 2]}), sources[2])
    Job(Echo(), sources, out, JobOptions(force=True)).run()
    assert parquet.read_table(out)["text"].to_pylist() == ["x", "y", "x", "y", None, None]


@pytest.mark.parametrize("values", [["x"], [1], [[1]]])
def test_a_later_file_may_have_nulls(tmp_path: Path, values: list[Any]) -> None:
    """In a column that has none in the first; a null list must not become an empty one."""
    column, sources = pyarrow.array(values), [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, array in zip(sources, (column, pyarrow.nulls(1, column.type)), strict=True):
        strict = pyarrow.field("n", column.type, nullable=bool(array.null_count))
        schema = pyarrow.schema([("text", pyarrow.string()), strict])
        parquet.write_table(pyarrow.table([["a"], array], schema=schema), path)
    for files in (sources, sources[::-1]):
        Job(Echo(), files, tmp_path / "out.parquet", JobOptions(force=True)).run()
        assert sorted(parquet.read_table(tmp_path / "out.parquet")["n"].to_pylist(), key=str) in (
            [*values, None],
            [None, *values],
        )


def test_a_text_that_is_no_utf8_leaves_an_empty_cell(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts, "n": [1, 2, 3]}), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert (found["text"], found["n"]) == (["a", None, "c"], [1, 2, 3])
    assert found["error_kind"] == [None, "undecodable", None]


@pytest.mark.parametrize("name", ["in.csv", "in.tsv"])
def test_cells_stay_as_csv_read_them(tmp_path: Path, name: str) -> None:
    hard = HARD if name == "in.csv" else [each for each in HARD if "\n" not in each]
    header = ["", "id", " my words", "score", "Text"]
    rows = [[str(n), f"0{n}", text, text, "x"] for n, text in enumerate(hard)]
    source = tmp_path / name
    with source.open("w", newline="") as file:
        if name == "in.csv":
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([header, *rows])
        else:
            file.writelines("\t".join(row) + "\n" for row in [header, *rows])
    own = [name if name not in ("score", "text") else f"transferry_{name}" for name in OWN]
    for ending in ("csv", "tsv", "parquet"):
        out = tmp_path / f"out.{ending}"
        run(source, out, column=" my words")
        if ending == "parquet":
            found = parquet.read_table(out).to_pylist()
            names = list(found[0])
        else:
            names, found = cells(out)
        assert names == [*header, *own]
        for row, text, kept in zip(found, hard, rows, strict=True):
            if ending == "tsv" and name == "in.csv" and set(text) & {"\n", "\r", "\t"}:
                assert [row[each] for each in header] == [*kept[:2], "", "", "x"]
                assert row["error_kind"] == "fields"
                continue
            assert [row[each] for each in header] == kept
            assert row["transferry_text"] == text.upper() or ending == "tsv"


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_table_keeps_its_delimiter(tmp_path: Path, delimiter: str) -> None:
    source, whole = tmp_path / "in.csv", tmp_path / "whole.csv"
    rows = [["n", "text"], *([str(n), text] for n, text in enumerate(HARD))]
    with source.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    run(source, whole, column="text")
    with whole.open(newline="") as file:
        found = list(csv.reader(file, delimiter=delimiter, strict=True))
    assert [row[:2] for row in found] == rows
    assert merged(source, whole, column="text") == whole.read_bytes()


COLUMNS = 'title,body,id,text\n"a, b",eins,1,x\n,zwei,2,y\ndrei,,3,z\n,,4,w\n'


def test_every_column_is_answered(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(COLUMNS)
    job = Job(Echo(), source, tmp_path / "out.csv", JobOptions(column=("title", "body")))
    summary = job.run()
    assert (summary.rows, summary.bad_rows, summary.errors) == (4, 1, {"empty": 2})
    assert summary.first_error == "row 4, column title: there is no text to work on"
    names, rows = cells(tmp_path / "out.csv")
    own = [f"{column}_{name}" for column in ("title", "body") for name in OWN]
    assert names == ["title", "body", "id", "text", *own]
    for row in rows:
        for column in ("title", "body"):
            assert row[f"{column}_text"] == row[column].upper()
            assert row[f"{column}_error_kind"] == ("empty" if row["id"] == "4" else "")
    assert [row["text"] for row in rows] == list("xyzw")
    run(source, tmp_path / "out.jsonl", column=("title", "body"), output_column=("t", "b"))
    record, *_ = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    theirs = {"id": "1", "text": "x", "title_source": "a, b", "t": "A, B"}
    assert theirs.items() <= record.items()
    assert (record["body_source"], record["b"]) == ("eins", "EINS")
    for options in ({"column": ("title", "title")}, {"column": ("title", "nothing")}):
        with pytest.raises(Exception, match=r"named twice|no column nothing; choose"):
            run(source, tmp_path / "no.csv", **options)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_several_columns_resume_and_merge(tmp_path: Path, ending: str) -> None:
    source, both = tmp_path / "in.csv", ("title", "body")
    source.write_text("title,body\n" + "".join(f"a{n},b{n}\n" for n in range(10)))
    whole = tmp_path / f"whole.{ending}"
    run(source, whole, column=both)
    out, options = tmp_path / f"out.{ending}", JobOptions(column=both, chunk_rows=3)
    computed = tmp_path / "computed"
    with pytest.raises(RuntimeError, match="device is gone"):
        Job(Echo(fail_at=13, computed=computed), source, out, options).run()
    assert Job(Echo(computed=computed), source, out, options).run().resumed == 1
    # Each input of the engine keeps its number, which seeds its samples.
    assert {*map(int, computed.read_text().split())} == {*range(20)}
    assert out.read_bytes() == whole.read_bytes()
    assert merged(source, whole, column=both) == whole.read_bytes()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"keep": "id,body"}, ["body", "id", *OWN]),
        ({"keep": ("id", "body")}, ["body", "id", *OWN]),
        ({"drop": "text"}, ["title", "body", "id", *OWN]),
        ({"drop": "title,body,id,text"}, OWN),
        ({"output_column": "de"}, ["title", "body", "id", "text", "de", *OWN[1:]]),
        ({"output_column": "text", "drop": "text"}, ["title", "body", "id", *OWN]),
        (
            {"output_column": "score"},
            ["title", "body", "id", "text", "score", "transferry_score", *OWN[2:]],
        ),
    ],
)
def test_chosen_columns(tmp_path: Path, options: dict[str, Any], wanted: list[str]) -> None:
    source = tmp_path / "in.csv"
    source.write_text(COLUMNS)
    run(source, tmp_path / "out.csv", column="body", **options)
    assert cells(tmp_path / "out.csv")[0] == wanted
    run(source, tmp_path / "out.parquet", column="body", **options)
    assert parquet.read_schema(tmp_path / "out.parquet").names == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "titel"}, r"in\.csv has no column titel for keep; did you mean title\?"),
        ({"drop": "zzz"}, r"no column zzz for drop; it has title, body, id, text"),
        ({"keep": "id", "drop": "text"}, "keep and drop exclude each other; choose one"),
        ({"output_column": "title"}, "there is a column title already; .*with drop title"),
        ({"output_column": ("a", "b")}, "output_column must give one name, found 2"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, options: Any, message: str) -> None:
    source = tmp_path / "in.csv"
    source.write_text(COLUMNS)
    with pytest.raises(Exception, match=message):
        run(source, tmp_path / "out.csv", column="body", **options)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": ("title", "body")}, "text has one answer a row, and there are 2 columns"),
        ({"column": "body", "keep": "id"}, "keep has no effect on text output; leave it out"),
    ],
)
def test_lines_have_no_columns(tmp_path: Path, options: Any, message: str) -> None:
    source = tmp_path / "in.csv"
    source.write_text(COLUMNS)
    with pytest.raises(Exception, match=message):
        run(source, tmp_path / "out.txt", **options)


def test_fields_of_json_are_chosen_by_row(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows: Sequence[dict[str, Any]] = [
        {"id": 5, "text": "a", "n": 1, "score": 2},
        {"text": "b", "more": [1]},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]] = (
        ({}, [{"n": 1, "score": 2, "source": "a"}, {"more": [1], "source": "b"}]),
        ({"keep": "more,n"}, [{"n": 1}, {"more": [1]}]),
        ({"drop": "text,score"}, [{"n": 1}, {"more": [1]}]),
    )
    for number, (options, kept) in enumerate(cases):
        out = tmp_path / f"{number}.jsonl"
        run(source, out, **options)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert [record.pop("id") for record in found] == [5, 1]
        score = "transferry_score" if "score" in kept[0] else "score"
        answers = ["text", score, "finish_reason", "target_tokens", "source_tokens"]
        for record, theirs in zip(found, kept, strict=True):
            assert list(record) == [*theirs, *answers]
            assert {name: record[name] for name in theirs} == theirs
    for option in ("keep", "drop"):
        for name in ("score,moer", "txet"):
            with pytest.raises(
                UsageError, match=f"no column .* in its first .* rows for {option};"
            ):
                run(source, out, **{option: name, "force": True})
    (empty := tmp_path / "empty.jsonl").write_text("")
    run(empty, out, keep="n", force=True)
    assert out.read_bytes() == b"", "nothing tells which fields its rows would have"


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_columns_are_the_fields_of_the_first_rows(ending: str, tmp_path: Path) -> None:
    """As pandas reads them; a later field is an error of its row."""
    rows: list[dict[str, Any]] = [{"text": f"row {number}"} for number in range(1001)]
    rows[0]["b"], rows[1]["id"], rows[2]["a"] = "1", "i", "2"
    rows[999]["score"], rows[1000]["late"] = "3", "4"
    source, out = tmp_path / "in.jsonl", tmp_path / f"out.{ending}"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(source, out, chunk_rows=400, drop="id")
    theirs = pandas.read_json(source, lines=True, dtype=False, nrows=1000)
    if ending == "parquet":
        table = parquet.read_table(out)
        header, found = table.schema.names, table.to_pylist()
    else:
        header, found = cells(out)
    columns = [name for name in theirs.columns if name not in ("text", "id")]
    assert columns == ["b", "a", "score"] and header[:4] == ["id", *columns]
    for name in columns:
        wanted = theirs[name].where(theirs[name].notna(), "").tolist()
        assert [row[name] or "" for row in found[:1000]] == wanted
    assert found[999]["error_kind"] in ("", None) and found[1000]["error_kind"] == "fields"
    assert merged(source, out, drop="id") == out.read_bytes()


TASKS: dict[str, tuple[str, list[str]]] = {
    "generate": ("text", ["--beam", "2", "--n-best", "2"]),
    "score": ("total", []),
    "embed": ("vector", []),
    "fill-mask": ("text", []),
    "classify": ("label", []),
    "rank": ("score", ["--pair", "pair"]),
    "tag": ("tags", []),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_answers_every_column(task: str, ways: Ways, tmp_path: Path) -> None:
    """Each cell of two columns has the answer that Engine gives to it alone.

    An empty cell has no answer, and is an error only where the whole row is empty.
    """
    way, bundle = ways(task)
    answer, options = TASKS[task]
    columns: dict[str, list[Any]] = {
        "title": ["the cat", "", "a dog ran", None],
        "n": [1, 2, 3, 4],
        "body": ["the dog", "a", "b", ""],
        "pair": ["x", "y", "z", "x"],
    }
    columns = {
        name: [way.text(cell) if name in ("title", "body") and cell else cell for cell in cells]
        for name, cells in columns.items()
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    command = ["score"] if task == "score" else ["run"]
    named = [] if task == "score" else ["--task", task]
    both = ["--column", "title", "--column", "body", "--output-column", "a", "--output-column", "b"]
    found: dict[str, Any] = {}
    for ending in ("parquet", "jsonl"):
        out = tmp_path / f"out.{ending}"
        ran = call(*command, bundle, tmp_path / "in.parquet", "-o", out, *named, *both, *options)
        assert ran.exit_code == 6, ran.stderr
        if ending == "parquet":
            found[ending] = parquet.read_table(out).to_pylist()
        else:
            found[ending] = [json.loads(line) for line in out.read_text().splitlines()]
    with Engine(bundle) as engine:
        for name, output in {"title": "a", "body": "b"}.items():
            given: Any = [cell or "" for cell in columns[name]]
            if task in ("rank", "score"):
                seconds: list[Any] = columns["pair"] if task == "rank" else [None] * 4
                given = list(zip(given, seconds, strict=True))
            searched: Any = {"beam": 2, "n_best": 2} if task == "generate" else {}
            results = getattr(engine, task.replace("-", "_"))(given, **searched)
            for place, result in enumerate(results):
                record, cells = result.record(2), result.cells(2)
                row, line = found["parquet"][place], found["jsonl"][place]
                assert row["n"] == line["n"] == columns["n"][place]
                if name == "title" and place == 1:
                    assert row[output] is line[output] is row[f"{name}_error_kind"] is None
                    continue
                if "error" in record:
                    assert row[f"{name}_error_kind"] == record["error"]["kind"]
                    assert line[f"{name}_error"] == record["error"]
                    continue
                if task == "embed":
                    # Other rows of a batch change the last bits.
                    assert row[output] == pytest.approx(record["vector"].tolist(), abs=1e-6)
                    continue
                assert row[output] == cells[answer]
                for part, value in cells.items():
                    if part not in (answer, "source"):
                        assert row[f"{name}_{part}"] == value, part
                for part, value in record.items():
                    written = line[output if part == answer else f"{name}_{part}"]
                    assert json.dumps(written) == json.dumps(value, default=json_value), part
