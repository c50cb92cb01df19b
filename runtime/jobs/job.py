"""A job: every row of a file answered, in order, in another file, and nothing lost on the way."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice, tee, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.score import ScoreResult
from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.files import durable_file, sha256, standard_output
from transferry.runtime.jobs.canary import Canary, share
from transferry.runtime.jobs.journal import (
    BESIDE,
    OUTPUT,
    Journal,
    Shard,
    Tally,
    differences,
    hash_of_hashes,
    hash_output,
)
from transferry.runtime.jobs.options import JobOptions, SinkFormat, Task
from transferry.runtime.jobs.readers import Source, named_format, open_source
from transferry.runtime.jobs.rows import SourceRow
from transferry.runtime.jobs.tasks import Answer, Answering, Pair, item_of, record_of
from transferry.runtime.jobs.writers import open_sink
from transferry.runtime.settings import to_toml

STANDARD_STREAM = Path("-")
# Of what describes an engine: what decides the numbers and is not the machine's own.
DECISIVE = (
    *("manifest_sha256", "variant", "provider", "threads", "optimisation", "tf32"),
    *("transferry", "onnxruntime"),
)


@dataclass
class Summary(Tally):
    """What a job has done so far, or in all.

    Attributes:
        saved: Rows of finished shards: those that an interruption cannot lose.
        resumed: How often a run of the job went on with what another had finished.
        finished_before: Whether there was nothing to do.
        made: What explains the output, as JSON values: fingerprint, versions, hashes.
    """

    saved: int = 0
    resumed: int = 0
    finished_before: bool = False
    made: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts, with rates a second, and what explains them."""
        return {
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "errors": self.errors,
            "first_error": self.first_error,
            "truncated": self.truncated,
            "source_tokens": self.source_tokens,
            "target_tokens": self.target_tokens,
            "log_probability": self.log_probability,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows / max(self.seconds, 1e-9), 1),
            "target_tokens_per_second": round(self.target_tokens / max(self.seconds, 1e-9), 1),
            "resumed": self.resumed,
            **self.marks(),
            **self.made,
        }

    def marks(self) -> dict[str, float]:
        """What there is to be told of scores or a canary, besides the counts."""
        marks = {name: self.made[name] for name in self.made if name.startswith("canaries")}
        fingerprint = self.made.get("fingerprint", {})
        if fingerprint.get("task") == "score":
            marks["scored_tokens"] = self.target_tokens
            marks["log_probability"] = round(self.log_probability, 6)
            if self.target_tokens:
                mean = -self.log_probability / self.target_tokens
                marks["perplexity"] = round(math.exp(mean), 6)
        return marks

    def __str__(self) -> str:
        """Says in a line how far it is."""
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.rows} rows in {self.seconds:.1f} s, {self.bad_rows} errors, "
            f"{self.rows / seconds:,.0f} rows/s, {self.target_tokens / seconds:,.0f} tokens/s"
        )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Summary:
        """Returns the summary that `to_dict` made the record of."""
        known = {item.name for item in fields(cls)}
        made = {name: value for name, value in record.items() if name not in known}
        return cls(**{name: record[name] for name in known & record.keys()}, made=made)

    def plain(self) -> dict[str, Any]:
        """Returns what a flat file can hold of `to_dict`."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if value is not None and not isinstance(value, dict)
        }


class Job:
    """One run over a file.

    The work is cut into shards. A finished shard is on the disk and in the journal, in the folder
    OUT.job, before the next is begun; the output appears when all are finished, together with
    OUT.summary.json. Whatever stops a job, another with the same arguments goes on where it was,
    and the output is the same to the byte.
    """

    journal: type[Journal] = Journal

    def __init__(
        self,
        bundle: Engine | Path | str,
        source: Path | str,
        sink: Path | str,
        options: JobOptions | None = None,
    ) -> None:
        """Opens everything, and changes nothing yet.

        Args:
            bundle: What answers.
            source: Where the rows come from; "-" is stdin.
            sink: Where the answers go; "-" is stdout, which cannot be gone on with.
            options: Settings; all by default if not given.

        Raises:
            InputError: The bundle or the source cannot be used.
            UsageError: The options do not fit each other, the bundle or the files.
        """
        self.options = options = options or JobOptions()
        self.path = Path(sink)
        self._check_path(Path(source))
        if options.share is not None and Path(source) == STANDARD_STREAM:
            raise UsageError("a shard is counted out of the whole input, so it cannot be stdin")
        self.engine = bundle if isinstance(bundle, Engine) else Engine.load(bundle)
        self.answering = Answering.of(self.engine, options)
        self.source = open_source(Path(source), format=options.format_in, column=options.column)
        self.target = None
        if options.target is not None:
            self.target = open_source(options.target, format=options.format_in)
        self.sink = open_sink(
            self.path,
            format=options.format or _named_sink(self.path, options.task),
            source=self.source,
            task=options.task,
            n_best=self.answering.n_best > 1,
            width=self.answering.width,
        )
        self.canary = None
        if options.canary is not None:
            generation = self.answering.generation
            self.canary = Canary(self.engine, share(options.canary), self.answering.ask, generation)

    def _check_path(self, source: Path) -> None:
        """Refuses to lose a file."""
        if self.path == STANDARD_STREAM or not self.path.exists():
            return
        if source.exists() and self.path.samefile(source):
            raise UsageError(f"{self.path} is the input; name another file for the output")
        if not self.path.is_file():
            raise UsageError(f"{self.path} is no file, so it is not replaced; name another")

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What may change a byte of the output, as JSON values."""
        described = self.engine.describe()
        options = self.options
        values = {
            **{name: described.get(name) for name in DECISIVE},
            "task": options.task,
            **self.answering.settings,
            "long_rows": options.long_rows,
            "input_format": self.source.format,
            "column": options.column,
            "columns": self.source.columns,
            "has_id": self.source.has_id,
            "output_format": self.sink.format,
            "compression": named_format(self.path)[1],
            "width": self.answering.width,
            "shard_rows": options.shard_rows,
        }
        if options.long_rows == "split":
            values["sentencex"] = described.get("sentencex")
        if options.share is not None:
            rows, digest = self._whole
            values |= {"shard": options.shard, "input_rows": rows, "input_sha256": digest}
        return cast(dict[str, Any], json.loads(json.dumps(values)))

    @cached_property
    def _whole(self) -> tuple[int, str]:
        return hash_rows(self._rows())

    @cached_property
    def _range(self) -> tuple[int, int | None]:
        """The first row of the job, and that after the last if it is not the input's end."""
        if self.options.share is None:
            return 0, None
        number, shards = self.options.share
        rows, _ = self._whole
        return rows * (number - 1) // shards, rows * number // shards

    def count(self) -> int:
        """Returns how many rows the job has, by reading them all; of stdin that cannot be."""
        first, last = self._range
        return (self._whole[0] if last is None else last) - first

    def run(
        self,
        watch: Callable[[Summary], None] = lambda summary: None,
        *,
        say: Callable[[str], None] = lambda line: None,
        settings: Mapping[str, Any] | None = None,
    ) -> Summary:
        """Answers every row that is not answered yet.

        Args:
            watch: Called with the counts so far after each answer.
            say: Told what a person should know of an earlier run.
            settings: What to write into OUT.settings.toml, if anything.

        Raises:
            InputError: The source cannot be read or the sink cannot be written, too many rows are
                bad, or an interrupted job does not fit.
            KeyboardInterrupt: It was interrupted, and what it saved is in OUT.job.
            ParityError: The canary found a defect.
            UsageError: The output exists, or another job writes it.
        """
        if self.path == STANDARD_STREAM:
            return self._run_through(watch)
        folder = self._beside(".job")
        summary = Summary()
        try:
            with self.journal.locked(folder) as journal:
                return self._run(journal, summary, watch, say, settings)
        except OSError as error:
            kept, remedy = "nothing was written", "Free some space or choose another place."
            if summary.saved:
                kept, remedy = self._kept(summary), "Free some space, and run the same again."
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror or error}; {kept}. {remedy}"
            ) from error
        except (KeyboardInterrupt, TransferryError) as error:
            if not summary.saved:
                raise
            message = "; ".join(filter(None, (str(error), self._kept(summary))))
            raise type(error)(message) from error

    def _kept(self, summary: Summary) -> str:
        of = f" of {self.count()}" if "_whole" in vars(self) else ""
        return f"{summary.saved}{of} rows are saved in {self._beside('.job')}"

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _run_through(self, watch: Callable[[Summary], None]) -> Summary:
        summary = Summary(made=self._made())
        rows = self._rows(*self._range)
        with standard_output() as file, closing(self._answered(rows, self._range[0])) as answered:
            self._write(answered, file, summary, summary, watch)
        return summary

    def _run(
        self,
        journal: Journal,
        summary: Summary,
        watch: Callable[[Summary], None],
        say: Callable[[str], None],
        settings: Mapping[str, Any] | None,
    ) -> Summary:
        if self.path.exists() and not self.options.force:
            finished = self._finished()
            if journal.former() in (None, self.fingerprint):
                journal.clear()
            return finished
        if note := journal.begin(self.fingerprint, force=self.options.force):
            say(note)
        self._answer_rest(journal, summary, watch, say)
        self._publish(journal, summary, settings)
        return summary

    def _answer_rest(
        self,
        journal: Journal,
        summary: Summary,
        watch: Callable[[Summary], None],
        say: Callable[[str], None],
    ) -> None:
        """Finishes every shard that is not finished yet."""
        rows = self._rows(*self._range)
        self._skip(rows, journal)
        for shard in journal.shards:
            summary.add(shard)
        summary.resumed, summary.saved = journal.session, journal.rows
        if summary.saved:
            say(f"{self._kept(summary)}; this run goes on behind them")
        self._check_errors(summary)
        first, most = self._range[0], self.options.shard_rows
        with closing(self._answered(rows, first + journal.rows)) as answered:
            while not _is_complete(journal, most):
                shard = Shard(first=first + journal.rows)
                with journal.part() as file:
                    some = islice(answered, most)
                    shard.source_sha256 = self._write(some, file, shard, summary, watch)
                journal.append(shard)
                summary.saved = journal.rows

    def _rows(self, first: int = 0, last: int | None = None) -> Iterator[SourceRow]:
        rows = self.source.rows(first, last)
        return rows if self.target is None else pairs(rows, self.target, first, last)

    def _skip(self, rows: Iterator[SourceRow], journal: Journal) -> None:
        """Reads the rows that are finished, which must be those that were answered."""
        message = "Restore it, or add --force to throw away what was saved"
        for shard in journal.shards:
            if hash_rows(islice(rows, shard.rows)) != (shard.rows, shard.source_sha256):
                raise InputError(
                    f"{self.source.path} has changed: rows {shard.first + 1} to "
                    f"{shard.first + shard.rows} are not those that were answered. {message}"
                )
        if _is_complete(journal, self.options.shard_rows) and next(rows, None) is not None:
            raise InputError(f"{self.source.path} has grown since its end was answered. {message}")

    def _answered(
        self, rows: Iterator[SourceRow], first: int
    ) -> Generator[tuple[SourceRow, Answer], None, None]:
        """Each row with its answer, in order."""
        kept, asked = tee(map(self.sink.admit, rows))
        items = (item_of(row, self.options.task) for row in asked)
        answers = self.answering.ask(self.engine, items, first)
        with closing(cast("Generator[Answer, None, None]", answers)):
            yield from zip(kept, answers, strict=True)

    def _write(
        self,
        answered: Iterable[tuple[SourceRow, Answer]],
        file: BinaryIO,
        shard: Tally,
        summary: Summary,
        watch: Callable[[Summary], None],
    ) -> str:
        """Writes rows into one file, counts them, and returns the hash of what came in."""
        writer, digest, before = self.sink.open(file), hashlib.sha256(), time.monotonic()
        for row, answer in answered:
            if self.canary is not None and not isinstance(answer, ScoreResult):
                self.canary.check(row.number, answer)
            writer.write(record_of(row, answer, self.answering.n_best))
            _update(digest, row)
            now = time.monotonic()
            tally = tally_of(row, answer, now - before)
            before = now
            shard.add(tally)
            if summary is not shard:
                summary.add(tally)
            self._check_errors(summary)
            watch(summary)
        writer.close()
        return digest.hexdigest()

    def _check_errors(self, summary: Summary) -> None:
        most = self.options.max_errors
        if most is not None and summary.bad_rows > most:
            raise InputError(
                f"more than {most} rows are bad, the first of them: {summary.first_error}. Mend "
                "the input, or allow more with --max-errors"
            )

    def _publish(
        self, journal: Journal, summary: Summary, settings: Mapping[str, Any] | None
    ) -> None:
        """Gives the output its name, last of all: where it is, all is."""
        joined = journal.folder / OUTPUT
        with durable_file(self.path, joined) as file:
            self.sink.join(journal.parts, file)
            file.flush()
            self._explain(journal, summary, settings, sha256(joined))
        journal.clear()

    def _explain(
        self,
        journal: Journal,
        summary: Summary,
        settings: Mapping[str, Any] | None,
        output_sha256: str,
    ) -> None:
        """Writes what lies beside the output."""
        sources = hash_of_hashes(shard.source_sha256 for shard in journal.shards)
        summary.made = self._made() | {"source_sha256": sources, "sha256": output_sha256}
        texts = {".summary.json": f"{json.dumps(summary.to_dict(), indent=1)}\n"}
        if settings is not None:
            texts[".settings.toml"] = to_toml(settings, summary.plain())
        for suffix, text in texts.items():
            with durable_file(self._beside(suffix), journal.folder / BESIDE) as beside:
                beside.write(text.encode(errors="replace"))

    def _made(self) -> dict[str, Any]:
        tally = self.canary.tally() if self.canary is not None else {}
        return {"fingerprint": self.fingerprint, **self.engine.describe(), **tally}

    @property
    def certificate(self) -> str:
        """What is known of the answers, for whoever reads them; see `Engine.certificate`."""
        return self.engine.certificate

    def _finished(self) -> Summary:
        """The summary of the output that exists, which this very job must have made."""
        refusal = f"{self.path} exists already"
        remedy = "add --force to replace it"
        record = read_summary(self.path)
        if record is None or record["sha256"] != hash_output(self.path):
            raise UsageError(f"{refusal}; {remedy}")
        if changes := differences(record["fingerprint"], self.fingerprint):
            raise UsageError(f"{refusal}, and {'; '.join(changes)}; {remedy}")
        rows, sources = self._rows(*self._range), []
        count = most = self.options.shard_rows
        while count == most:
            count, found = hash_rows(islice(rows, most))
            sources.append(found)
        if hash_of_hashes(sources) != record.get("source_sha256"):
            raise UsageError(f"{refusal}, and {self.source.path} has changed since; {remedy}")
        summary = Summary.from_dict(record)
        summary.finished_before = True
        return summary


