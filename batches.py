"""Batches of other engines: a picklable function from a table to the same with answers.

Ray Data, Hugging Face datasets, Spark and pandas call it with their own tables.
"""

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from transferry.runtime.bundle.bundle import read_manifest
from transferry.runtime.decoding.generation_options import SYNONYMS, GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.table import TASKS, default_task, option_names
from transferry.runtime.engine.tasks.task import Layout, Task
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.formats.columnar import ColumnarReader, import_pyarrow, require_texts
from transferry.runtime.jobs.formats.records import ColumnChoice
from transferry.runtime.jobs.formats.rows import InputRow, layout_of, with_texts
from transferry.runtime.jobs.formats.writers import ParquetWriter, open_writer
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.settings import field_types, hint, shown

# Options of tasks that need lists or a second file.
_OF_FILES = {"generation", "messages", "prompt_ids", "target"}


class Mapper:
    """Answers the rows of a table: a function for `map_batches` of Ray Data and the like.

        mapper = Mapper("bundles/ende", column="en", beam=4, replicas=1)
        table = mapper(table)

    It takes a pyarrow Table or RecordBatch, a pandas DataFrame, or a mapping from names to columns,
    and returns the same kind: the table's columns as they are, and behind them those that a job
    writes into Parquet. A row that cannot be answered has `error_kind` and `error_message`.

    A pickled mapper has the settings alone; each process opens the bundle at its first batch, and
    refuses another bundle than the one that the mapper was made with. With sampling, a row's place
    in its batch seeds it.
    """

    def __init__(self, bundle: Path | str, **options: Any) -> None:
        """Checks the options; opens nothing yet.

        Args:
            bundle: Folder of the bundle, on every machine.
            **options: `task`, `column` and `output_column` of JobOptions; options of the task,
                such as `top`, and fields of GenerationOptions; keywords of `Engine`, such as
                `variant` and `replicas`.

        Raises:
            InputError: There is no such bundle.
            UsageError: An option is unknown or out of range, or options conflict.
        """
        self.bundle = Path(bundle).absolute()
        self.sha256 = hashlib.sha256(read_manifest(self.bundle)).hexdigest()
        ours = {"task", "column", "output_column"} | option_names(*TASKS.values()) - _OF_FILES
        searched = field_types(GenerationOptions).keys() - ours
        loading = {"device", *inspect.signature(Engine).parameters}
        loading = (loading | field_types(SessionOptions).keys()) - {"folder", "options", "session"}
        if unknown := sorted(options.keys() - ours - searched - loading):
            told = hint(unknown, (*ours, *searched, *loading), SYNONYMS)
            raise UsageError(f"a mapper has no {', '.join(unknown)}; {told}")
        chosen = {name: value for name, value in options.items() if name in ours}
        generation = {name: value for name, value in options.items() if name in searched}
        self._options = JobOptions(**chosen, generation=generation)
        self._load = {name: value for name, value in options.items() if name in loading}
        self._reset()

    def _reset(self) -> None:
        self._opened: tuple[int, Engine] | None = None
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[1:] not in _OPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with its answers.

        Raises:
            InputError: A column is missing or holds no texts, or the bundle is another one here.
            UsageError: The bundle cannot do the task with these options.
        """
        pyarrow = import_pyarrow("A mapper")
        names = _names(batch)
        plan = self._plans.get(names) or _Plan(self._engine(), self._options, names)
        self._plans[names] = plan
        return _with(batch, plan.answers(pyarrow.table(dict(plan.needed(batch)))))

    def schema(self, schema: Any) -> Any:
        """Returns the pyarrow schema of a batch's answer, given that of the batch."""
        plan = _Plan(self._engine(), self._options, tuple(schema.names))
        for field in plan.writer.schema:
            schema = schema.append(field)
        return schema

    def _engine(self) -> Engine:
        if self._opened is None or self._opened[0] != os.getpid():  # a session survives no fork
            self._reset()
            engine = Engine(self.bundle, **self._load)
            if engine.bundle.sha256 != self.sha256:
                raise InputError(
                    f"{self.bundle} on this machine is not the bundle that the mapper was made "
                    "with; copy it there again, or make the mapper anew"
                )
            self._opened = os.getpid(), engine
        return self._opened[1]


_OPENED = frozenset(("opened", "plans"))


