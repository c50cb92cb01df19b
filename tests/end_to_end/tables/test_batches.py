"""Batches of other engines: the answers of a job, in the table that they came in."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import call
from transferry.batches import Mapper
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.ray_job import ENVIRONMENT

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
parquet = pytest.importorskip("pyarrow.parquet")
TEXTS = ["a dog runs", "two men talk", "", None, "a dog", "a dog runs"]
SETTINGS: dict[str, Any] = {"variant": "portable", "replicas": 1, "max_length": 6, "beam": 2}


@pytest.fixture(scope="module")
def table() -> Any:
    """With a column that no pandas frame gives back, and a name that an answer has too."""
    columns = {"n": range(6), "en": TEXTS, "text": [{"a": n} for n in range(6)]}
    return pyarrow.table(columns).replace_schema_metadata({"of": "the user"})


@pytest.fixture(scope="module")
def mapper(bundle_folder: Path) -> Mapper:
    return Mapper(bundle_folder, column="en", **SETTINGS)


@pytest.fixture(scope="module")
def expected(bundle_folder: Path, table: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output of a job."""
    source, out = (tmp_path_factory.mktemp("job") / name for name in ("in.parquet", "out.parquet"))
    parquet.write_table(table, source)
    options = ["--column", "en", "--variant", "portable", "--max-length", "6", "--beam", "2"]
    assert call("run", bundle_folder, source, "-o", out, *options).exit_code == 6
    return parquet.read_table(out)


def test_the_table_of_a_job(mapper: Mapper, table: Any, expected: Any) -> None:
    assert mapper(table).equals(expected, check_metadata=True)
    assert mapper.schema(table.schema) == expected.schema
    parts = [mapper(batch) for batch in table.to_batches(4)]
    assert pyarrow.Table.from_batches(parts).equals(expected)
    assert mapper(table.slice(0, 0)).schema == expected.schema
    nothing = pyarrow.table({"n": [3], "en": [None], "text": table["text"][3:4]})
    assert mapper(nothing)["error_kind"].to_pylist() == ["no-text"]


def test_frames_and_columns(mapper: Mapper, table: Any, expected: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"en": TEXTS, "text": [object()] * 6}, index=[*"abcdef"])
    found, answers = mapper(frame), expected["transferry_text"].to_pylist()
    assert found[["en", "text"]].equals(frame)
    assert found["transferry_text"].tolist() == answers
    assert str(found["target_tokens"].dtype) == "Int64"
    lists = mapper({"en": TEXTS, "text": TEXTS})
    assert (lists["text"], lists["transferry_text"]) == (TEXTS, answers)
    assert list(mapper(pandas.DataFrame({"en": np.empty(0)}))["text"]) == []
    nothing = mapper(pandas.DataFrame({"en": [float("nan")] * 2}))
    assert nothing["error_kind"].tolist() == ["no-text"] * 2
    numbered = Mapper(mapper.bundle, column="0", **SETTINGS)(pandas.DataFrame({0: TEXTS, 1: 6}))
    assert [*numbered][:3] == [0, 1, "text"]
    assert numbered["text"].tolist() == answers
    arrays = mapper({"en": np.array(TEXTS, object)})
    assert isinstance(arrays["text"], np.ndarray)
    assert arrays["text"].tolist() == answers


def test_it_travels_without_its_models(mapper: Mapper, table: Any, expected: Any) -> None:
    sent = pickle.dumps(mapper)
    assert sent == pickle.dumps(Mapper(mapper.bundle, column="en", **SETTINGS)), "caches go by it"
    assert len(sent) < 4000
    assert pickle.loads(sent)(table).equals(expected)
    other = pickle.loads(sent)
    other.sha256 = "ab12"
    with pytest.raises(InputError, match="is not the bundle that the mapper was made with"):
        other(table)


def test_mistakes_are_told_at_once(bundle_folder: Path, mapper: Mapper, table: Any) -> None:
    with pytest.raises(UsageError, match="a mapper has no beams; write beam"):
        Mapper(bundle_folder, beams=4)
    with pytest.raises(UsageError, match="beam must be at least 1"):
        Mapper(bundle_folder, column="en", beam=0)(table)
    with pytest.raises(InputError, match="expected a bundle"):
        Mapper(bundle_folder.parent)
    for batch in ({"en": "seven"}, {"en": ["seven"], "n": []}, {"en": iter("ab")}):
        with pytest.raises(UsageError, match="expected columns of one length, found"):
            mapper(batch)
    with pytest.raises(UsageError, match="found list; with Ray Data"):
        mapper(TEXTS)
    with pytest.raises(InputError, match="there is no column en"):
        mapper(table.drop_columns("en"))
    with pytest.raises(InputError, match="expected text in the column en, found int64"):
        mapper({"en": [1, 2]})
    twice = pyarrow.Table.from_arrays([table["en"]] * 2, ["en", "en"])
    for batch in (twice, twice.to_batches()[0], twice.to_pandas()):
        with pytest.raises(InputError, match="the batch: two columns have the name 'en'; rename"):
            mapper(batch)
    for values in (["a", 5], ["\ud800"]):
        with pytest.raises(InputError, match="expected text in the column en, found "):
            mapper({"en": values})


@pytest.mark.optional("datasets")
def test_datasets(mapper: Mapper, expected: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"en": TEXTS})
    mapper({"en": ["this process has a session, which no fork can use"]})
    answered = rows.map(mapper, batched=True, batch_size=3, num_proc=2)
    assert answered["text"][:] == expected["transferry_text"].to_pylist()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.update(ENVIRONMENT)
    ray = pytest.importorskip("ray", reason="ray is absent; `make test-all` installs it")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.optional("ray")
@pytest.mark.parametrize("format", ["pyarrow", "pandas", "numpy"])
def test_ray_data(
    bundle_folder: Path, table: Any, expected: Any, format: str, cluster: None
) -> None:
    data = pytest.importorskip("ray.data", reason="ray is absent; `make test-all` installs it")
    rows = data.from_arrow(table.select(["n", "en"]))
    answered = rows.map_batches(
        Mapper,
        fn_constructor_args=[bundle_folder],
        fn_constructor_kwargs={"column": "en", **SETTINGS},
        batch_format=format,
        batch_size=4,
        concurrency=1,
    )
    found = sorted(answered.take_all(), key=lambda row: row["n"])
    assert [row["text"] for row in found] == expected["transferry_text"].to_pylist()
