"""The console blocks of docs/ show what their commands print, but for numbers.

The commands run with a model that is trained for a few steps, so that its answers differ too.
"""

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
MADE: dict[str, Any] = runpy.run_path(str(CHECKOUT / "docs" / "make_sessions.py"))
# A model that has learnt to end its answers: long ones take time.
QUICK = {"--max-minutes 2": "--max-steps 180", "head -100": "head -30"}
# Their output is the model's text.
TEXT = re.compile(r"-o - *$|^python |^cat |^head ")
# Progress, told every 30 seconds.
TOLD = re.compile(r"\w+: [\d,]+ of ")


def heads(lines: list[str]) -> list[str]:
    """The first word of each line, with every number as 0."""
    words = (line.split()[0] for line in lines if line.strip())
    return [re.sub(r"[\d,.]*\d", "0", word) for word in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


def test_numbers_do_not_matter() -> None:
    assert heads(["446 rows in 0.7 s", "", "PASSED: bundles/demo"]) == ["0", "PASSED:"]
    assert heads(["1,446 rows"]) == heads(["2 rows"]) != heads(["no rows"])


def test_a_page_is_recorded() -> None:
    page = "a\n```console\n$ x 1\nold\n$ y\n```\nb\n```sh\n$ z\n```\n"
    assert MADE["recorded"](page, lambda command: [f"ran {command}"]) == page.replace(
        "old\n", "ran x 1\n"
    ).replace("$ y\n", "$ y\nran y\n")


@pytest.mark.skipif(
    os.environ.get("SESSIONS") != "1", reason="it trains for minutes: SESSIONS=1 runs it"
)
@pytest.mark.parametrize("page", MADE["PAGES"], ids=lambda page: page.name)
def test_the_commands_print_what_the_page_shows(page: Path, folder: Path) -> None:
    """In order: the tutorial makes what the others use."""
    for command, shown in MADE["sessions"](page.read_text(encoding="utf-8")):
        for slow, quick in QUICK.items():
            command = command.replace(slow, quick)
        printed = MADE["run"](command, folder)
        if TEXT.search(command):
            assert bool(printed) == bool(shown), command
            continue
        found, shown = iter(heads(printed)), [line for line in shown if not TOLD.match(line)]
        # In this order; a model that is trained less may print more, such as ties.
        missing = [head for head in dict.fromkeys(heads(shown)) if head not in found]
        assert not missing, f"{command}: {printed}; `make sessions`"


def test_the_neighbours_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    text = (CHECKOUT / "docs" / "how-to" / "find-neighbours.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```", text, re.S | re.M)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        np.save("vectors.npy", np.eye(6, dtype=np.float32)[[0, 1, 2, 3, 4, 3]])
        Path("lines.txt").write_text("".join(f"line {number}\n" for number in range(6)))
        exec(compile(re.sub("^    ", "", block, flags=re.M), "find-neighbours.md", "exec"), {})
    found = capsys.readouterr().out.splitlines()
    assert found[:2] == ["1.000  line 3", "1.000  line 5"]
