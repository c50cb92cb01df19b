"""Inputs of commands: twelve lines, and files of pairs to train on."""

from pathlib import Path

import pytest


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
