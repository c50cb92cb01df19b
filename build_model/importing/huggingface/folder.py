"""A checkpoint folder of `save_pretrained`: settings by name, tensors one at a time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from transferry.build_model.importing.formats.foreign import instead
from transferry.build_model.importing.formats.tensors import (
    DAMAGED,
    NamedTensors,
    Tensors,
    open_weights,
)
from transferry.runtime.errors import DOWNLOAD, InputError
from transferry.runtime.io.documents import MOST_JSON, read_document
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.settings import shown

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"

REMEDY = DAMAGED
# Settings of a tokenizer in transformers that its ids do not show, with the usual values.
IN_FORCE: Mapping[str, Any] = {
    "truncation_side": "right",
    "padding_side": "right",
    "split_special_tokens": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
# Sizes of lists that are made before the shape of a model is checked.
MOST_SIZE = 1 << 24
# Where a checkpoint may be within the folder of a training or of a download.
INNER = ("*", "snapshots/*", "*/snapshots/*")

# Text part of models that read images too, by model_type, where text_config names no other.
TEXT_PARTS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# Settings of such models that text_config does not decide, beside those of generation.
OF_WHOLE = (
    *("architectures", "tie_word_embeddings", "quantization", "quantization_config"),
    *("compression_config", "id2label", "label2id", "num_labels", "problem_type"),
    *("sentence_transformers", "sbert_ce_default_activation_function"),
)

Value = TypeVar("Value")


class Settings:
    """A JSON file of settings; unsupported values raise an error with the key.

    null counts as absent, as in transformers. Every key that is read is remembered, so that unread
    keys can be judged. A value of another type or range than a method returns is an InputError.

    Attributes:
        path: The file.
        values: Its settings by name, without those that the user ignores.
        ignored: Settings that the user ignores.
        left: Settings without effect though they were read, as words.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], ignored: frozenset[str] = frozenset()
    ) -> None:
        self.path = path
        self.values = {name: value for name, value in values.items() if name not in ignored}
        self.ignored = {name: values[name] for name in sorted(ignored & values.keys())}
        self.left: list[str] = []
        self._asked: set[str] = set()

    @classmethod
    def read(
        cls, path: Path, *, required: bool = True, ignored: frozenset[str] = frozenset()
    ) -> Self:
        """Reads a file; one that is not required and absent is empty."""
        absent = not required and not path.exists()
        return cls(path, {} if absent else read_document(path, dict[str, Any], REMEDY), ignored)

    def unread(self) -> dict[str, Any]:
        """Returns the settings that were not asked for, without null."""
        return {
            name: value
            for name, value in self.values.items()
            if value is not None and name not in self._asked
        }

    def leave(self, name: str, value: Any) -> None:
        """Lists a value among the settings without effect, though it was asked for."""
        self.left.append(f"{name} {value}")

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting unchecked."""
        self._asked.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def unless_null(self, name: str, default: Value) -> Value | int:
        """Returns the default of a setting for which null is not the default but 0."""
        return 0 if name in self.values else default

    def whole(self, name: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """Returns a whole number from 0 to `most`; without a default it must be there."""
        value = self.get(name, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 0:
            raise InputError(f"{self.path}: {name} must be a whole number, found {value!r}")
        if value > most:
            raise InputError(f"{self.path}: {name} must be at most {most}, found {shown(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Returns a number."""
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise InputError(f"{self.path}: {name} must be a number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a bool."""
        value = self.get(name, default)
        if type(value) in (int, float) and value in (0, 1):
            value = bool(value)
        if type(value) is not bool:
            raise InputError(f"{self.path}: {name} must be true or false, found {value!r}")
        return value

    def choice(self, name: str, choices: Mapping[str, Value], default: str) -> Value:
        """Returns the value of the key of `choices` that the setting names."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, value, " or ".join(choices))
        return choices[value]

    def only(self, name: str, *supported: Any) -> None:
        """Raises for a setting that is present and not supported."""
        value = self.get(name, supported[0])
        if not any(type(value) is type(other) and value == other for other in supported):
            self.refuse(name, value, " or ".join(map(json.dumps, supported)))

    def refuse(self, name: str, found: Any, supported: str) -> NoReturn:
        """Raises the error for an unsupported setting."""
        raise InputError(
            f"{self.path}: {name} is {_as_json(found)}, which cannot be imported; supported: "
            f"{supported}"
        )


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except (ValueError, RecursionError):  # YAML may hold a list that contains itself
        return repr(value)


class PretrainedFolder:
    """A folder with config.json and the weights in one file or several.

    Attributes:
        generation: generation_config.json, empty if absent.
        tokenizer: tokenizer_config.json, empty if absent.
        special_tokens: special_tokens_map.json, empty if absent.
        text_notes: A note on the parts that read images; set by `tensors`.
        notes: Differences of the tokenizer from its files, for the summary.
        segments: Of the tokens of a pair of texts, as the tokenizer numbers them; set by it.
        in_force: Settings of the tokenizer in transformers, which its class or its files decide;
            set by the tokenizer.
        padded: Tokens that the tokenizer puts after a text and that no head reads; set by it.
        pairs: Whether the chat template joins pairs of texts; set by the importer.
        images: Names of the parts that read images, as tensors begin; set by `take_text`.
        size: Ids of the vocabulary; set by the importer.
        lower: Whether texts are lower-cased before the tokenizer reads them; set by the importer.
    """

    def __init__(self, folder: Path, ignored: frozenset[str] = frozenset()) -> None:
        """Reads the settings, without those that the user ignores."""
        self.folder = folder
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder / CONFIG} is missing; {_elsewhere(folder)}")
        self.config = Settings.read(folder / CONFIG, ignored=ignored)
        others = (
            Settings.read(folder / name, required=False, ignored=ignored)
            for name in (GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS)
        )
        self.generation, self.tokenizer, self.special_tokens = others
        self.notes: list[str] = []
        self.text_notes: list[str] = []
        self.segments: list[int] = []
        values = self.tokenizer.values
        self.in_force = {name: values.get(name) or usual for name, usual in IN_FORCE.items()}
        self.padded, self.size = 0, MOST_SIZE
        self.pairs = self.lower = False
        self.images: tuple[str, ...] = ()

    def token(self, name: str, default: int | None = None) -> int:
        """Returns a token id, of several end tokens the first; see `tokens`."""
        found = self.tokens(name)
        if len(found) > 1 and name != "eos_token_id":
            self.generation.refuse(name, found, "one token")
        if found:
            return found[0]
        if default is None:
            raise InputError(
                f"{self.config.path}: expected {name}, found none; add the id of that token"
            )
        return default

    def begin(self, default: int | None = None) -> int:
        """Returns the token that the decoder begins with; `generate` reads one file for it."""
        name = "decoder_start_token_id"
        if self.generation.get(name) is None and self.generation.get("bos_token_id") is not None:
            name = "bos_token_id"
        return self.token(name, default)

    def tokens(self, name: str) -> list[int]:
        """Returns token ids; generation_config.json takes precedence, as in `generate`."""
        first: list[int] = []
        for settings in (self.generation, self.config):
            value = settings.get(name, [])
            found = value if isinstance(value, list) else [value]
            found = [token for token in found if token != -1]  # -1 stands for no token
            if name == "eos_token_id":
                # No answer holds an id beyond the vocabulary.
                found = [each for each in found if type(each) is not int or each < self.size]
            for token in found:
                if type(token) is not int or (token < 0 and not first):
                    raise InputError(f"{settings.path}: {name} must be an id, found {token!r}")
            first = first or list(dict.fromkeys(found))
        return first

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return set(self.tensors().shapes)

    def tensors(self) -> Tensors:
        """Returns the tensors."""
        tensors = open_weights(self.folder)
        return self._text_of(tensors) if self.images else tensors

    def _text_of(self, tensors: Tensors) -> Tensors:
        """Returns the tensors of the text part, under the names of a model of text alone."""
        places, left = dict[str, tuple[Tensors, str]](), 0
        for name, tensor in tensors.shapes.items():
            plain = name.removeprefix("model.").removeprefix("language_model.")
            if plain.startswith(self.images):
                left += tensor.numel()
            else:
                places[plain.removeprefix("model.")] = tensors, name
        note = f"the text part of a model that reads images; {left:,} parameters left out"
        self.text_notes = [note]
        return NamedTensors(tensors.origin, places)

    def take_text(self, generation: Iterable[str]) -> None:
        """Leaves the text part of a model that reads images too: `text_config` and its tensors.

        Of the whole model's settings, those of generation and `OF_WHOLE` count, before text_config.
        """
        found = dict(self.config.values)
        text = found.pop("text_config", None)
        kind = TEXT_PARTS.get(str(found.pop("model_type", None)))
        if kind is None or not isinstance(text, dict):
            return
        names = [name for name in (*OF_WHOLE, *generation) if found.get(name) is not None]
        whole = {name: found.pop(name) for name in names}
        # A head finds the end of a text by the padding token of text_config.
        padding = {name: whole.pop(name) for name in ("pad_token_id",) if name in whole}
        self.config.values = {"model_type": kind, **padding, **text, **whole}
        if found:
            self.config.left.append(f"{', '.join(found)} (of the whole model, not of its text)")
        self.images = ("vision_tower.", "multi_modal_projector.")


def _elsewhere(folder: Path) -> str:
    """Describes where the checkpoint is, or how to get one."""
    found = instead(folder)
    if folder.is_file():
        return found or f"{folder} is a file; name the folder that holds it"
    if not folder.is_dir():
        return f"there is no such folder. {DOWNLOAD}"
    if found:
        return found
    # Of a training, or of the cache of Hugging Face.
    inner = [each for depth in INNER for each in sorted(folder.glob(f"{depth}/{CONFIG}"))]
    if inner := [each for each in inner if b'"model_type"' in read_bytes(each, MOST_JSON)]:
        return f"there is one in {inner[-1].parent}; import that folder"
    return "expected a folder that save_pretrained of transformers wrote"


def require_plain(config: Settings) -> None:
    """Refuses a checkpoint whose weights are quantised."""
    if config.get("quantization") is not None:
        raise InputError(
            f"{config.path}: quantization is set: weights of MLX, quantised; dequantise them: "
            f"mlx_lm.convert --hf-path {config.path.parent} --mlx-path FOLDER --dequantize"
        )
    for name in ("quantization_config", "compression_config"):
        if (found := config.get(name)) is not None:
            kind = found.get("quant_method") if isinstance(found, dict) else None
            raise InputError(
                f"{config.path}: {name} is {kind or _as_json(found)}: the weights are quantised, "
                "which cannot be imported. Import the checkpoint from before the quantisation, or "
                "load this one with transformers, dequantize() it and use save_pretrained"
            )
