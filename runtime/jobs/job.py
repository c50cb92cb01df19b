"""A job: one task over every row of a file, written in order to another, resumable at any point."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowResult
from transferry.runtime.engine.tasks.table import TASKS, default_task
from transferry.runtime.engine.tasks.task import Task
from transferry.runtime.errors import LOG, InputError, Option, TransferryError, UsageError
from transferry.runtime.io.atomic import durable_file, require_writable, standard_output, unwritable
from transferry.runtime.io.outputs import STANDARD_STREAM, require_own
from transferry.runtime.jobs.canary import Canary
from transferry.runtime.jobs.chunk_folder import ending_of
from transferry.runtime.jobs.formats.detection import named_format
from transferry.runtime.jobs.formats.openai_batch import Seen
from transferry.runtime.jobs.formats.readers import open_inputs, open_reader
from transferry.runtime.jobs.formats.records import ColumnChoice, Record, RowWriter
from transferry.runtime.jobs.formats.remote_file import RemoteFile
from transferry.runtime.jobs.formats.rows import InputRow, RowReader, changed, hash_rows, read_rows
from transferry.runtime.jobs.formats.sources import Inputs, open_sources, reads_once, sampled
from transferry.runtime.jobs.formats.writers import open_writer
from transferry.runtime.jobs.job_options import JobOptions, fraction
from transferry.runtime.jobs.journal import JOB_FORMAT, Chunk, Journal, differences, hash_of_hashes
from transferry.runtime.jobs.merge import join_remote
from transferry.runtime.jobs.output_files import (
    BESIDE,
    FOLDER,
    SETTINGS,
    check_output,
    foreign_output,
    remote_output,
)
from transferry.runtime.jobs.plan import (
    RESTORE,
    Runner,
    cut,
    hash_of_input,
    is_cut,
    partition_range,
)
from transferry.runtime.jobs.summary import SUMMARY, Summary, Tally, beside, read_summary
from transferry.runtime.settings import path_of, require_type, to_toml
from transferry.runtime.stopping import at_stop

# Of `Engine.describe`: what decides the numbers and does not belong to the machine.
DECISIVE = (
    *("manifest_sha256", "variant", "provider", "threads", "optimisation", "tf32"),
    *("transferry", "onnxruntime"),
)


class Job:
    """One run of a task over a file.

    The work is cut into chunks. A finished chunk is on the disk and in the journal, in the folder
    OUT.job, before the next begins; once all are finished the output appears, with
    OUT.summary.json. Whatever stops a job, another one with the same arguments continues it, and
    the output is the same to the byte.
    """

    def __init__(
        self,
        bundle: Engine | Path | str,
        inputs: Inputs,
        output: Path | str | RemoteFile,
        options: JobOptions | None = None,
        runner: Runner | None = None,
    ) -> None:
        """Opens everything; writes nothing yet.

        Args:
            bundle: An engine, or the folder of a bundle.
            inputs: File of the rows, or several, which are read one after another: paths, patterns
                such as "rows/*.jsonl", folders of Hugging Face datasets, URLs; "-" is stdin.
            output: File of the results; "-" is stdout, where a job cannot be resumed. A URL is a
                folder of parts, whose job folder lies in the working folder.
            options: Settings; all by default if not given.
            runner: Computes the chunks; this process if not given.

        Raises:
            InputError: The bundle or the input cannot be used.
            UsageError: The options do not fit each other, the bundle or the files.
        """
        require_type("options", options, JobOptions | None)
        require_type("runner", runner, Runner | None)
        self.options = options = options or JobOptions()
        self.remote = remote_output(output, options.partition)
        here = output if self.remote is None else Path.cwd() / self.remote.folder.name
        self.output = path_of("output", here)
        self.runner = runner or Runner()
        if self.output != STANDARD_STREAM and self.runner.owns_output:
            if self.remote is None:
                self.runner.check_kind(self.output)
            require_writable(self.output, BESIDE)
        self.sources = open_sources(inputs)
        if self.runner.owns_output:
            given = bundle.bundle.folder if isinstance(bundle, Engine) else bundle
            read = (*self.sources, options.target, path_of("bundle", given))
            local = [path for path in read if isinstance(path, Path)]
            foreign = self.runner.journal.foreign
            if self.remote is None:
                check_output(self.output, local, "job", force=options.force, foreign_folder=foreign)
            else:
                require_own(self.folder, foreign)
        if options.partition is not None and any(map(reads_once, self.sources)):
            raise UsageError("a partition needs a file that can be read twice, so no pipe or stdin")
        self.engine = bundle if isinstance(bundle, Engine) else Engine(bundle)
        self.reader, self.target = self._readers()
        self.layout = self.reader.layout
        name: Any = options.task or self.layout.task or default_task(self.engine.bundle)
        self.options = options = replace(options, task=name)
        self.task: Task = TASKS[name](self.engine, options, self.layout)
        self.writer = self._writer()
        self._is_cut, columns = is_cut(self), self.writer.columns
        if self._is_cut and columns is not None:
            self.writer = replace(self.writer, columns=replace(columns, numbers=False))
        every = options.canary and fraction(options.canary)[1]
        self.canary = Canary(self.engine, every, self.task) if every else None
        self._read, self._ran, self._cut = 0, False, dict[str, Any]()

    def _readers(self) -> tuple[RowReader, RowReader | None]:
        """Opens the input and the targets of its rows."""
        options = self.options
        reader = open_inputs(
            self.sources,
            format=options.format_in,
            column=options.messages or options.prompt_ids or options.column,
            lists=options.prompt_kind in ("messages", "ids"),
            languages=(options.source_language_column, options.target_language_column),
            **options.dialect,
        )
        if (task := reader.layout.task) and options.task not in (None, task):
            raise UsageError(
                f"{reader.layout.path} asks for task {task}, not {options.task}; add ",
                *(Option("task"), f" {task}"),
            )
        if options.target is None:
            return reader, None
        if options.target == STANDARD_STREAM in self.sources:
            raise UsageError("standard input cannot be the input and the targets; name a file")
        return reader, open_reader(options.target, format=options.format_in, **options.dialect)

    def _writer(self) -> RowWriter:
        """Returns the writer of the output."""
        options = self.options
        names = options.output_column, options.keep, options.drop
        return open_writer(
            self.output,
            format=options.format,
            rows=self.layout,
            task=self.task.name,
            kinds=self.task.columns,
            n_best=self.task.n_best,
            width=self.task.width,
            choice=ColumnChoice(*names, partial(sampled, self.reader)),
        )

    @property
    def readers(self) -> list[RowReader]:
        """Of the input, and of its targets if there are any."""
        return [self.reader, *([self.target] if self.target is not None else [])]

    @property
    def folder(self) -> Path:
        """The folder of finished chunks."""
        return beside(self.output, FOLDER)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that may change a byte of the output, as JSON values."""
        described, options = self.engine.describe(), self.options
        values = {
            "job_format": JOB_FORMAT,
            **{name: described.get(name) for name in DECISIVE},
            "task": self.task.name,
            **self.task.settings,
            "long_rows": self.task.long_rows,
            "input_format": self.layout.format,
            "column": options.column,
            "columns": self.layout.columns,
            "output_columns": self.writer.columns and self.writer.columns.names,
            "output_delimiter": self.layout.delimiter,
            **{name: getattr(options, name) for name in ("keep", "drop", "chunk_rows")},
            "has_id": self.layout.has_id,
            "output_format": self.writer.format,
            "compression": named_format(self.output)[1],
            "width": self.task.width,
        }
        versions = ["special_tokens", "transferry-kernels"]
        versions += ["sentencex"] if options.long_rows == "split" else []
        mark = self.layout.mark or None
        others = {**options.dialect, "limit": options.limit, "output_mark": mark}
        if (schema := getattr(self.writer, "schema", None)) is not None:
            others["types_and_metadata"] = hashlib.sha256(schema.serialize()).hexdigest()[:16]
        others |= {name: described.get(name) for name in versions}
        values |= {name: value for name, value in others.items() if value is not None}
        if options.partition is not None:
            rows = self.row_range  # counts the input
            values |= {"partition": options.partition, "rows": rows}
            whole = {"input_rows": self.reader.count}
            values |= self._cut or whole | {"input_sha256": hash_of_input(self.reader, self.target)}
        return cast(dict[str, Any], json.loads(json.dumps(values)))

    @cached_property
    def row_range(self) -> tuple[int, int | None]:
        """The job's first row, and a row that comes after its last; None if unknown."""
        if self.options.partition is None:
            return 0, self.options.limit
        if self._is_cut:
            self._cut = cut(self.reader, self.options, self.writer.columns)
            return 0, None
        local = self.remote is None and self.output != STANDARD_STREAM
        folder = self.output.parent if local else None
        return partition_range(self.reader, self.target, self.options, folder)

    def chunk_rows(self, first: int) -> int:
        """Returns the rows of a chunk that begins at a row, where the input does not end before."""
        return self.reader.chunk(first, self.options.chunk_rows)

    def count(self) -> int | None:
        """Returns the number of rows, where it is known without reading them."""
        (first, last), rows = self.row_range, self.reader.count
        return rows and (rows if last is None else min(rows, last)) - first

    def expected(self, done: int | None = None, place: Any = None) -> int | None:
        """Returns `count`, or an estimate from the bytes before row `done` at `place`, or read."""
        if (known := self.count()) is not None:
            return known
        if not (share := self.reader.share(place)):
            return None
        rows, last = round((self._read if done is None else done) / share), self.row_range[1]
        return rows if last is None else min(rows, last)

    def _check_run(self, watch: object, say: object, settings: object) -> None:
        require_type("watch", watch, Callable)
        require_type("say", say, Callable)
        require_type("settings", settings, Mapping | None)
        if self._ran:
            raise UsageError("a Job runs once, and this one did; make a new one to continue it")

    def run(
        self,
        watch: Callable[[Summary], None] = lambda summary: None,
        *,
        say: Callable[[str], None] = LOG.info,
        settings: Mapping[str, Any] | None = None,
    ) -> Summary:
        """Computes every row that is not computed yet.

        Args:
            watch: Called with the counts so far: after each row, or by Ray every second.
            say: Called with notes on an earlier run. Default: the log `transferry`.
            settings: What to write into OUT.settings.toml, if anything.

        Raises:
            InputError: The input cannot be read or the output cannot be written, too many rows
                have errors, or the interrupted job has other settings.
            KeyboardInterrupt: The job was interrupted; the message says what is saved.
            ParityError: The canary found a defect.
            UsageError: The output exists, or another job writes it.
        """
        self._check_run(watch, say, settings)
        self._ran, summary = True, Summary()
        add = partial(self._add, summary)
        if self.output == STANDARD_STREAM:
            found = self.results(self.rows(*self.row_range), self.row_range[0])
            counting = self.counting(summary, add, watch)
            with standard_output() as file, counting as count, closing(found) as results:
                self.write(results, file, self.row_range[0], count)
            summary.made = self._made()
            return summary
        with self._telling_saved(summary), self.runner.journal.locked(self.folder) as journal:
            if (record := self._former()) is not None:
                finished = self._finished(record)
                if self.remote is not None:
                    self._complete(say)
                if journal.former() in (None, self.fingerprint):
                    journal.clear()
                return finished
            if note := journal.begin(self.fingerprint, force=self.options.force):
                say(note)
            if journal.rows:
                say(self._resumed(journal.rows))
            summary.resumed = journal.session
            self.runner.run(self, journal, summary, add, watch)
            texts = partial(self._texts, journal, summary, settings)
            if self.remote is not None:
                watch(replace(summary, note=f"uploading to {self.remote.folder}"))
                end, begin = ending_of(self.fingerprint), self._cut.get("bytes", [0])[0]
                self.remote.publish(journal.parts, end, texts, begin)
                self._complete(say)
            else:
                if not self.options.force:  # it may have appeared since the job began
                    require_own(self.output, lambda path: foreign_output(path, "job"))
                self.runner.publish(self, journal, partial(self._describe, journal, texts))
            journal.clear()
        return summary

    def _add(self, summary: Summary, tally: Tally) -> None:
        """Adds counts to a summary; raises InputError after too many errors."""
        summary.add(tally)
        most = self.options.max_errors
        if most is not None and summary.bad_rows > most:
            told = f"more than {most} rows are bad, the first of them: {summary.first_error}. Fix "
            raise InputError(told, "the input, or allow more with ", Option("max_errors"))

    @contextmanager
    def _telling_saved(self, summary: Summary) -> Iterator[None]:
        """Adds the number of saved rows to the message of an error or interruption."""
        try:
            with at_stop(lambda: self._saved(summary.saved) if summary.saved else None):
                yield
        except OSError as error:
            if not summary.saved:
                raise unwritable(self.output, error) from error
            kept = f"; {self._saved(summary.saved)}"
            raise unwritable(self.output, error, kept, ", and run the job again") from error
        except (KeyboardInterrupt, TransferryError) as error:
            if not summary.saved:
                raise
            saved = f"{'; ' if str(error) else ''}{self._saved(summary.saved)}"
            if isinstance(error, TransferryError):
                raise type(error)(*error.parts, saved) from error
            raise KeyboardInterrupt(f"{error}{saved}") from error

    @contextmanager
    def counting(
        self, summary: Summary, add: Callable[[Tally], None], watch: Callable[[Summary], None]
    ) -> Iterator[Callable[[Tally], None]]:
        """Yields `add` for single rows; `watch` is called for each, and while one is awaited.

        Rows are computed by length, thousands at once, and written in order, so `ahead` counts too.
        """

        def waiting(ahead: int) -> None:
            summary.ahead, summary.total = ahead, self.expected()
            watch(summary)

        def count(tally: Tally) -> None:
            add(tally)
            summary.ahead, summary.total = max(0, summary.ahead - tally.rows), self.expected()
            watch(summary)

        with self.engine.watched(waiting):
            yield count

    def _saved(self, rows: int) -> str:
        of = f" of {known:,}" if (known := self.count()) is not None else ""
        return f"{rows:,}{of} rows are saved in {self.folder}"

    def _resumed(self, rows: int) -> str:
        """Says how far an earlier run came and which settings this run shares with it."""
        usual = asdict(GenerationOptions()) if self.task.generation else {}
        chosen = [name for name, value in self.task.settings.items() if value != usual.get(name)]
        names = ("task", "variant", *chosen, "column", "limit", "partition", "chunk_rows")
        settings = {name: self.fingerprint.get(name) for name in names}
        told = ", ".join(
            f"{name.replace('_', '-')} {', '.join(value) if name == 'column' else value}"
            for name, value in settings.items()
            if value is not None and value is not False and value != []
        )
        start = f", from row {self.row_range[0] + rows + 1:,} on" if self.runner.in_order else ""
        return f"{self._saved(rows)}; this run computes the rest{start}, with {told}"

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        """Streams rows first to last - 1 of the input, with their targets if there are any."""
        for row in read_rows(self.reader, self.target, first, last):
            self._read = row.number + 1
            yield row

    def require_unchanged(self, chunk: Chunk, rows: Iterable[InputRow]) -> None:
        """Raises InputError if the input rows of a finished chunk are not what they were."""
        if hash_rows(rows) != (chunk.rows, chunk.source_sha256):
            end = chunk.first + chunk.rows
            told = f"{changed(self.readers, chunk.first, end)}: rows {chunk.first + 1} to {end} "
            raise InputError(told, "are not those that were computed. ", *RESTORE)

    def results(
        self, rows: Iterator[InputRow], first: int
    ) -> Generator[tuple[InputRow, RowResult], None, None]:
        """Yields each row with its result, in order; `first` is the number of the first row."""
        kept = deque[InputRow]()  # `tee` would keep 57 more: it frees rows in blocks

        def read() -> Iterator[Any]:
            for row in map(self.writer.admit, rows):
                kept.append(row)
                yield self.task.whole(row)

        found = self.task.answers(self.engine, read(), first * len(self.layout.texts))
        with closing(cast("Generator[RowResult, None, None]", found)):
            for result in found:
                yield kept.popleft(), result
        if kept:
            raise ValueError(f"{len(kept)} rows have no result")

    def write(
        self,
        results: Iterable[tuple[InputRow, RowResult]],
        file: BinaryIO,
        first: int,
        add: Callable[[Tally], None],
    ) -> Chunk:
        """Writes rows into one file, and calls `add` with the counts of each one written."""
        chunk, digest = Chunk(first=first), hashlib.sha256()
        # In this chunk: neither interruptions nor workers change the counts.
        seen, ids = Seen(), Seen()
        names, looks_special = self.layout.texts, self.engine.bundle.tokenizer.looks_special

        def records() -> Iterator[Record]:
            before = time.monotonic()
            for row, result in results:
                given = self.task.whole(row)
                if self.canary is not None:
                    self.canary.check(row.number, result, given, row.number * len(names))
                yield self.writer.record(row, result, self.task.n_best)
                row.update(digest)
                now = time.monotonic()
                tally = Tally.of(row.number, result, now - before, names)
                tally.special_texts = int(any(map(looks_special, result.texts)))
                if result.error is None and (key := self.task.key(given)) is not None:
                    tally.repeated = int(seen.again(key))
                if self.layout.format == "openai" and ids.again(row.id):
                    tally.repeated_ids, tally.first_repeated_id = 1, str(row.id)
                before = now
                chunk.add(tally)
                add(tally)

        self.writer.write(records(), file)
        chunk.source_sha256 = digest.hexdigest()
        return chunk

    def _texts(
        self, journal: Journal, summary: Summary, settings: Mapping[str, Any] | None, digest: str
    ) -> dict[str, str]:
        """Returns the texts of the summary and the settings."""
        sources = hash_of_hashes(chunk.source_sha256 for chunk in journal.chunks if chunk.rows)
        summary.made = self._made() | {"source_sha256": sources, "sha256": digest}
        texts = {SUMMARY: summary.document()}
        if settings is not None:
            texts[SETTINGS] = to_toml(settings, summary.plain())
        return texts

    def _describe(
        self, journal: Journal, texts: Callable[[str], Mapping[str, str]], digest: str
    ) -> None:
        """Writes the summary and the settings beside the output."""
        for suffix, text in texts(digest).items():
            with durable_file(beside(self.output, suffix), journal.folder) as file:
                file.write(text.encode())

    def _complete(self, say: Callable[[str], None]) -> None:
        """Completes the output of partitions elsewhere, or says what is lacking."""
        if self.remote is None or self.options.partition is None:
            return
        if note := join_remote(self.remote, fraction(self.options.partition)[1]):
            say(note)

    def _made(self) -> dict[str, Any]:
        tally = self.canary.tally() if self.canary is not None else {}
        made = {"fingerprint": self.fingerprint, **self.engine.describe(), **tally}
        return {**made, **self.runner.about}

    def _former(self) -> dict[str, Any] | None:
        """Returns the summary of an existing output, if it is not to be replaced."""
        if self.remote is not None:
            return self.remote.begin(self.fingerprint, force=self.options.force)
        if not self.output.exists() or self.options.force:
            return None
        require_own(self.output, lambda path: foreign_output(path, "job"))
        return read_summary(self.output)

    def _finished(self, record: dict[str, Any]) -> Summary:
        """Returns the summary of the existing output, which this job must have written."""
        refusal = f"{self.output if self.remote is None else self.remote.folder} exists already"
        remedy = "; add ", Option("force"), " to replace it"
        if changes := differences(record["fingerprint"], self.fingerprint):
            raise UsageError(f"{refusal}, and ", *changes, *remedy)
        rows, first, hashes = self.rows(*self.row_range), self.row_range[0], list[str]()
        while (found := hash_rows(islice(rows, self.chunk_rows(first))))[0]:
            first += found[0]
            hashes.append(found[1])
        if hash_of_hashes(hashes) != record.get("source_sha256"):
            raise UsageError(f"{refusal}, and {changed(self.readers)} since", *remedy)
        summary = Summary.from_dict(record)
        summary.finished_before = True
        return summary
