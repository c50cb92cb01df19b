"""The documents agree with the command line, the Makefile and each other."""

import contextlib
import itertools
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from transferry.cli import main
from transferry.runtime.console import shared_options

CHECKOUT = Path(__file__).resolve().parent.parent
GENERATED = CHECKOUT / "docs" / "cli.md"  # by `make docs`, for the site
DOCUMENTS = [CHECKOUT / "README.md", *sorted({*(CHECKOUT / "docs").rglob("*.md")} - {GENERATED})]
# A link or a picture: ![...](...), with the part after #.
LINK = re.compile(r"\]\(<?([^)#>\s]*)(?:#([^)>\s]*))?[^)]*\)")


def blocks(text: str) -> list[str]:
    """Content of fenced blocks, lines that a backslash continues joined."""
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.S | re.M)
    return [re.sub(r"\\\n\s*", "", block) for block in fenced]


def commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a shell line as words, without redirections and assignments."""
    lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if not set(token) <= set("|&;()"):
            words.append(token)
            continue
        end = next((place for place, word in enumerate(words) if word in ("<", ">", ">>")), None)
        words = [*itertools.dropwhile(lambda word: "=" in word, words[:end])]
        if words:
            yield words
        words = []


def shell_commands(text: str, program: str) -> list[list[str]]:
    """The arguments of each command of a program in the fenced blocks."""
    found = []
    for line in "\n".join(blocks(text)).splitlines():
        # A line that shlex cannot read, with an apostrophe in prose say, is no shell.
        with contextlib.suppress(ValueError):
            found += [words[1:] for words in commands(line) if Path(words[0]).name == program]
    return found


def parse(arguments: list[str]) -> None:
    """Lets the real commands parse arguments, and runs nothing."""
    with main.make_context("transferry", list(arguments)) as context:
        name, command, rest = main.resolve_command(context, list(arguments))
        assert command is not None
        command.make_context(name, rest, parent=context)


def transferry_lines() -> Iterator[Any]:
    for path in DOCUMENTS:
        for arguments in shell_commands(path.read_text(encoding="utf-8"), "transferry"):
            yield pytest.param(arguments, id=f"{path.name}: {shlex.join(arguments)}")


def test_the_commands_are_found_in_what_a_shell_would_read() -> None:
    text = """\
A word on transferry run, and `transferry inspect x` in passing.
```sh
transferry train --source a \\
    --out b   # a comment
cat a | .venv/bin/transferry run b - -o - > c && make demo PYTHON=python3.12
$ OMP_NUM_THREADS=1 transferry doctor
```
```text
Usage: transferry run [OPTIONS] BUNDLE INPUT
it's no shell: transferry
```
"""
    assert shell_commands(text, "transferry") == [
        ["train", "--source", "a", "--out", "b"],
        ["run", "b", "-", "-o", "-"],
        ["doctor"],
    ]
    assert shell_commands(text, "make") == [["demo", "PYTHON=python3.12"]]


@pytest.mark.parametrize("arguments", [*transferry_lines()])
def test_every_command_shown_is_one(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_options, "read_settings", lambda path: {})
    try:
        parse(arguments)
    except click.exceptions.Exit as end:  # --help and --version end here
        assert end.exit_code == 0


@pytest.mark.parametrize(
    "arguments", [["fly"], ["run", "bundle"], ["run", "b", "t", "--bean", "4"]]
)
def test_a_command_that_is_none_is_told(arguments: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parse(arguments)


def test_the_readme_shows_how_to_use_it() -> None:
    text = DOCUMENTS[0].read_text(encoding="utf-8")
    shown = {arguments[0] for arguments in shell_commands(text, "transferry")}
    assert shown >= {"train", "export", "verify", "run"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_shown_exists(path: Path) -> None:
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {"setup", "test", "demo", "docs"} <= targets
    for arguments in shell_commands(path.read_text(encoding="utf-8"), "make"):
        named = {word for word in arguments if "=" not in word and not word.startswith("-")}
        assert named <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_benchmark_shown_exists_or_names_its_commit(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        missing = [
            name
            for name in re.findall(r"benchmarks/\w+\.py", line)
            if not (CHECKOUT / name).is_file()
        ]
        assert not missing or re.search(r"\b[0-9a-f]{7}\b", line), missing


def anchors(page: Path) -> set[str]:
    """Anchors of a page: its headings, as GitHub and the site name them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = []
    for target, anchor in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        page = path.parent / target if target else path
        if not page.exists() or (anchor and anchor not in anchors(page)):
            missing.append(f"{target}#{anchor}")
        # The site has no page outside of its folder.
        elif path.name != "README.md" and not page.resolve().is_relative_to(CHECKOUT / "docs"):
            missing.append(target)
    assert missing == []


def test_pages_are_short() -> None:
    """Readers look references up and read other pages whole."""
    references = {"bundle", "design", "errors", "formats", "import", "parity", "performance"}
    references |= {"portability", "variants"}
    words = {path.stem: len(path.read_text("utf-8").split()) for path in DOCUMENTS[1:]}
    assert [name for name, count in words.items() if count > 1500 and name not in references] == []
    assert sum(words.values()) <= 40_000, "shorten the pages that you touched"


