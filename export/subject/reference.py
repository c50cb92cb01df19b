"""The side of torch: a folder that `import` reads, a checkpoint, or a named function."""

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
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.folders import names_function, staged_folder, temporary_folder
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer


def load_reference(
    folder: Path,
    kept: Path | None = None,
    *,
    beside: Path | None = None,
    importing: Mapping[str, Any] = MappingProxyType({}),
    tokenizer: Path | AnyTokenizer | None = None,
) -> Checkpoint:
    """Reads a checkpoint, imports a folder into one, or calls a function for a module.

    A folder is imported into `kept`, by default a temporary checkpoint `beside` a path or in
    TMPDIR, with the options `importing` of `import_pretrained`. A module takes a `tokenizer`: a
    path, or the tokenizer of the bundle beside it.

    Raises:
        InputError: It is neither, or cannot be imported.
        UsageError: The tokenizer's library is not installed, or there is nothing to import.
    """
    function = named_function(str(folder), "")
    if function is None and isinstance(tokenizer, Path):
        raise UsageError(f"{folder} has a tokenizer of its own; leave --tokenizer out")
    if function is not None:
        from transferry.build_model.own.load import load_own

        return load_own(function, str(folder), tokenizer)
    if not folder.exists():
        raise InputError(
            f"{folder}: expected a folder that `transferry import` reads, a checkpoint, "
            "or module:function, found nothing of these"
        )
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


def named_function(reference: str, option: str = "--reference ") -> Callable[[], Any] | None:
    """Returns the function that `module:function` names; None if it is the path of a folder.

    The current folder is looked into first, as `python -m` does.

    Raises:
        UsageError: There is no such module or function, or importing it fails.
    """
    if not names_function(reference):
        return None
    module, _, name = reference.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"{option}{reference}: importing {module} failed: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise UsageError(f"{option}{reference}: {module} has no function {name!r}")
    return found  # type: ignore[no-any-return]
