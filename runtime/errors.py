"""The one exception family of transferry, and the exit code that each member stands for.

A message says what was expected, what was found and what to do next; `cli.main` prints it without
a traceback and exits with `exit_code`.
"""


class TransferryError(Exception):
    """Base of every error that a user can cause or mend."""

    exit_code = 3


class UsageError(TransferryError):
    """Options that contradict each other, or a value outside its range."""

    exit_code = 2


class InputError(TransferryError):
    """Text, a checkpoint or a bundle that cannot be used as it is."""

    exit_code = 3


class AllocationError(InputError, MemoryError):
    """Memory that onnxruntime needs and cannot have; for numpy's own see its base MemoryError."""


class ParityError(TransferryError):
    """What ONNX Runtime answers is not what the reference answers."""

    exit_code = 4


class ProviderError(TransferryError):
    """The execution provider that was asked for cannot run here."""

    exit_code = 5


class BadRowsError(TransferryError):
    """A job is finished, but some of its rows hold an error instead of an answer."""

    exit_code = 6
