"""The files of an output: results, summary, settings and job folder, and who wrote them.

An output may be a folder of parts, each a whole file of the format:

    _manifest.json           names, rows, bytes and hashes of the parts, in order; written last
    000000000000.jsonl       rows from that number on; elsewhere also named by its content

Elsewhere the folder also holds _summary.json and _settings.toml; and of partition 2 of 3
_summary.2-of-3.json and so on, until all three are there, whatever machines they ran on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.atomic import durable_file
from transferry.runtime.io.outputs import STANDARD_STREAM, foreign_file, require_apart, require_own
from transferry.runtime.jobs.formats.remote_file import RemoteFile, RemoteFolder, is_url
from transferry.runtime.jobs.journal import (
    CHUNKS,
    JOB,
    JOURNAL,
    Part,
    differences,
    hash_of_hashes,
    hash_output,
)
from transferry.runtime.jobs.summary import SUMMARY, Summary, beside, read_summary
from transferry.runtime.settings import foreign_settings

# Files beside the output, by their suffixes.
SETTINGS, FOLDER = ".settings.toml", ".job"
BESIDE = (SUMMARY, SETTINGS, FOLDER)
# Folder beside the outputs of partitions: numbers of lines, which each of them counts in part.
LINES = ".transferry-lines"


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

    `what` is a noun for the inputs. Only a "job" has a folder and settings, and gives
    `foreign_folder`: it returns the fault of an existing job folder, see `require_own`.
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


MANIFEST = "_manifest.json"
# Parts that are uploaded together.
_TOGETHER = 64
# Files of an output elsewhere: parts, and their descriptions, perhaps of one partition.
_PART = re.compile(r"\d{12,}-[0-9a-f]{16}\.[\w.]+")
_ABOUT = re.compile(
    r"_(manifest|summary|settings)(\.\d+-of-(\d+))?\.(json|toml)(\.[0-9a-f]{16}\.tmp)?"
)


def manifest(parts: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yields the lines of a manifest, given the name, rows, bytes and hash of each part."""
    yield b'{"format": 1, "parts": ['
    for number, part in enumerate(parts):
        yield (",\n" if number else "\n").encode() + json.dumps(part).encode()
    yield b"\n]}\n"


def part_record(part: Part, name: str) -> dict[str, Any]:
    """Returns the entry of a part in a manifest."""
    return {"name": name, "rows": part.rows, "bytes": part.size, "sha256": part.sha256}


def write_manifest(folder: Path, parts: Iterable[Part]) -> None:
    """Writes the manifest of parts that lie in a folder."""
    records = (part_record(part, part.path.relative_to(folder).as_posix()) for part in parts)
    with durable_file(folder / MANIFEST) as file:
        file.writelines(manifest(records))


def remote_output(output: object, partition: str | None = None) -> RemoteOutput | None:
    """Returns the output that a URL stands for; None for a path."""
    url = output.url if isinstance(output, RemoteFile) else str(output)
    return RemoteOutput(RemoteFolder(url), partition) if is_url(url) else None


