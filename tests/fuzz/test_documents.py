"""Any mutation of any file that is read: exit 0, or an error in words; never more than that.

No traceback, no crash, no hang, no memory, and no file outside of the output.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.models import ODD, gpt2
from tests.fuzz.sandbox import LOAD, MEMORY, Sandbox
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.io.whole import sha256

# Done; refused as input; and where an answer or a certificate is no longer valid.
EXIT_CODES = {0, 3, 4}
# Wrong options; a job folder that is not ours; rows that hold an error.
MORE_CODES = {
    "bundle/portable/weights.bin": {6},
    "bundle/portable/encoder.onnx": {6},
    "settings.toml": {2},
    "stopped.jsonl.job/job.json": {2},
    "stopped.jsonl.job/journal.jsonl": {2},
    "1.jsonl": {2},
    "1.jsonl.summary.json": {2},
    "rows.jsonl": {6},
}
RUN = ("run", "bundle", "lines.txt", "-o", "new.jsonl", "--quiet", "--force")
# Each file that is read, and a command that reads it. Of a bundle, the manifest vouches for it.
READ: dict[str, tuple[str, ...]] = {
    "bundle/manifest.json": RUN,
    "bundle/tokenizer.json": RUN,
    "bundle/ranks.tiktoken": RUN,
    "bundle/portable/encoder.onnx": RUN,
    "bundle/portable/weights.bin": RUN,
    "bundle/reference.npz": (LOAD, "bundle"),
    "bundle/certificates/*.json": ("inspect", "bundle"),
    "run/config.json": (LOAD, "run"),
    "run/tokenizer.json": (LOAD, "run"),
    "run/samples.json": (LOAD, "run"),
    "run/model.safetensors": (LOAD, "run"),
    "gpt2/config.json": ("import", "gpt2", "--out", "new"),
    "gpt2/vocab.json": ("import", "gpt2", "--out", "new"),
    "gpt2/merges.txt": ("import", "gpt2", "--out", "new"),
    "gpt2/model.safetensors": ("import", "gpt2", "--out", "new"),
    "1.jsonl": ("merge", "1.jsonl", "2.jsonl", "-o", "new.jsonl"),
    "1.jsonl.summary.json": ("merge", "1.jsonl", "2.jsonl", "-o", "new.jsonl"),
    "stopped.jsonl.job/job.json": ("run", "bundle", "lines.txt", "-o", "stopped.jsonl", "--quiet"),
    "stopped.jsonl.job/journal.jsonl": (
        *("run", "bundle", "lines.txt", "-o", "stopped.jsonl", "--quiet"),
    ),
    "settings.toml": (*RUN, "--config", "settings.toml"),
    "rows.jsonl": ("run", "bundle", "rows.jsonl", "-o", "new.jsonl", "--quiet"),
}

# Texts that Python does not write as JSON.
RAW = (
    *(b"Infinity", b"NaN", b"1e999", b"9" * 5000, b'"\\ud800"', b'"\xff"', b"[" * 100_000),
    *(b'{"a":' * 100_000, b"{", b"", b'{"a":1,"a":2}'),
)


@dataclass
class Place:
    """A folder with everything, and a pristine copy of it."""

    folder: Path
    pristine: Path
    sandbox: Sandbox

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.pristine, self.folder, symlinks=True)

    def find(self, name: str) -> Path:
        (path,) = self.folder.glob(name)
        return path

    def vouch(self, path: Path) -> None:
        """Has the manifest vouch for a file, as whoever changed it would."""
        bundle = self.folder / "bundle"
        if not path.is_relative_to(bundle) or not path.is_file() or path.stem == "manifest":
            return
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        name = path.relative_to(bundle).as_posix()
        if name in manifest["files"]:
            manifest["files"][name] = {"sha256": sha256(path), "size": path.stat().st_size}
            (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def place(
    run_folder: Path, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("documents")
    pristine = folder / "pristine"
    pristine.mkdir()
    shutil.copytree(run_folder, pristine / "run")
    shutil.copytree(bundle_folder, pristine / "bundle")
    gpt2(pristine / "gpt2")
    lines = [pair.source for pair in builtin_pairs(12, seed=1)]
    (pristine / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
    rows = (json.dumps({"text": line, "id": n}) for n, line in enumerate(lines))
    (pristine / "rows.jsonl").write_text("\n".join(rows))
    (pristine / "settings.toml").write_text("beam = 2\nmax-length = 9\nlength-penalty = 0.5\n")
    sandbox = Sandbox()

    def done(*arguments: str) -> None:
        ended = sandbox.run(pristine, *arguments)
        assert ended.code == 0, ended.stderr

    done("verify", "bundle", "--certify", "2026-11-21", "--force", "--quiet")
    for part in (1, 2):
        done(*RUN[:3], "-o", f"{part}.jsonl", "--partition", f"{part}/2", "--quiet")
    stopped = pristine / "stopped.jsonl.job"
    (stopped / "000000").mkdir(parents=True)
    summary = json.loads((pristine / "1.jsonl.summary.json").read_bytes())
    (stopped / "job.json").write_text(json.dumps(summary["fingerprint"]))
    chunk = b"{}\n"
    (stopped / "000000" / "00000000.part").write_bytes(chunk)
    record = {"rows": 1, "errors": {}, "first": 0, "sha256": hashlib.sha256(chunk).hexdigest()}
    (stopped / "journal.jsonl").write_text(json.dumps(record | {"size": len(chunk)}) + "\n")
    (folder / "outside").write_text("dear to somebody\n")
    shutil.copytree(pristine, folder / "work", symlinks=True)
    yield Place(folder / "work", pristine, sandbox)
    sandbox.close()


def test_the_unchanged_files_are_read(place: Place) -> None:
    for name, command in READ.items():
        place.restore()
        place.find(name)
        ended = place.sandbox.run(place.folder, *command)
        # The stopped job is of another input.
        assert ended.code == (3 if name.startswith("stopped") else 0), (name, ended)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside of a JSON value."""
    yield path
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """A JSON value in which the container of the value at a path was changed."""
    whole = [json.loads(json.dumps(value))]
    container: Any = whole
    for key in (0, *path)[:-1]:
        container = container[key]
    change(container, (0, *path)[-1])
    return whole[0] if whole else None


