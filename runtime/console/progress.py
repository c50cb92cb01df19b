"""What a person sees of a command: messages, progress bars, the summary of a job."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from transferry.runtime.console.options import COMMAND_LINE
from transferry.runtime.errors import BadRowsError
from transferry.runtime.stopping import at_stop
from transferry.runtime.tables import printable

if TYPE_CHECKING:
    from transferry.runtime.jobs.job import Job
    from transferry.runtime.jobs.summary import Summary

# Seconds between two lines of progress, and between two updates of a bar.
LOG_EVERY, SHOW_EVERY = 30.0, 0.2
# Options of a single call, which OUT.settings.toml does not repeat.
OF_ONE_CALL = ("quiet", "force", "as_json")


def say(line: str) -> None:
    """Prints a message on stderr; stdout is for data."""
    click.echo(printable(line), err=True)


def show(text: str) -> None:
    """Prints a text for people on stdout."""
    click.echo(printable(text))


def teller(quiet: bool) -> Callable[[str], None]:
    """Returns `say`, or with --quiet a function that prints nothing."""
    return (lambda line: None) if quiet else say


@contextlib.contextmanager
def progress(label: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr if that is a terminal.

    Args:
        label: Text before the bar.
        quiet: Show nothing.

    Yields:
        A function that takes the units done, the units in total, and a note to show behind the bar.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    bar: Any
    with (
        at_stop(_show_cursor),
        click.progressbar(
            length=1,
            label=label,
            file=sys.stderr,
            item_show_func=lambda item: printable(str(item or "")),
        ) as bar,
    ):

        def show(done: int, total: int, note: str = "") -> None:
            bar.length = total
            bar.update(done - bar.pos, note)

        yield show


def _show_cursor() -> None:
    """Ends the line of a bar, which hides the cursor (ECMA-48, DECTCEM)."""
    os.write(2, b"\x1b[?25h\n")


@contextlib.contextmanager
def _watching(job: Job, *, stdin: bool, quiet: bool) -> Iterator[Callable[[Summary], None]]:
    """Shows how far a job is: a bar on a terminal, else a line every `LOG_EVERY` seconds."""
    has_bar = sys.stderr.isatty() and not stdin and not quiet  # the rows of stdin are not counted
    total = job.count() if has_bar else None
    every, shown = (SHOW_EVERY if has_bar else LOG_EVERY), time.monotonic()
    with progress("running", not has_bar) as show:

        def watch(summary: Summary) -> None:
            nonlocal shown
            if time.monotonic() - shown < every and summary.rows != total:
                return
            shown = time.monotonic()
            if has_bar:
                show(summary.rows, total, summary)
            elif not quiet:
                say(str(summary))

        yield watch


def run_job(job: Job, options: Mapping[str, Any]) -> None:
    """Runs a job, showing its progress and in the end its summary.

    Args:
        job: The job.
        options: The command's options; OUT.settings.toml repeats them.

    Raises:
        BadRowsError: Some rows hold an error.
        KeyboardInterrupt: The job was interrupted; the message says how to continue it.
    """
    quiet, stdin = options["quiet"], str(options["text"]) == "-"
    if not job.engine.certificate.startswith("none"):
        teller(quiet)(f"certificate {job.engine.certificate}")
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name not in OF_ONE_CALL
    }
    command = f"continue with: {click.get_current_context().meta[COMMAND_LINE]}"
    try:
        with (
            at_stop(lambda: command if job.folder.exists() else None),
            _watching(job, stdin=stdin, quiet=quiet) as watch,
        ):
            summary = job.run(watch, say=teller(quiet), settings=settings)
    except KeyboardInterrupt as error:
        again = (f"{error}; {command}",) if error.args else ()
        raise KeyboardInterrupt(*again) from error
    show_summary(options["out"], summary, quiet=quiet, as_json=options["as_json"])


def show_summary(out: Path, summary: Summary, *, quiet: bool, as_json: bool) -> None:
    """Prints the summary of a finished job: for a person on stderr, as JSON on stdout.

    Raises:
        BadRowsError: Some rows hold an error.
    """
    if not quiet:
        say(f"{out} was finished before: {summary}" if summary.finished_before else str(summary))
        if marks := summary.marks():
            say(", ".join(f"{name} {value}" for name, value in marks.items()))
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=1))
    if summary.bad_rows:
        raise BadRowsError(
            f"{summary.bad_rows} of {summary.rows} rows could not be answered and hold an error "
            f"instead, the first of them: {summary.first_error}"
        )
