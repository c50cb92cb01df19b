"""Commands of a host that serves: exit codes, streams and files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call, done
from transferry.runtime.console.shared_options import SMALL_INPUT, processes_for


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("chosen", ["--beam 3 --n-best 2", "--sample --seed 5 --top-k 9"])
def test_the_settings_beside_an_output_give_it_again(
    bundle_folder: Path, lines: Path, tmp_path: Path, chosen: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = f"{chosen} --max-length 20 --format jsonl --prefix sieben".split()
    done("run", bundle_folder, lines, "-o", first, *options)
    settings = f"{first}.settings.toml"
    done("run", "--config", settings, "-o", second)
    assert second.read_bytes() == first.read_bytes()
    # Settings give the options that are not repeated; the command line wins.
    assert call("run", "--config", settings, "--max-length", "9").exit_code == 2
    done("run", "--config", settings, "--force", "--max-length", "9")
    assert second.read_bytes() != first.read_bytes()


def test_standard_streams_carry_answers_and_nothing_else(
    bundle_folder: Path, lines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.txt"
    done("run", bundle_folder, lines, "-o", out)
    result = done("run", bundle_folder, "-", "-o", "-", stdin=lines.read_bytes())
    assert result.stdout_bytes == out.read_bytes()
    assert result.stdout.count("\n") == 12
    assert result.stderr.startswith("12 rows in")
    quiet = call("run", bundle_folder, "-", "--quiet", stdin=lines.read_bytes())
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_a_sample_depends_on_the_seed_and_on_nothing_else(bundle_folder: Path, lines: Path) -> None:
    def sample(*options: str) -> bytes:
        result = done("run", bundle_folder, lines, "-o", "-", "--sample", *options)
        return result.stdout_bytes

    assert sample("--seed", "1") == sample("--seed", "1", "--batch-rows", "1")
    assert sample("--seed", "1", "--replicas", "3") != sample("--seed", "2")
    assert sample("--seed", "2", "--replicas", "3", "--processes", "2") == sample("--seed", "2")


def test_processes_start_for_inputs_that_are_worth_it(tmp_path: Path) -> None:
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_text("a\n")
    large.write_bytes(b"a\n" * (SMALL_INPUT // 2))
    assert processes_for([small, small]) == 1
    for inputs in ([large], [small, large], [tmp_path], [Path("-")], [small, "s3://corpora/en"]):
        assert processes_for(inputs) is None


def test_every_answer_begins_with_the_prefix_which_counts(bundle_folder: Path, lines: Path) -> None:
    prefix = "hundert" * 5
    result = done("run", bundle_folder, lines, "--prefix", prefix, "--max-length", "34")
    assert all(line.startswith(prefix) for line in result.stdout.splitlines())


def test_inspect_names_the_extras_that_a_bundle_needs(
    bundle_folder: Path, chat_bundle_folder: Path
) -> None:
    assert "extras" not in call("inspect", bundle_folder).stdout
    shown = call("inspect", chat_bundle_folder).stdout
    assert re.search(r"^extras +chat for chats: pip install ", shown, re.M)


def test_inspect(bundle_folder: Path) -> None:
    shown, whole = call("inspect", bundle_folder), call("inspect", bundle_folder, "--graphs")
    assert shown.exit_code == whole.exit_code == 0
    assert len(shown.stdout.splitlines()) <= 20
    assert "encoder-decoder" in shown.stdout
    assert "encoder-decoder: vocabulary_size" in whole.stdout
    assert "portable/encoder.onnx" in whole.stdout
    manifest = json.loads(call("inspect", bundle_folder, "--json").stdout)
    assert manifest.pop("certificates") == []
    assert manifest == json.loads((bundle_folder / "manifest.json").read_bytes())


def test_doctor() -> None:
    result = call("doctor", "--json")
    checks = {check["name"]: check["status"] for check in json.loads(result.stdout)}
    assert checks["cpu"] == "ok"
    assert result.exit_code == (5 if "fault" in checks.values() else 0)
    assert "onnxruntime" in call("doctor").stdout
