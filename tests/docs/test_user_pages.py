"""Pages for users of other tools, notebooks and the files of the project on GitHub."""

import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import transferry
from transferry import Engine
from transferry.runtime.decoding.generation_options import SYNONYMS

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((CHECKOUT / "docs" / "coming-from").glob("*.md"))
NOTEBOOKS = sorted((CHECKOUT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def bundles(
    tmp_path: Path,
    fast_bundle_folder: Path,
    reader_bundle_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A working folder with the bundles that the pages name."""
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "ende").symlink_to(fast_bundle_folder)
    (tmp_path / "bundles" / "minilm").symlink_to(reader_bundle_folder)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("bundles")
def test_lines_for_users_of_another_tool_run(page: Path) -> None:
    theirs, ours = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)
    compile(theirs, page.name, "exec")
    names: dict[str, Any] = {"texts": ["a dog runs in the park", "two men talk"]}
    exec(compile(ours, page.name, "exec"), names)
    assert len(names["vectors" if "vectors" in ours else "answers"]) == 2


@pytest.mark.usefixtures("bundles")
def test_a_value_is_computed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    page = (CHECKOUT / "docs" / "how-to" / "read-a-failing-report.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    exec(compile(block, "read-a-failing-report.md", "exec"), {})
    assert float(capsys.readouterr().out) < 1e-5


def wrong_names(table: str) -> list[str]:
    """Rows of a page whose name of ours is not the one for theirs, or no method of Engine."""
    wrong = []
    for theirs, ours in re.findall(r"^\| `(\w+)[^|]*\| `([^`]+)`", table, re.M):
        method = re.match(r"(\w+)\(", ours)
        known = theirs not in SYNONYMS or SYNONYMS[theirs] == ours
        if not known or (method and not hasattr(Engine, method[1]) and method[1] != "Engine"):
            wrong.append(f"{theirs}: {ours}")
    return wrong


def test_names_of_other_tools_are_those_that_messages_translate() -> None:
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    assert wrong_names(pages) == []
    assert len([name for name in SYNONYMS if f"| `{name}` |" in pages]) > 9
    assert wrong_names("| `num_beams` | `beams` |\n| `score_batch` | `rate(pairs)` |\n") == [
        "num_beams: beams",
        "score_batch: rate(pairs)",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("bundles")
def test_notebooks_run(path: Path) -> None:
    pytest.importorskip("pandas")
    names: dict[str, Any] = {}
    cells = json.loads(path.read_text("utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert len(cells) > 4


def test_workflows_test_every_python_that_the_project_names() -> None:
    """And run recipes that the Makefile has."""
    folder = CHECKOUT / ".github" / "workflows"
    flows = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in folder.glob("*.yml")}
    assert {*flows} == {"test", "nightly", "release"}
    text = "".join(path.read_text("utf-8") for path in folder.glob("*.yml"))
    recipes = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= recipes
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert flows["test"]["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    assert f">={named[0]}" == project["requires-python"]
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == project["version"]


def absent_lines(page: str) -> list[str]:
    """Added lines of the diffs of a page that their file does not hold."""
    absent = []
    for diff in re.findall(r"^```diff\n(.*?)^```", page, re.S | re.M):
        held: set[str] = set()
        for line in diff.splitlines():
            if line.startswith("+++ "):
                held = {*(CHECKOUT / line[4:]).read_text("utf-8").splitlines()}
            elif line[1:] not in held:
                absent.append(line)
    return absent


def test_diffs_for_contributors_are_in_the_tree() -> None:
    page = (CHECKOUT / "docs" / "adding.md").read_text("utf-8")
    assert absent_lines(page) == []
    assert page.count("\n+") > 25
    assert absent_lines("```diff\n+++ cli.py\n+no such line\n```\n") == ["+no such line"]


def test_the_page_of_the_api_names_what_is_there() -> None:
    page = (CHECKOUT / "docs" / "api.md").read_text("utf-8")
    names = [each.rpartition(".") for each in re.findall(r"^::: (\S+)", page, re.M)]
    assert names[0][2] == "generate"
    assert [name for place, _, name in names if not hasattr(import_module(place), name)] == []
    # A class is imported from `transferry`, as both pages say.
    text = page + (CHECKOUT / "docs" / "python.md").read_text("utf-8")
    results = re.findall(r"`([A-Z]\w+Result)`", text)
    classes = {name for _, _, name in names if name[0].isupper()} - {"Mapper"}
    assert {*results, *classes} <= {*dir(transferry)}
