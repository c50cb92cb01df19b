"""The command line, called in this process."""

from pathlib import Path

from click.testing import CliRunner, Result

from transferry.cli import main


def call(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """Runs a command; what is no exit of the command itself is raised."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """Runs a command that must succeed."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result
