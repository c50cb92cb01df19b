"""A saved checkpoint comes back bit by bit; a damaged one is refused, never half-written."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.build_model.train import small
from tests.build_model.train.small import BYTES
from transferry.build_model import checkpoint
from transferry.build_model.checkpoint import (
    average,
    load_checkpoint,
    load_config,
    load_tensors,
    save_config,
    save_tensors,
)
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.train_config import TrainConfig
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, Tokenizer

SHAPE = ModelConfig(**small.SHAPE, max_positions=32)
TRAIN = TrainConfig(max_steps=7, seed=3)


def save(folder: Path) -> Transformer:
    """Writes the files of a finished training."""
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    folder.mkdir()
    save_config(folder, SHAPE, TRAIN)
    BYTES.save(folder)
    save_tensors(folder / checkpoint.WEIGHTS, model.state_dict(), {"weights": "step 7"})
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "run")
    return tmp_path / "run"


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_training_comes_back_bit_by_bit(tmp_path: Path) -> None:
    saved = save(tmp_path / "run")
    loaded = load_checkpoint(tmp_path / "run")
    assert bits(loaded.model.state_dict()) == bits(saved.state_dict())
    assert not loaded.model.training
    assert loaded.model.config == SHAPE
    assert loaded.config == TRAIN
    assert loaded.tokenizer.encode("Straße") == BYTES.encode("Straße")


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.tensor([-0.0, 1e-45, 3.4e38, 0.1]),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "steps": torch.tensor(5, dtype=torch.int64),
        "trained": torch.ones(2, requires_grad=True),
    }
    save_tensors(tmp_path / "x.safetensors", tensors, {"progress": "Schritt 5"})
    loaded, metadata = load_tensors(tmp_path / "x.safetensors")
    assert metadata == {"progress": "Schritt 5"}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].numpy().tobytes() == tensor.detach().contiguous().numpy().tobytes()


def test_the_average_is_the_mean(tmp_path: Path) -> None:
    # In float32, 1e8 + 1 - 1e8 is 0.
    rows = [[1e8, 1.0, 0.1], [1.0, 2.0, 0.1], [-1e8, 6.0, 0.1]]
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path, row in zip(paths, rows, strict=True):
        save_tensors(path, {"w": torch.tensor(row), "b": torch.tensor([row[1]])})
    mean = average(paths)
    assert mean["w"].dtype == torch.float32
    assert torch.equal(mean["w"], torch.tensor([1 / 3, 3.0, 0.1]))
    assert torch.equal(mean["b"], torch.tensor([3.0]))
    assert bits(average(paths[:1])) == bits(load_tensors(paths[0])[0])


FILES = ("config.json", "tokenizer.json", "ranks.tiktoken", "model.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InputError, match=re.escape(str(folder / name))):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(folder: Path, name: str, kept: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(kept * len(content))])
    # Ranks cut between two lines are seen by their number only: then the folder is named.
    named = folder if name == "ranks.tiktoken" else folder / name
    with pytest.raises(InputError, match=re.escape(str(named))):
        load_checkpoint(folder)


@pytest.mark.parametrize("position", [0, 8, 20])
def test_a_changed_header_is_refused(folder: Path, position: int) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_checkpoint(folder)


def record(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "model": SHAPE.to_dict(), "train": TRAIN.to_dict(), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (record(format=2), "must have format 1, found 2"),
        (record(format=True), "must have format 1, found True"),
        (record(model={**SHAPE.to_dict(), "depth": 3}), "ModelConfig has no depth"),
        (record(model={**SHAPE.to_dict(), "dropout": "none"}), "not the config of a checkpoint"),
        (record(model=[1]), "not the config of a checkpoint"),
        (record(train={}), "needs an end"),
        ({"format": 1, "model": SHAPE.to_dict()}, "'train'"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_bad_config_is_refused(folder: Path, content: object, message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"{re.escape(str(path))}.*{message}"):
        load_config(folder)


def test_binary_rubbish_is_no_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError, match=re.escape(str(folder / "config.json"))):
        load_config(folder)


def test_the_tokenizer_of_another_training_is_refused(folder: Path) -> None:
    pieces = [*SINGLE_BYTES, b"ab"]
    Tokenizer("other", r".", {piece: rank for rank, piece in enumerate(pieces)}).save(folder)
    with pytest.raises(InputError, match=f"{folder}.* has 260 ids, .* vocabulary_size 259"):
        load_checkpoint(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    save_config(folder, ModelConfig(**{**SHAPE.to_dict(), "d_ff": 48}), TRAIN)
    message = r"model\.safetensors does not fit .*config\.json: expected decoder.0.feed_forward"
    with pytest.raises(InputError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("changed", [{"relative_buckets": 2}, {"separate_positions": True}])
def test_a_shape_that_cannot_be_made_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    save_config(folder, ModelConfig(**{**SHAPE.to_dict(), **changed}), TRAIN)
    with pytest.raises(InputError, match=r"config\.json: a model of this shape cannot be made"):
        load_checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_without_value_are_refused(folder: Path, value: float) -> None:
    weights, _ = load_tensors(folder / "model.safetensors")
    weights["decoder.0.feed_forward.inner.weight"][3, 4] = value
    save_tensors(folder / "model.safetensors", weights)
    with pytest.raises(InputError, match=r"model\.safetensors: decoder\.0\.feed_forward\.inner"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: save_tensors(folder / checkpoint.WEIGHTS, {"w": torch.ones(3)}),
        lambda folder: save_config(folder, SHAPE, TrainConfig(max_steps=99)),
    ],
    ids=["weights", "config"],
)
def test_a_full_disk_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device; nothing was written"):
        write(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
