"""Commands and Engine open no socket, and write no file that the user did not name."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.optional import PACKAGES, program
from transferry.runtime.ort import TELEMETRY_SWITCH

STRACE = shutil.which("strace")
# System calls that reach a network or make a file.
CALLS = "network,open,openat,openat2,creat,mkdir,mkdirat,link,linkat,symlink,symlinkat,rename"
CHANGING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|(?:creat|mkdir\w*|link\w*|symlink\w*|rename)\(")
# Semaphores of tqdm's lock, and compiled modules of Python packages.
HARMLESS = re.compile(r'"/dev/(null|tty|shm/sem\.[\w.-]+)"|/__pycache__')
# glibc asks the local cache of user names for the home folder.
NAME_CACHE = re.compile(r'socket\(AF_UNIX|sun_path="/var/run/nscd/socket"')

OFFLINE = """
import sys
from pathlib import Path
from tests.commands import FEW, done

run, text, out = map(Path, sys.argv[1:])
done("export", run, "--out", out / "bundle", "--variant", "portable", "--quiet")
done("verify", out / "bundle", *FEW, "--checkpoint", run)
done("run", out / "bundle", text, "--task", "fill-mask", "-o", out / "answers.jsonl", "--quiet")

from transferry import Engine

(answer,) = Engine(out / "bundle").fill_mask(["a [MASK]"])
assert answer.error is None
"""
NODE = """
import "JS/node.js";
import { loadOnnxRuntime } from "JS/devices.js";
const { ort } = await loadOnnxRuntime();
await ort.InferenceSession.create("GRAPH");
"""


def traced(folder: Path, *command: str | Path, **environment: str) -> list[str]:
    """Runs a command in empty folders; returns its system calls that leave `folder`."""
    if STRACE is None:
        pytest.skip("strace is not installed")
    home, trace = folder / "home", folder / "trace"
    for path in (home, folder / "tmp", folder / "cwd"):
        path.mkdir()
    own = {name: value for name, value in os.environ.items() if name not in ("CI", *environment)}
    for name in (TELEMETRY_SWITCH, "TORCHINDUCTOR_CACHE_DIR"):  # set for and by the tests
        own.pop(name, None)
    # Temporary files are in TMPDIR, as documented.
    own |= {"HOME": str(home), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [STRACE, "-f", "-qq", "--seccomp-bpf", "-e", f"trace={CALLS}", "-o", trace, *command],
        cwd=folder / "cwd",
        env=own | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr[:80]}")
    assert done.returncode == 0, done.stderr
    found = [str(path) for path in (*home.rglob("*"), *(folder / "cwd").iterdir())]
    for line in trace.read_text(errors="replace").splitlines():
        call = line.split(maxsplit=1)[1]
        if re.match(r"(socket|connect|bind|send\w+|listen)\(", call):
            found += [] if NAME_CACHE.search(call) else [call]
        elif CHANGING.search(call) and not HARMLESS.search(call) and str(folder) not in call:
            found.append(call)
    return found


def test_export_verify_run_and_engine_are_silent(reader_run_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a [MASK]\n")
    assert traced(tmp_path, sys.executable, "-c", OFFLINE, reader_run_folder, text, tmp_path) == []


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_value_of_the_user_stays(tmp_path: Path, value: str) -> None:
    """With the telemetry on, the same trace finds its files: the check can fail."""
    code = "import transferry.runtime.ort.session"
    found = traced(tmp_path, sys.executable, "-c", code, **{TELEMETRY_SWITCH: value})
    assert any("deviceid" in name for name in found) == (value == "0")


def test_an_earlier_import_of_onnxruntime_is_told(tmp_path: Path) -> None:
    code = "import onnxruntime, transferry.runtime.ort"
    own = {name: value for name, value in os.environ.items() if name != TELEMETRY_SWITCH}
    own |= {"HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", code]
    warned = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    assert f"set {TELEMETRY_SWITCH}=1" in warned.stderr
    own[TELEMETRY_SWITCH] = "0"
    chosen = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    assert chosen.stderr == ""


@pytest.mark.optional("openvino")
def test_openvino_is_silent(tmp_path: Path) -> None:
    code = "from transferry.runtime.ort.openvino_runner import openvino_core\nopenvino_core()"
    assert traced(tmp_path, sys.executable, "-c", code) == []


@pytest.mark.optional("onnxruntime-node")
def test_node_is_silent(bundle_folder: Path, tmp_path: Path) -> None:
    node = program("node")
    assert node is not None
    graph = next(bundle_folder.rglob("encoder.onnx"))
    script = tmp_path / "session.mjs"
    script.write_text(NODE.replace("JS", str(PACKAGES.parent)).replace("GRAPH", str(graph)))
    assert traced(tmp_path, node, script) == []
