"""Inputs of commands: twelve lines, and files of pairs to train on."""

import shutil
from pathlib import Path

import pytest

from tests.commands import SMALLEST, done


@pytest.fixture(scope="session", autouse=True)
def _shared_traces(traces: None) -> None:
    """Exports and verifications of these tests share `TRACES`."""


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve sentences, a line each."""
    from transferry.build_model.train.corpus import builtin_pairs

    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    sources = [pair.source for pair in builtin_pairs(12, seed=7)]
    path.write_text("".join(f"{source}\n" for source in sources), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options that train on forty pairs."""
    from transferry.build_model.train.corpus import builtin_pairs

    folder = tmp_path_factory.mktemp("pairs")
    for name, count, seed in (("train", 40, 1), ("valid", 4, 2)):
        text = "".join("\t".join(pair) + "\n" for pair in builtin_pairs(count, seed))
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return ["--pairs", str(folder / "train.tsv"), "--valid-pairs", str(folder / "valid.tsv")]


@pytest.fixture(scope="session")
def trained(pairs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, for tests to copy."""
    run = tmp_path_factory.mktemp("trained") / "run"
    done("train", *pairs, *SMALLEST, "--max-steps", "1", "--out", run, "--quiet")
    return run


@pytest.fixture
def place(
    run_folder: Path, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Some of everything that commands read and write."""
    from transferry.build_model.train.corpus import builtin_pairs

    for name, folder in (("run", run_folder), ("bundle", bundle_folder)):
        shutil.copytree(folder, tmp_path / name)
    pairs = builtin_pairs(20, seed=1)
    lines = {
        "lines.txt": [pair.source for pair in pairs[:3]],
        "train.tsv": ["\t".join(pair) for pair in pairs],
        "valid.tsv": ["\t".join(pair) for pair in pairs[:5]],
        "notes.txt": ["dear to somebody"],
        "settings.toml": ["max-length = 9"],
    }
    for name, texts in lines.items():
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "manifest.json").write_text('{"name": "photos", "format": 1}')
    (tmp_path / "photos" / "settings.toml").write_text('preset = "dark"\n')
    (tmp_path / "link").symlink_to("lines.txt")
    (tmp_path / "hard.xml").hardlink_to(tmp_path / "bundle" / "manifest.json")
    shutil.copy(tmp_path / "lines.txt", tmp_path / "notes.txt.summary.json")
    (tmp_path / "run" / "settings.toml").write_text('preset = "tiny"\n[made]\nversion = "0.1"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def place_of_all(
    place: Path, writer_bundle_folder: Path, reader_bundle_folder: Path, chat_bundle_folder: Path
) -> Path:
    """And bundles of each architecture, one with a chat template."""
    (place / "writer").symlink_to(writer_bundle_folder)
    (place / "reader").symlink_to(reader_bundle_folder)
    (place / "chat").symlink_to(chat_bundle_folder)
    return place
