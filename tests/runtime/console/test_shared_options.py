"""Options made from a dataclass, settings files, and former names of options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from transferry.runtime.console.fields import fields_as_options, given
from transferry.runtime.console.group import Commands
from transferry.runtime.console.shared_options import configurable


@dataclass(frozen=True)
class Sea:
    """A sea.

    Attributes:
        depth: depth in metres.
        salt: salt in
            the water.
        tides: has tides.
        frozen: is frozen.
        kind: kind of sea.
        name: its name.
    """

    depth: int
    salt: float = 3.5
    tides: bool = True
    frozen: bool = False
    kind: Literal["inland", "open"] = "open"
    name: str | None = None


def call(*arguments: str | Path, **defaults: str) -> tuple[Result, dict[str, Any]]:
    """Calls a command `sail` with the options of a sea, and returns its arguments."""
    found: dict[str, Any] = {}

    @click.group(cls=Commands)
    def main() -> None: ...

    @main.command()
    @configurable
    @click.option("--report", "page")
    @fields_as_options(Sea, leave_out=["name"], defaults=defaults)
    def sail(**values: Any) -> None:
        found.update(given(values, Sea), page=values["page"])

    return CliRunner().invoke(main, ["sail", *map(str, arguments)]), found


def test_the_help_of_a_field_ends_with_its_default() -> None:
    result, _ = call("--help", depth="from the chart", frozen="off")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "--depth INTEGER Depth in metres. Default: from the chart." in lines
    assert "--salt FLOAT Salt in the water. Default: 3.5." in lines
    assert "--tides / --no-tides Has tides. Default: on." in lines
    assert "--frozen / --no-frozen Is frozen. Default: off." in lines
    assert "--kind [inland|open] Kind of sea. Default: open." in lines
    assert "--name" not in result.stdout
    plain, _ = call("--help")
    assert "--no-frozen" not in plain.stdout, "without a default elsewhere nothing is to be undone"


def test_only_options_that_are_given_have_a_value() -> None:
    assert call()[1] == {"page": None}
    given_here = ("--depth", "7", "--no-tides", "--kind", "inland")
    assert call(*given_here)[1] == {"depth": 7, "tides": False, "kind": "inland", "page": None}


def test_a_settings_file_may_use_the_names_of_options(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('report = "a.html"\ndepth = 4\nsalt = 1.0\n')
    _, found = call("--config", settings, "--depth", "5")
    assert found == {"page": "a.html", "depth": 5, "salt": 1.0}
    settings.write_text('page = "b.html"\n')
    assert call("--config", settings)[1] == {"page": "b.html"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depht = 4\nsalted = 1.0", "sets depht, salted, which sail does not have"),
        ("depth = four", "is not TOML"),
    ],
)
def test_unusable_settings_are_refused(text: str, message: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(text)
    result, _ = call("--config", settings)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {settings} {message}")
