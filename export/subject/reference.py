"""The side of torch: a folder that `import` reads, a checkpoint, or a named function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.checkpoint_folder import CONFIG, REMEDY
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.folders import temporary_folder


def load_reference(folder: Path) -> Checkpoint:
    """Reads a checkpoint, or imports a folder into a temporary one.

    Raises:
        InputError: It is neither, or cannot be imported.
        UsageError: The tokenizer's library is not installed.
    """
    config = folder / CONFIG
    if config.is_file() and "format" in read_document(config, dict[str, Any], REMEDY):
        return load_checkpoint(folder)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: expected a folder that `transferry import` reads, a checkpoint, "
            "or module:function, found nothing of these"
        )
    with temporary_folder() as made:
        import_pretrained(folder, made / "checkpoint")
        return load_checkpoint(made / "checkpoint")


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
