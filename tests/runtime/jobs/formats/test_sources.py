"""Where rows are: several files, patterns, datasets, URLs; and how many of them are read."""

import gzip
import http.server
import json
import os
import threading
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call, done
from tests.runtime.jobs.helpers import Echo, read_records
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.formats.detection import partition_columns
from transferry.runtime.jobs.formats.readers import open_inputs
from transferry.runtime.jobs.formats.sources import expand
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
pytest.importorskip("pyarrow.dataset")
pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec", reason="fsspec is an optional extra")
pytest.importorskip("aiohttp", reason="aiohttp, which fsspec reads http with, is not installed")

TEXTS = [["a", "b c"], [], ["d"], ["e", "f", "g"]]
WHOLE = [text for part in TEXTS for text in part]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part {number}.txt" for number in range(len(TEXTS))]
    for path, texts in zip(paths, TEXTS, strict=True):
        path.write_text("".join(f"{text}\n" for text in texts))
    return paths


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A folder as `Dataset.save_to_disk` of Hugging Face writes it."""
    folder = tmp_path / "saved"
    folder.mkdir()
    names = []
    for number, texts in enumerate(TEXTS):
        names.append(f"data-{number:05}-of-00004.arrow")
        table = pyarrow.table({"text": pyarrow.array(texts, "string")})
        path = str(folder / names[-1])
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as to:
            to.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the files; it knows no ranges."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

    handler = partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def texts(*inputs: Path | str, **chosen: Any) -> list[Any]:
    return [row.text for row in open_inputs(expand(inputs), **chosen).rows()]


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("last", [None, 0, 1, 4, 7])
def test_rows_are_numbered_throughout(parts: list[Path], first: int, last: int | None) -> None:
    reader = open_inputs(expand(parts))
    for _ in range(2):  # the second time it knows how many rows each has
        found = [(row.number, row.text) for row in reader.rows(first, last)]
        assert found == [*enumerate(WHOLE)][first:last]
        assert len(list(reader.rows())) == len(WHOLE)


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "1.tsv", tmp_path / "2.tsv"
    one.write_text("id\ttext\n7\ta\n")
    other.write_text("text\tsource\nx\ty\n")
    with pytest.raises(InputError, match=r"2.tsv: expected tsv with .* id, text, .*found tsv"):
        open_inputs(expand([one, other]), column="text")
    other.write_text("text\tid\nb\t8\n")  # another order is no other table
    found = [row.cells for row in open_inputs([one, other]).rows()]
    assert found == [("7", "a"), ("8", "b")]
    other.write_text("text\nb\n")
    with pytest.raises(InputError, match=r"2.tsv: expected tsv with the columns id, text, .*found"):
        open_inputs([one, other])
    for name in ("1.jsonl", "2.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name, name: 1}) + "\n")
    assert texts(tmp_path / "*.jsonl") == ["1.jsonl", "2.jsonl"]


@pytest.mark.parametrize("rest", [b"", b"no object\n\n"])
def test_a_file_without_an_object_tells_no_columns(tmp_path: Path, rest: bytes) -> None:
    """Spark writes empty files beside others."""
    rows = b'{"id": 7, "source": "a", "n": 1}\n'
    for number, content in enumerate((rest, rows, rest, rows)):
        (tmp_path / f"{number}.jsonl").write_bytes(content)
    reader = open_inputs(expand([tmp_path]))
    assert (reader.layout.column, reader.layout.columns) == ("source", ("n",))
    found = [row for row in reader.rows() if isinstance(row.text, str)]
    assert [(row.text, row.id, row.fields) for row in found] == [("a", 7, {"n": 1})] * 2
    other = {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "a"}}
    chat = {**other, "url": "/v1/completions", "body": {"prompt": "a"}}
    for number, request in enumerate((None, other, chat)):
        line = json.dumps(request) + "\n" if request else ""
        (tmp_path / f"{number}.jsonl").write_text(line)
    found = list(open_inputs(expand([tmp_path / "[012].jsonl"]), format="openai").rows())
    assert found[0].text == "a"
    assert isinstance(found[1].text, RowError)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["x/*.txt"], "expected files of this pattern, found no file"),
        (["-", "a.txt"], "standard input cannot be one of several"),
        (["."], "expected a folder with files of one format, found the endings .csv, .json"),
        (["empty"], "expected a folder with files of one format, found no file"),
        (["delta/day=1"], "found a table of Delta Lake, whose files hold rows of former versions"),
        (["delta/day=1/a.txt"], "found a table of Delta Lake"),
        (["delta/*/*.txt"], "found a table of Delta Lake"),
        (["memory://delta/*/*.txt"], "memory:///delta: expected files, found a table of Iceberg"),
        ([], "expected an input, found none"),
        (["splits"], r"several splits; name one of them: splits/train, splits/test"),
        (["nosuch://a/b.txt"], "nosuch://a/b.txt cannot be opened"),
        (["memory://missing.txt"], "memory://missing.txt: there is no such file"),
        (["memory://missing*.txt"], "expected files of this pattern, found no file"),
    ],
)
def test_what_is_no_input_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "splits").mkdir()
    splits = {"splits": ["train", "test"]}
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps(splits))
    (tmp_path / "a.csv").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "delta" / "day=1").mkdir(parents=True)
    stored = fsspec.filesystem("memory")
    for name in ("delta/_delta_log/00.json", "delta/day=1/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("delta/metadata/00001-9e3.metadata.json", "delta/day=1/a.txt"):
        stored.pipe(name, b"")
    with pytest.raises((InputError, UsageError), match=message):
        texts(*inputs)


def test_the_folder_of_a_table_is_read(bundle_folder: Path, tmp_path: Path) -> None:
    """As Spark and pandas write it, columns in the names of folders; pyarrow reads the same."""
    columns = {
        "text": ["seven", "eight", "nine", "ten"],
        "lang": ["de", "a/b=c %", "fr", None],
        "day": ["x=1", "2", "1", "1"],
    }
    table, folder, out = pyarrow.table(columns), tmp_path / "run=5" / "table", tmp_path / "out"
    pyarrow.parquet.write_to_dataset(table, folder, partition_cols=["lang", "day"])
    (folder / "_SUCCESS").touch()
    (folder / ".crc").touch()
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "video.metadata.json").touch()  # not of Iceberg
    done("run", bundle_folder, folder, "--column", "text", "-o", out.with_suffix(".parquet"))
    answered = pyarrow.parquet.read_table(out.with_suffix(".parquet"))
    expected = pyarrow.dataset.dataset(folder, partitioning="hive").to_table()
    assert answered.column_names[:3] == ["text", "lang", "day"]
    for name in columns:
        found = expected[name].cast(pyarrow.string()).to_pylist()
        assert sorted(answered[name].to_pylist(), key=str) == sorted(found, key=str)
    pairs = zip(*(answered[name].to_pylist() for name in columns), strict=True)
    assert sorted(pairs, key=str) == sorted(zip(*columns.values(), strict=True), key=str)


def test_the_name_of_a_folder_may_hold_an_equals_sign() -> None:
    """Spark writes it as %3D; the first plain sign ends the name."""
    path = Path("/data/a%3Db=c%3Dd/n=e=f/part.parquet")
    assert partition_columns(path) == {"a=b": "c=d", "n": "e=f"}


@pytest.mark.parametrize("name", ["a=%E4", "%FF=a", "a=%ED%A0%80", "a=%C3"])
def test_the_name_of_a_folder_is_utf8(name: str) -> None:
    """pyarrow refuses such a name too; another text in its place would join the rows of two."""
    with pytest.raises(InputError, match="expected UTF-8 in the names of its folders"):
        partition_columns(Path("/data", name, "part.parquet"))


@pytest.mark.parametrize(
    ("folder", "values", "same"),
    [
        ("a=de", ["de", "de"], True),
        ("a=de", ["de", "en"], False),
        ("a=de", ["de", None], False),
        ("a=07", [7, 7], True),
        ("a=7", [7, 8], False),
        ("a=x", [7, 7], False),
        ("a=2024-01-02", [date(2024, 1, 2)] * 2, True),
        ("a=0.5", [0.5, 0.5], True),
        ("a=__HIVE_DEFAULT_PARTITION__", [None, None], True),
    ],
)
def test_a_column_and_its_folder_agree(
    tmp_path: Path, folder: str, values: Any, same: bool
) -> None:
    """pyarrow, Polars and DuckDB read the folder's value, pandas refuses."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    (place := tmp_path / folder).mkdir()
    for column in (plain := pyarrow.array(values), plain.dictionary_encode()):
        table = pyarrow.table({"text": ["a", "b"], "a": column})
        with pyarrow.ipc.new_file(place / "part.arrow", table.schema) as file:
            file.write_table(table)
        reader = open_inputs(expand([place]), column="text")
        assert reader.layout.names == ("text", "a")
        if same:
            assert len([*reader.rows()]) == 2
        else:
            with pytest.raises(InputError, match="column a has other values than"):
                list(reader.rows())


