"""The hashed bytes are the used ones: each change of a file between the two is noticed."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError
from transferry.runtime.io.sealed_folder import FileRecord, SealedFolder
from transferry.runtime.io.whole import sha256

CONTENT = np.arange(64, dtype=np.float32).tobytes()


@pytest.fixture
def bundle_copy(bundle_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))


@pytest.fixture
def folder(tmp_path: Path) -> SealedFolder:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "a.bin"
    path.write_bytes(CONTENT)
    files = SealedFolder(tmp_path, {"inner/a.bin": FileRecord(sha256(path), len(CONTENT))})
    files.check()
    return files


def test_reads_bytes_and_arrays(folder: SealedFolder) -> None:
    assert folder.read("inner/a.bin") == CONTENT
    values = folder.array("inner/a.bin", "float32", 8, (2, 3))
    assert values.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert values.flags.owndata
    with pytest.raises(InputError, match="is used, but not listed among the files"):
        folder.read("inner/b.bin")


def overwritten(path: Path) -> None:
    path.write_bytes(CONTENT[::-1])


def written_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def backdated(path: Path) -> None:
    times = path.stat()
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT[::-1])
    other.replace(path)


@pytest.mark.parametrize(
    "change",
    [overwritten, written_in_place, backdated, replaced, lambda p: os.truncate(p, 9), Path.unlink],
)
def test_no_change_of_a_file_in_use_goes_unseen(
    folder: SealedFolder, change: Callable[[Path], None]
) -> None:
    path = folder.watch("inner/a.bin")
    folder.require_unchanged()
    change(path)
    with pytest.raises(InputError, match=r"changed while it was in use|has changed: its sha256"):
        folder.require_unchanged()
    with pytest.raises(InputError):
        folder.read("inner/a.bin")


def test_another_entry_of_the_same_content_is_no_change(folder: SealedFolder) -> None:
    path = folder.watch("inner/a.bin")
    os.link(path, path.with_name("backup"))
    path.chmod(0o400)
    folder.require_unchanged()


def test_threads_may_watch_while_others_check(tmp_path: Path) -> None:
    """Graphs are opened in threads, and each checks the files of all."""
    names = [f"{number}.bin" for number in range(400)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    record = FileRecord(sha256(tmp_path / names[0]), 1)
    files = SealedFolder(tmp_path, dict.fromkeys(names, record))

    def use(name: str) -> None:
        files.watch(name)
        files.require_unchanged()

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(use, names))) == len(names)


def test_weights_that_change_during_a_run_end_it(bundle_copy: Path) -> None:
    """The answers after the change could be of other weights, so none is given."""
    engine = Engine(bundle_copy, replicas=1)
    answers = engine.generate([f"a man {number}" for number in range(5000)])
    assert next(answers).error is None
    weights = bundle_copy / "portable" / "weights.bin"
    # In place: a session that reads a mapped file while it is cut dies of SIGBUS.
    with weights.open("r+b") as file:
        file.write(weights.read_bytes())
    with pytest.raises(InputError, match=r"weights\.bin was changed while it was in use"):
        next(answers)


def test_weights_that_change_while_a_bundle_is_opened_are_refused(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = bundle_copy / "portable" / "weights.bin"
    watch = SealedFolder.watch

    def late(files: SealedFolder, name: str) -> Path:
        path = watch(files, name)
        weights.write_bytes(weights.read_bytes())
        return path

    monkeypatch.setattr(SealedFolder, "watch", late)
    with pytest.raises(InputError, match="was changed while it was in use"):
        Engine(bundle_copy)


def test_a_pipe_or_device_is_no_file(folder: SealedFolder) -> None:
    path = folder.path / "inner" / "a.bin"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="found a pipe, a device or a socket"):
        folder.check()
