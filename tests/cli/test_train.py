"""Training and export by command: from nothing to answers, resumed, replaced."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.commands import FEW, SMALLEST, call, changed, done, fails


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_from_nothing_to_answers(tmp_path: Path) -> None:
    """The crossing: train, export, verify, run, with a model that has learnt nothing yet."""
    run, bundle, out = tmp_path / "run", tmp_path / "bundle", tmp_path / "answers.jsonl"
    # The shape of `run_folder`, whose graphs are traced already.
    shape = ("--dropout=0.1", "--vocabulary-size=400", "--d-model=32", "--d-ff=48")
    more = ("--decoder-layers=2", "--max-positions=64", "--max-steps=2")
    options = changed(SMALLEST, *shape, *more)
    trained = call("train", "--builtin", "--out", run, *options)
    assert trained.exit_code == 0, trained.stderr
    assert "validation loss" in trained.stderr
    exported = done("export", run, "--out", bundle)
    text = tmp_path / "text"
    text.write_bytes(b"".join((run / "corpus" / "test.en").read_bytes().splitlines(True)[:5]))
    verify: list[str | Path] = ["verify", bundle, *FEW, "--checkpoint", run, "--text", text]
    verified = done(*verify, "--json")
    assert json.loads(verified.stdout)["settings"]["variant"] == "cpu-fp32"
    fails(2, "not cpu-fp32: add --variant portable", *verify, "--cross-check")
    answered = done("run", bundle, text, "-o", out, "--max-length", "12")
    assert len(read_json_lines(out)) == 5
    made = tomllib.loads(out.with_name(f"{out.name}.settings.toml").read_text())["made"]
    assert made["certificate"].startswith("none: nothing was verified for variant cpu-fp32")
    assert trained.stdout + exported.stdout + answered.stdout == ""


def test_settings_come_from_a_file(pairs: list[str], tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("max-steps = 1\nlabel-smoothing = 0.25\nvocabulary-size = 300\n")
    run = tmp_path / "run"
    result = call("train", *pairs, *SMALLEST, "--config", settings, "--out", run, "--quiet")
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    config = json.loads((run / "config.json").read_bytes())
    assert config["train"]["label_smoothing"] == 0.25
    assert config["model"]["vocabulary_size"] == 300


def test_a_run_is_replaced_by_force_only(trained: Path, pairs: list[str], tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    options = [*pairs, *SMALLEST, "--quiet", "--max-steps", "1", "--out", str(run)]
    weights = (run / "model.safetensors").read_bytes()
    fails(
        2, "continue it with --resume, or replace it with --force", "train", *options, "--seed", "1"
    )
    assert (run / "model.safetensors").read_bytes() == weights
    done("train", *options, "--seed", "1", "--force")
    assert (run / "model.safetensors").read_bytes() != weights


@pytest.mark.parametrize("settings", [None, 'theme = "dark"\n', "no TOML"])
def test_force_replaces_only_a_run(pairs: list[str], tmp_path: Path, settings: str | None) -> None:
    photo = tmp_path / "photo"
    photo.write_text("dear to somebody\n")
    if settings is not None:
        (tmp_path / "settings.toml").write_text(settings)
    options = [*pairs, *SMALLEST, "--max-steps=1"]
    result = call("train", *options, "--out", tmp_path, "--force")
    assert result.exit_code in (2, 3)
    assert photo.exists()


def test_a_run_continues_as_it_was_started(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    fails(2, "found --batch-tokens 999", "train", "--out", run, "--resume", "--batch-tokens", "999")

    def steps() -> int:
        records = read_json_lines(run / "metrics.jsonl")
        return int(records[-1]["step"])

    left = run / "checkpoints" / ".model.0123456789abcdef.part"  # by a process that was killed
    left.touch()
    done("train", "--out", run, "--resume", "--max-steps", "3")
    assert steps() == 3
    assert not left.exists()
    # Where a run ends is remembered from the last command that gave it.
    done("train", "--out", run, "--resume", "--preset", "tiny")
    assert steps() == 3


def test_a_killed_run_that_saved_nothing_is_not_resumed(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "settings.toml", tmp_path)
    fails(
        3,
        "saved yet, so there is nothing to resume; start over",
        "train",
        "--out",
        tmp_path,
        "--resume",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="torch's threads are of another library")
@pytest.mark.parametrize(("own", "spins"), [(None, 1000), ("passive", 0)])
def test_threads_of_torch_do_not_spin_for_long(own: str | None, spins: int) -> None:
    """Unless the user says how they wait; torch's library shows its settings."""
    code = (
        "import sys, transferry.__main__ as program\n"
        "sys.argv = ['transferry', '--version']\n"
        "try: program.main()\n"
        "except SystemExit: import torch"
    )
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_WAIT_POLICY": own} if own else {})
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in found.stderr
