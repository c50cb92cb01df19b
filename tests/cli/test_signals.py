"""Commands that are interrupted, and commands without some packages."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import ENDLESS, SMALLEST, done
from transferry.cli import main
from transferry.runtime.errors import install_command


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Starts a command whose standard input stays open."""
    return subprocess.Popen(
        [sys.executable, "-m", "transferry.cli", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def interrupt(
    process: subprocess.Popen[bytes], number: signal.Signals, ready: Callable[[], bool]
) -> str:
    """Sends a signal once the process is far enough, and returns its message."""
    try:
        give_up = time.monotonic() + 1200
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up, "the process never got there"
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=1200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert stdout == b""
    return stderr.decode()


signals = pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM]
)


@signals
def test_an_interrupted_run_leaves_nothing(
    bundle_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start("run", bundle_folder, "-", "-o", tmp_path / "answers.jsonl")
    assert process.stdin is not None
    process.stdin.write(b"seven\neight\n")
    process.stdin.flush()
    said = interrupt(process, number, (tmp_path / "answers.jsonl.job").exists)
    assert said.strip() == "interrupted"
    assert list(tmp_path.iterdir()) == []


@signals
def test_an_interrupted_training_tells_how_to_continue(
    pairs: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "a run"
    process = start("train", *pairs, *SMALLEST, *ENDLESS, "--out", run)
    said = interrupt(process, number, (run / "state.safetensors").exists)
    assert f"continue with: transferry train --out '{run}' --resume\n" in said
    # Without the files on the command line; the end is reported anew.
    done("train", "--out", run, "--resume", "--max-steps", "1", "--quiet")
    assert (run / "model.safetensors").exists()


@signals
def test_a_training_that_never_began_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    pipe, run = tmp_path / "pairs.tsv", tmp_path / "run"
    os.mkfifo(pipe)
    process = start("train", "--pairs", pipe, "--valid-pairs", pipe, *SMALLEST, "--out", run)
    said = interrupt(process, number, (run / "settings.toml").exists)
    assert "interrupted" in said
    assert "--resume" not in said
    assert list(tmp_path.iterdir()) == [pipe]


def run_without(modules: tuple[str, ...], *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs commands in a Python in which some modules are not installed."""
    script = f"""
import sys
sys.modules |= dict.fromkeys({modules!r})  # None stands for a module that is not to be found
from transferry.cli import main
code = 0
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as end:
        code = code or end.code
sys.exit(code)
"""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_help_needs_nothing_heavy() -> None:
    heavy = ("torch", "onnx", "onnxruntime", "numpy", "tiktoken")
    names = list(main.commands)
    done = run_without(heavy, ["--help"], *([name, "--help"] for name in names))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: ") == 1 + len(names)


def test_mistakes_are_told_before_torch_is_loaded(
    run_folder: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    run, bundle = str(run_folder), str(bundle_folder)
    export = ["export", run, "--out", str(tmp_path / "bundle")]
    train = ["train", "--builtin", "--out", str(tmp_path / "run")]
    mistakes = {
        "--max-steps must be": [*train, "--max-steps", "-1"],
        "--d-model must be a multiple of heads": [*train, "--heads", "3"],
        "--r-drop must be": [*train, "--dropout", "0", "--r-drop", "1"],
        "--vocabulary-size must be": [*train, "--vocabulary-size", "5"],
        "give --source and --target": ["train", "--out", str(tmp_path / "run")],
        "full is not empty": [*train[:-1], str(tmp_path / "full")],
        "--dropout must be": ["distil", bundle, *train[2:], "--dropout", "2"],
        "--beam must be": ["verify", bundle, "--checkpoint", run, "--beam", "0"],
        "expected a checkpoint, found a bundle": ["verify", bundle, "--checkpoint", bundle],
        "there is no variant": [*export, "--variant", "cpu-int5"],
        "is calibrated on text": [*export, "--variant", "cpu-int8"],
        "exists already": [*export[:3], bundle],
    }
    done = run_without(("torch",), *mistakes.values())
    assert done.returncode == 2
    for line, mistake in zip(done.stderr.splitlines(), mistakes, strict=True):
        assert mistake in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        "train --builtin --out run",
        "export {run} --out bundle",
        "verify {bundle} --checkpoint {run}",
    ],
)
def test_a_host_without_torch_says_what_to_install(
    run_folder: Path, bundle_folder: Path, command: str
) -> None:
    arguments = command.format(run=run_folder, bundle=bundle_folder).split()
    done = run_without(("torch",), arguments)
    assert (done.returncode, done.stdout) == (2, "")
    told = " --checkpoint" if arguments[0] == "verify" else ""
    needed = f"Error: {arguments[0]}{told} needs torch, which is not installed; "
    assert done.stderr == needed + f"{install_command('export')}\n"


def test_a_host_without_torch_runs_and_verifies(bundle_folder: Path, lines: Path) -> None:
    absent = ("torch", "onnx", "onnxscript", "safetensors", "tokenizers", "sentencepiece")
    commands = [["verify", str(bundle_folder)], ["run", str(bundle_folder), str(lines), "--quiet"]]
    done = run_without(absent, *commands)
    assert (done.returncode, done.stderr) == (0, "")