@st.composite
def mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """Other bytes than these: as JSON if they are, else as bytes."""
    kinds = ["bytes", "cut", "insert"]
    try:
        value = json.loads(content)
        kinds += ["value"] * 4 + ["remove", "raw", "raw"]
    except ValueError:
        value = None
    kind = draw(st.sampled_from(kinds))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "bytes":
        size = draw(st.integers(1, 8))
        return content[:at] + draw(st.binary(min_size=size, max_size=size)) + content[at + size :]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + content[at : at + draw(st.integers(1, 4096))] + content[at:]
    path = draw(st.sampled_from(sorted(places(value), key=str)))
    if kind == "remove":
        if not path:
            return b""
        return json.dumps(replaced(value, path, lambda inside, key: inside.pop(key))).encode()
    odd = draw(st.sampled_from(ODD)) if kind == "value" else "@raw@"
    changed = replaced(value, path, lambda inside, key: inside.__setitem__(key, odd))
    text = json.dumps(changed).encode()
    return text.replace(b'"@raw@"', draw(st.sampled_from(RAW)), 1) if kind == "raw" else text


def require_survived(place: Place, name: str, command: tuple[str, ...]) -> None:
    before = (place.folder.parent / "outside").read_bytes()
    ended = place.sandbox.run(place.folder, *command)
    assert ended.code in EXIT_CODES | MORE_CODES.get(name, set()), (name, ended)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "\x1b" not in ended.stderr, "a terminal would obey"
    assert ended.seconds < ended.limit, (name, ended)
    assert ended.memory < MEMORY, (name, ended)
    beside = {path.name for path in place.folder.parent.iterdir()}
    assert beside == {"outside", "pristine", "work"}, name
    assert (place.folder.parent / "outside").read_bytes() == before


@pytest.mark.parametrize("name", READ)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(place: Place, name: str, data: st.DataObject) -> None:
    place.restore()
    path = place.find(name)
    path.write_bytes(data.draw(mutations(path.read_bytes())))
    place.vouch(path)
    require_survived(place, name, READ[name])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path) -> None:
    os.truncate(path, 1 << 32)  # sparse


NO_FILES = [pipe, endless, folder, huge, Path.unlink]
REPLACED = [name for name in READ if name not in ("rows.jsonl", "1.jsonl")]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # A reader serves several files: by default each file meets two or three of the changes.
        pytest.param(name, change, marks=pytest.mark.thorough if (row + column) % 2 else ())
        for row, name in enumerate(REPLACED)
        for column, change in enumerate(NO_FILES)
    ],
)
def test_something_else_than_a_file_is_refused(
    place: Place, name: str, change: Callable[[Path], None]
) -> None:
    place.restore()
    change(place.find(name))
    require_survived(place, name, READ[name])
