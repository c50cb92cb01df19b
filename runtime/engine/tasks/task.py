"""The protocol of a task: options, rows, records, formats, comparison, and its words on a page.

Each module beside this one declares one task. The command line reads all of them for --help, so
they import numpy and the models inside functions.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from transferry.runtime.engine.preprocess import InLanguages, LongRows
from transferry.runtime.engine.prompts import Parts
from transferry.runtime.engine.result import PartsResult, with_blanks
from transferry.runtime.settings import Count

if TYPE_CHECKING:
    from transferry.runtime.decoding.generation_options import GenerationOptions
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.proof.compare import Tolerance
    from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

OutputFormat = Literal["text", "jsonl", "tsv", "csv", "parquet", "npy", "openai"]
# Type of a column in a table; of lists and objects as JSON has them, [type] and {name: type}.
Kind: TypeAlias = (
    Literal["text", "integer", "float", "boolean", "vector"] | Sequence[Any] | Mapping[str, Any]
)
TABLES: tuple[OutputFormat, ...] = ("jsonl", "tsv", "csv", "parquet")
LINES: tuple[OutputFormat, ...] = ("jsonl", "text", "tsv", "csv", "parquet")


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options of every task.

    Attributes:
        long_rows: Rows longer than the model's positions: an error, truncated, or split into
            sentences. Default: error; truncate for an encoder-only bundle with a longest row.
    """

    long_rows: LongRows | None = None


@dataclass(frozen=True, kw_only=True)
class TopOptions(RowOptions):
    """Options of tasks with several answers.

    Attributes:
        top: Candidates per mask, answers per row, or weights of a sparse vector. Default: 5; of
            answer 1, of embed all.
    """

    top: Count | None = None


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(RowOptions):
    """Languages of a job's rows.

    Attributes:
        source_language: Language of the rows, such as eng_Latn. Default: the bundle's own.
        target_language: Language of the outputs. Default: the bundle's own.
        source_language_column: Column with each row's language, else --source-language.
        target_language_column: Column with each output's language, else --target-language.
    """

    source_language: str | None = None
    target_language: str | None = None
    source_language_column: str | None = None
    target_language_column: str | None = None

    @property
    def spoken(self) -> dict[str, str | None]:
        """The options by name, in the order of a fingerprint."""
        names = ("source_language", "target_language")
        return {key: getattr(self, key) for name in names for key in (name, f"{name}_column")}

    def require(self, tokenizer: AnyTokenizer) -> None:
        """Raises UsageError for a language that the tokenizer lacks."""
        for name in ("source_language", "target_language"):
            if (language := getattr(self, name)) is not None:
                tokenizer.special.language(language)
            elif (column := getattr(self, f"{name}_column")) is not None:
                tokenizer.special.require_languages(f"the column {column}")

    def text_of(self, row: Any) -> Any:
        """Returns the text of a row with its languages; an error as it is."""
        source, target = row.languages
        source, target = source or self.source_language, target or self.target_language
        if source is target is None or not isinstance(row.text, str):
            return row.text
        return InLanguages(row.text, source, target)


@dataclass(frozen=True)
class Layout:
    """Columns and settings of an input, known before its rows are read.

    Attributes:
        path: The file, or words for several; "-" is standard input, which can be read once.
        format: Its format.
        columns: Fields that are passed through, in order: all but the text and `id`. In JSONL,
            where each row has its own, those of the first object.
        has_id: Whether rows have an id of their own.
        schema: Arrow schema of a columnar file; None for others.
        column: Field that holds the text.
        has_chat: Whether the rows are known to be chats.
        task: The task that the input sets.
        others: Fields that hold further texts, each answered too.
        names: All columns of a table, in order; empty for other inputs.
        delimiter: Character between the columns of CSV.
        mark: Byte order mark of TSV and CSV, if there is one.
    """

    path: Any
    format: str
    columns: tuple[str, ...]
    has_id: bool
    schema: Any = None
    column: str = ""
    has_chat: bool = False
    task: str | None = None
    others: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    delimiter: str = ","
    mark: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All fields that hold texts."""
        return self.column, *self.others

    def __str__(self) -> str:
        names = self.names or (*self.texts, *self.columns)
        return f"{self.format} with the columns {', '.join(names)}"


@dataclass(frozen=True)
class Bounds:
    """Limits within which rounding explains that two engines differ, and these engines.

    Attributes:
        served: The engine of the job.
        reference: The engine that computes rows again.
        tolerance: Limit on logits.
        vector: Limit on the entries of a vector, in units of its largest entry.
        score: Limit on the scores of a head.
        log_probability: Limit on the log-probability of a token, in nats.
    """

    served: Any
    reference: Any
    tolerance: Tolerance
    vector: float
    score: float
    log_probability: float


# How two results differ, "" within the bounds; and the number of near ties that differ.
Difference = tuple[str, int]


class Page(NamedTuple):
    """Words of a task on a page, and options of the engine's method there."""

    button: str
    label: str = "Text"
    example: str = "A sentence"
    options: Mapping[str, Any] = {}


