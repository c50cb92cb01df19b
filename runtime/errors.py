"""Exceptions of transferry and their exit codes.

A message says what was expected, what was found and what to do; `cli.main` prints it without a
traceback and exits with `exit_code`.
"""


class TransferryError(Exception):
    """Base of every error that a user can cause or fix."""

    exit_code = 3


class UsageError(TransferryError):
    """A value outside its range, or options that exclude each other."""

    exit_code = 2


class InputError(TransferryError):
    """Text, checkpoint or bundle that cannot be used."""

    exit_code = 3


class AllocationError(InputError, MemoryError):
    """onnxruntime is out of memory; catch MemoryError to include numpy."""


class ParityError(TransferryError):
    """ONNX Runtime and the reference give different answers."""

    exit_code = 4


class ProviderError(TransferryError):
    """The requested execution provider cannot run here."""

    exit_code = 5


class BadRowsError(TransferryError):
    """A job finished, but some of its rows hold an error instead of an answer."""

    exit_code = 6


def require(holds: bool, name: str, expected: str, found: object) -> None:
    """Raises a UsageError for a value outside its range.

    Args:
        holds: Whether the value is in its range.
        name: The option.
        expected: The range, in words that follow "must be".
        found: The value.
    """
    if not holds:
        raise UsageError(f"{name} must be {expected}, found {found}")
