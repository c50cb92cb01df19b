"""Odd options and settings of every command: refused in words, or carried out; nothing is touched.

Commands and options come from click's own tree, so that a new one is tried without a change here.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from transferry.build_model.checkpoint import load_config
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.train_config import TrainConfig
from transferry.cli import main
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options
from transferry.runtime.errors import TransferryError, UsageError
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.settings import to_toml

# A hang has no end; an export on a busy machine takes its time.
SECONDS = 600
EXIT_CODES = {0, 2, 3, 4, 5, 6}
SHAPE = "--d-model 16 --heads 2 --encoder-layers 1 --decoder-layers 1 --d-ff 16 --quiet"
# Arguments and options of each command, to which odd ones are added.
COMMANDS = {
    "train": (
        "",
        "--pairs train.tsv --valid-pairs valid.tsv --preset tiny --max-steps 1 "
        f"--vocabulary-size 300 --out new {SHAPE}",
    ),
    "distil": (
        "bundle",
        "--pairs train.tsv --valid-pairs valid.tsv --preset tiny --max-steps 1 "
        f"--beam 1 --out new {SHAPE}",
    ),
    "import": ("photos", "--out new"),
    "export": ("run", "--out new --variant portable --quiet"),
    "verify": ("bundle", "--quiet"),
    "report": ("lines.txt", "-o new.html"),
    "audit": ("photos", "--reference run --text lines.txt --quiet"),
    "run": ("bundle lines.txt", "-o new.jsonl --max-length 5 --quiet"),
    "score": ("bundle lines.txt", "--target lines.txt -o new.jsonl --quiet"),
    "merge": ("1.jsonl 2.jsonl", "-o new.jsonl"),
    "sign": ("bundle", "--key lines.txt"),
    "inspect": ("bundle", ""),
    "page": ("bundle", "--out new"),
    "doctor": ("", ""),
    "completion": ("bash", ""),
}
PATHS = (
    *("lines.txt", "answers.jsonl", "bundle", "run", "photos", "pipe", "link", "loop", "empty"),
    *("bundle/manifest.json", "bundle/new", "run/new.html", "absent/new", ".", "..", "/", "-"),
    *("new.xlsx", "new.npy", "new.parquet", "new.jsonl.gz", "1.jsonl", "1.jsonl.summary.json"),
)
NUMBERS = ("0", "-1", "1", "2", "0.5", "4.7", "1e308", "1e-320", "nan", "inf", "-inf", "9" * 20)
TEXTS = ("", "\0", "a\0b", "\ud800", "\udcff", "x" * 300, "x" * 100_000, "9" * 5000, "true", "[1]")
FRACTIONS = ("1/1", "1/2", "0/1", "2/1", "1/0", f"1/{'9' * 5000}", "1/2/3", "2026-11-21")
odd_words = st.one_of(
    st.sampled_from((*PATHS, *NUMBERS, *TEXTS, *FRACTIONS)),
    st.integers(min_value=2**31).map(str),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
odd_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.sampled_from((0, -1, 1, 2, 2**31, 2**63, 2**64, 10**20, 10**4000, True, False)),
        st.sampled_from((0.5, 4.7, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))),
        st.sampled_from([*PATHS, *NUMBERS, *FRACTIONS, "", "\0", "x" * 100_000]),
    ),
    lambda values: st.lists(values, max_size=3),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def place(
    run_folder: Path, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Some of everything; a note in each folder keeps it from being replaced."""
    from transferry.build_model.train.corpus import builtin_pairs

    folder = tmp_path_factory.mktemp("place")
    for name, source in (("run", run_folder), ("bundle", bundle_folder)):
        shutil.copytree(source, folder / name)
        (folder / name / "notes.txt").write_text("dear to somebody\n")
    pairs = builtin_pairs(20, seed=1)
    lines = {
        "lines.txt": [pair.source for pair in pairs[:2]],
        "train.tsv": ["\t".join(pair) for pair in pairs],
        "valid.tsv": ["\t".join(pair) for pair in pairs[:5]],
        "answers.jsonl": ['{"text": "dear to somebody"}'],
        "empty": [],
    }
    for name, texts in lines.items():
        (folder / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    (folder / "photos").mkdir()
    (folder / "photos" / "manifest.json").write_text('{"name": "photos"}')
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("lines.txt")
    (folder / "loop").symlink_to("loop")
    before = Path.cwd()
    os.chdir(folder)
    for number in (1, 2):
        parts = ["run", "bundle", "lines.txt", "-o", f"{number}.jsonl", "--partition"]
        assert CliRunner().invoke(main, [*parts, f"{number}/2"]).exit_code == 0
    yield folder
    os.chdir(before)


def test_every_command_is_tried() -> None:
    assert COMMANDS.keys() == main.commands.keys()


@pytest.mark.parametrize("name", COMMANDS)
@given(data=st.data())
def test_odd_options(place: Path, name: str, data: st.DataObject) -> None:
    parameters = [each for each in main.commands[name].params if each.name != "help"]
    arguments, options = (words.split() for words in COMMANDS[name])
    for parameter in data.draw(st.lists(st.sampled_from(parameters), min_size=1, max_size=2)):
        if isinstance(parameter, click.Argument):
            number = data.draw(st.integers(0, len(arguments) - 1))
            arguments[number] = data.draw(odd_words)
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            options.append(data.draw(st.sampled_from([*parameter.opts, *parameter.secondary_opts])))
        else:
            options.append(f"{parameter.opts[-1]}={data.draw(odd_words)}")
    execute(place, [name, *options, "--", *arguments])


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "doctor"])
@given(data=st.data())
def test_odd_settings(place: Path, name: str, data: st.DataObject) -> None:
    parameters = [str(each.name) for each in main.commands[name].params]
    chosen = data.draw(st.dictionaries(st.sampled_from(parameters), odd_values, min_size=1))
    path = place.parent / f"{place.name}.toml"
    text = to_toml(chosen, {}).replace("NaN", "nan").replace("Infinity", "inf")
    path.write_text(text, encoding="utf-8")
    arguments, options = (words.split() for words in COMMANDS[name])
    execute(place, [name, *options, "--config", str(path), "--", *arguments])


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (GenerationOptions, {}),
        (JobOptions, {}),
        (RayOptions, {"engine": "ray"}),
        (BatchOptions, {}),
        (TrainConfig, {"max_steps": 1}),
        (ModelConfig, vars(ModelConfig(300, 16, 2, 1, 1, 16))),
    ],
)
@given(data=st.data())
def test_odd_fields(config: type[Any], needed: dict[str, Any], data: st.DataObject) -> None:
    """A dataclass takes a value or raises a UsageError; it never keeps one of another type."""
    names = [field.name for field in dataclasses.fields(config)]
    values = st.one_of(odd_values, st.none(), st.text(), st.integers(), st.floats(), st.binary())
    chosen = data.draw(st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=2))
    try:
        made = config(**{**needed, **chosen})
    except UsageError as error:
        assert len(str(error)) < 1000
        return
    kinds: dict[type, Any] = {bool: bool, int: int, float: (float, int), str: str}
    for name, value in chosen.items():
        default = {field.name: field.default for field in dataclasses.fields(config)}[name]
        if type(default) in kinds:
            assert isinstance(getattr(made, name), kinds[type(default)])
            assert isinstance(value, bool) == isinstance(default, bool)


