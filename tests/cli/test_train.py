"""Training and export by command: from nothing to answers, resumed, replaced."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.training import SMALLEST
from tests.commands import FEW, call, changed


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class TestTrain:
    def test_from_nothing_to_answers(self, tmp_path: Path) -> None:
        """The crossing: train, export, verify, run, with a model that has learnt nothing yet."""
        run, bundle, out = tmp_path / "run", tmp_path / "bundle", tmp_path / "answers.jsonl"
        # The shape of `run_folder`, whose graphs are traced already.
        shape = [
            "--dropout=0.1",
            "--vocabulary-size=400",
            "--d-model=32",
            "--d-ff=48",
            "--decoder-layers=2",
        ]
        options = changed(SMALLEST, *shape, "--max-positions=64", "--max-steps=2")
        trained = call("train", "--builtin", "--out", run, *options)
        assert trained.exit_code == 0, trained.stderr
        assert "validation loss" in trained.stderr
        exported = call("export", run, "--out", bundle)
        assert exported.exit_code == 0, exported.stderr
        text = tmp_path / "text"
        text.write_bytes(b"".join((run / "corpus" / "test.en").read_bytes().splitlines(True)[:5]))
        verify: list[str | Path] = ["verify", bundle, *FEW, "--checkpoint", run, "--text", text]
        verified = call(*verify, "--json")
        assert verified.exit_code == 0, verified.stderr
        assert json.loads(verified.stdout)["settings"]["variant"] == "cpu-fp32"
        refused = call(*verify, "--cross-check")
        assert refused.exit_code == 2
        assert "not cpu-fp32: add --variant portable" in refused.stderr
        answered = call("run", bundle, text, "-o", out, "--max-length", "12")
        assert answered.exit_code == 0, answered.stderr
        assert len(read_json_lines(out)) == 5
        made = tomllib.loads(out.with_name(f"{out.name}.settings.toml").read_text())["made"]
        assert made["certificate"].startswith("none: nothing was verified for variant cpu-fp32")
        assert trained.stdout + exported.stdout + answered.stdout == ""

    def test_an_export_replaces_a_bundle_by_force_only(
        self, bundle_folder: Path, run_folder: Path, tmp_path: Path
    ) -> None:
        refused = call("export", run_folder, "--out", bundle_folder)
        assert refused.exit_code == 2
        assert "add --force" in refused.stderr
        (tmp_path / "photos").mkdir()
        refused = call("export", run_folder, "--out", tmp_path / "photos", "--force")
        assert refused.exit_code == 2
        assert "is no bundle, so it is not replaced" in refused.stderr

    def test_settings_come_from_a_file(self, pairs: list[str], tmp_path: Path) -> None:
        settings = tmp_path / "settings.toml"
        settings.write_text("max-steps = 1\nlabel-smoothing = 0.25\nvocabulary-size = 300\n")
        run = tmp_path / "run"
        result = call("train", *pairs, *SMALLEST, "--config", settings, "--out", run, "--quiet")
        assert (result.exit_code, result.stdout) == (0, ""), result.stderr
        config = json.loads((run / "config.json").read_bytes())
        assert config["train"]["label_smoothing"] == 0.25
        assert config["model"]["vocabulary_size"] == 300

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ("", ["--source", "--target", "--pairs", "--builtin"]),
            ("--builtin --source a --target b", ["--builtin", "--source"]),
            ("--source a", ["--source", "--target"]),
            (
                "--builtin --encoding o200k_base --vocabulary-size 9",
                ["--encoding", "--vocabulary-size"],
            ),
            ("--resume --force", ["--resume", "--force"]),
        ],
    )
    def test_conflicting_options_are_refused(
        self, tmp_path: Path, options: str, named: list[str]
    ) -> None:
        result = call("train", "--preset", "tiny", "--out", tmp_path / "run", *options.split())
        assert result.exit_code == 2
        assert [name for name in named if name not in result.stderr] == []
        assert list(tmp_path.iterdir()) == []

    def test_a_refused_shape_leaves_nothing(self, pairs: list[str], tmp_path: Path) -> None:
        result = call("train", *pairs, *changed(SMALLEST, "--heads=3"), "--out", tmp_path / "run")
        assert result.exit_code == 2
        assert "--d-model must be a multiple of heads (3), found 16" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_run_is_replaced_by_force_only(self, pairs: list[str], tmp_path: Path) -> None:
        run = tmp_path / "run"
        options = [*pairs, *SMALLEST, "--quiet", "--max-steps", "1", "--out", str(run)]
        assert call("train", *options).exit_code == 0
        weights = (run / "model.safetensors").read_bytes()
        refused = call("train", *options, "--seed", "1")
        assert refused.exit_code == 2
        assert "continue it with --resume, or replace it with --force" in refused.stderr
        assert (run / "model.safetensors").read_bytes() == weights
        assert call("train", *options, "--seed", "1", "--force").exit_code == 0
        assert (run / "model.safetensors").read_bytes() != weights

    @pytest.mark.parametrize("settings", [None, 'theme = "dark"\n', "no TOML"])
    def test_force_replaces_only_a_run(
        self, pairs: list[str], tmp_path: Path, settings: str | None
    ) -> None:
        photo = tmp_path / "photo"
        photo.write_text("dear to somebody\n")
        if settings is not None:
            (tmp_path / "settings.toml").write_text(settings)
        options = [*pairs, *SMALLEST, "--max-steps=1"]
        result = call("train", *options, "--out", tmp_path, "--force")
        assert result.exit_code in (2, 3)
        assert photo.exists()

    def test_a_file_is_no_folder_for_a_run(self, pairs: list[str], tmp_path: Path) -> None:
        out = tmp_path / "photo"
        out.write_text("dear to somebody\n")
        result = call("train", *pairs, *SMALLEST, "--max-steps=1", "--out", out, "--force")
        assert result.exit_code == 3
        assert f"{out}: cannot be created" in result.stderr
        assert out.read_text() == "dear to somebody\n"

    def test_a_run_continues_as_it_was_started(self, pairs: list[str], tmp_path: Path) -> None:
        run = tmp_path / "run"
        options = [*pairs, *SMALLEST, "--max-steps", "1"]
        assert call("train", *options, "--out", run, "--quiet").exit_code == 0

        changed = call("train", "--out", run, "--resume", "--batch-tokens", "999")
        assert changed.exit_code == 2
        assert "found --batch-tokens 999" in changed.stderr

        def steps() -> int:
            records = read_json_lines(run / "metrics.jsonl")
            return int(records[-1]["step"])

        assert call("train", "--out", run, "--resume", "--max-steps", "3").exit_code == 0
        assert steps() == 3
        # Where a run ends is remembered from the last command that gave it.
        assert call("train", "--out", run, "--resume", "--preset", "tiny").exit_code == 0
        assert steps() == 3

    def test_cuda_where_there_is_none(self, pairs: list[str], tmp_path: Path) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("torch can use CUDA here")
        options = [*pairs, *changed(SMALLEST, "--max-steps=1", "--device=cuda")]
        result = call("train", *options, "--out", tmp_path / "run")
        assert result.exit_code == 5
        assert list(tmp_path.iterdir()) == []
