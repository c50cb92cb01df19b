"""The folder of a checkpoint: created, refused or replaced; the options of its command."""

import importlib.metadata
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.atomic import TEMPORARY
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.folders import found_at, is_bundle, is_checkpoint, names_function
from transferry.runtime.io.outputs import foreign_member, require_own
from transferry.runtime.settings import foreign_settings, read_settings, write_settings
from transferry.runtime.stopping import at_stop, held

CONFIG = "config.json"
SETTINGS = "settings.toml"
STATE = "state.safetensors"  # the state that --resume continues from
FORMAT = 1  # of config.json
REMEDY = "train again, or restore the file"
# Where the files of a checkpoint that is being replaced are kept, in its folder.
FORMER = ".former"
# Every checkpoint has one of these settings: trained ones the first, imported ones the second.
MARKS = frozenset({"preset", "huggingface"})
# Files that training and import write into a checkpoint.
OWN = re.compile(
    r"settings\.toml|(config|samples|tokenizer|huggingface|vocab)\.json|metrics\.jsonl|curves\.png"
    r"|(model|state|checkpoints/\d+)\.safetensors|corpus/(train|valid|test)\.(en|de)"
    r"|ranks\.tiktoken|sentencepiece\.model|(source|target)\.spm|chat_template\.jinja"
    r"|distilled/((rows|answers|pairs|valid)\.jsonl|answers\.jsonl\.(summary\.json|job/[^/]+))"
)
# Files that `transferry distil` keeps in a checkpoint.
DISTILLED = "distilled"
ROWS, ANSWERS, PAIRS, VALID = (
    f"{DISTILLED}/{name}.jsonl" for name in ("rows", "answers", "pairs", "valid")
)
# Options that a checkpoint does not store, and options that may change on --resume: the end of the
# training, the limit for errors of a teacher, and the places of files.
OF_ONE_CALL = {"out", "resume", "force", "device", "quiet"}
MAY_CHANGE = {"max_steps", "max_minutes", "max_errors", "teacher"} | {
    f"{prefix}{name}" for prefix in ("", "valid_") for name in ("source", "target", "pairs", "text")
}
START_OVER = "start over with --force instead of --resume"


def leader() -> bool:
    """Whether this process writes files and output; true without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def check_folder(out: Path, *, force: bool, resumable: bool = False) -> bool:
    """Returns whether a folder, which need not exist, holds a checkpoint to be replaced.

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
    require_own(out, foreign_checkpoint)
    return True