def columns(**kinds: Kind) -> Mapping[str, Kind]:
    """Returns the columns of a table with their types, in order."""
    return kinds


class Task:
    """A task with its options, ready to run on any engine of the same bundle.

    Attributes:
        name: Its name on the command line; the engine's method has "_" for "-".
        command: The command that runs it.
        options: Type of its options.
        elsewhere: Options that `settings` leaves out: another key of a fingerprint holds them.
        columns: Types of its own columns in a table, in order; every task has more.
        in_json: Further columns in JSON.
        answer: The column with the answer.
        formats: Formats of its records.
        default_format: Format of an output whose name tells none.
        has_canary: Whether `same` can compare two results.
        page: Words of the task on a page; None where a page does not offer the task.
        settings: Options that decide the results, by name.
        arguments: Arguments of the engine's method.
        long_rows: Treatment of rows that are too long.
        generation: Generation options; None for tasks that generate nothing.
        width: Length of the vectors; 0 for tasks without vectors.
    """

    name: ClassVar[str]
    command: ClassVar[str] = "run"
    options: ClassVar[type[RowOptions]]
    elsewhere: ClassVar[frozenset[str]] = frozenset({"long_rows"})
    columns: Mapping[str, Kind]
    in_json: ClassVar[Mapping[str, Kind]] = {}
    answer: ClassVar[str] = "text"
    formats: tuple[OutputFormat, ...] = TABLES
    default_format: ClassVar[OutputFormat] = "jsonl"
    has_canary: ClassVar[bool] = True
    page: ClassVar[Page | None] = None

    generation: GenerationOptions | None = None
    width = 0

    def __init__(self, engine: OpenBundle, options: Any, layout: Layout) -> None:
        """Prepares the task for an input.

        Raises:
            InputError: The input lacks a column.
            ParityError: A required certificate does not cover the task or the search.
            UsageError: The bundle cannot do the task with these options.
        """
        engine.require_task(self.name)
        self.long_rows: LongRows = options.long_rows or "error"
        names = [each.name for each in fields(self.options) if each.name not in self.elsewhere]
        self.settings: dict[str, Any] = {name: getattr(options, name) for name in names}
        self.arguments = self.settings

    @classmethod
    def check(cls, options: Any) -> None:
        """Raises UsageError for options that conflict, before a bundle is opened."""

    def given(self, row: Any) -> Any:
        """Returns an `InputRow` as the engine takes it."""
        return row.text

    def whole(self, row: Any) -> Any:
        """Returns a row as the engine takes it: of several columns, each is an input."""
        if not row.others:
            return self.given(row)
        return Parts(tuple(map(self.given, row.singles)), cells=True)

    def key(self, given: Any) -> Any:
        """Returns the part of a row of `given` that decides its answer; None if its number does."""
        return given

    def run(self, engine: Any, rows: Iterator[Any], first: int) -> Iterator[Any]:
        """Yields the result of each row of `given`, in order; the first row has a number."""
        method = getattr(engine, self.name.replace("-", "_"))
        found: Iterator[Any] = method(rows, long_rows=self.long_rows, **self.arguments)
        return found

    def answers(self, engine: Any, rows: Iterator[Any], first: int) -> Iterator[Any]:
        """Yields the result of each row as `run` does; the rows may be `Parts`."""
        waiting: deque[Any] = deque()

        def inputs() -> Iterator[Any]:
            for row in rows:
                waiting.append(row)
                yield from row.inputs if isinstance(row, Parts) else (row,)

        with contextlib.closing(self.run(engine, inputs(), first)) as found:  # type: ignore[type-var]
            for one in found:
                row = waiting.popleft()
                if not isinstance(row, Parts):
                    yield one
                    continue
                parts = [one, *islice(found, len(row.inputs) - 1)]
                yield PartsResult.of(with_blanks(parts, self.answer) if row.cells else parts)

    def same(self, row: Any, again: Any, bounds: Bounds) -> Difference:
        """Compares results of the job and of the reference; both are answers."""
        raise NotImplementedError

    def same_row(self, row: Any, again: Any, bounds: Bounds, given: Any, number: int) -> Difference:
        """Compares as `same`, also given the row as the engine took it and its number."""
        return self.same(row, again, bounds)

    @property
    def n_best(self) -> int:
        """Limit on the hypotheses of a row."""
        return self.generation.n_best if self.generation else 1
