"""Completion of commands and options in bash, zsh and fish, by click's own scripts."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import get_completion_class

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import atomic_file

NAME, VARIABLE = "transferry", "_TRANSFERRY_COMPLETE"
# Where each shell looks by itself, below the home folder; zsh only if its fpath names the folder.
FILES = {
    "bash": f".local/share/bash-completion/completions/{NAME}",
    "zsh": f".zfunc/_{NAME}",
    "fish": f".config/fish/completions/{NAME}.fish",
}


def script(command: click.Command, shell: str) -> str:
    """Returns the script that completes a command in a shell, one of `FILES`."""
    kind = get_completion_class(shell)
    assert kind is not None
    # click reads the version of bash only to warn about versions before 4.4.
    completion = kind(command, {}, NAME, VARIABLE)
    return completion.source_template % completion.source_vars()


def install(command: click.Command, shell: str) -> str:
    """Writes the script to the shell's folder; returns the remaining steps."""
    path = Path.home() / FILES[shell]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent}: cannot be made: {error.strerror}") from error
    with atomic_file(path) as file:
        file.write(script(command, shell).encode())
    if shell == "zsh":
        line = f"fpath=({path.parent} $fpath); autoload -Uz compinit; compinit"
        return f"{path}; add to ~/.zshrc, if it is not there: {line}"
    return f"{path}; a new {shell} completes"