def foreign_checkpoint(out: Path) -> str:
    """Describes the fault of a folder that should be a checkpoint; "" if it is one."""
    kept = out / FORMER / SETTINGS
    path = kept if kept.exists() else out / SETTINGS
    # Other programs also write settings.toml.
    if foreign_settings(path) or MARKS.isdisjoint(read_settings(path)):
        return "is not a checkpoint"
    return foreign_member(out, lambda name: bool(OWN.fullmatch(name.removeprefix(f"{FORMER}/"))))


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a checkpoint, without checking the fields of the model.

    Raises:
        InputError: There is no checkpoint, or the file is damaged or of another format version.
    """
    path = folder / CONFIG
    if not path.exists():
        raise InputError(f"{path} is missing: expected a checkpoint, {found_at(folder)}")
    record = read_document(path, dict[str, Any], REMEDY)
    if "model_type" in record:
        raise InputError(f"{folder}: expected a checkpoint, {found_at(folder)}")
    if record.get("format") is True or record.get("format") != FORMAT:
        raise InputError(
            f"{path} must have format {FORMAT}, found {record.get('format', 'none')!r}; use the "
            "version of transferry that wrote it"
        )
    return record


def is_pretrained(folder: Path) -> bool:
    """Whether a folder is one for `import`, sound or not, and no checkpoint or module:function.

    Raises:
        InputError: It is a bundle, absent, or a damaged checkpoint.
    """
    if names_function(str(folder)):
        return False
    config = folder / CONFIG
    record = read_document(config, dict[str, Any], REMEDY) if config.is_file() else {}
    if "model_type" in record:
        return True
    if "format" in record or is_bundle(folder) or is_checkpoint(folder) or not folder.exists():
        read_config(folder)
        return False
    return True


def resumable(out: Path) -> bool:
    """Whether the checkpoint has something to continue from: a state, or answers of a teacher."""
    return any((out / name).exists() for name in (STATE, ANSWERS, f"{ANSWERS}.job"))


@contextmanager
def training(
    out: Path, *, force: bool, resume: bool, leads: bool = True, command: str = "train"
) -> Iterator[None]:
    """Makes an empty folder for a checkpoint; when resuming, uses the folder as it is.

    A replaced checkpoint is kept until the new training can be resumed. After an earlier error it
    comes back, or the folder is removed, so that a second attempt needs no --force. Of several
    processes, the one that `leads` looks after the folder.

    Raises:
        UsageError: The folder is not empty and `force` is off, or it holds something else.
        InputError: The folder cannot be created.
        KeyboardInterrupt: The training was interrupted; the message says how to continue it.
    """
    existed, former, fresh = out.exists(), out / FORMER, leads and not resume

    def end() -> str | None:
        if resumable(out):
            return f"continue with: transferry {command} --out {shlex.quote(str(out))} --resume"
        if fresh:
            _clear(out, keep=former)
            if former.exists():
                _move(former, out)
            for folder in [former] if existed else [former, out]:
                shutil.rmtree(folder, ignore_errors=True)
        return None

    with ExitStack() as stack:
        with held():
            if fresh:
                _begin(out, former, force=force)
            for path in out.rglob(".*.part") if leads and resume else ():
                if re.fullmatch(TEMPORARY, path.name):  # of a killed training; it may be large
                    path.unlink(missing_ok=True)
            stack.enter_context(at_stop(end))
        try:
            yield
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(*filter(None, [end()])) from error
        except BaseException:
            end()
            raise
    if leads:
        shutil.rmtree(former, ignore_errors=True)


def require_state(out: Path) -> None:
    """Raises InputError for a training that was killed before it saved anything."""
    if not (path := out / STATE).exists():
        told = "nothing was saved yet, so there is nothing to resume"
        raise InputError(f"{path} is missing: {told}; {START_OVER}")


def _begin(out: Path, former: Path, *, force: bool) -> None:
    """Creates the folder of a training and sets the replaced checkpoint aside."""
    try:
        replaces = check_folder(out, force=force, resumable=True)
        out.mkdir(parents=True, exist_ok=True)
        if replaces:
            _set_aside(out, former)
    except OSError as error:
        raise InputError(
            f"{out}: cannot be created: {error.strerror}; choose another folder"
        ) from error


def _set_aside(out: Path, former: Path) -> None:
    """Moves the files of a checkpoint into its folder `former`, which a kill may have left."""
    if resumable(out) and (former / SETTINGS).exists():
        shutil.rmtree(former, ignore_errors=True)
    if (former / SETTINGS).exists():  # the files beside it are of a training that made nothing
        _clear(out, keep=former)
        return
    former.mkdir(exist_ok=True)
    _move(out, former)


def _move(folder: Path, target: Path) -> None:
    # The settings last: where they are, everything is.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == SETTINGS):
        if path != target:
            path.rename(target / path.name)


def _clear(folder: Path, *, keep: Path) -> None:
    for path in folder.iterdir():
        if path == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remember(
    out: Path, options: Mapping[str, Any], made: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Writes the command's options and further facts into settings.toml."""
    chosen = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name not in OF_ONE_CALL
    }
    version = {"version": importlib.metadata.version("transferry")}
    write_settings(out / SETTINGS, chosen, {**version, **made})


def recall(
    out: Path, options: dict[str, Any], given: Mapping[str, Any], command: str = "train"
) -> dict[str, Any]:
    """Returns the options for continuing a training: the stored ones, except those that may change.

    `options` are all of the resuming command, `given` those that the user gave.

    Raises:
        UsageError: A given option would change the training, or another command made it.
        InputError: There is no training to continue.
    """
    if given.get("force"):
        raise UsageError(
            "--resume and --force exclude each other: continue a training or replace its checkpoint"
        )
    stored = read_settings(out / SETTINGS)
    if "huggingface" in stored:
        raise UsageError(
            f"{out} was imported, so it has no training to continue; start a new training"
        )
    if (maker := "distil" if "teacher" in stored else "train") != command:
        raise UsageError(
            f"{out} was made by {maker}; continue it with: transferry {maker} --out "
            f"{shlex.quote(str(out))} --resume"
        )
    for name, value in given.items():
        if name not in OF_ONE_CALL | MAY_CHANGE and value != stored.get(name):
            flag = f"--{name.replace('_', '-')}"
            found = f"found {flag} {value}; leave it out to resume"
            if value is None:
                found = "found it left out; give it again"
            raise UsageError(
                f"the training was started with {flag} {stored.get(name, 'left out')}, {found}, or "
                "start over with --force"
            )
    return options | stored | dict(given)


def recalled(out: Path, options: Mapping[str, Any]) -> str:
    """Returns a line on the settings of a continued training."""
    told = (
        f"--{name.replace('_', '-')}{'' if value is True else f' {shlex.quote(str(value))}'}"
        for name, value in options.items()
        if name not in OF_ONE_CALL and value is not None and value is not False
    )
    return f"settings of {out / SETTINGS}: {' '.join(told)}"
