"""Folders that appear whole or not at all, temporary folders, and the kinds of folders."""

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import locked, remove_rests, temporary_name, unwritable
from transferry.runtime.stopping import at_stop

CONFIG = "config.json"
_MOST_CONFIG = 1 << 24  # bytes
# Files by which the folders that `import` reads are known.
_IMPORTED = {
    "modules.json": "sentence-transformers",
    CONFIG: "Hugging Face",
    "*.npz": "Marian",
}


def names_function(reference: str) -> bool:
    """Whether a reference is `module:function`, and no path."""
    module, colon, _ = reference.partition(":")
    return bool(colon) and module.replace(".", "").isidentifier() and not Path(reference).exists()


def is_bundle(folder: Path) -> bool:
    """Whether a folder has the manifest of a bundle, valid or not."""
    return (folder / "manifest.json").is_file()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the files of a checkpoint, valid or not."""
    marks = (folder / name for name in ("checkpoints", "settings.toml"))
    return (folder / "model.safetensors").is_file() and any(each.exists() for each in marks)


def found_at(folder: Path) -> str:
    """Describes the content of a path where another folder was expected, and the next step."""
    place = shlex.quote(str(folder))
    if not folder.exists():
        return "found nothing"
    if not folder.is_dir():
        return "found a file"
    if is_bundle(folder):
        return "found a bundle"
    if is_checkpoint(folder):
        return f"found a checkpoint; export it: transferry export {place} --out BUNDLE"
    if (folder / "reference.npz").is_file():
        return "found a bundle without its manifest.json; copy the bundle again"
    for mark, kind in _IMPORTED.items():
        if any(mark != CONFIG or _is_config(path) for path in folder.glob(mark)):
            return f"found a folder of {kind}; export it: transferry export {place} --out BUNDLE"
    return "found another folder"


def _is_config(path: Path) -> bool:
    """Whether a file names a model_type; CTranslate2 and Keras write config.json too."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return b'"model_type"' in file.read(_MOST_CONFIG)
    return False


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Temporary folder beside `out`, to be filled and renamed; always removed at the end.

    Those that killed processes left for this `out` are removed first: a bundle may be large.

    Raises InputError for a full disk, or a place that is not writable.
    """
    folder = temporary_name(out, out.absolute().parent)
    made = [parent for parent in folder.parents if not parent.exists()]

    def undo() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # it holds `out`
                parent.rmdir()

    with at_stop(undo):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_rests(out)
            folder.mkdir()
            with locked(partial(os.open, folder, os.O_RDONLY)):
                yield folder
        except OSError as error:
            raise unwritable(out, error) from error
        finally:
            undo()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Folder for intermediate files, removed at the end; raises InputError if it cannot be made."""
    try:
        folder = Path(tempfile.gettempdir(), f"transferry-{os.urandom(8).hex()}")
    except OSError as error:
        raise InputError(f"{error}; name a folder with TMPDIR") from error

    with at_stop(partial(shutil.rmtree, folder, ignore_errors=True)):
        try:
            folder.mkdir(0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder: Path, out: Path) -> None:
    """Renames a folder to `out`; an existing `out` is removed once the new one is in place.

    Raises InputError if the replaced folder cannot be removed.
    """
    if not out.exists():
        folder.rename(out)
        return
    old = folder.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)  # of a process killed once `out` was in place

    def finish() -> None:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)

    with at_stop(finish):
        out.rename(old)
        try:
            folder.rename(out)
        except BaseException:
            old.rename(out)
            raise
        try:
            shutil.rmtree(old)
        except OSError as error:
            raise InputError(
                f"{out} is replaced, but its old folder cannot be removed ({error}); delete {old}"
            ) from error