def _named_sink(path: Path, task: Task) -> SinkFormat | None:
    """The format where a name says none: scores are no text, so JSONL is the plainest."""
    known = named_format(path)[0] in get_args(SinkFormat)
    return "jsonl" if task == "score" and not known else None


def tally_of(row: SourceRow, answer: Answer, seconds: float) -> Tally:
    """Counts one row."""
    tally = Tally(
        rows=1,
        truncated=int(answer.truncated),
        source_tokens=answer.source_tokens,
        target_tokens=answer.target_tokens,
        seconds=seconds,
    )
    if isinstance(answer, ScoreResult):
        tally.log_probability = answer.total
    if answer.error is not None:
        tally.errors = {answer.error.kind: 1}
        tally.first_error = f"row {row.number + 1}: {answer.error.message}"
    return tally


def pairs(
    rows: Iterator[SourceRow], target: Source, first: int, last: int | None
) -> Iterator[Pair]:
    """Joins rows with those of another input.

    Raises:
        InputError: One input ends before the other.
    """
    for row, other in zip_longest(rows, target.rows(first, last)):
        if row is None or other is None:
            longer = f"{target.path} goes on" if row is None else f"{target.path} ends"
            number = (row or other).number
            raise InputError(
                f"{longer} behind row {number} of the other input; give files of equal length"
            )
        raw = b"%d %b%b" % (len(row.raw), row.raw, other.raw)
        yield Pair(row.number, row.id, row.text, row.fields, raw, other.text)


def hash_rows(rows: Iterable[SourceRow]) -> tuple[int, str]:
    """Returns the number of rows and the hash of what they were read from."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        _update(digest, row)
        count += 1
    return count, digest.hexdigest()


def read_summary(output: Path) -> dict[str, Any] | None:
    """Reads what lies beside an output; None where that is nothing, or no summary of a job."""
    try:
        record = json.loads(output.with_name(f"{output.name}.summary.json").read_bytes())
    except (OSError, ValueError):
        return None
    needed = {"fingerprint", "sha256", "rows"}
    return record if isinstance(record, dict) and needed <= record.keys() else None


def _update(digest: hashlib._Hash, row: SourceRow) -> None:
    digest.update(b"%d " % len(row.raw))
    digest.update(row.raw)


def _is_complete(journal: Journal, shard_rows: int) -> bool:
    """Whether the last shard is finished, which is the one with fewer rows than the others."""
    return bool(journal.shards) and journal.shards[-1].rows < shard_rows
