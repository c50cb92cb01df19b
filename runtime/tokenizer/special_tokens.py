"""The special tokens, and the rest of what tokenizer.json holds whatever the kind of tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError

FORMAT_VERSION = 1
SETTINGS_FILE = "tokenizer.json"


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that stand for no text, and where they belong around a text that a model reads.

    Attributes:
        pad_id: fills rows up to equal length.
        bos_id: what every output of an encoder-decoder begins after.
        eos_id: ends an output.
        mask_id: hides a token in masked language modelling; None where nothing is hidden.
        before: what every text that goes into the model begins with.
        after: what it ends with.
    """

    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    mask_id: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        for token_id in self.ids():
            if type(token_id) is not int or token_id < 0:
                raise InputError(f"expected special ids of at least 0, found {token_id!r}")

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """What the model reads for a text of these ids."""
        return [*self.before, *ids, *self.after]

    def ids(self) -> set[int]:
        """All of them."""
        named = {self.pad_id, self.bos_id, self.eos_id, *self.before, *self.after}
        return named if self.mask_id is None else named | {self.mask_id}


# What a trained tokenizer has: an encoder-decoder's sources end with the end token, the text that
# a decoder goes on with does not, and what an encoder alone reads is marked at both ends.
SOURCES = SpecialTokens()
PROMPTS = SpecialTokens(after=())
PASSAGES = SpecialTokens(mask_id=3, before=(1,))


def read_settings(folder: Path) -> dict[str, Any]:
    """What `save` of any kind of tokenizer wrote into tokenizer.json.

    Raises:
        InputError: the file is missing, malformed or of another format version.
    """
    path = folder / SETTINGS_FILE
    try:
        settings = json.loads(read_bytes(path))
    except ValueError as error:
        raise InputError(f"{path}: expected JSON, found something else: {error}.") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(settings).__name__}.")
    found = settings.get("format_version")
    if found != FORMAT_VERSION:
        raise InputError(
            f"{path}: expected format version {FORMAT_VERSION}, found {found}. "
            "Export again with this version of transferry."
        )
    return settings


def special_of(settings: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens of a tokenizer's settings.

    Raises:
        InputError: one of them is missing.
        KeyError: there are none.
    """
    special: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings["special"].items()
    }
    if lacking := {field.name for field in fields(SpecialTokens)} - special.keys():
        raise InputError(f"expected the special tokens' {min(lacking)}, found none")
    return SpecialTokens(**special)


def read_bytes(path: Path) -> bytes:
    """The content of a tokenizer's file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path}: expected a tokenizer's file, which cannot be read: {error.strerror or error}."
        ) from error