def test_a_dataset_of_hugging_face_is_read(dataset: Path) -> None:
    assert texts(dataset) == texts(dataset / "*.arrow") == WHOLE
    reader = open_inputs(expand([dataset]))
    assert [row.text for row in reader.rows(2, 5)] == WHOLE[2:5]
    (dataset / "state.json").write_text('{"_data_files": [{"filename": "../part.arrow"}]}')
    with pytest.raises(InputError, match="expected the files of a dataset"):
        texts(dataset)
    for name, content in (
        *(("state.json", content) for content in ("{}", "[]", '{"_data_files": ["a.arrow"]}')),
        *(("dataset_dict.json", content) for content in ("3", '{"splits": [1]}')),
    ):
        (dataset / name).write_text(content)
        with pytest.raises(InputError, match="save the dataset again"):
            texts(dataset)


@pytest.mark.parametrize(
    ("of_file", "more"),
    [
        ({}, {"_indices_data_files": [{"filename": "indices.arrow"}]}),
        ({"skip": 0, "take": 2}, {"_indices_data_files": None}),
    ],
)
def test_a_choice_of_the_rows_of_a_dataset_is_refused(
    dataset: Path, of_file: dict[str, Any], more: dict[str, Any]
) -> None:
    """As datasets 1 saved after a filter, a shuffle or a split."""
    state = json.loads((dataset / "state.json").read_text())
    state["_data_files"] = [file | of_file for file in state["_data_files"]]
    (dataset / "state.json").write_text(json.dumps(state | more))
    with pytest.raises(InputError, match=r"rows of its own.*flatten_indices"):
        texts(dataset)


