"""A finished chunk stays finished, and nothing else is taken for it."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.jobs.helpers import contents, names
from transferry.runtime.errors import InputError
from transferry.runtime.jobs.journal import (
    JOB,
    JOB_FORMAT,
    JOURNAL,
    LOCK,
    Chunk,
    Journal,
    differences,
)

FINGERPRINT = {"task": "generate", "beam": 4, "prefix": [1, 2]}


def finish(journal: Journal, *contents: bytes, rows: int = 2) -> None:
    for content in contents:
        with journal.next_file() as file:
            file.write(content)
        journal.append(Chunk(rows=rows, first=journal.rows, errors={"empty": 1}))


@contextmanager
def begun(folder: Path, fingerprint: Any = FINGERPRINT, **options: bool) -> Iterator[Journal]:
    """The journal of a job that runs, and nothing to be told of an earlier run."""
    with Journal.locked(folder) as journal:
        assert journal.begin(fingerprint, **{"force": False, **options}) == ""
        yield journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job that was interrupted after three chunks."""
    folder = tmp_path / "out.job"
    with begun(folder) as journal:
        finish(journal, b"one", b"two", b"three")
    return folder


@pytest.mark.parametrize(
    "tail",
    [b'{"first": 6, "rows"', b"\0\0\0\0", b"\0\0\0\n", b"17\n", b'{"first": 6, "lines": 2}\n'],
)
def test_a_torn_line_is_no_finished_chunk(folder: Path, tail: bytes) -> None:
    whole = (folder / JOURNAL).read_bytes()
    with (folder / JOURNAL).open("ab") as file:
        file.write(tail)
    with Journal.locked(folder) as journal:
        journal.begin(FINGERPRINT, force=False)
        assert journal.rows == 6
        assert (folder / JOURNAL).read_bytes() == whole
        finish(journal, b"four")
    with begun(folder) as journal:
        assert journal.rows == 8


@pytest.mark.parametrize("damage", ["gone", "shorter", "changed", "line", "gap"])
def test_what_is_damaged_is_computed_again_and_all_behind_it(folder: Path, damage: str) -> None:
    part, path = folder / "000000" / "00000001.part", folder / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "gone":
        part.unlink()
    elif damage == "shorter":
        part.write_bytes(b"tw")
    elif damage == "changed":
        part.write_bytes(b"TWO")
    elif damage == "line":
        path.write_bytes(lines[0] + b"}" + lines[1] + lines[2])
    else:
        path.write_bytes(lines[0] + lines[2])
    with Journal.locked(folder) as journal:
        note = journal.begin(FINGERPRINT, force=False)
        assert "finished chunks are damaged or gone and will be computed again" in note
        assert journal.rows == 2
        assert path.read_bytes() == lines[0]


@pytest.mark.parametrize("form", [None, 3, JOB_FORMAT + 1])
def test_a_folder_of_another_version_is_refused(folder: Path, form: int | None) -> None:
    """Not even its journal is touched, since its lines may have another form."""
    fingerprint = FINGERPRINT if form is None else FINGERPRINT | {"job_format": form}
    (folder / JOB).write_text(json.dumps(fingerprint))
    with (folder / JOURNAL).open("ab") as file:
        file.write(b"17\n")
    before = contents(folder)
    now = FINGERPRINT | {"job_format": JOB_FORMAT}
    expected = f"another version of transferry: expected job format {JOB_FORMAT}, found {form or 1}"
    with Journal.locked(folder) as journal, pytest.raises(InputError, match=expected):
        journal.begin(now, force=False)
    assert contents(folder) == before
    with begun(folder, now, force=True):
        assert names(folder) == {JOB, JOURNAL, LOCK}
    assert differences(fingerprint, now) == [
        f"job format was {form or 1}, is {JOB_FORMAT} in this version of transferry"
    ]


def test_nothing_is_named_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps only synced data: files before their names, names in order."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        found = os.fstat(descriptor)
        for path in (tmp_path, *tmp_path.rglob("*")):
            if os.path.samestat(path.stat(), found):
                done.append(f"sync {path.name}")
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"name {target.name}")
        return replace(path, target)

    def told() -> list[str]:
        """The calls made; of temporary files the kind in their names."""
        lines = [re.sub(r"\.(.+)\.[0-9a-f]{16}\.part", r"\1's", line) for line in done]
        done.clear()
        return lines

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    with Journal.locked(tmp_path / "out.job") as journal:
        journal.begin(FINGERPRINT, force=False)
        assert told() == [
            *(f"sync {JOURNAL}", "sync out.job"),
            *(f"sync {JOB}'s", f"name {JOB}", "sync out.job", f"sync {tmp_path.name}"),
        ]
        finish(journal, b"one")
        part = "00000000.part"
        named = [f"sync {part}'s", f"name {part}", "sync 000000", f"sync {JOURNAL}"]
        assert told() == ["sync out.job", *named]
        finish(journal, b"two")
        assert [each.replace("1", "0") for each in told()] == named


def test_another_job_that_finished_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "out.job"
    folder.mkdir()
    (folder / JOB).write_text(json.dumps(FINGERPRINT))
    (folder / "00000000.tmp").write_bytes(b"open")
    (folder / JOURNAL).write_bytes(b"torn")
    with begun(folder, {"beam": 1}):
        assert (folder / JOURNAL).read_bytes() == b""
        assert names(folder) == {JOB, JOURNAL, LOCK}


def test_a_lock_that_was_removed_while_it_was_opened_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job ends, and removes the folder, between the opening and the locking."""
    import fcntl

    file = folder / LOCK
    flock, removed, locked = fcntl.flock, list[Path](), list[int]()

    def late(descriptor: int, operation: int) -> None:
        # filelock also locks files of its own, to see whether the file system can.
        if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
            if not removed:
                file.unlink()
                removed.append(file)
            locked.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with Journal.locked(folder):
        assert removed
        assert len(locked) == 2
        assert os.path.samestat(os.fstat(locked[-1]), file.stat())


@pytest.mark.parametrize("where", ["before", "while reading"])
def test_an_error_before_anything_is_read_loses_nothing(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(folder)

    def stop(chunk: Chunk, file: Path) -> bool:
        raise KeyboardInterrupt

    with Journal.locked(folder) as journal, pytest.raises(KeyboardInterrupt):
        if where == "before":
            raise KeyboardInterrupt
        monkeypatch.setattr(Chunk, "is_intact", stop)
        journal.begin(FINGERPRINT, force=False)
    assert names(folder) == before
