"""Output of a command for people: messages, progress bars, the summary of a job.

Messages on stderr may be lines of JSON, for systems that collect logs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from transferry.runtime.errors import BadRowsError
from transferry.runtime.jobs.formats.remote_file import RemoteFile
from transferry.runtime.stopping import at_stop
from transferry.runtime.tables import counted, printable

if TYPE_CHECKING:
    from transferry.runtime.jobs.job import Job
    from transferry.runtime.jobs.summary import Summary

# Seconds between two updates of a bar, and the least time over which a rate is taken: rows come in
# batches sorted by length and checks differ in cost, so a rate is taken over half the phase.
SHOW_EVERY, WINDOW = 0.2, 30.0
# Share of the total from which on the rest is estimated before a window is full, and the least
# width of a bar: notes that leave it no room are not shown.
ENOUGH, LEAST_BAR = 0.01, 6
# Options of a single call, which OUT.settings.toml does not repeat.
OF_ONE_CALL = ("quiet", "force", "as_json", "dry_run")
# Of a context of click: words that repeat the command.
COMMAND_LINE = f"{__name__}.command_line"


def logs_json() -> bool:
    """Whether messages on stderr are lines of JSON: TRANSFERRY_LOG=json."""
    return os.environ.get("TRANSFERRY_LOG") == "json"


def log_every() -> float:
    """Seconds between two lines of progress: TRANSFERRY_LOG_EVERY, or 30."""
    try:
        return float(os.environ.get("TRANSFERRY_LOG_EVERY", ""))
    except ValueError:
        return 30.0


def as_logged(message: str, level: str = "info", **fields: Any) -> str:
    """Returns a message as it is printed on stderr; in JSON with the time in UTC."""
    if not logs_json():
        return message
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = {"time": now, "level": level, "message": message, **fields}
    return json.dumps(record, ensure_ascii=False)


def say(line: str, **fields: Any) -> None:
    """Prints a message on stderr, with facts for a log of JSON; stdout is for data."""
    line = as_logged(printable(line), **fields)
    if (bars := sys.modules.get("tqdm")) and sys.stderr.isatty():
        bars.tqdm.write(line, file=sys.stderr)  # above the bar that is on the screen
    else:
        click.echo(line, err=True)


def show(text: str) -> None:
    """Prints a text for people on stdout."""
    click.echo(printable(text))


def show_verdict(text: str) -> None:
    """Prints a text whose first word is PASSED or FAILED; on a terminal in green or red."""
    word, rest = text[:6], text[6:]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        word = click.style(word, fg={"PASSED": "green", "FAILED": "red"}.get(word), bold=True)
    click.echo(f"{word}{printable(rest)}")


def teller(quiet: bool) -> Callable[[str], None]:
    """Returns `say`, or with --quiet a function that prints nothing."""
    return (lambda line: None) if quiet else say


class Progress:
    """How far a command is: on a terminal a bar for each phase, else a line every half minute.

    `unit` is the noun of the counted things, for a rate; no rate if empty.
    """

    def __init__(
        self,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[..., None] = say,
    ) -> None:
        self.unit, self.phase = unit, ""
        self._bar: Any = None
        self._clock, self._tell = clock, tell
        self._terminal = sys.stderr.isatty() and not logs_json()
        self._every = SHOW_EVERY if self._terminal else log_every()
        self._shown = 0.0
        self._samples: deque[tuple[float, int]] = deque()
        self._began = 0.0

    def show(
        self,
        phase: str,
        done: int,
        total: int | None = None,
        note: str = "",
        seconds_left: float = math.inf,
    ) -> None:
        """Shows a state, unless the last one was shown a moment ago.

        Another phase begins a new line; a limit ends this one after `seconds_left`.
        """
        now = self._clock()
        if phase != self.phase:
            self.close()
            self.phase, self._samples = phase, deque()
            self._shown = 0.0 if self._terminal else now
        if not self._samples:
            self._began = now
        lasted = now - self._began
        # A longer phase has coarser samples, a thousand in all.
        if not self._samples or now - self._samples[-1][0] >= max(SHOW_EVERY / 2, lasted / 2000):
            self._samples.append((now, done))
        window = max(WINDOW, lasted / 2)
        while len(self._samples) > 2 and self._samples[1][0] < now - window:
            self._samples.popleft()
        last = self._terminal and done == total
        if now - self._shown < self._every and not last:
            return
        self._shown = now
        told = [*self._pace(now, done, total, seconds_left), *filter(None, [note])]
        if self._terminal:
            self._draw(done, total, printable(", ".join(told)).split(", "))
        else:
            share = "" if not total else f" of {total:,} ({100 * done // total} %)"
            line = f"{phase}: " + ", ".join([f"{done:,}{share}", *told])
            self._tell(line, phase=phase, done=done, total=total)

    def _pace(self, now: float, done: int, total: int | None, seconds_left: float) -> Iterator[str]:
        """Yields the rate of the last half of the phase, and the time that is left at that rate."""
        began, first = self._samples[0]
        if now - began < 1 or done <= first:
            return
        rate = (done - first) / (now - began)
        if self.unit:
            yield f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.1f} {self.unit}/s"
        # The first rows of a batch say little of the rest.
        enough = total is not None and (done - first >= ENOUGH * total or now - began >= WINDOW / 2)
        seconds = (total - done) / rate if total is not None and enough else math.inf
        if 0 < (seconds := min(seconds, seconds_left)) < math.inf:
            left = timedelta(seconds=round(seconds))
            yield f"{str(left).removeprefix('0:')} left"

    def _draw(self, done: int, total: int | None, told: list[str]) -> None:
        from tqdm import tqdm

        # ^C of a terminal must not begin a new line, or the bar would stay twice.
        columns = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - len("^C") - 1
        counts = "{n:,} of {total:,}" if total is not None else "{n:,}"
        bar = "{desc} {percentage:3.0f} % {bar} " if total is not None else "{desc} "
        shape = f"{bar}{counts}{{postfix}}"
        if self._bar is None:
            tqdm.monitor_interval = 0  # no thread of its own
            self._bar = tqdm(
                desc=self.phase, file=sys.stderr, ncols=columns, mininterval=0, bar_format=shape
            )
        # The total may be an estimate, which changes.
        self._bar.ncols, self._bar.total, self._bar.bar_format = columns, total, shape
        counted = len(f"{self.phase} 100 %  {done:,}") + (len(f" of {total:,}") if total else 0)
        room = columns - counted - LEAST_BAR
        # Notes go first, then the rate; the time that is left comes last.
        while told and sum(len(word) + 2 for word in told) > room:
            told.pop(0 if told[-1].endswith(" left") else -1)
        self._bar.set_postfix_str(", ".join(told), refresh=False)
        self._bar.n = done
        self._bar.refresh()

    def close(self, *, interrupted: bool = False) -> None:
        """Removes the bar, which says nothing of a finished phase; one interrupted stays."""
        if self._bar is not None:
            self._bar.leave = interrupted
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def progress(quiet: bool, unit: str = "") -> Iterator[Callable[..., None]]:
    """Yields `Progress.show`, or with `quiet` a function that shows nothing."""
    if quiet:
        yield lambda *state: None
        return
    shown = Progress(unit)
    try:
        with at_stop(partial(shown.close, interrupted=True)):
            yield shown.show
    finally:
        shown.close()


def _show_rows(tell: Callable[..., None], summary: Summary) -> None:
    """Shows how far a job is."""
    errors = counted(summary.bad_rows, "error") if summary.bad_rows else ""
    done, note = summary.rows + summary.ahead, filter(None, [errors, summary.note])
    total = summary.total
    tell("rows", done if total is None else min(done, total), total, ", ".join(note))


@dataclass(frozen=True)
class Estimate:
    """Estimate of a whole job on this machine.

    Attributes:
        rows: Rows of the input.
        sampled: Rows that were computed for the estimate.
        bad_rows: Rows that will hold an error.
        source_tokens: Tokens to read.
        target_tokens: Tokens to generate, fill in or score.
        seconds: Time, with as many engines as workers.
        memory: Largest resident memory of this process so far, in bytes; None where the system
            does not say. A job of any length needs little more.
        workers: Processes that compute.
        cluster: Words on the cluster of a job on Ray.
    """

    rows: int
    sampled: int
    bad_rows: int
    source_tokens: int
    target_tokens: int
    seconds: float
    memory: int | None
    workers: int = 1
    cluster: str = ""

    def __str__(self) -> str:
        whole, on_ray = timedelta(seconds=round(self.seconds)), bool(self.cluster)
        lasts = f"about {whole} h" if whole else "less than a second"
        lines = [
            f"{counted(self.rows, 'row')}, about {self.source_tokens:,} tokens to read and "
            f"{self.target_tokens:,} to write, {counted(self.bad_rows, 'error')}",
            f"{lasts} ({self.rows / self.seconds:,.1f} rows/s)" if self.seconds else lasts,
        ]
        if self.memory is not None:
            lines.append(f"about {self.memory / 1e9:.1f} GB of memory{' a worker' * on_ray}")
        lines += [self.cluster] * on_ray
        lines.append(f"estimated from {counted(self.sampled, 'row')}; nothing was written")
        return "\n".join(lines)


def estimate(job: Job, most: int = 256) -> Estimate:
    """Reads all rows, computes at most `most` drawn at random, and writes nothing."""
    workers, cluster = job.runner.outlook(job)
    draw, sample, rows = random.Random(0), list[Any](), 0
    for row in job.rows(*job.row_range):  # algorithm R: each row is drawn as likely as any other
        rows += 1
        if len(sample) < most:
            sample.append(row)
        elif (place := draw.randrange(rows)) < most:
            sample[place] = row
    sample.sort(key=lambda row: row.number)
    began = time.monotonic()
    found = [result for _, result in job.results(iter(sample), 0)]
    seconds = time.monotonic() - began
    each = rows / max(1, len(sample))
    return Estimate(
        rows,
        len(sample),
        round(each * sum(result.error is not None for result in found)),
        round(each * sum(result.source_tokens for result in found)),
        round(each * sum(result.target_tokens for result in found)),
        round(each * seconds / workers, 3),
        _peak_memory(),
        workers,
        cluster,
    )


def _peak_memory() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # kilobytes on Linux


def run_job(job: Job, options: Mapping[str, Any]) -> None:
    """Runs a job, showing its progress and in the end its summary; may write the settings.

    Raises:
        BadRowsError: Some rows hold an error.
        KeyboardInterrupt: The job was interrupted; the message says how to continue it.
    """
    quiet = options["quiet"]
    if options["dry_run"]:
        found = estimate(job)
        show(json.dumps(asdict(found), indent=1) if options["as_json"] else str(found))
        return
    if not job.engine.certificate.startswith("none"):
        # OUT.summary.json has the cell and the whole hashes.
        short = re.sub(r" \([^()]*\)", "", job.engine.certificate)
        short = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", short)
        teller(quiet)(f"certificate {short}")
    settings = {name: _plain(value) for name, value in options.items() if name not in OF_ONE_CALL}
    command = f"continue with: {click.get_current_context().meta[COMMAND_LINE]}"
    try:
        with (
            at_stop(lambda: command if job.folder.exists() else None),
            progress(quiet, "rows") as tell,
        ):
            summary = job.run(partial(_show_rows, tell), say=teller(quiet), settings=settings)
    except KeyboardInterrupt as error:
        again = (f"{error}; {command}",) if error.args else ()
        raise KeyboardInterrupt(*again) from error
    show_summary(options["out"], summary, quiet=quiet, as_json=options["as_json"])


def _plain(value: Any) -> Any:
    """Returns an option as a settings file can hold it."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, Path | RemoteFile) else value


def show_summary(out: Path, summary: Summary, *, quiet: bool, as_json: bool) -> None:
    """Prints the summary of a finished job: for a person on stderr, as JSON on stdout.

    Raises BadRowsError if rows hold an error.
    """
    if not quiet:
        say(f"{out} was finished before: {summary}" if summary.finished_before else str(summary))
        if marks := summary.marks():
            found = ((name.replace("_", " "), value) for name, value in marks.items())
            say(
                ", ".join(
                    f"{name} {value:,.6f}" if isinstance(value, float) else f"{name} {value:,}"
                    for name, value in found
                    if value is not None
                )
            )
        if count := summary.repeated_ids:
            first = summary.first_repeated_id
            say(f"{counted(count, 'row')} with the custom_id of an earlier row, first {first!r}")
        if summary.special_texts:
            meant = summary.made.get("special_tokens", "as-text")
            say(
                f"{counted(summary.special_texts, 'row')} with text that looks like a special "
                f"token, read {meant} (--special-tokens)"
            )
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=1))
    if summary.bad_rows:
        raise BadRowsError(
            f"{summary.bad_rows} of {summary.rows} rows hold an error, the first: "
            f"{summary.first_error}"
        )
