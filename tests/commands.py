"""The command line, called in this process, and other Pythons."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from transferry.cli import main

# Seconds that a test waits at the most where a defect would have it wait for ever: a hundred times
# as long as a quiet machine takes.
PATIENCE = 600.0

# Options of `verify` where a test is not about batches: else each of 64 or 256 sizes is computed.
FEW = "--batch-rows", "4"

# The smallest model that can be trained.
SMALLEST = [
    *("--preset=tiny", "--d-model=16", "--heads=2", "--d-ff=16"),
    *("--encoder-layers=1", "--decoder-layers=1", "--device=cpu", "--valid-sentences=4"),
]
# Long enough to be interrupted, and saved at every step.
ENDLESS = ["--max-steps=1000000", "--save-every=1", "--validate-every=1000000"]

# Object of click's context: the traces that export and verify share, set by the fixture `traces`.
shared: object = None


def call(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """Runs a command; raises every exception but its own exit."""
    given = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, given, input=stdin, obj=shared)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """Runs a command that must succeed."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def fails(code: int, message: str, *arguments: str | Path, stdin: bytes = b"") -> Result:
    """Runs a command that must end with an exit code and a message."""
    result = call(*arguments, stdin=stdin)
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr
    return result


def python(*arguments: object, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs another Python that must end with an exit code; its output is text."""
    settings = {"capture_output": True, "text": True, "timeout": PATIENCE} | options
    done = subprocess.run([sys.executable, *map(str, arguments)], check=False, **settings)
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done


def changed(given: Sequence[str | Path], *options: str) -> list[str | Path]:
    """A command with options in place of those of the same name."""
    names = {option.partition("=")[0] for option in options}
    words = iter(given)
    kept: list[str | Path] = []
    for word in words:
        if word in names:
            next(words)  # its value
        elif str(word).partition("=")[0] not in names:
            kept.append(word)
    return [*kept, *options]
