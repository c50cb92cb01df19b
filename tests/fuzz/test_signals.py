"""SIGINT and SIGTERM at any moment of any command: it ends with 130 and leaves nothing behind."""

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.commands import PATIENCE, done
from tests.export.subject.graphs import linear_layer
from tests.fuzz.models import gpt2
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.engine.engine import verify
from transferry.runtime.io.whole import sha256
from transferry.runtime.page.site import WASM, WEBGPU

# Commands that load torch take seconds; of these the short run tries fewer moments.
TORCH = {
    "train": "train --pairs pairs.tsv --valid-pairs valid.tsv --vocabulary-size 300 --d-model 16 "
    "--encoder-layers 1 --decoder-layers 1 --heads 2 --d-ff 32 --batch-tokens 256 --max-steps 12 "
    "--validate-every 4 --save-every 2 --max-positions 128 --out new",
    "import": "import gpt2 --out new",
    "export": "export run --out new --variant portable",
    "verify": "verify bundle --checkpoint run --variant portable --junit new.xml",
    "audit": "audit linear.onnx --reference linear:audited --junit new.xml",
}
LIGHT = {
    "recorded": "verify bundle --certify 2026-11-21 --force --junit new.xml",
    "inspect": "inspect bundle",
    "page": "page bundle --out new --onnxruntime-web npm",
    "doctor": "doctor",
    "completion": "completion zsh",
    "run": "run bundle lines.txt -o new.jsonl --chunk-rows 16 --batch-rows 8",
    "score": "score bundle lines.txt --target lines.txt -o new.tsv --chunk-rows 16",
    "report": "report report.json -o new.html",
    "merge": "merge 1.jsonl 2.jsonl -o new.jsonl",
}
COMMANDS = TORCH | LIGHT
# Files that hold times; a resumed training also writes its options anew.
TIMED = (
    *(".summary.json", "settings.toml", "new.xml"),
    *("metrics.jsonl", "curves.png", "state.safetensors"),
)

# Spread evenly, also where few are drawn: multiples of the golden ratio, modulo 1.
MOMENTS = st.integers(0, 1 << 16).map(lambda number: (0.35 + number * 0.6180339887) % 1)
NUMBERS = st.sampled_from([signal.SIGTERM, signal.SIGINT])