@given(st.dictionaries(st.text(max_size=9), odd_values))
def test_odd_generation(values: dict[str, Any]) -> None:
    if values:
        with pytest.raises(UsageError, match="generation has no "):
            generation_options(values)


@given(data=st.data())
def test_odd_values_in_the_config_of_a_run(place: Path, data: st.DataObject) -> None:
    record = json.loads((place / "run" / "config.json").read_bytes())
    path = place.parent / f"{place.name}-run" / "config.json"
    path.parent.mkdir(exist_ok=True)
    part = data.draw(st.sampled_from(["model", "train", "generation"]))
    names = st.sampled_from(sorted(record.get(part, {"beam": 1, "zz": 1})))
    record[part] = {**record.get(part, {}), data.draw(names): data.draw(odd_values)}
    path.write_text(json.dumps(record))
    with contextlib.suppress(TransferryError):
        load_config(path.parent)


def execute(place: Path, words: list[str]) -> None:
    """Runs a command, which must not hang, raise or touch a file that exists."""
    before = contents(place)
    with time_limit():
        result = CliRunner().invoke(main, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in EXIT_CODES, result.stderr
    assert "Traceback" not in result.stderr
    after = contents(place)
    for path in sorted(after.keys() - before.keys(), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert {path: after.get(path) for path in before} == before


def contents(folder: Path) -> dict[Path, str]:
    """Kind of every path in a folder, with the hash of a file."""
    paths = folder.rglob("*")
    return {path: content(path) for path in paths}


def content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return oct(path.stat().st_mode)


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*arguments: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} seconds")

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
