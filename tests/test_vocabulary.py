"""One word for one thing: words that the vocabulary of docs/design.md replaced do not come back."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
SECTION = (CHECKOUT / "docs" / "design.md").read_text(encoding="utf-8").split("## Vocabulary")[1]
# Lines that must name what was called otherwise before: former options, former job folders.
ALLOWED = {
    "shard": ("FORMER_NAMES", "format 1", "(chunks|shards)", "named chunks shards"),
    "opinions": ("FORMER_NAMES", "Schema 1"),
}


def banned() -> list[str]:
    rows = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("|")]
    return [word.strip() for row in rows[2:] for word in row[2].split(",") if word.strip()]


def texts() -> list[Path]:
    packages = ("build_model", "export", "runtime", "benchmarks")
    sources = [path for package in packages for path in (CHECKOUT / package).rglob("*.py")]
    pages = [path for path in (CHECKOUT / "docs").glob("*.md") if path.name != "design.md"]
    return [*sources, CHECKOUT / "cli.py", *pages, CHECKOUT / "README.md"]


def uses(word: str, text: str) -> list[str]:
    """The lines that use a word, as one of its own, part of a name, or in the plural."""
    name = re.compile(rf"(?<![a-z]){re.escape(word)}s?(?![a-z])", re.I)
    return [line.strip() for line in text.splitlines() if name.search(line)]


def test_a_word_is_found_in_prose_and_in_names() -> None:
    for line in ("the rough scores", "rough_graph(head)", "Sinks are closed", "a = TODO_sink"):
        assert uses("rough", line) or uses("sink", line), line
    for line in ("through the graph", "sinking", "thorough"):
        assert not uses("rough", line), line
        assert not uses("sink", line), line


@pytest.mark.parametrize("word", banned())
def test_a_word_that_was_replaced_is_not_used(word: str) -> None:
    found = {
        f"{path.relative_to(CHECKOUT)}: {line}"
        for path in texts()
        for line in uses(word, path.read_text(encoding="utf-8"))
        if not any(allowed in line for allowed in ALLOWED.get(word, ()))
    }
    assert not found, "see the vocabulary in docs/design.md"


def test_every_file_that_the_design_names_exists() -> None:
    page = (CHECKOUT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:build_model|export|runtime|tests|docs)/[\w/]+\.\w+|cli\.py)`", page)
    )
    assert len(named) > 30
    assert [name for name in sorted(named) if not (CHECKOUT / name).is_file()] == []
