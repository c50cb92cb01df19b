"""Fields of settings as options of a command, with their types and help."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from transferry.runtime.console.group import FilePath
from transferry.runtime.proof.certificates.strength import FORMER
from transferry.runtime.settings import check_value, field_helps, field_types

Command = TypeVar("Command", bound=Callable[..., Any])


class PanelOption(click.Option):
    """An option that --help lists under `panel`, the heading of a concern; last if empty."""

    def __init__(self, *names: Any, panel: str = "", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.panel = panel


class Required(click.Choice[str]):
    """The strength of a certificate; a settings file may say true and false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Turns a switch into a strength."""
        if isinstance(value, bool):
            return "checkpoint" if value else None
        return super().convert(FORMER.get(value, value), param, ctx)


class Switch(click.Choice[str]):
    """On, off, or a word; a settings file may say true and false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Turns the words true and false into a bool."""
        word = json.dumps(value) if isinstance(value, bool) else value
        chosen = super().convert(word, param, ctx)
        return {"true": True, "false": False}.get(chosen, chosen)


def together(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combines options into one decorator, in the order of --help."""

    def add(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


def fields_as_options(
    config: type[Any],
    *,
    leave_out: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
    panel: str = "",
    panels: Mapping[str, Sequence[str]] | None = None,
    prefixes: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Adds an option for each field of a dataclass, with its help from the docstring.

    A field of several values is an option that may be given several times. An option that is not
    given is None, or (), so that `given` can tell it from the field's default.

    Args:
        config: The dataclass.
        leave_out: Fields that get no option.
        defaults: Words of --help for defaults that are not the field's own. A bool among these can
            be switched on and off.
        panel: Heading of the options in --help.
        panels: Fields under other headings.
        prefixes: Words before the help of a field.
    """
    hints, helps, defaults = get_type_hints(config), field_helps(config), defaults or {}
    headings = {name: each for each, names in (panels or {}).items() for name in names}

    def declared(field: dataclasses.Field[Any]) -> Callable[[Any], Any]:
        hint, flag = hints[field.name], field.name.replace("_", "-")
        text = helps.get(field.name, "")  # python -OO keeps no docstrings
        made = partial(
            click.option,
            cls=PanelOption,
            panel=headings.get(field.name, panel),
            callback=partial(_in_range, config, field.name),
        )
        if NoneType in get_args(hint):
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
        if before := (prefixes or {}).get(field.name):
            text = before + (text if text[:2].isupper() else text[:1].lower() + text[1:])
        several = get_origin(hint) is tuple
        if several:
            hint = get_args(hint)[0]
        default = None if field.default is dataclasses.MISSING else field.default
        if isinstance(default, bool):
            default = "on" if default else None
        if bool in get_args(hint):
            default = json.dumps(field.default)
        if (default := defaults.get(field.name, default)) not in (None, "", ()):
            text = f"{text} Default: {default}."
        if hint is bool:
            name = f"--{flag}/--no-{flag}" if default else f"--{flag}"
            return made(name, is_flag=True, default=None, help=text)
        return made(f"--{flag}", type=_kind(hint), multiple=several, help=text)

    fields = [field for field in dataclasses.fields(config) if field.name not in leave_out]
    return together(*map(declared, fields))


def _kind(hint: Any) -> Any:
    """Returns click's type of values of a field."""
    if hint is Path:
        return FilePath()
    if bool in get_args(hint):
        (words,) = (get_args(each) for each in get_args(hint) if each is not bool)
        return Switch(["true", "false", *words])
    return click.Choice(get_args(hint)) if get_origin(hint) is Literal else hint


def _in_range(
    config: type[Any], name: str, context: click.Context, parameter: click.Parameter, value: Any
) -> Any:
    """Checks an option at once: before a command loads torch or reads a file."""
    if value not in (None, ()):
        check_value(name, value, field_types(config)[name])
    return value


def given(
    values: Mapping[str, Any], config: type[Any], *, leave_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the options that were given and are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(config)} - set(leave_out)
    return {
        name: value for name, value in values.items() if name in names and value not in (None, ())
    }
