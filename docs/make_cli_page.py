"""Writes docs/cli.md from the --help of every command: `make docs`."""

from pathlib import Path

import click

from transferry.cli import main

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 80

OPENING = """\
# The command line

What `transferry --help` and the `--help` of every command print. This page is generated: after a
change, `make docs` writes it anew, and a test tells when that was forgotten.
"""


def page() -> str:
    """Returns the page as the installed commands make it."""
    parts = [OPENING, _block(_help(main, "transferry"))]
    for name, command in main.commands.items():
        parts += [f"## transferry {name}\n", _block(_help(command, f"transferry {name}"))]
    return "\n".join(parts)


def _help(command: click.Command, name: str) -> str:
    # A width of its own, or the page would depend on the terminal that made it.
    return command.get_help(click.Context(command, info_name=name, terminal_width=WIDTH))


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
