"""The side of torch: a folder that `import` reads, a checkpoint, or a named function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.checkpoint_folder import is_pretrained
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import UsageError
from transferry.runtime.io.folders import staged_folder, temporary_folder


def load_reference(
    folder: Path,
    kept: Path | None = None,
    *,
    beside: Path | None = None,
    importing: Mapping[str, Any] = MappingProxyType({}),
) -> Checkpoint:
    """Reads a checkpoint, or imports a folder into one.

    Args:
        folder: The folder.
        kept: Checkpoint to import into. Default: a temporary one.
        beside: Path beside which the temporary checkpoint is made. Default: TMPDIR.
        importing: Options of `import_pretrained`.

    Raises:
        InputError: It is neither, or cannot be imported.
        UsageError: The tokenizer's library is not installed, or there is nothing to import.
    """
    if not is_pretrained(folder):
        if kept is not None:
            raise UsageError(f"{folder} is a checkpoint, so none is kept; leave --keep out")
        return load_checkpoint(folder)
    with ExitStack() as stack:
        if kept is None:
            made = staged_folder(beside) if beside else temporary_folder()
            kept = stack.enter_context(made) / "checkpoint"
        import_pretrained(folder, kept, **importing)
        return load_checkpoint(kept)


def named_function(reference: str) -> Callable[[], Any] | None:
    """Returns the function that `module:function` names; None if it is the path of a folder.

    The current folder is looked into first, as `python -m` does.

    Raises:
        UsageError: There is no such module or function, or importing it fails.
    """
    module, colon, name = reference.partition(":")
    if not colon or Path(reference).exists() or not module.replace(".", "").isidentifier():
        return None
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"--reference {reference}: importing {module} failed: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise UsageError(f"--reference {reference}: {module} has no function {name!r}")
    return found  # type: ignore[no-any-return]
