"""The folder of a run: made, refused or replaced, and what it remembers of the command."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.settings import read_settings, write_settings

SETTINGS = "settings.toml"
# One of these settings is in every run, trained or imported.
MARKS = frozenset({"preset", "huggingface"})
# What a run does not remember, and what may be said anew when it continues: where it ends, and
# where its files lie by now.
OF_ONE_CALL = {"out", "resume", "force", "device", "quiet"}
MAY_CHANGE = {"max_steps", "max_minutes"} | {
    f"{prefix}{name}" for prefix in ("", "valid_") for name in ("source", "target", "pairs", "text")
}


def check_folder(out: Path, *, force: bool, resumable: bool = False) -> bool:
    """Tells whether a folder holds a run that is to be replaced.

    Args:
        out: The folder, which need not exist.
        force: Replace a run.
        resumable: The command could continue it.

    Raises:
        UsageError: The folder holds something and `force` is off, or what it holds is no run.
        InputError: It is a file.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: cannot be made: it is no folder; name another")
    if not out.is_dir() or not any(out.iterdir()):
        return False
    if not force:
        remedy = (
            "--resume continues it, --force replaces it" if resumable else "--force replaces it"
        )
        raise UsageError(f"{out} holds something already; {remedy}")
    # Other programs have a settings.toml too.
    path = out / SETTINGS
    if not path.exists() or MARKS.isdisjoint(read_settings(path)):
        raise UsageError(f"{out} is no run of transferry, so it is not replaced; name another")
    return True


def make_folder(out: Path, *, force: bool) -> None:
    """Makes an empty folder.

    Raises:
        UsageError: The folder holds something and `force` is off, or what it holds is no run.
        InputError: It cannot be made.
    """
    try:
        if check_folder(out, force=force, resumable=True):
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made: {error.strerror}; name another") from error


def remember(out: Path, options: Mapping[str, Any]) -> None:
    """Writes RUN/settings.toml: the command's options, for `recall` and for a person."""
    chosen = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name not in OF_ONE_CALL
    }
    made = {"version": importlib.metadata.version("transferry")}
    write_settings(out / SETTINGS, chosen, made)


def recall(out: Path, options: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a run was started with, but for what may change.

    Args:
        out: The run.
        options: All options of the command that continues it.
        said: Those of them that are no defaults.

    Raises:
        UsageError: What was said would change the run.
        InputError: There is no run to continue.
    """
    if said.get("force"):
        raise UsageError("--resume and --force exclude each other: continue a run or replace it")
    stored = read_settings(out / SETTINGS)
    if "huggingface" in stored:
        raise UsageError(f"{out} was imported, so there is no training to continue; train anew")
    for name, value in said.items():
        if name not in OF_ONE_CALL | MAY_CHANGE and value != stored.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"--resume continues the run as it was started, with {flag} "
                f"{stored.get(name, 'left out')}, and {flag} {value} would change it; leave it "
                "out, or start anew with --force"
            )
    return options | stored | dict(said)