@dataclass
class Place:
    """A folder with the inputs, and the hashes of each command's undisturbed output."""

    folder: Path
    temporary: Path
    seconds: dict[str, float] = field(default_factory=dict)
    made: dict[str, dict[str, str]] = field(default_factory=dict)

    def start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "transferry", *shlex.split(command)],
            cwd=self.folder,
            env=os.environ | {"TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, command: str) -> dict[str, str]:
        """Runs a command to its end; returns hashes of its standard output and its files.

        In this process: a new one would spend most of its time on imports.
        """
        with contextlib.chdir(self.folder):
            stdout = done(*shlex.split(command)).stdout_bytes
        found = {} if "verify" in command else {"stdout": hashlib.sha256(stdout).hexdigest()}
        return found | {
            name: sha256(self.folder / name)
            for name in sorted(names(self.folder))
            if name.startswith("new") and (self.folder / name).is_file()
            if not name.endswith(TIMED)
        }

    def learn(self, name: str) -> None:
        """Runs a command once; returns its outputs and its time."""
        if name == "export":  # the longest of all, whose result is the bundle itself
            nothing = hashlib.sha256(b"").hexdigest()
            files = [path for path in (self.folder / "bundle").rglob("*") if path.is_file()]
            self.made[name] = {"stdout": nothing} | {
                f"new/{path.relative_to(self.folder / 'bundle')}": sha256(path)
                for path in files
                if path.parent.name != "certificates"
            }
            self.seconds[name] = 10.0
        elif name == "verify":  # prints what it found, and ends with 0 again
            self.made[name], self.seconds[name] = {}, 8.0
        elif name not in self.made:
            begun = time.monotonic()
            self.made[name] = self.finish(COMMANDS[name])
            self.seconds[name] = time.monotonic() - begun + import_seconds(name in TORCH)
            self.clear()

    def clear(self) -> None:
        for path in self.folder.glob("new*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@functools.cache
def import_seconds(torch: bool) -> float:
    """Seconds for a process's imports."""
    begun = time.monotonic()
    module = "transferry.export.bundle" if torch else "transferry.runtime.jobs.job"
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def place(run_folder: Path, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("signals")
    place = Place(folder / "work", folder / "tmp")
    place.folder.mkdir()
    place.temporary.mkdir()
    shutil.copytree(run_folder, place.folder / "run")
    shutil.copytree(bundle_folder, place.folder / "bundle")
    gpt2(place.folder / "gpt2")
    linear_layer(place.folder)
    pairs = builtin_pairs(100, seed=1)
    lines = "".join(f"{pair.source}\n" for pair in pairs)
    (place.folder / "lines.txt").write_text(lines)
    (place.folder / "npm").mkdir()
    for name in (*WASM, *WEBGPU):
        (place.folder / "npm" / name).write_text(name)
    for name, count in (("pairs", 100), ("valid", 10)):
        table = "".join("\t".join(pair) + "\n" for pair in pairs[:count])
        (place.folder / f"{name}.tsv").write_text(table)
    for part in (1, 2):
        place.finish(f"run bundle lines.txt -o {part}.jsonl --partition {part}/2")
    report = verify(place.folder / "bundle").to_dict()
    (place.folder / "report.json").write_text(json.dumps(report))
    return place


def handles_signals(process: subprocess.Popen[bytes]) -> bool:
    """Whether the command's first line has run; before that, Python itself answers signals."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:  # no Linux, or it has ended
        return True
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def require_clean_stop(place: Place, name: str, moment: float, number: signal.Signals) -> None:
    place.clear()
    place.learn(name)
    before = names(place.folder)
    process = place.start(COMMANDS[name])
    try:
        while not handles_signals(process):
            assert process.poll() is None, "it ended, and never handled a signal"
            time.sleep(0.001)
        time.sleep(moment * place.seconds[name])
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    said = stderr.decode()
    assert process.returncode in (0, 130), said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    # onnxruntime keeps a file there, whether it is interrupted or not.
    assert names(place.temporary) <= {".ses"}
    again = COMMANDS[name]
    if process.returncode == 130:
        assert "interrupted" in said
        left = names(place.folder) - before
        assert not [path for path in left if Path(path).name.startswith(".")], left
        assert may_stay(place, name), left
        if name == "train" and left:
            assert "continue with: transferry train --out new --resume\n" in said
            again = "train --out new --resume"
        elif (place.folder / "new").exists():  # the signal came last of all
            assert name in ("import", "export"), left
            place.clear()
    elif name in ("train", "import", "export"):  # which replace nothing
        place.clear()
    if name not in ("export", "verify") or os.environ.get("FUZZ") == "long":
        assert place.finish(again) == place.made[name]
    place.clear()


def may_stay(place: Place, name: str) -> bool:
    """Whether an interrupted command left a state to continue from, or a whole output."""
    left = {path for path in names(place.folder) if path.startswith("new")}
    if name == "train":
        return not left or "new/state.safetensors" in left
    if name in ("run", "score"):
        out = COMMANDS[name].split("-o ")[1].split()[0]
        journal = place.folder / f"{out}.job" / "journal.jsonl"
        return out in left or not left or journal.read_bytes().endswith(b"\n")
    return True


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def examples(share: int) -> Callable[[Any], Any]:
    # Nothing is gained by a simpler moment: the next time another line is running then.
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=max(1, settings().max_examples // share), phases=phases)


@pytest.mark.parametrize("name", sorted(LIGHT))
@examples(10)
@given(moment=MOMENTS, number=NUMBERS)
def test_a_command_stops_at_any_moment(
    place: Place, name: str, moment: float, number: signal.Signals
) -> None:
    require_clean_stop(place, name, moment, number)


# Two of these write nothing but a report.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in ("audit", "verify") else ())
        for name in sorted(TORCH)
    ],
)
@examples(20)
@given(moment=MOMENTS, number=NUMBERS)
def test_a_command_with_torch_stops_at_any_moment(
    place: Place, name: str, moment: float, number: signal.Signals
) -> None:
    require_clean_stop(place, name, moment, number)
