"""Writes docs/cli.md, which only the site has, from the help of every command: `make docs`."""

from pathlib import Path

import click

from transferry.cli import main
from transferry.runtime.console.group import HELP_ALL

PAGE = Path(__file__).with_name("cli.md")
# A width of its own, or the page would depend on the terminal that made it.
WIDTH = 80
OPENING = (
    "# The command line\n\nThe output of `transferry --help`, and of each command's `--help-all`.\n"
)


def page() -> str:
    """Returns the page as the installed commands make it."""
    parts = [OPENING, _help(main, "transferry")]
    for name, command in main.commands.items():
        parts += [f"## transferry {name}\n", _help(command, f"transferry {name}")]
    return "\n".join(parts)


def _help(command: click.Command, name: str) -> str:
    settings = main.context_settings | {"terminal_width": WIDTH}
    context = click.Context(command, info_name=name, **settings)
    context.meta[HELP_ALL] = True
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    return "\n".join(["```text", *lines, "```", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
