"""The folder of a run: created, refused or replaced; the options of its command."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.settings import read_settings, write_settings

SETTINGS = "settings.toml"
# Every run has one of these settings: trained runs the first, imported ones the second.
MARKS = frozenset({"preset", "huggingface"})
# Options that a run does not store, and options that may change on --resume: the end of the
# training, and the places of its files.
OF_ONE_CALL = {"out", "resume", "force", "device", "quiet"}
MAY_CHANGE = {"max_steps", "max_minutes"} | {
    f"{prefix}{name}" for prefix in ("", "valid_") for name in ("source", "target", "pairs", "text")
}


def check_folder(out: Path, *, force: bool, resumable: bool = False) -> bool:
    """Returns whether a folder holds a run to be replaced.

    Args:
        out: The folder, which need not exist.
        force: Replace a run.
        resumable: The command has --resume.

    Raises:
        UsageError: The folder is not empty and `force` is off, or it holds something else.
        InputError: The path is a file.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: cannot be created: it is a file; choose another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return False
    if not force:
        resume = "continue it with --resume, or " if resumable else ""
        raise UsageError(f"{out} is not empty; {resume}replace it with --force")
    # Other programs also write settings.toml.
    path = out / SETTINGS
    if not path.exists() or MARKS.isdisjoint(read_settings(path)):
        raise UsageError(f"{out} is not a run, so it is not replaced; choose another folder")
    return True


def make_folder(out: Path, *, force: bool) -> None:
    """Creates an empty folder.

    Raises:
        UsageError: The folder is not empty and `force` is off, or it holds something else.
        InputError: The folder cannot be created.
    """
    try:
        if check_folder(out, force=force, resumable=True):
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out}: cannot be created: {error.strerror}; choose another folder"
        ) from error


def remember(out: Path, options: Mapping[str, Any]) -> None:
    """Writes RUN/settings.toml with the command's options."""
    chosen = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name not in OF_ONE_CALL
    }
    made = {"version": importlib.metadata.version("transferry")}
    write_settings(out / SETTINGS, chosen, made)


def recall(out: Path, options: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options for continuing a run: the stored ones, except those that may change.

    Args:
        out: The run.
        options: All options of the resuming command.
        given: Those of them that the user gave.

    Raises:
        UsageError: A given option would change the run.
        InputError: There is no run to continue.
    """
    if given.get("force"):
        raise UsageError("--resume and --force exclude each other: continue a run or replace it")
    stored = read_settings(out / SETTINGS)
    if "huggingface" in stored:
        raise UsageError(
            f"{out} was imported, so it has no training to continue; start a new training"
        )
    for name, value in given.items():
        if name not in OF_ONE_CALL | MAY_CHANGE and value != stored.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"the run was started with {flag} {stored.get(name, 'left out')}, found {flag} "
                f"{value}; leave it out to resume, or start over with --force"
            )
    return options | stored | dict(given)
