"""Too little memory: refused before native libraries end the process, explained where they do not.

OpenBLAS exits with 1, and torch aborts, where a limit on the address space leaves them no room.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from transferry.runtime.errors import InputError

REMEDY = "raise the limit (ulimit -v), or end other programs"
# MiB of address space without which libraries cannot even be loaded: at least, and for each core,
# whose threads reserve a stack and an arena. Measured with a tiny model on two cores, rounded up.
RUNTIME, WITH_TORCH = (200, 40), (1200, 140)
TORCH_COMMANDS = {"train", "import", "export", "audit"}
# Messages of the dynamic loader.
_NO_ROOM = ("failed to map segment", "annot allocate memory", "can't start new thread")


def require_memory(arguments: Sequence[str]) -> None:
    """Raises InputError for a limit on the address space with which the command cannot begin."""
    try:
        import resource
    except ImportError:  # there is no such limit on Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or "--help" in arguments:
        return
    torch = arguments[0] in TORCH_COMMANDS or any(
        word.startswith("--checkpoint") for word in arguments
    )
    base, each = WITH_TORCH if torch else RUNTIME
    least = base + each * (os.cpu_count() or 1)
    if limit < least << 20:
        raise InputError(
            f"expected at least {least} MiB of address space, found a limit of {limit >> 20} MiB; "
            f"{REMEDY}"
        )


def out_of_memory(error: BaseException) -> InputError | None:
    """Returns the error for a user whose memory ran out; None for any other error."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_ROOM):
        found = str(error).strip().splitlines()
        return InputError(
            f"there is not enough memory ({(found or ['out of memory'])[-1]}); {REMEDY}"
        )
    return None