class RemoteOutput:
    """An output elsewhere: a folder of parts, of a whole job or of its partitions together.

    Attributes:
        folder: The folder.
        mark: ".2-of-3" in the names of a partition's own files.
    """

    def __init__(self, folder: RemoteFolder, partition: str | None = None) -> None:
        self.folder, self._of = folder, (partition or "").partition("/")[2]
        self.mark = f".{str(partition).replace('/', '-of-')}" if partition else ""

    def begin(self, fingerprint: Mapping[str, Any], *, force: bool) -> dict[str, Any] | None:
        """Returns the summary that an earlier run of the job wrote, if it is there.

        Raises:
            InputError: The folder cannot be read and written.
            UsageError: It holds another job's output, and `force` is not given; or other files.
        """
        found = self.folder.sizes()
        for name in found:
            if not (_PART.fullmatch(name) or _ABOUT.fullmatch(name)):
                raise UsageError(
                    f"{self.folder} holds {name}, which transferry did not write, so it is not "
                    "replaced; name another, or move it away"
                )
        if (probe := f"_settings{self.mark}.toml") not in found:  # a trial, before hours of work
            self.folder.write(probe, b"")
            self.folder.remove([probe])
        kin = sorted(name for name in found if name.startswith("_summary") and self._is_kin(name))
        # Beside partitions, files without their number describe the joined output.
        joined = {MANIFEST, "_summary.json"} if kin else set()
        others = [name for name in found if not self._is_kin(name) and name not in joined]
        own = f"_summary{self.mark}.json"
        if f"_manifest{self.mark}.json" in found and own in kin and not force:
            return self.record(own)
        if not force and (others or (kin and self._differs(kin[0], fingerprint))):
            raise UsageError(
                f"{self.folder} holds the output of another job; add ",
                *(Option("force"), " to replace it, or name another"),
            )
        return None

    def _differs(self, name: str, fingerprint: Mapping[str, Any]) -> bool:
        """Whether the summary of another partition is of another job."""
        theirs = dict(self.record(name).get("fingerprint", {}))
        own = {"partition": None, "rows": None, "bytes": None}
        return bool(differences(theirs | own, {**fingerprint, **own}))

    def _is_kin(self, name: str) -> bool:
        """Whether a file is a part, or of this job or one of its partitions."""
        about = _ABOUT.fullmatch(name)
        return about is None or (about[3] or "") == self._of

    def record(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file."""
        try:
            found = json.loads(self.folder.read(name))
        except ValueError as error:
            told = f"{self.folder}/{name} is damaged; add "
            raise InputError(told, Option("force"), " to replace it") from error
        return found if isinstance(found, dict) else {}

    def publish(
        self,
        parts: Iterable[Part],
        ending: str,
        texts: Callable[[str], Mapping[str, str]],
        begin: int = 0,
    ) -> None:
        """Uploads the parts, then their descriptions; the manifest makes them the output.

        Parts that are there already, under the name of their content, are not uploaded again.
        `texts` returns summary and settings, by suffix, given the output's hash. `begin` is the
        byte of a partition whose rows are not counted: added to the numbers of rows, it gives names
        in the same order.

        Raises:
            InputError: The folder cannot be written.
        """
        found, lines, hashes = self.folder.sizes(), [], []
        stale = [name for name in found if not self._is_kin(name)]
        self.folder.remove([*stale, *([MANIFEST] if MANIFEST in found else [])])
        waiting = iter(parts)
        while group := list(islice(waiting, _TOGETHER)):
            named = [
                (part, f"{begin + part.first:012d}-{part.sha256[:16]}.{ending}") for part in group
            ]
            new = [(part.path, name) for part, name in named if found.get(name) != part.size]
            if new:
                self.folder.upload(new)
            lines += [part_record(part, name) for part, name in named]
            hashes += [part.sha256 for part in group]
        self._require(lines)
        for suffix, text in texts(hash_of_hashes(hashes)).items():
            _, kind, extension = suffix.split(".")
            self.folder.write(f"_{kind}{self.mark}.{extension}", text.encode())
        self.folder.write(f"_manifest{self.mark}.json", b"".join(manifest(lines)))
        if not self.mark:
            self.tidy(lines)

    def finish(self, parts: Sequence[Mapping[str, Any]], summary: Summary) -> None:
        """Makes partitions that are all there one output; see `publish`."""
        self._require(parts)
        summary.made["sha256"] = hash_of_hashes(part["sha256"] for part in parts)
        self.folder.write("_summary.json", summary.document().encode())
        self.folder.write(MANIFEST, b"".join(manifest(parts)))
        self.tidy(parts)

    def _require(self, lines: Sequence[Mapping[str, Any]]) -> None:
        found = self.folder.sizes()
        for part in lines:
            if found.get(part["name"]) != part["bytes"]:
                raise InputError(
                    f"{self.folder}/{part['name']} was not stored whole; run the command again"
                )

    def tidy(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Removes all parts but those of a manifest."""
        kept = {part["name"] for part in parts}
        found = self.folder.sizes()
        self.folder.remove([name for name in found if _PART.fullmatch(name) and name not in kept])