def test_no_file_of_a_folder_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, beside = tmp_path / "folder", tmp_path / "beside"
    for place in (folder, folder / "below", folder / "_below", beside):
        place.mkdir()
        (place / "rows.txt").write_text(f"{place.name}\n")
    (folder / "again.txt").symlink_to("below/rows.txt")
    assert texts(folder) == ["below", "below", "folder"]
    for target in (beside, tmp_path / "absent"):
        (folder / ".link").symlink_to(target)
        (folder / "link").symlink_to(target)
        with pytest.raises(InputError, match="link: expected a file, found a link to a folder or"):
            texts(folder)
        (folder / "link").unlink()
        (folder / ".link").unlink()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="expected a path, found nothing"):
        texts("")
    (tmp_path / "below").symlink_to(folder / "below")
    assert texts(tmp_path / "below") == ["below"]
    if hasattr(os, "getuid") and os.getuid():  # root may read all
        (folder / "below").chmod(0)
        with pytest.raises(InputError, match="below: cannot be read: Permission denied"):
            texts(folder)


def test_a_damaged_file_is_told(dataset: Path, tmp_path: Path, server: str) -> None:
    path = dataset / "data-00000-of-00004.arrow"
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 or not")
    for content, damage in ((path.read_bytes() * 2, "several streams"), (b"rows", "Expected")):
        path.write_bytes(content)
        for place in (dataset, f"{server}/saved/{path.name}"):
            with pytest.raises(InputError, match=f"cannot be read as Arrow: {damage}"):
                texts(place)
    with pytest.raises(InputError, match="cannot be read as Parquet: Parquet magic"):
        texts(f"{server}/rows.parquet")
    (tmp_path / "rows.xlsx").touch()
    for place in (tmp_path / "rows.xlsx", f"{server}/rows.xlsx"):
        with pytest.raises(InputError, match="cannot be read as a workbook: File is not a zip"):
            texts(place)


