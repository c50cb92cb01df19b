"""Temporary folders of outputs, and the rests of processes that were killed."""

import os
import signal
from pathlib import Path

import pytest

from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.folders import staged_folder


def begin(out: Path) -> int:
    """Begins to fill a temporary folder or file for `out` in another process, which then waits."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        with atomic_file(out) if out.suffix else staged_folder(out) as begun:
            if isinstance(begun, Path):
                (begun / "weights.bin").touch()
            else:
                begun.write(b"1" * 100_000)
            os.write(write, b"1")
            signal.alarm(20)  # a test that fails does not kill it
            signal.pause()
    os.read(read, 1)
    for end in (read, write):
        os.close(end)
    return process


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("name", ["bundle", "report.html"])
def test_rests_of_killed_processes_are_removed(tmp_path: Path, name: str) -> None:
    out, mine = tmp_path / name, tmp_path / f".{name}.notes.part"
    mine.mkdir()
    (mine / "notes").touch()
    kill(begin(tmp_path / f"{name}s"))
    kept = {*tmp_path.iterdir()}
    kill(begin(out))
    assert len({*tmp_path.iterdir()} - kept) == 1
    alive = begin(out)
    (filled,) = {*tmp_path.iterdir()} - kept
    with atomic_file(out) if out.suffix else staged_folder(out):
        assert filled.exists()
    kill(alive)
    made = {out} if out.suffix else set()
    with atomic_file(out) if out.suffix else staged_folder(out):
        assert len({*tmp_path.iterdir()} - kept - made) == 1
        assert not filled.exists()
    assert {*tmp_path.iterdir()} == kept | made


def test_the_rest_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tmp_path / ".bundle.0123456789abcdef.part"
    rest.mkdir()

    def unreadable(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", unreadable)
    with staged_folder(tmp_path / "bundle") as folder:
        assert folder.is_dir()
    assert rest.is_dir()