class _Plan(ColumnarReader):
    """Layout, task and writer for tables of the same names."""

    def __init__(self, engine: Engine, options: JobOptions, names: tuple[str, ...]) -> None:
        """Finds the columns; opens nothing."""
        texts = options.column
        layout = layout_of(Path("the batch"), "arrow", names, next(iter(texts), None))
        self.layout: Layout = with_texts(layout, texts[1:])
        self.languages = options.source_language_column, options.target_language_column
        name = options.task or default_task(engine.bundle)
        self.engine, self.options = engine, replace(options, task=name)
        self.task: Task = TASKS[name](engine, self.options, self.layout)
        found = open_writer(
            Path("answers.parquet"),
            rows=self.layout,
            task=name,
            kinds=self.task.columns,
            n_best=self.task.n_best,
            width=self.task.width,
            choice=ColumnChoice(options.output_column),
        )
        columns = found.columns
        assert isinstance(found, ParquetWriter)
        assert columns is not None
        pyarrow = import_pyarrow()
        own = [field for field in found.schema if field.name in columns.kinds]
        self.writer = replace(
            found, schema=pyarrow.schema(own), columns=replace(columns, source=(), repeated=())
        )

    def needed(self, batch: Any) -> Iterator[tuple[str, Any]]:
        """Yields the columns that the task reads, as Arrow has them."""
        pair = getattr(self.options, "pair", None)
        import pyarrow

        for name in dict.fromkeys(filter(None, (*self.layout.texts, *self.languages, pair))):
            if name not in self.layout.names:
                known = ", ".join(self.layout.names)
                raise InputError(f"the batch has no column {name}; it has {known}")
            if self.layout.names.count(name) > 1:
                raise InputError(f"the batch: two columns have the name {name!r}; rename one")
            # Names of a frame may be numbers.
            is_frame = not isinstance(batch, Mapping) and not hasattr(batch, "schema")
            column = batch.iloc[:, self.layout.names.index(name)] if is_frame else batch[name]
            if not isinstance(column, pyarrow.Array | pyarrow.ChunkedArray):
                try:
                    column = pyarrow.array(column, from_pandas=True)
                except (pyarrow.ArrowException, ValueError, LookupError) as error:
                    raise InputError(
                        f"the batch: expected text in the column {name}, found {error}"
                    ) from error
            # Without any text, a column of pandas is one of numbers.
            lacks = column.null_count == len(column)
            yield name, pyarrow.nulls(len(column), "string") if lacks else column

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        """Streams the rows of the table."""
        yield from self._numbered(iter(self.table.to_batches(1024)), 0, first, last)

    def answers(self, table: Any) -> Any:
        """Returns the columns of the answers, in order."""
        self.table = table
        require_texts(replace(self.layout, schema=table.schema))
        rows = list(self.rows())
        found = self.task.answers(self.engine, map(self.task.whole, rows), 0)
        records = [
            self.writer.record(row, result, self.task.n_best)
            for row, result in zip(rows, found, strict=True)
        ]
        return self.writer.table(records)


def _names(batch: Any) -> tuple[str, ...]:
    import pyarrow

    if isinstance(batch, pyarrow.Table | pyarrow.RecordBatch):
        return tuple(batch.schema.names)
    if isinstance(batch, Mapping):
        _require_columns(batch)
        return tuple(batch)
    if hasattr(batch, "iloc") and hasattr(batch, "columns"):
        return tuple(map(str, batch.columns))
    raise UsageError(
        "expected a pyarrow table, a pandas frame or a mapping of columns, found "
        f"{type(batch).__name__}; with Ray Data choose batch_format='pyarrow'"
    )


def _require_columns(batch: Mapping[str, Any]) -> None:
    """Raises UsageError for a single text in the place of a column, and for another length."""
    lengths = [
        None if isinstance(column, str | bytes) or not isinstance(column, Sized) else len(column)
        for column in batch.values()
    ]
    for (name, column), length in zip(batch.items(), lengths, strict=True):
        if length is None or length != lengths[0]:
            told = f"expected columns of one length, found {shown(column)} in {name}"
            raise UsageError(f"the batch: {told}")


def _with(batch: Any, answers: Any) -> Any:
    """Returns a batch with further columns."""
    import pyarrow

    columns = {name: answers[name].combine_chunks() for name in answers.schema.names}
    if isinstance(batch, pyarrow.Table):
        for field in answers.schema:
            batch = batch.append_column(field, columns[field.name])
        return batch
    if isinstance(batch, pyarrow.RecordBatch):
        schema = pyarrow.unify_schemas([batch.schema, answers.schema])
        arrays = [*batch.columns, *columns.values()]
        return pyarrow.record_batch(arrays, schema.with_metadata(batch.schema.metadata))
    if isinstance(batch, Mapping):
        arrays_in = any(isinstance(column, np.ndarray) for column in batch.values())
        convert = _as_numpy if arrays_in else (lambda column: column.to_pylist())
        return {**batch, **{name: convert(column) for name, column in columns.items()}}
    import pandas

    kept = {pyarrow.int64(): pandas.Int64Dtype(), pyarrow.bool_(): pandas.BooleanDtype()}
    # Integers stay integers where one is missing, so that all batches have the same types.
    frame = answers.to_pandas(types_mapper=kept.get)
    return batch.assign(**{name: frame[name].array for name in columns})


def _as_numpy(column: Any) -> np.ndarray:
    """Returns a column as numpy has it: vectors as `[rows, width]`, NaN where there is none."""
    import pyarrow

    if not pyarrow.types.is_fixed_size_list(column.type):
        return cast(np.ndarray, column.to_numpy(zero_copy_only=False))
    flat = column.values.to_numpy(zero_copy_only=False)
    vectors = np.array(flat).reshape(-1, column.type.list_size)
    vectors[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return vectors
