"""A run on disk: safetensors and JSON, each file written whole or not at all.

RUN/
  config.json                  format version, ModelConfig, TrainConfig (null if imported) and
                               default generation options for the bundle
  settings.toml                options of the command, for `--resume`
  corpus/                      the built-in corpus, if the run was trained on it
  tokenizer.json ...           settings and files of the tokenizer
  samples.json                 sentences whose answers export records
  model.safetensors            weights to export
  metrics.jsonl curves.png
  checkpoints/STEP.safetensors weights at the last validations, for averaging
  state.safetensors            weights, optimiser and progress, for `--resume`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from transferry.build_model.config import ModelConfig, TrainConfig
from transferry.build_model.transformer import Transformer
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import atomic_file, sha256
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
STATE = "state.safetensors"
SAMPLES = "samples.json"


@dataclass(frozen=True)
class Checkpoint:
    """A trained model with everything that export needs.

    Attributes:
        model: The model in eval mode, float32, on the CPU.
        config: Training settings; None if the run was imported.
        tokenizer: Its tokenizer.
        generation: Fields of GenerationOptions that become the bundle's defaults.
        sha256: Hash of the weights file; empty if the model was not read from a file.
    """

    model: Transformer
    config: TrainConfig | None
    tokenizer: AnyTokenizer
    generation: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors and string metadata as one safetensors file, whole or not at all."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as file:
        file.write(safetensors.torch.save(contiguous, dict(metadata or {})))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads tensors and metadata that `save_tensors` wrote.

    Raises:
        InputError: The file is missing, truncated or not safetensors.
    """
    missing = f"is {path.parent} the folder of a finished training?"
    with open_tensors(path, missing, "train again or restore the file") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def open_tensors(path: Path, if_missing: str, if_damaged: str) -> Iterator[Any]:
    """Opens a safetensors file.

    Args:
        path: The file.
        if_missing: What to do if there is no such file.
        if_damaged: What to do if it is truncated or not safetensors.

    Raises:
        InputError: The file is missing, truncated or not safetensors.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; {if_missing}") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file ({error}); {if_damaged}"
        ) from error


def save_config(
    folder: Path,
    model: ModelConfig,
    train: TrainConfig | None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json; `train` is None for an imported run."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "model": model.to_dict(),
        "train": None if train is None else train.to_dict(),
    }
    if generation:
        record["generation"] = dict(generation)
    with atomic_file(folder / CONFIG) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


def load_config(folder: Path) -> tuple[ModelConfig, TrainConfig]:
    """Reads the config.json of a training.

    Raises:
        InputError: The file is missing, not JSON, of another format version or has unknown
            settings; or the run was imported.
    """
    model, train, _ = _read_config(folder)
    if train is None:
        raise InputError(f"{folder} was imported, so it has no training to continue")
    return model, train


def _read_config(folder: Path) -> tuple[ModelConfig, TrainConfig | None, dict[str, Any]]:
    path = folder / CONFIG
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record["format"] != FORMAT:
            raise InputError(
                f"{path} must have format {FORMAT}, found {record['format']!r}; use the version "
                "of transferry that wrote it"
            )
        train = record["train"]
        return (
            ModelConfig.from_dict(record["model"]),
            None if train is None else TrainConfig.from_dict(train),
            dict(record.get("generation", {})),
        )
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); expected the folder of a run"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise InputError(f"{path} is not the config of a run: {error}") from error


def save_samples(folder: Path, texts: Sequence[str]) -> None:
    """Writes samples.json."""
    with atomic_file(folder / SAMPLES) as file:
        file.write(json.dumps(list(texts), ensure_ascii=False, indent=1).encode() + b"\n")


def load_samples(folder: Path) -> list[str]:
    """Reads samples.json; returns an empty list if the run has no such file.

    Raises:
        InputError: The file is not a JSON list of strings.
    """
    path = folder / SAMPLES
    if not path.exists():
        return []
    try:
        return [str(text) for text in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a list of sentences: {error}") from error


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints, summed in float64."""
    total: dict[str, Tensor] = {}
    for path in paths:
        weights, _ = load_tensors(path)
        for name, tensor in weights.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}


def first_mismatch(error: Exception) -> str:
    """The first of the lines of `load_state_dict`'s message, below its heading."""
    lines = str(error).splitlines()
    return lines[1].strip() if lines[1:] else str(error)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a finished training or an imported model.

    Raises:
        InputError: A file is missing or damaged, or the weights do not match the config.
    """
    model_config, train_config, generation = _read_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocabulary_size != model_config.vocabulary_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary_size} ids, but config.json has "
            f"vocabulary_size {model_config.vocabulary_size}; take both from one run"
        )
    weights, _ = load_tensors(folder / WEIGHTS)
    model = Transformer(model_config)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(
            f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {first_mismatch(error)}"
        ) from error
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{folder / WEIGHTS}: {name} holds NaN or infinity; train again")
    digest = sha256(folder / WEIGHTS)
    return Checkpoint(model.eval(), train_config, tokenizer, generation, digest)
