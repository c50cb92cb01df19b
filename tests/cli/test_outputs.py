"""Outputs of commands: never over an input, and over nothing that the command did not write."""

import os
import shutil
from pathlib import Path

import pytest

from tests.commands import call, done, fails
from tests.docs.test_bad_input import snapshot

TINY = ["--preset", "tiny", "--d-model", "16", "--heads", "2", "--encoder-layers", "1"]
TINY += ["--decoder-layers", "1", "--d-ff", "16", "--max-steps", "1", "--vocabulary-size", "300"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run bundle lines.txt -o bundle/manifest.json --force", "lies in bundle, which is the"),
        ("run bundle lines.txt -o bundle --force", "is not a file|is the input"),
        ("run bundle link -o lines.txt --force", "lines.txt is the input"),
        ("run bundle lines.txt -o link --force", "link is the input"),
        ("run bundle lines.txt -o settings.toml --config settings.toml --force", "is the input"),
        ("score bundle lines.txt --target notes.txt -o notes.txt --force", "is the input"),
        ("run bundle lines.txt -o notes.txt --force", "no job wrote it, so it is not replaced"),
        ("verify bundle --report bundle/manifest.json", "lies in bundle, which is the input"),
        ("verify bundle --report hard.xml", "hard.xml is the input"),
        ("verify bundle --report notes.txt --force", "notes.txt is not a report of"),
        ("verify bundle --report new.html --junit new.html", "are both outputs"),
        ("verify bundle --checkpoint run --report run/new.html", "lies in run, which is the"),
        ("export run --out photos --force", "photos exists and is no bundle"),
        ("export run --out empty --force", "empty exists and is no bundle"),
        ("export run --out run --force", "run is the input"),
        ("export run --out run/bundle", "lies in run, which is the input"),
        ("export bundle/.. --out bundle --force", "lies in bundle/.., which is the input"),
        ("export run --text bundle/manifest.json --out bundle --force", "holds the input"),
        (
            "train --pairs train.tsv --valid-pairs valid.tsv --out photos --force",
            "is not a checkpoint",
        ),
        ("train --pairs run/config.json --valid-pairs v --out run --force", "holds the input"),
        ("train --pairs train.tsv --valid-pairs v --out lines.txt --force", "it is a file"),
        ("import run --out run --force", "run is the input"),
        ("import photos --out photos/run", "lies in photos, which is the input"),
        ("import bundle --out photos --force", "photos is not a checkpoint"),
        ("merge lines.txt notes.txt -o lines.txt --force", "lines.txt is "),
        ("merge lines.txt notes.txt -o link --force", "link is "),
    ],
)
def test_nothing_of_the_users_is_replaced(place: Path, command: str, message: str) -> None:
    before = snapshot(place)
    result = call(*command.split())
    assert result.exit_code in (2, 3)
    assert any(part in result.stderr for part in message.split("|")), result.stderr
    assert snapshot(place) == before


def test_a_bundle_with_something_else_in_it_is_not_replaced(place: Path) -> None:
    path = place / "bundle" / "certificates" / "notes.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("dear to somebody\n")
    command = "export", "run", "--out", "bundle", "--force"
    fails(2, "bundle holds certificates/notes.txt, which transferry did not", *command)
    assert path.exists()


@pytest.mark.parametrize("name", ["notes.txt", "corpus/notes.txt", "checkpoints/best", "mine/a"])
@pytest.mark.parametrize("command", ["train --builtin --preset tiny", "import photos"])
def test_a_run_with_something_else_in_it_is_not_replaced(
    place: Path, name: str, command: str
) -> None:
    (place / "run" / name).parent.mkdir(exist_ok=True)
    (place / "run" / name).write_text("dear to somebody\n")
    before = snapshot(place)
    words = *command.split(), "--out", "run", "--force"
    fails(2, f"run holds {name}, which transferry did not write", *words)
    assert snapshot(place) == before


def test_a_report_is_replaced_by_a_report(place: Path) -> None:
    options = ["--report", "report.html", "--junit", "report.xml"]
    for _ in range(2):
        done("verify", "bundle", *options)
    assert call("verify", "bundle", "--report", "report.xml").exit_code == 2
    Path("report.html").write_text("my own page\n")
    fails(2, "report.html is not a report of", "verify", "bundle", *options)


@pytest.mark.parametrize("pipe", ["report", "junit"])
def test_a_pipe_is_not_waited_for(place: Path, pipe: str) -> None:
    os.mkfifo("pipe")
    fails(
        2, "so it is not replaced", "verify", "bundle", "--checkpoint", "run", f"--{pipe}", "pipe"
    )


@pytest.mark.parametrize(
    "given", ["--pairs absent.tsv", "--pairs lines.txt", "--builtin --heads 5"]
)
def test_a_training_that_cannot_begin_leaves_the_former_run(place: Path, given: str) -> None:
    options = given.split()
    valid = [] if "--builtin" in options else ["--valid-pairs", "valid.tsv"]
    before = snapshot(place)
    refused = call("train", *options, *valid, *TINY[:2], *options, "--out", "run", "--force")
    assert refused.exit_code in (2, 3)
    assert snapshot(place) == before


def test_a_training_that_stops_before_it_can_be_resumed_leaves_the_former_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transferry.build_model.train.loop import Trainer

    def stop(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    before = snapshot(place)
    train = ["train", "--pairs", "train.tsv", "--valid-pairs", "valid.tsv", *TINY, "--quiet"]
    train += ["--out", "run", "--force"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_loop", stop)
        assert call(*train).exit_code == 130
    assert snapshot(place) == before
    done(*train)
    changed = snapshot(place)
    assert changed["run/model.safetensors"] != before["run/model.safetensors"]
    assert "run/.former" not in changed


def test_what_a_kill_leaves_of_a_forced_training_is_replaced(place: Path) -> None:
    run, former = place / "run", place / "run" / ".former"
    first = snapshot(run)
    former.mkdir()
    for path in [path for path in run.iterdir() if path != former]:
        path.rename(former / path.name)
    (run / "settings.toml").write_text('preset = "tiny"\n[made]\n')
    (run / "corpus").mkdir()
    train = ["train", "--valid-pairs", "valid.tsv", *TINY, "--out", "run", "--force"]
    assert call(*train, "--pairs", "absent.tsv").exit_code == 3
    assert snapshot(run) == first, "the run from before the kill"


@pytest.mark.parametrize("changed", ["--max-steps=-5", "--max-minutes nan", "--pairs lines.txt"])
def test_a_refused_resumption_changes_nothing(place: Path, trained: Path, changed: str) -> None:
    shutil.copytree(trained, "new")
    before = snapshot(place)
    refused = call("train", "--out", "new", "--resume", *changed.split())
    assert refused.exit_code in (2, 3)
    assert snapshot(place) == before
    done("train", "--out", "new", "--resume", "--max-steps", "2", "--quiet")
    assert "max_steps = 2\n" in Path("new/settings.toml").read_text()
