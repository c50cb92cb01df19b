"""The commands as a person or a scheduler calls them: exit codes, streams, files, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call
from transferry.cli import main
from transferry.runtime.errors import install_command

pytestmark = pytest.mark.usefixtures("traces")

# The smallest model that is one.
SMALLEST = [
    *("--preset=tiny", "--d-model=16", "--heads=2", "--d-ff=16"),
    *("--encoder-layers=1", "--decoder-layers=1", "--device=cpu", "--valid-sentences=4"),
]
# Long enough to be interrupted, and saved at every step.
ENDLESS = ["--max-steps=1000000", "--save-every=1", "--validate-every=1000000"]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve sentences, a line each."""
    from transferry.build_model.train.corpus import builtin_pairs

    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    sources = [pair.source for pair in builtin_pairs(12, seed=7)]
    path.write_text("".join(f"{source}\n" for source in sources), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options that train on forty pairs."""
    from transferry.build_model.train.corpus import builtin_pairs

    folder = tmp_path_factory.mktemp("pairs")
    for name, count, seed in (("train", 40, 1), ("valid", 4, 2)):
        text = "".join("\t".join(pair) + "\n" for pair in builtin_pairs(count, seed))
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return ["--pairs", str(folder / "train.tsv"), "--valid-pairs", str(folder / "valid.tsv")]


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
        # What was not said again was found in the settings; what is said wins.
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
        result = call("verify", bundle_folder, "--checkpoint", run_folder, "--text", lines)
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
        options = [*SMALLEST, *shape, "--max-positions=64", "--max-steps=2"]
        trained = call("train", "--builtin", "--out", run, *options)
        assert trained.exit_code == 0, trained.stderr
        assert "validation loss" in trained.stderr
        exported = call("export", run, "--out", bundle)
        assert exported.exit_code == 0, exported.stderr
        text = tmp_path / "text"
        text.write_bytes(b"".join((run / "corpus" / "test.en").read_bytes().splitlines(True)[:5]))
        verify: list[str | Path] = ["verify", bundle, "--checkpoint", run, "--text", text]
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
        result = call("train", *pairs, *SMALLEST, "--heads", "3", "--out", tmp_path / "run")
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
        # Where a run ends is remembered from the last time that it was said.
        assert call("train", "--out", run, "--resume", "--preset", "tiny").exit_code == 0
        assert steps() == 3

    def test_cuda_where_there_is_none(self, pairs: list[str], tmp_path: Path) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("torch can use CUDA here")
        options = [*pairs, *SMALLEST, "--max-steps=1"]
        result = call("train", *options, "--out", tmp_path / "run", "--device", "cuda")
        assert result.exit_code == 5
        assert list(tmp_path.iterdir()) == []


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Starts a command whose standard input stays open."""
    return subprocess.Popen(
        [sys.executable, "-m", "transferry.cli", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs, this test run perhaps, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def interrupt(
    process: subprocess.Popen[bytes], number: signal.Signals, ready: Callable[[], bool]
) -> str:
    """Sends a signal once the process is far enough, and returns what it says to that."""
    try:
        give_up = time.monotonic() + 120
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up, "the process never got there"
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert stdout == b""
    return stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
class TestSignals:
    def test_an_interrupted_run_leaves_nothing(
        self, bundle_folder: Path, tmp_path: Path, number: signal.Signals
    ) -> None:
        process = start("run", bundle_folder, "-", "-o", tmp_path / "answers.jsonl")
        assert process.stdin is not None
        process.stdin.write(b"seven\neight\n")
        process.stdin.flush()
        said = interrupt(process, number, (tmp_path / "answers.jsonl.job").exists)
        assert said.strip() == "interrupted"
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupted_training_tells_how_to_continue(
        self, pairs: list[str], tmp_path: Path, number: signal.Signals
    ) -> None:
        run = tmp_path / "a run"
        process = start("train", *pairs, *SMALLEST, *ENDLESS, "--out", run)
        said = interrupt(process, number, (run / "state.safetensors").exists)
        assert f"continue with: transferry train --out '{run}' --resume\n" in said
        # Without the files on the command line; the end is said anew.
        result = call("train", "--out", run, "--resume", "--max-steps", "1", "--quiet")
        assert result.exit_code == 0, result.stderr
        assert (run / "model.safetensors").exists()

    def test_a_training_that_never_began_leaves_nothing(
        self, tmp_path: Path, number: signal.Signals
    ) -> None:
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
        "expected a run, found a bundle": ["verify", bundle, "--checkpoint", bundle],
        "expected a run, found another folder": ["export", str(tmp_path / "full"), *export[2:]],
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
    needed = f"Error: {arguments[0]} needs torch, which is not installed; "
    assert done.stderr == needed + f"{install_command('export')}\n"


def test_a_host_without_torch_runs_and_verifies(bundle_folder: Path, lines: Path) -> None:
    absent = ("torch", "onnx", "onnxscript", "safetensors", "tokenizers")
    commands = [["verify", str(bundle_folder)], ["run", str(bundle_folder), str(lines), "--quiet"]]
    done = run_without(absent, *commands)
    assert (done.returncode, done.stderr) == (0, "")
