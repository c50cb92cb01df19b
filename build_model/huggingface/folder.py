"""A checkpoint as `save_pretrained` leaves it: settings asked by name, tensors one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
from torch import Tensor

from transferry.runtime.errors import InputError
from transferry.runtime.files import read_object

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Value = TypeVar("Value")


class Settings:
    """A JSON file of settings. What cannot be carried over is refused by the name of its key.

    A key that is null counts as one that is not there, as in transformers.
    """

    def __init__(self, path: Path, *, required: bool = True) -> None:
        self.path = path
        self.values = read_object(path) if required or path.exists() else {}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting as it is."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least 0.

        Raises:
            InputError: It is something else, or it is missing and has no default.
        """
        value = self.get(name, default)
        if type(value) is not int or value < 0:
            raise InputError(f"{self.path}: {name} must be a whole number, found {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """Returns a number.

        Raises:
            InputError: It is something else.
        """
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise InputError(f"{self.path}: {name} must be a number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false.

        Raises:
            InputError: It is something else.
        """
        value = self.get(name, default)
        if type(value) is not bool:
            raise InputError(f"{self.path}: {name} must be true or false, found {value!r}")
        return value

    def choice(self, name: str, choices: Mapping[str, Value], default: str) -> Value:
        """Returns what a setting stands for.

        Raises:
            InputError: It is none of the choices.
        """
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, value, " or ".join(choices))
        return choices[value]

    def only(self, name: str, *supported: Any) -> None:
        """Refuses a setting that is there and none of those that are supported."""
        value = self.get(name, supported[0])
        if not any(type(value) is type(other) and value == other for other in supported):
            self.refuse(name, value, " or ".join(map(json.dumps, supported)))

    def refuse(self, name: str, found: Any, supported: str) -> None:
        """Raises the error for a setting that cannot be carried over."""
        raise InputError(
            f"{self.path}: {name} is {json.dumps(found)}, which cannot be imported; supported: "
            f"{supported}"
        )


class Checkpoint:
    """A folder with config.json and safetensors, in one file or in several.

    Attributes:
        folder: Where it lies.
        config: config.json.
        generation: generation_config.json, empty where there is none.
        tokenizer: tokenizer_config.json, empty where there is none.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the settings.

        Raises:
            InputError: There is no config.json, or a file of settings is no JSON object.
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
        """Returns a token's id as `generate` finds it: generation_config.json comes first.

        Raises:
            InputError: It is missing and has no default, or there are several.
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
        """Returns the files of the weights, in a fixed order.

        Raises:
            InputError: There are none that can be read, or the index is no index.
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
        return {name for path in self.files() for name in self._read(path, names_only=True)}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor with its name, as it is stored.

        Raises:
            InputError: A file is missing, truncated or not safetensors.
        """
        for path in self.files():
            yield from self._read(path).items()

    def _read(self, path: Path, *, names_only: bool = False) -> dict[str, Any]:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return {
                    name: None if names_only else file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118
                }
        except FileNotFoundError as error:
            raise InputError(
                f"{path} is missing; the weights must be safetensors, since pickled ones "
                "(pytorch_model.bin) can run code: save_pretrained of transformers writes them anew"
            ) from error
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(
                f"{path} is not a whole safetensors file ({error}); copy or download it again"
            ) from error
