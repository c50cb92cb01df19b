"""Options that no command takes: refused before any work, in words that name them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import call, fails
from transferry.cli import main
from transferry.runtime.console.group import COMMANDS, COMMON, FilePath

RUN = "run bundle lines.txt -o new.jsonl"
NINES = "9" * 20
CHECKOUT = Path(__file__).parents[2]


OUT_OF_RANGE = [
    (f"{RUN} --chunk-rows {NINES}", "--chunk-rows must be a whole number of at most 2"),
    (f"{RUN} --partition 1/{'9' * 5000}", "partition must be I/N"),
    (f"{RUN} --canary 1/{'9' * 5000}", "canary must be 1/N"),
    (f"{RUN} --device {'9' * 5000}", "--device must be numbers of GPUs"),
    (f"{RUN} --threads 2000", "2000 is not in the range 1<=x<=1024"),
    (f"{RUN} --replicas 0", "0 is not in the range 1<=x<=1024"),
    (f"{RUN} --replicas 2 --processes 3", "--processes must be 1 to 2, the replicas, found 3"),
    (f"{RUN} --batch-rows {NINES}", "is not in the range 1<=x<=65536"),
    (f"{RUN} --max-length 65", "65, but the model has 64 positions"),
    (f"{RUN} --force --force --stop a --stop b --limit 0", "--limit must be at least 1"),
    (f"{RUN} --prefix \udcff", "--prefix must be UTF-8, found"),
    ("run bundle lines.txt -o new\0", "expected a path, found"),
    ("run reader lines.txt --task fill-mask --top 0", "a whole number of at least 1, found 0"),
    ("import  --out new", "expected a path, found nothing"),
    ("export run --out ", "expected a path, found nothing"),
    ("verify bundle --checkpoint run --beam -5", "beam must be at least 1, found -5"),
    ("verify bundle --device -1", "-1 is not in the range 0<=x<=1024"),
    ("train --builtin --out new --max-minutes inf", "--max-minutes must be at most"),
    ("train --builtin --out new --peak-learning-rate 1e308", "must be at most 1000, found"),
    (f"train --builtin --out new --d-model {NINES}", "a whole number of at most 1000000"),
    ("train --builtin --out new --vocabulary-size -1", "is not in the range"),
    ("train --builtin --out new --device tpu", "device must be cpu, cuda, cuda:N or auto"),
]
EXCLUDING = [
    (f"{RUN} --out other.jsonl", "--out is given twice; give it once"),
    (f"{RUN} --shard 1/2 --partition 2/2", "--partition is given twice; give it once"),
    (f"{RUN} --no-scores --scores", "--scores is given twice; give it once"),
    (f"{RUN} --min-length 9 --max-length 8", "--min-length=9"),
    ("run bundle lines.txt --json", "cannot both go to standard output"),
    ("merge lines.txt notes.txt -o - --json", "cannot both go to standard output"),
    ("run chat lines.txt --chat --messages m", "--messages and --chat exclude each other"),
    ("run chat lines.txt --column c --prompt-ids m", "--column and --prompt-ids exclude each"),
    ("run chat lines.txt --chat --long-rows truncate", "--long-rows=truncate and --chat exclude"),
    ("run chat lines.txt --task embed --chat", "--chat has no effect on task embed"),
    ("run reader lines.txt --task fill-mask --beam 4", "--beam has no effect on task fill-mask"),
    ("verify bundle --text x", "--text needs --checkpoint"),
    ("verify bundle --self-test", "--self-test needs --checkpoint"),
    ("verify bundle --cross-check", "--cross-check needs --checkpoint"),
    ("verify bundle --opinions", "--cross-check needs --checkpoint"),
    ("verify bundle --beam 3 --suppress 7", "--beam needs --checkpoint"),
    ("verify bundle --checkpoint run --target x", "--target needs --text"),
    ("verify bundle --checkpoint run --beam 3 --sample", "--sample and --beam=3 exclude"),
    ("train --builtin --source a --target b --out new", "--builtin and --source"),
    ("train --source a --out new", "--source and --target"),
    (
        "train --builtin --encoding o200k_base --vocabulary-size 9 --out new",
        "--encoding o200k_base and --vocabulary-size 9 exclude each other",
    ),
    ("train --resume --force --out new", "--resume and --force"),
    ("train --preset prose --source a --target b --out new", "--source and architecture dec"),
    ("train --preset tiny --text a --out new", "--text and architecture encoder-decoder exclude"),
    ("train --preset prose --out new", "give --text, or --builtin"),
    ("train --preset prose --builtin --text a --out new", "--builtin and --text exclude"),
    ("export run --out new --keep kept", "is a checkpoint, so none is kept; leave --keep out"),
]
NO_TASK = "whose task is generate; all other tasks need an encoder-only one"
TASKS = [
    ("run reader lines.txt", "task embed writes npy, parquet, jsonl or openai, not text"),
    ("run reader lines.txt --task embed --format npy", "npy cannot go to standard output"),
    (
        "run reader lines.txt --task fill-mask --format npy",
        "fill-mask writes jsonl, text, tsv, csv or parquet, not npy",
    ),
    ("run reader lines.txt --task generate", "its tasks: embed, fill-mask"),
    *((f"run bundle lines.txt --task {task}", NO_TASK) for task in ("embed", "fill-mask")),
    *((f"run bundle lines.txt --task {task}", NO_TASK) for task in ("classify", "tag")),
    ("score bundle lines.txt", "encoder-decoder; name the texts to score with --target"),
    ("score writer lines.txt --target lines.txt", "decoder-only; leave out --target"),
    ("score reader lines.txt", "which generates nothing"),
]


@pytest.mark.parametrize(("command", "message"), [*OUT_OF_RANGE, *EXCLUDING, *TASKS])
def test_a_refused_command_says_why_and_leaves_nothing(
    place_of_all: Path, command: str, message: str
) -> None:
    names = sorted(place_of_all.iterdir())
    refused = call(*command.split(" "))
    assert refused.exit_code == 2, refused.stderr
    assert message in " ".join(refused.stderr.split()), refused.stderr
    assert sorted(place_of_all.iterdir()) == names


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("beam = 4.7", "beam must be a whole number, found 4.7"),
        ("beam = 1979-05-27", "beam must be a whole number, found datetime.date"),
        (f"beam = {'9' * 5000}", "is not TOML"),
        (f"beam = {'[' * 5000}", "is not TOML"),
        ("length-penalty = [1]", "length-penalty must be a number, found [1]"),
        ('early_stopping = "yes"', "'yes' is not one of 'true', 'false', 'never'"),
        ("early_stopping = 5", "early-stopping must be true, false or text, found 5"),
        ('stop = "."', "stop must be a list, found '.'"),
        ("forced_end = [true]", "forced-end must be a list"),
        ("prefix = 5", "prefix must be text, found 5"),
        ("variant = [1, 2]", "variant must be text, found [1, 2]"),
        ("device = 0", "device must be text, found 0"),
        ("require-certificate = 5", "must be true, false or text, found 5"),
        (
            'require-certificate = "yes"',
            "is not one of 'checkpoint', 'checkpoint without fresh graphs', 'recorded'",
        ),
        ('format = "xlsx"', "is not one of 'text'"),
        ("out = 5", "out must be text, found 5"),
        ("threads = 0", "0 is not in the range"),
        ("beam = {a = 1}", "beam must be a whole number, found {'a': 1}"),
    ],
)
def test_a_setting_of_another_type(place: Path, line: str, message: str) -> None:
    Path("settings.toml").write_text(f"{line}\n")
    names = sorted(place.iterdir())
    refused = call(*RUN.split(), "--config", "settings.toml")
    assert refused.exit_code == 2, refused.stderr
    assert message in " ".join(refused.stderr.split()), refused.stderr
    assert "settings.toml" in refused.stderr or "--" in refused.stderr
    assert sorted(place.iterdir()) == names


@pytest.mark.parametrize("line", ['variants = "cpu-fp32"', "variants = [1]", "variants = 5"])
def test_an_option_that_repeats_is_a_list(place: Path, line: str) -> None:
    Path("settings.toml").write_text(f"{line}\n")
    fails(
        2, "variants must be a list", "export", "run", "--out", "new", "--config", "settings.toml"
    )


@pytest.mark.parametrize("line", ["max_steps = true", 'preset = "none"', "beams = 5\nseed = []"])
def test_the_settings_of_a_run_are_checked_too(place: Path, line: str) -> None:
    Path("run/settings.toml").write_text(f"{line}\n")
    refused = call("train", "--out", "run", "--resume")
    assert refused.exit_code == 2
    assert line.split()[0].replace("_", "-")[:4] in refused.stderr or "seed" in refused.stderr


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("generation", {"beam": "4"}, "beam must be a whole number of at most 10000, found '4'"),
        ("generation", {"n_best": 4}, "n_best=4 is more than beam=1 can give"),
        ("model", {"heads": "2"}, "heads must be a whole number of at least 1, found '2'"),
        ("model", {"dropout": [0.1]}, "dropout must be at least 0 and below 1, found [0.1]"),
        ("model", {"tied": "yes"}, "tied must be true or false, found 'yes'"),
        ("model", {"norm": ["rms"]}, "norm must be one of layer, rms, found ['rms']"),
        ("model", {"architecture": {}}, "architecture must be one of encoder-decoder, "),
        ("model", {"d_model": 10**20}, "d_model must be a whole number of at most 1000000"),
        ("train", {"max_steps": 1.5}, "max_steps must be a whole number of at least 0, found 1.5"),
    ],
)
def test_the_config_of_a_run_is_checked_before_any_work(
    place: Path, part: str, changes: dict[str, object], message: str
) -> None:
    path = Path("run/config.json")
    record = json.loads(path.read_bytes())
    record[part] = {**record.get(part, {}), **changes}
    path.write_text(json.dumps(record))
    refused = fails(3, message, "export", "run", "--out", "new")
    assert "exporting" not in refused.stderr
    assert "config.json" in refused.stderr


def test_a_pipe_without_a_writer_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferry.runtime.io.lines.PIPE_SECONDS", 0.1)
    os.mkfifo("pipe")
    fails(3, "pipe: no process writes into this pipe", "run", "bundle", "pipe", "-o", "new.jsonl")


def test_help_lists_every_command_by_its_purpose() -> None:
    listed = [name for names in COMMANDS.values() for name in names]
    assert sorted(listed) == sorted(main.commands)


@pytest.mark.parametrize("command", main.commands)
def test_every_command_has_help_all(command: str) -> None:
    """And an output that cannot be standard output refuses to be a file of its name."""
    assert f"Usage: main {command}" in call(command, "--help-all").stdout
    for each in main.commands[command].params:
        kind = each.type
        if isinstance(kind, FilePath) and kind.writes and not kind.remote:
            refused = call(command, "x", each.opts[-1], "-")
            assert "expected a path, found -; standard output" in refused.stderr


def test_help_needs_no_docstrings() -> None:
    command = (sys.executable, "-OO", "-m", "transferry", "run", "--help")
    assert (
        "--beam INTEGER" in subprocess.run(command, capture_output=True, check=True).stdout.decode()
    )


@pytest.mark.parametrize("command", COMMON)
def test_help_is_short_and_help_all_has_the_rest(command: str) -> None:
    short, whole = (call(command, option) for option in ("-h", "--help-all"))
    listed = short.stdout.partition("Common options:")[2]
    names = [f"--{name}" for name in COMMON[command].split()]
    places = [re.search(rf"^  (-o, )?{name}\b", listed, re.M) for name in names]
    found = [place.start() for place in places if place]
    assert len(found) == len(names)
    assert found == sorted(found)
    assert f"{command} --help-all shows every option." in short.stdout
    options = {option for each in main.commands[command].params for option in each.opts}
    assert all(f"{option} " in whole.stdout for option in options if option.startswith("--"))
    assert "shows every option" not in whole.stdout
    if "Search:" in whole.stdout:
        assert whole.stdout.index("Search:") < whole.stdout.index("Machine:")


def test_messages_of_the_runtime_name_settings() -> None:
    """A program reads chunk_rows, the command line --chunk-rows; see `Option`."""
    commands = [main.commands[name] for name in ("run", "score", "merge")]
    options = {name for each in commands for option in each.params for name in option.opts}
    rooms = ("engine", "io", "jobs", "tokenizer")
    for path in (path for room in rooms for path in (CHECKOUT / "runtime" / room).rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            is_command = re.search(r"BUNDLE|[Vv]erify|Ray \(%s\)", node.value)  # or a log of both
            named = {*re.findall("--[a-z-]+", node.value)} & options
            assert node in prose or is_command or not named, (path, node.value)
