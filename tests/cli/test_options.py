"""Options that no command takes: refused before any work, in words that name them."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.test_outputs import place as place
from tests.commands import call
from transferry.cli import main
from transferry.runtime.console.group import COMMANDS, COMMON

RUN = "run bundle lines.txt -o new.jsonl"
NINES = "9" * 20


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{RUN} --beam {NINES}", f"beam must be a whole number of at most 10000, found {NINES}"),
        (
            f"{RUN} --max-length {NINES}",
            "--max-length must be a whole number of at most 1000000",
        ),
        (f"{RUN} --seed {NINES}", "seed must be from 0 to 2**64 - 1, found"),
        (
            f"{RUN} --chunk-rows {NINES}",
            "--chunk-rows must be a whole number of at most 2",
        ),
        (f"{RUN} --partition 1/{'9' * 5000}", "partition must be I/N"),
        (f"{RUN} --canary 1/{'9' * 5000}", "canary must be 1/N"),
        (f"{RUN} --device {'9' * 5000}", "--device must be numbers of GPUs"),
        (f"{RUN} --threads 2000", "2000 is not in the range 1<=x<=1024"),
        (f"{RUN} --out other.jsonl", "--out is given twice; give it once"),
        (f"{RUN} --shard 1/2 --partition 2/2", "--partition is given twice; give it once"),
        (f"{RUN} --no-scores --scores", "--scores is given twice; give it once"),
        (f"{RUN} --force --force --stop a --stop b --limit 0", "--limit must be at least 1"),
        (f"{RUN} --replicas 0", "0 is not in the range 1<=x<=1024"),
        (f"{RUN} --batch-rows {NINES}", "is not in the range 1<=x<=65536"),
        (f"{RUN} --length-penalty nan", "--length-penalty must be from -10 to 10, found nan"),
        (f"{RUN} --sample --temperature inf", "temperature must be from 1e-6 to 1e6"),
        (f"{RUN} --prefix \udcff", "--prefix must be UTF-8, found"),
        ("run bundle lines.txt -o new\0", "expected a path, found"),
        ("import  --out new", "expected a path, found nothing"),
        ("export run --out ", "expected a path, found nothing"),
        ("verify bundle --checkpoint run --beam -5", "beam must be at least 1, found -5"),
        ("verify bundle --device -1", "-1 is not in the range 0<=x<=1024"),
        ("train --builtin --out new --max-minutes inf", "--max-minutes must be at most"),
        ("train --builtin --out new --peak-learning-rate 1e308", "must be at most 1000, found"),
        (f"train --builtin --out new --d-model {NINES}", "a whole number of at most 1000000"),
        ("train --builtin --out new --vocabulary-size -1", "is not in the range"),
        ("train --builtin --out new --device tpu", "device must be cpu, cuda, cuda:N or auto"),
    ],
)
def test_an_option_out_of_range(place: Path, command: str, message: str) -> None:
    names = sorted(place.iterdir())
    refused = call(*command.split(" "))
    assert refused.exit_code == 2, refused.stderr
    assert message in refused.stderr
    assert sorted(place.iterdir()) == names


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("beam = 4.7", "beam must be a whole number, found 4.7"),
        ("beam = true", "beam must be a whole number, found True"),
        ('beam = "4"', "beam must be a whole number, found '4'"),
        ("beam = [4]", "beam must be a whole number, found [4]"),
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
    refused = call("export", "run", "--out", "new", "--config", "settings.toml")
    assert refused.exit_code == 2
    assert "variants must be a list" in refused.stderr


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
    refused = call("export", "run", "--out", "new")
    assert refused.exit_code == 3
    assert message in refused.stderr
    assert "exporting" not in refused.stderr
    assert "config.json" in refused.stderr


def test_a_pipe_without_a_writer_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferry.runtime.io.lines.PIPE_SECONDS", 0.1)
    os.mkfifo("pipe")
    refused = call("run", "bundle", "pipe", "-o", "new.jsonl")
    assert refused.exit_code == 3
    assert "pipe: no process writes into this pipe" in refused.stderr


def test_help_lists_every_command_by_its_purpose() -> None:
    listed = [name for names in COMMANDS.values() for name in names]
    assert sorted(listed) == sorted(main.commands)


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