def test_urls_are_read_as_they_stream_in(
    parts: list[Path], dataset: Path, tmp_path: Path, server: str
) -> None:
    urls = [f"{server}/{part.name.replace(' ', '%20')}" for part in parts]
    assert texts(*urls) == WHOLE
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress("ä\nö\n".encode()))
    assert texts(f"{server}/rows.txt.gz") == ["ä", "ö"]
    pyarrow.parquet.write_table(pyarrow.table({"text": WHOLE}), tmp_path / "rows.parquet")
    assert texts(f"{server}/rows.parquet") == WHOLE
    assert texts(f"{server}/saved/data-00000-of-00004.arrow") == TEXTS[0]
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"a" * 999)[:-9])
    with pytest.raises(InputError, match="damaged or cut short"):
        texts(f"{server}/cut.txt.gz")
    with pytest.raises(InputError, match=r"no.txt: there is no such file"):
        texts(f"{server}/no.txt")


def test_a_server_that_is_gone_is_told(server: str) -> None:
    message = r"rows.txt: cannot be read: .*Connection refused.* Check the connection"
    with pytest.raises(InputError, match=message):
        texts("http://127.0.0.1:9/rows.txt")


@pytest.mark.parametrize("limit", [1, 3, 6, 99])
def test_a_limit_reads_a_beginning(parts: list[Path], tmp_path: Path, limit: int) -> None:
    out = tmp_path / "out.jsonl"
    job = Job(Echo(), parts, out, JobOptions(limit=limit, chunk_rows=2))
    assert job.run().rows == min(limit, len(WHOLE))
    assert [record["source"] for record in read_records(out)] == WHOLE[:limit]
    again = Job(Echo(), parts, out, JobOptions(limit=limit, chunk_rows=2)).run()
    assert again.finished_before
    with pytest.raises(UsageError, match="limit"):
        Job(Echo(), parts, out, JobOptions(limit=2, chunk_rows=2)).run()
    parts_of = [
        Job(Echo(), parts, tmp_path / f"{n}.jsonl", JobOptions(limit=5, partition=f"{n}/2"))
        for n in (1, 2)
    ]
    assert sum(part.run().rows for part in parts_of) == 5


def test_the_command_takes_several_inputs(
    bundle_folder: Path, parts: list[Path], tmp_path: Path, server: str
) -> None:
    out, settings = tmp_path / "out.jsonl", ("--max-length", "5")
    done("run", bundle_folder, *parts[:3], f"{server}/part%203.txt", "-o", out, *settings)
    assert [record["source"] for record in read_records(out)] == WHOLE
    refused = call("run", bundle_folder, parts[0], "-o", "memory://a")
    assert refused.exit_code == 2
    assert "cannot be written: name a store" in refused.stderr


def test_a_dry_run_writes_nothing(bundle_folder: Path, parts: list[Path], tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    out = tmp_path / "out.jsonl"
    command: list[str | Path] = ["run", bundle_folder, *parts, "-o", out, "--dry-run"]
    told = done(*command).stdout
    assert "6 rows" in told
    assert "nothing was written" in told
    found = json.loads(done(*command, "--json").stdout)
    assert (found["rows"], found["sampled"], found["bad_rows"]) == (6, 6, 0)
    assert found["source_tokens"] > 6
    assert set(tmp_path.iterdir()) == before
