"""A checkpoint folder of `save_pretrained`: settings by name, tensors one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from transferry.build_model.checkpoint import open_tensors
from transferry.runtime.errors import InputError
from transferry.runtime.files import read_object

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Value = TypeVar("Value")


class Settings:
    """A JSON file of settings; unsupported values raise an error with the key.

    null counts as absent, as in transformers.
    """

    def __init__(self, path: Path, *, required: bool = True) -> None:
        self.path = path
        self.values = read_object(path) if required or path.exists() else {}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting unchecked."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least 0.

        Raises:
            InputError: The value is another, or missing without a default.
        """
        value = self.get(name, default)
        if type(value) is not int or value < 0:
            raise InputError(f"{self.path}: {name} must be a whole number, found {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """Returns a number.

        Raises:
            InputError: The value is no number.
        """
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise InputError(f"{self.path}: {name} must be a number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a bool.

        Raises:
            InputError: The value is no bool.
        """
        value = self.get(name, default)
        if type(value) is not bool:
            raise InputError(f"{self.path}: {name} must be true or false, found {value!r}")
        return value

    def choice(self, name: str, choices: Mapping[str, Value], default: str) -> Value:
        """Returns the value of the chosen key.

        Raises:
            InputError: The setting is not a key of `choices`.
        """
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, value, " or ".join(choices))
        return choices[value]

    def only(self, name: str, *supported: Any) -> None:
        """Raises for a setting that is present and not supported."""
        value = self.get(name, supported[0])
        if not any(type(value) is type(other) and value == other for other in supported):
            self.refuse(name, value, " or ".join(map(json.dumps, supported)))

    def refuse(self, name: str, found: Any, supported: str) -> None:
        """Raises the error for an unsupported setting."""
        raise InputError(
            f"{self.path}: {name} is {json.dumps(found)}, which cannot be imported; supported: "
            f"{supported}"
        )


class Checkpoint:
    """A folder with config.json and one or more safetensors files.

    Attributes:
        folder: The folder.
        config: config.json.
        generation: generation_config.json, empty if absent.
        tokenizer: tokenizer_config.json, empty if absent.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the settings.

        Raises:
            InputError: config.json is missing, or a settings file is not a JSON object.
        """
        self.folder = folder
        if not (folder / CONFIG).is_file():
            raise InputError(
                f"{folder / CONFIG} is missing; expected a folder that save_pretrained of "
                "transformers wrote"
            )
        self.config = Settings(folder / CONFIG)
        self.generation = Settings(folder / GENERATION, required=False)
        self.tokenizer = Settings(folder / TOKENIZER_CONFIG, required=False)

    def token(self, name: str, default: int | None = None) -> int:
        """Returns a token id; generation_config.json takes precedence, as in `generate`.

        Raises:
            InputError: The token is missing without a default, or there are several.
        """
        for settings in (self.generation, self.config):
            value = settings.get(name)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, list):
                settings.refuse(name, value, "one token")
            if value is not None:
                if type(value) is not int or value < 0:
                    raise InputError(f"{settings.path}: {name} must be an id, found {value!r}")
                return value
        if default is None:
            raise InputError(f"{self.config.path}: expected {name}, found none")
        return default

    def files(self) -> list[Path]:
        """Returns the weight files in a fixed order.

        Raises:
            InputError: The index is malformed or points outside of the folder.
        """
        index = self.folder / INDEX
        if (self.folder / WEIGHTS).exists() or not index.exists():
            return [self.folder / WEIGHTS]
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise InputError(f"{index}: expected a weight_map that names files, found {places!r}")
        names = sorted(set(map(str, places.values())))
        if outside := [name for name in names if Path(name).name != name]:
            raise InputError(f"{index}: expected files of its own folder, found {outside[0]!r}")
        return [self.folder / name for name in names]

    def names(self) -> set[str]:
        """Returns the names of all tensors.

        Raises:
            InputError: A file is missing, truncated or not safetensors.
        """
        return {name for file in self._opened() for name in file.keys()}  # noqa: SIM118

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor as stored.

        Raises:
            InputError: A file is missing, truncated or not safetensors.
        """
        for file in self._opened():
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    def _opened(self) -> Iterator[Any]:
        if_missing = (
            "the weights must be safetensors, since pickled ones (pytorch_model.bin) can run code: "
            "save_pretrained of transformers converts them"
        )
        for path in self.files():
            with open_tensors(path, if_missing, "copy or download it again") as file:
                yield file