def test_the_site_has_every_page_once() -> None:
    lines = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ *- (?:[^#\n]*: )?(\S+\.md)$", lines, re.M)
    pages = [path.relative_to(CHECKOUT / "docs").as_posix() for path in [*DOCUMENTS[1:], GENERATED]]
    assert sorted(listed) == sorted(pages), "list the page under nav in mkdocs.yml"


def test_the_page_of_the_command_line_has_every_option() -> None:
    page = runpy.run_path(str(CHECKOUT / "docs" / "make_cli_page.py"))["page"]()
    sections = dict(re.findall(r"^## transferry (\w+)$(.*?)(?=^## |\Z)", page, re.S | re.M))
    assert list(sections) == list(main.commands)
    wide = [line for line in page.splitlines() if len(line) > 80 and "[relu|" not in line]
    assert wide == [], "wider than a terminal"
    for name, command in main.commands.items():
        options = [each for each in command.params if isinstance(each, click.Option)]
        shown = [option.opts[-1] for option in options if not option.hidden]
        assert [option for option in shown if option not in sections[name]] == [], name


def test_generated_tables_are_in_their_pages() -> None:
    """Model types as the import knows them; speed as recorded, in README's headline too."""
    made = runpy.run_path(str(CHECKOUT / "docs" / "make_tables.py"))
    pages = {page.name: page.read_text(encoding="utf-8") for page in made["PAGES"]}
    for text in pages.values():
        empty = re.sub(r"(: make docs -->\n).*?(?=<!-- /)", r"\1", text, flags=re.S)
        assert empty != text == made["with_tables"](empty), "run `make docs`"
    _, _, greedy, _, int8, _ = [cell.split(" ")[0] for cell in made["speed"]()[1]]
    assert f"**Speed**: {greedy} times CTranslate2 in float32, {int8} in int8" in pages["README.md"]


def test_the_types_of_documents_in_javascript_are_those_of_python() -> None:
    made = runpy.run_path(str(CHECKOUT / "docs" / "make_js_schema.py"))["page"]()
    assert (CHECKOUT / "js" / "schema.js").read_text(encoding="utf-8") == made, "run `make docs`"


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_shows_an_example_of_itself(name: str) -> None:
    epilog = main.commands[name].epilog or ""
    listed = re.split("Examples?:", epilog)[-1]
    examples = shell_commands(f"```\n{listed}```", "transferry")
    assert len(examples) >= 2
    assert {arguments[0] for arguments in examples} == {name}


def test_the_session_in_python_runs(
    fast_bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (CHECKOUT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert len(shown) > 8
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "ende").symlink_to(fast_bundle_folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in shown:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["report"].passed


# Words of a test of an architecture: its fixtures, or the name.
OF_ARCHITECTURE = {
    "encoder-decoder": r"\b(bundle_folder|run_folder|both)\b",
    "decoder-only": r"writer_",
    "encoder-only": r"reader_|encoder-only",
}
CELL = re.compile(r'\[[^]]+\]\((tests/\S+\.py) "(test_\w+)"\)')


def unheld_cells(text: str) -> list[str]:
    """Cells of the table of runtimes whose test does not exist or is of another architecture."""
    header, _, *rows = re.search(r"^\| runtime \|.*(?:\n\|.*)+", text, re.M)[0].splitlines()  # type: ignore[index]
    architectures = [cell.strip() for cell in header.strip("| ").split("|")][1:]
    assert set(architectures) == set(OF_ARCHITECTURE)
    missing = []
    for row in rows:
        runtime, *cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        for architecture, cell in zip(architectures, cells, strict=True):
            held = CELL.fullmatch(cell)
            source = CHECKOUT / held[1] if held else CHECKOUT
            code = source.read_text(encoding="utf-8") if source.is_file() else ""
            exists = held and re.search(rf"^def {held[2]}\(", code, re.M)
            if not exists or not re.search(OF_ARCHITECTURE[architecture], code):
                missing.append(f"{runtime}, {architecture}")
    return missing


def test_each_cell_of_the_table_of_runtimes_names_its_test() -> None:
    text = DOCUMENTS[0].read_text(encoding="utf-8")
    assert unheld_cells(text) == []
    assert text.count("| runtime |") == 1


@pytest.mark.parametrize(
    ("cell", "held"),
    [
        ('[x](tests/runtime/ort/test_cuda.py "test_cuda_passes_the_recorded_reference")', True),
        ('[x](tests/runtime/ort/test_cuda.py "test_what_is_not_there")', False),
        ('[x](tests/runtime/ort/no_test.py "test_cuda_passes_the_recorded_reference")', False),
        ('[x](tests/runtime/engine/tasks/test_embed.py "test_vectors")', False),
        ("x", False),
    ],
)
def test_a_cell_without_a_test_is_told(cell: str, held: bool) -> None:
    table = f"| runtime | {' | '.join(OF_ARCHITECTURE)} |\n|---|---|---|---|\n"
    row = f"| R | {cell} | {cell} | {cell} |"
    wanted = [] if held else [f"R, {name}" for name in OF_ARCHITECTURE]
    assert unheld_cells(table + row) == wanted
