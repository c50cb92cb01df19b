"""A training run on disk: safetensors and JSON, each file written whole or not at all.

RUN/
  config.json                  format version, ModelConfig, TrainConfig (null where the run was
                               imported), defaults of generation that export hands on
  settings.toml                the command's options, which `--resume` takes up
  corpus/                      the built-in corpus, where it was trained on
  tokenizer.json ...           its settings, and the files of its kind
  samples.json                 sentences for the answers that export records
  model.safetensors            the weights to export
  metrics.jsonl curves.png
  checkpoints/STEP.safetensors weights at the last validations, for averaging
  state.safetensors            weights, optimiser and progress that `--resume` continues
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    """A trained model with all that export needs.

    Attributes:
        model: The model in eval mode, float32, on the CPU.
        config: What it was trained with; None where it was imported.
        tokenizer: Turns text into its ids and back.
        generation: Fields of GenerationOptions that the bundle makes its defaults.
        sha256: Of the file of weights that it was read from; empty where it was not.
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
    """Reads what `save_tensors` wrote: tensors and metadata.

    Raises:
        InputError: The file is missing, truncated or not safetensors.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise InputError(
            f"{path} is missing; is {path.parent} the folder of a finished training?"
        ) from error
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file ({error}); train again or restore the file"
        ) from error


def save_config(
    folder: Path,
    model: ModelConfig,
    train: TrainConfig | None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json; see `Checkpoint` for what may be None."""
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
    """Reads config.json of a training.

    Raises:
        InputError: It is missing, no JSON, of another format version, or names unknown settings;
            or the run was imported.
    """
    model, train, _ = _read_config(folder)
    if train is None:
        raise InputError(f"{folder} was imported, so there is no training to continue")
    return model, train


def _read_config(folder: Path) -> tuple[ModelConfig, TrainConfig | None, dict[str, Any]]:
    path = folder / CONFIG
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record["format"] != FORMAT:
            raise InputError(
                f"{path} has format {record['format']!r}, but this version of transferry reads "
                f"format {FORMAT}; use the version that wrote it"
            )
        train = record["train"]
        return (
            ModelConfig.from_dict(record["model"]),
            None if train is None else TrainConfig.from_dict(train),
            dict(record.get("generation", {})),
        )
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); expected the folder of a training"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise InputError(f"{path} is not a training's config: {error}") from error


def save_samples(folder: Path, texts: Sequence[str]) -> None:
    """Writes samples.json."""
    with atomic_file(folder / SAMPLES) as file:
        file.write(json.dumps(list(texts), ensure_ascii=False, indent=1).encode() + b"\n")


def load_samples(folder: Path) -> list[str]:
    """Reads samples.json; none where a run has no such file.

    Raises:
        InputError: It is no JSON list of strings.
    """
    path = folder / SAMPLES
    if not path.exists():
        return []
    try:
        return [str(text) for text in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a list of sentences: {error}") from error


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Returns the mean of the weights of several checkpoints, summed in float64."""
    total: dict[str, Tensor] = {}
    for path in paths:
        weights, _ = load_tensors(path)
        for name, tensor in weights.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a finished training.

    Raises:
        InputError: A file is missing or damaged, or the weights do not fit the config.
    """
    model_config, train_config, generation = _read_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocabulary_size != model_config.vocabulary_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary_size} ids, but config.json says "
            f"vocabulary_size {model_config.vocabulary_size}; they are not of one training"
        )
    weights, _ = load_tensors(folder / WEIGHTS)
    model = Transformer(model_config)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {error}") from error
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{folder / WEIGHTS}: {name} holds NaN or infinity; train again")
    digest = sha256(folder / WEIGHTS)
    return Checkpoint(model.eval(), train_config, tokenizer, generation, digest)
