"""Commands of a host that serves: exit codes, streams and files."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import FEW, call


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class TestRun:
    def test_every_line_is_answered_in_order(
        self, bundle_folder: Path, lines: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "answers.jsonl"
        result = call("run", bundle_folder, lines, "-o", out)
        assert result.exit_code == 0
        assert result.stdout == ""
        assert "12 rows in" in result.stderr
        rows = read_json_lines(out)
        assert [row["id"] for row in rows] == list(range(12))
        assert [row["source"] for row in rows] == lines.read_text(encoding="utf-8").splitlines()
        assert all(row["finish_reason"] in ("end", "length") for row in rows)
        assert len({row["text"] for row in rows}) > 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "answers.jsonl",
            "answers.jsonl.settings.toml",
            "answers.jsonl.summary.json",
        ]

    @pytest.mark.parametrize("chosen", ["--beam 3 --n-best 2", "--sample --seed 5 --top-k 9"])
    def test_the_settings_beside_an_output_give_it_again(
        self, bundle_folder: Path, lines: Path, tmp_path: Path, chosen: str
    ) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        options = f"{chosen} --max-length 20 --format jsonl --prefix sieben".split()
        assert call("run", bundle_folder, lines, "-o", first, *options).exit_code == 0
        settings = f"{first}.settings.toml"
        assert call("run", "--config", settings, "-o", second).exit_code == 0
        assert second.read_bytes() == first.read_bytes()
        # Settings give the options that are not repeated; the command line wins.
        assert call("run", "--config", settings, "--max-length", "9").exit_code == 2
        assert call("run", "--config", settings, "--force", "--max-length", "9").exit_code == 0
        assert second.read_bytes() != first.read_bytes()

    def test_standard_streams_carry_answers_and_nothing_else(
        self, bundle_folder: Path, lines: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "answers.txt"
        assert call("run", bundle_folder, lines, "-o", out).exit_code == 0
        result = call("run", bundle_folder, "-", "-o", "-", stdin=lines.read_bytes())
        assert result.exit_code == 0
        assert result.stdout_bytes == out.read_bytes()
        assert result.stdout.count("\n") == 12
        assert result.stderr.startswith("12 rows in")
        quiet = call("run", bundle_folder, "-", "--quiet", stdin=lines.read_bytes())
        assert (quiet.stdout, quiet.stderr) == (result.stdout, "")

    def test_n_best_lists_the_answers_best_first(
        self, bundle_folder: Path, lines: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "answers.jsonl"
        options = ("--beam", "4", "--n-best", "3")
        assert call("run", bundle_folder, lines, "-o", out, *options).exit_code == 0
        for row in read_json_lines(out):
            scores = [answer["score"] for answer in row["n_best"]]
            assert len(scores) == 3
            assert scores == sorted(scores, reverse=True)
            assert row["text"] == row["n_best"][0]["text"]

    def test_a_sample_depends_on_the_seed_and_on_nothing_else(
        self, bundle_folder: Path, lines: Path
    ) -> None:
        def sample(*options: str) -> bytes:
            result = call("run", bundle_folder, lines, "-o", "-", "--sample", *options)
            assert result.exit_code == 0
            return result.stdout_bytes

        assert sample("--seed", "1") == sample("--seed", "1", "--batch-rows", "1")
        assert sample("--seed", "1", "--replicas", "3") != sample("--seed", "2")

    def test_every_answer_begins_with_the_prefix(self, bundle_folder: Path, lines: Path) -> None:
        result = call("run", bundle_folder, lines, "--prefix", "Am Montag", "--max-length", "30")
        assert result.exit_code == 0
        assert all(line.startswith("Am Montag") for line in result.stdout.splitlines())

    def test_a_prefix_is_counted_in_tokens(self, bundle_folder: Path, lines: Path) -> None:
        prefix = "hundert" * 5
        result = call("run", bundle_folder, lines, "--prefix", prefix, "--max-length", "34")
        assert result.exit_code == 0

    def test_a_bad_line_becomes_an_error_on_its_own_row(
        self, bundle_folder: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "answers.jsonl"
        result = call("run", bundle_folder, "-", "-o", out, stdin=b"seven\n\neight\n")
        assert result.exit_code == 6
        assert "1 of 3 rows" in result.stderr
        rows = read_json_lines(out)
        assert [row.get("error", {}).get("kind") for row in rows] == [None, "empty", None]
        assert Path(f"{out}.settings.toml").exists()

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ("--sample --beam 4", ["--sample", "--beam=4"]),
            ("--n-best 5 --beam 4", ["--n-best=5", "--beam=4"]),
            ("--min-length 9 --max-length 8", ["--min-length=9", "--max-length=8"]),
            ("--temperature 0.5", ["--temperature=0.5", "--sample"]),
            ("--max-length 65", ["65", "64 positions"]),
            ("--threads 0", ["threads", "0"]),
            ("--replicas 0", ["replicas", "0"]),
            ("--variant fast", ["'fast'", "portable"]),
        ],
    )
    def test_conflicting_options_are_refused(
        self, bundle_folder: Path, lines: Path, tmp_path: Path, options: str, named: list[str]
    ) -> None:
        out = tmp_path / "answers.jsonl"
        result = call("run", bundle_folder, lines, "-o", out, *options.split())
        assert result.exit_code == 2
        assert [name for name in named if name not in result.stderr] == []
        assert list(tmp_path.iterdir()) == []

    def test_an_output_is_replaced_by_force_only(
        self, bundle_folder: Path, lines: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "answers.jsonl"
        assert call("run", bundle_folder, lines, "-o", out).exit_code == 0
        before = out.read_bytes()
        beam: list[str | Path] = [
            "run",
            bundle_folder,
            lines,
            "-o",
            out,
            "--beam",
            "3",
            "--max-length",
            "9",
        ]
        result = call(*beam)
        assert result.exit_code == 2
        assert "--force" in result.stderr
        assert out.read_bytes() == before
        assert call(*beam, "--force").exit_code == 0
        assert out.read_bytes() != before
        assert len(read_json_lines(out)) == 12

    @pytest.mark.parametrize("kind", ["device", "folder"])
    def test_only_a_file_is_replaced(
        self, bundle_folder: Path, lines: Path, tmp_path: Path, kind: str
    ) -> None:
        out = tmp_path / "answers"
        if kind == "device":
            os.mkfifo(out)  # like /dev/null, which root could replace
        else:
            out.mkdir()
        result = call("run", bundle_folder, lines, "-o", out, "--force")
        assert result.exit_code == 2
        assert "is not a file" in result.stderr
        assert out.is_fifo() or out.is_dir()

    def test_the_command_line_overrides_settings_from_a_file(
        self, bundle_folder: Path, lines: Path, tmp_path: Path
    ) -> None:
        settings = tmp_path / "settings.toml"
        settings.write_text('format = "jsonl"\nmax-length = 5\nn-best = 2\nbeam = 2\n')
        result = call("run", bundle_folder, lines, "--config", settings, "--n-best", "1")
        assert result.exit_code == 0
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert max(row["target_tokens"] for row in rows) == 5
        assert all("n_best" not in row for row in rows)


class TestVerifyInspectDoctor:
    def test_a_bundle_is_compared_with_its_run(
        self, bundle_folder: Path, run_folder: Path, lines: Path
    ) -> None:
        result = call("verify", bundle_folder, *FEW, "--checkpoint", run_folder, "--text", lines)
        assert result.exit_code == 0
        assert re.search(r"^beam 4 +12 +12 ", result.stdout, re.M)
        assert result.stdout.startswith("PASSED")
        assert result.stderr == ""

    def test_a_bundle_is_compared_with_its_recorded_answers(self, bundle_folder: Path) -> None:
        result = call("verify", bundle_folder, "--json")
        assert result.exit_code == 0
        report = json.loads(result.stdout)
        assert report["passed"]
        assert report["comparisons"]
        assert [search["search"] for search in report["decisions"]] == ["greedy", "beam 4"]

    def test_inspect_names_the_extras_that_a_bundle_needs(
        self, bundle_folder: Path, chat_bundle_folder: Path
    ) -> None:
        assert "extras" not in call("inspect", bundle_folder).stdout
        shown = call("inspect", chat_bundle_folder).stdout
        assert re.search(r"^extras +chat for chats: pip install ", shown, re.M)

    def test_inspect(self, bundle_folder: Path) -> None:
        shown, whole = call("inspect", bundle_folder), call("inspect", bundle_folder, "--graphs")
        assert shown.exit_code == whole.exit_code == 0
        assert len(shown.stdout.splitlines()) <= 20
        assert "encoder-decoder" in shown.stdout
        assert "encoder-decoder: vocabulary_size" in whole.stdout
        assert "portable/encoder.onnx" in whole.stdout
        manifest = json.loads(call("inspect", bundle_folder, "--json").stdout)
        assert manifest.pop("certificates") == []
        assert manifest == json.loads((bundle_folder / "manifest.json").read_bytes())

    def test_doctor(self) -> None:
        result = call("doctor", "--json")
        checks = {check["name"]: check["status"] for check in json.loads(result.stdout)}
        assert checks["cpu"] == "ok"
        assert result.exit_code == (5 if "fault" in checks.values() else 0)
        assert "onnxruntime" in call("doctor").stdout
