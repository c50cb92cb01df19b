"""A checkpoint on disk: safetensors and JSON, each file written whole or not at all.

CHECKPOINT/
  config.json                  format version, ModelConfig, TrainConfig (null if imported) and
                               default generation options for the bundle
  settings.toml                options of the command, for `--resume`
  corpus/                      the built-in corpus, if the checkpoint was trained on it
  tokenizer.json ...           settings and files of the tokenizer
  samples.json                 sentences whose answers export records
  model.safetensors            weights to export
  metrics.jsonl curves.png
  checkpoints/STEP.safetensors weights at the last validations, for averaging
  state.safetensors            weights, optimiser and progress, for `--resume`
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from transferry.build_model.checkpoint_folder import CONFIG, FORMAT, REMEDY, read_config
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.train_config import TrainConfig
from transferry.runtime.bundle.card import UNKNOWN, ModelCard
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import checked, read_document
from transferry.runtime.io.whole import open_regular, sha256
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

WEIGHTS = "model.safetensors"
SAMPLES = "samples.json"
# Types of stored weights: float32 has every number of the other two, which are half as large.
STORED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Checkpoint:
    """A trained model with everything that export needs.

    Attributes:
        model: The model in eval mode, float32, on the CPU.
        config: Training settings; None if the checkpoint was imported.
        generation: Fields of GenerationOptions that become the bundle's defaults.
        sha256: Hash of the weights file; empty if the model was not read from a file.
    """

    model: Transformer
    config: TrainConfig | None
    tokenizer: AnyTokenizer
    generation: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""
    head: HeadSettings | None = None
    card: ModelCard = UNKNOWN


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
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _opened(path: Path) -> AbstractContextManager[Any]:
    missing = f"is {path.parent} the folder of a finished training?"
    return open_tensors(path, missing, "train again or restore the file")


@contextmanager
def open_tensors(path: Path, if_missing: str, if_damaged: str) -> Iterator[Any]:
    """Opens a safetensors file; the remedies are for errors.

    Raises:
        InputError: The file is missing, truncated or not safetensors.
    """
    if path.exists():
        with open_regular(path):  # which a pipe is not, and safetensors would wait for one
            pass
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
    head: HeadSettings | None = None,
    card: ModelCard = UNKNOWN,
) -> None:
    """Writes config.json; `train` is None for an imported checkpoint."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "model": model.to_dict(),
        "train": None if train is None else train.to_dict(),
    }
    if generation:
        record["generation"] = dict(generation)
    if head is not None:
        record["head"] = asdict(head)
    if known := card.to_dict():
        record["card"] = known
    with atomic_file(folder / CONFIG) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


def load_config(folder: Path) -> tuple[ModelConfig, TrainConfig]:
    """Reads the config.json of a training.

    Raises:
        InputError: The file is missing, not JSON, of another format version or has unknown
            settings; or the checkpoint was imported.
    """
    model, train, *_ = _read_config(folder)
    if train is None:
        raise InputError(f"{folder} was imported, so it has no training to continue")
    return model, train


def _read_config(
    folder: Path,
) -> tuple[ModelConfig, TrainConfig | None, dict[str, Any], HeadSettings | None, ModelCard]:
    path, record = folder / CONFIG, read_config(folder)
    try:
        train, head = record["train"], record.get("head")
        return (
            ModelConfig.from_dict(record["model"]),
            None if train is None else TrainConfig.from_dict(train),
            dict(record.get("generation", {})),
            None if head is None else checked(head, HeadSettings, f"{path}: head", REMEDY),
            checked(record.get("card", {}), ModelCard, f"{path}: card", REMEDY),
        )
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise InputError(f"{path} is not the config of a checkpoint: {error}") from error


def save_samples(folder: Path, texts: Sequence[str]) -> None:
    """Writes samples.json."""
    with atomic_file(folder / SAMPLES) as file:
        file.write(json.dumps(list(texts), ensure_ascii=False, indent=1).encode() + b"\n")


def load_samples(folder: Path) -> list[str]:
    """Reads samples.json; returns an empty list if the checkpoint has no such file.

    Raises:
        InputError: The file is not a JSON list of strings.
    """
    path = folder / SAMPLES
    if not path.exists():
        return []
    return read_document(path, list[str], "restore the file, or remove it")


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints, summed in float64."""
    total: dict[str, Tensor] = {}
    for path in paths:
        weights, _ = load_tensors(path)
        for name, tensor in weights.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a finished training or an imported model.

    Raises:
        InputError: A file is missing or damaged, or the weights do not match the config.
    """
    model_config, train_config, generation, head, card = _read_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocabulary_size != model_config.vocabulary_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary_size} ids, but config.json has "
            f"vocabulary_size {model_config.vocabulary_size}; take both from one checkpoint"
        )
    try:
        model = Transformer(model_config)
    except (ArithmeticError, AttributeError, RuntimeError) as error:  # of short memory too
        raise InputError(
            f"{folder / CONFIG}: a model of this shape cannot be made here ({error}); take the "
            "file and the weights from one checkpoint"
        ) from error
    _fill(model, folder)
    digest = sha256(folder / WEIGHTS)
    return Checkpoint(model.eval(), train_config, tokenizer, generation, digest, head, card)


def _fill(model: Transformer, folder: Path) -> None:
    """Reads the weights of a checkpoint into its model, one tensor in memory at a time."""
    path, state = folder / WEIGHTS, model.state_dict()
    with _opened(path) as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in sorted(state.keys() | found.keys()):
        wanted, is_there = state.get(name), found.get(name)
        if wanted is None or is_there != list(wanted.shape):
            shape = "no such tensor" if wanted is None else list(wanted.shape)
            raise InputError(
                f"{path} does not fit {folder / CONFIG}: expected {name} {shape}, found "
                f"{is_there or 'none'}; take both from one checkpoint"
            )
        # Opened for each, so that what was read before need not stay in memory.
        with _opened(path) as file:
            tensor: Tensor = file.get_tensor(name)
            if tensor.dtype not in STORED:
                expected = " or ".join(str(each).removeprefix("torch.") for each in STORED)
                raise InputError(
                    f"{path}: expected {name} in {expected}, found {tensor.dtype}; train again"
                )
            if not is_finite(tensor):
                raise InputError(f"{path}: {name} holds NaN or infinity; train again")
            # float32 has every number of the shorter types.
            wanted.copy_(tensor)


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a floating tensor are finite; takes no memory of its size."""
    # Among numbers with a NaN, the smallest and the largest are NaN.
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())
