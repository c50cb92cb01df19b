"""Writes docs/cli.md from the --help of every command: `make docs`."""

import copy
from pathlib import Path

import click

from transferry.cli import main
from transferry.runtime.console.group import HELP_ALL

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 80

OPENING = """\
# The command line

The output of `transferry --help` and of each command's `--help`, without summary and examples; an
option of several commands is described at the first of them, and one with a default takes a value.
`make docs` generates this page.
"""

Record = tuple[str, str]


def page() -> str:
    """Returns the page as the installed commands make it."""
    parts = [OPENING, _block(_help(main, "transferry"))]
    described: dict[Record, str] = {}
    all_of: dict[str, list[str]] = {}  # options that are described at a command
    for name, command in main.commands.items():
        short, shared = _without(command, described)
        parts += [f"## transferry {name}\n", _block(_help(short, f"transferry {name}"))]
        for first, names in shared.items():
            others = [name for name in all_of[first] if name not in names]
            listed = f"all options but {', '.join(others)}" if len(others) < len(names) else ""
            parts.append(f"As in `{first}`: {listed or ', '.join(names)}.\n")
        all_of[name] = [f"`{each.opts[-1]}`" for each in short.params if _is_described(each)]
    return "\n".join(parts)


def _is_described(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not parameter.hidden


def _without(
    command: click.Command, described: dict[Record, str]
) -> tuple[click.Command, dict[str, list[str]]]:
    """Hides options that an earlier command has; adds the others to `described`.

    Returns:
        A copy of the command, and the names of the hidden options by the first command.
    """
    short, shared = copy.copy(command), dict[str, list[str]]()
    short.params = [copy.copy(parameter) for parameter in command.params]
    short.add_help_option = False
    short.epilog = None
    short.help = (command.help or "").partition("\n\n")[2]  # `transferry --help` lists the summary
    for parameter in short.params:
        record = parameter.get_help_record(click.Context(command))
        if isinstance(parameter, click.Option) and record is not None:
            first = described.setdefault(record, str(command.name))
            if first != command.name:
                parameter.hidden = True
                shared.setdefault(first, []).append(f"`{parameter.opts[-1]}`")
            kind = record[0].removesuffix(" RANGE").rpartition(" ")[2]
            if kind in ("INTEGER", "FLOAT", "TEXT"):
                parameter.metavar = "" if "Default:" in record[1] else kind
    return short, shared


def _help(command: click.Command, name: str) -> str:
    # A width of its own, or the page would depend on the terminal that made it.
    settings = main.context_settings | {"terminal_width": WIDTH}
    context = click.Context(command, info_name=name, **settings)
    context.meta[HELP_ALL] = True
    text = command.get_help(context)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
