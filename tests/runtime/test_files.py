"""Lines come out as they went in, and a file is there whole or not at all."""

import errno
import gzip
import hashlib
import os
import re
from pathlib import Path

import pytest

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import TEMPORARY, atomic_file, unwritable
from transferry.runtime.io.lines import read_lines
from transferry.runtime.io.whole import sha256

# Characters at which str.splitlines would cut a sentence in two.
SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("name", ["plain.txt", "packed.gz", "packed.txt"])
def test_lines_survive(tmp_path: Path, name: str) -> None:
    content = f"\ufeffeins\r\n\n{SEPARATORS}\nkein Ende".encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, mtime=0) if "packed" in name else content)
    assert list(read_lines(path)) == ["eins", "", SEPARATORS, "kein Ende"]


@pytest.mark.parametrize(
    ("content", "lines"),
    [(b"", []), (b" a \t\r\r\n\n\xef\xbb\xbfb\r", [" a \t\r", "", "\ufeffb\r"])],
)
def test_only_the_line_end_is_stripped(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert list(read_lines(path)) == lines


def test_lines_are_streamed(tmp_path: Path) -> None:
    """The first line is there although the last, which is broken, was not reached."""
    path = tmp_path / "text"
    path.write_bytes(b"eins\n" * 50_000 + b"\xff\n")
    assert next(read_lines(path)) == "eins"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", b"gut\nschlecht \xff\n", "text, line 2: expected UTF-8, found the byte 0xff"),
        ("photo.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "photo.png: .*binary file"),
        ("utf16", "Wörter\n".encode("utf-16-le"), "utf16: .*UTF-16"),
        ("cut", "Wörter\n".encode("utf-16")[:-1], "cut: expected utf-16-le, found other bytes"),
        ("mac", b"eins\rzwei\r", r"mac: .*found only \\r; convert it: tr"),
        ("nul", b"eins\nzwei\0\n", "nul, line 2: .*found a NUL"),
        ("rows.parquet", b"PAR1\x15\0", "rows.parquet: .*found a Parquet file"),
        ("photo.gz", gzip.compress(b"\0\1\2", mtime=0), "photo.gz: .*binary file"),
        ("cut.gz", gzip.compress(os.urandom(50_000).hex().encode())[:-9], "cut.gz: .*cut short"),
        ("changed.gz", gzip.compress(b"text\n", mtime=0)[:-8] + bytes(8), "changed.gz: .*damaged"),
        (
            "garbled.gz",
            gzip.compress(b"text\n", mtime=0)[:10] + b"\xff" * 20,
            "garbled.gz: .*damaged",
        ),
        ("text.gz", b"no gzip at all\n", "text.gz: .*does not begin as gzip"),
        ("empty.gz", b"", "empty.gz: .*does not begin as gzip"),
    ],
)
def test_bad_content_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_lines(path))


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be read: (No such file|Is a directory)"):
        list(read_lines(tmp_path / name))


def test_atomic_file_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["result"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_atomic_file_leaves_nothing_behind(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    path = tmp_path / "result"
    with pytest.raises(interruption), atomic_file(path) as file:
        file.write(b"half")
        raise interruption
    assert names(tmp_path) == []


def test_atomic_file_names_place_and_reason(tmp_path: Path) -> None:
    message = r"such/result: .*No such file.*nothing was written"
    with pytest.raises(InputError, match=message), atomic_file(tmp_path / "no/such/result"):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_atomic_file_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result"
    path.write_bytes(b"old")
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(InputError, match="No space left on device"), atomic_file(path) as file:
        os.dup2(full, file.fileno())
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["result"]


def test_atomic_file_on_a_folder(tmp_path: Path) -> None:
    (tmp_path / "result" / "inside").mkdir(parents=True)
    with pytest.raises(InputError, match="Is a directory"), atomic_file(tmp_path / "result"):
        pass
    assert names(tmp_path) == ["result"]


def test_a_name_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)
    with atomic_file(path) as file:
        file.write(b"new")
    assert names(tmp_path) == [path.name]


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    found = set()
    for _ in range(20):
        with atomic_file(tmp_path / "result"):
            found |= {name for name in names(tmp_path) if name != "result"}
    assert len(found) == 20
    assert all(re.fullmatch(TEMPORARY, name) for name in found)


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="needs a device")
def test_a_device_is_not_replaced() -> None:
    path, message = Path(os.devnull), "is not a file, so it is not"
    with pytest.raises(InputError, match=message), atomic_file(path):
        pass
    assert path.is_char_device()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space or"),
        (errno.ENOENT, "Create the folder or"),
        (errno.EROFS, "Make it writable or"),
        (errno.ENAMETOOLONG, "Shorten the name or"),
        (errno.EIO, "Fix this or"),
    ],
)
def test_the_remedy_fits_the_cause(number: int, remedy: str) -> None:
    error = unwritable("out", OSError(number, os.strerror(number)))
    assert f"nothing was written. {remedy} choose another place." in str(error)


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 1_000_000)
    assert sha256(path) == hashlib.sha256(b"x" * 1_000_000).hexdigest()
    with pytest.raises(InputError, match="missing: cannot be read"):
        sha256(tmp_path / "missing")
