"""The files of an output: results, summary, settings and job folder, and who wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from transferry.runtime.errors import InputError
from transferry.runtime.io.outputs import STANDARD_STREAM, foreign_file, require_apart, require_own
from transferry.runtime.jobs.journal import CHUNKS, JOB, JOURNAL, hash_output
from transferry.runtime.jobs.summary import read_summary
from transferry.runtime.settings import foreign_settings

# Files beside the output, by their suffixes.
SUMMARY, SETTINGS, FOLDER = BESIDE = (".summary.json", ".settings.toml", ".job")
# Folder beside the outputs of partitions: numbers of lines, which each of them counts in part.
LINES = ".transferry-lines"


def beside(output: Path, suffix: str) -> Path:
    """Returns the path of a file that belongs to an output."""
    return output.with_name(output.name + suffix)


def check_output(
    output: Path,
    inputs: Sequence[Path],
    command: str,
    *,
    force: bool,
    foreign_folder: Callable[[Path], str] | None = None,
    what: str = "the input",
) -> None:
    """Refuses an output whose files would replace an input or somebody else's file.

    Args:
        output: The output; "-" is standard output, which has no files beside it.
        inputs: Everything that the command reads.
        command: "job" or "merge".
        force: Replace an existing output of the command.
        foreign_folder: Returns the fault of an existing job folder, see `require_own`; None for a
            command without a job folder and settings.
        what: Noun for the inputs in the message.
    """
    if output == STANDARD_STREAM:
        require_apart([output], inputs, what)
        return
    suffixes = (SUMMARY, SETTINGS, FOLDER) if foreign_folder else (SUMMARY,)
    files = [output, *(beside(output, suffix) for suffix in suffixes)]
    require_apart(files, inputs, what)
    # Without --force an output that exists is compared with the job later.
    if force or not output.exists():
        require_own(output, lambda path: foreign_output(path, command))
    require_own(files[1], _foreign_summary)
    if foreign_folder is not None:
        require_own(files[2], foreign_settings)
        require_own(files[3], foreign_folder)
        require_own(files[3], _foreign_journal)


def foreign_output(output: Path, command: str) -> str:
    """Returns what is wrong with an output that a command should have written; "" if nothing is."""
    record = read_summary(output)
    if record is None or ("merged" in record) != (command == "merge"):
        return f"exists already, and no {command} wrote it"
    # Where a job was killed before the output got its name, the summary describes the next one.
    folder = beside(output, FOLDER)
    unnamed = [folder / CHUNKS, *folder.glob(".*.part")]
    if any(_has_hash(path, record["sha256"]) for path in (output, *unnamed)):
        return ""
    return f"exists already, and has changed since a {command} wrote it"


def _has_hash(path: Path, digest: object) -> bool:
    if not (path.is_file() or path.is_dir()):
        return False
    try:
        return hash_output(path) == digest
    except InputError:  # a folder in a folder
        return False


def _foreign_journal(folder: Path) -> str:
    """Returns what is wrong with files that have the names of a job's; "" if nothing is."""
    # Of a journal, a kill may leave half a line.
    for name, mark in ((JOB, b'"task"'), (JOURNAL, b'{"rows": ')):
        path = folder / name
        empty = not path.exists() or (path.is_file() and not path.stat().st_size)
        if not empty and (fault := foreign_file(path, mark, "of a job")):
            return f"holds {name}, which {fault}"
    return ""


def _foreign_summary(path: Path) -> str:
    output = path.with_name(path.name.removesuffix(SUMMARY))
    own = path.is_file() and read_summary(output) is not None
    return "" if own else "was not written by transferry"
