"""Weights of every format are the same numbers, and nothing of a file is run."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from transferry.build_model.importing.formats import tensors
from transferry.build_model.importing.formats.tensors import (
    PickledFile,
    SafetensorsFile,
    Tensors,
    open_weights,
    tensor_writer,
)
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.importer import read_pretrained
from transferry.runtime.errors import InputError

STATE = {
    "b.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.tensor([0.5, -0.0, 1e-45]),
    "half": torch.arange(5).to(torch.float16),
    "brain": torch.randn(3, 7).to(torch.bfloat16),
    "one": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
}


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), content


def require_same(found: Tensors, wanted: dict[str, Tensor]) -> None:
    assert found.shapes.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert bits(found.read(name)) == bits(tensor)
        shape = found.shapes[name]
        assert (shape.device.type, shape.shape, shape.dtype) == ("meta", tensor.shape, tensor.dtype)


# --- what is written ------------------------------------------------------------------------------


def test_the_file_is_the_library_s_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with tensor_writer(path, STATE) as file:
        for name in reversed(STATE):
            file[name] = STATE[name]
        assert torch.equal(file["b.weight"], STATE["b.weight"])
        file["b.weight"] = STATE["b.weight"].T.contiguous().T
    assert path.read_bytes() == safetensors.torch.save(STATE)
    require_same(SafetensorsFile(path), STATE)


# --- pickled weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("archive", [True, False])
def test_pickled_tensors_come_back_bit_by_bit(archive: bool, tmp_path: Path) -> None:
    state = dict(STATE)
    state["tied"], state["turned"] = state["b.weight"], state["b.weight"].T
    state["slice"] = state["b.weight"][1:]
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=archive)
    require_same(PickledFile(tmp_path / "x.bin"), state)


def test_the_pages_of_a_large_file_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(STATE, tmp_path / "x.bin")
    opened: list[Path] = []

    def load(path: Path, load: Callable[[Path], Any] = tensors._load) -> Any:
        opened.append(path)
        return load(path)

    monkeypatch.setattr(tensors, "_load", load)
    monkeypatch.setattr(tensors, "_KEPT_BYTES", 20)
    require_same(PickledFile(tmp_path / "x.bin"), STATE)
    assert 3 <= len(opened) < len(STATE) + 2


class Shell:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (self.command,)


@pytest.mark.parametrize("archive", [True, False])
def test_code_is_named_and_not_run(archive: bool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    state = {"weight": torch.ones(3), "more": Shell(f"touch {ran}")}
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=archive)
    message = r"x\.bin: expected tensors alone, found \w+\.system, which could run code"
    with pytest.raises(InputError, match=message):
        _ = PickledFile(tmp_path / "x.bin").shapes
    assert not ran.exists()
    (tmp_path / "y.bin").write_bytes(pickle.dumps(state["more"]))
    with pytest.raises(InputError, match=r"y\.bin"):
        _ = PickledFile(tmp_path / "y.bin").shapes
    assert not ran.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected tensors by name, found list"),
        ({}, "expected tensors by name, found dict"),
        ({"epoch": 3}, "found int at 'epoch'"),
        ({3: torch.ones(2)}, "found Tensor at 3"),
        ({"w": torch.eye(3).to_sparse()}, r"plain numbers in the tensor w, .*sparse"),
    ],
)
def test_what_is_no_state_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(InputError, match=message):
        _ = PickledFile(tmp_path / "x.bin").shapes


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_pickle_is_refused(kept: float, archive: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save(STATE, path, _use_new_zipfile_serialization=archive)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(InputError, match=re.escape(str(path))):
        require_same(PickledFile(path), STATE)


# --- several files --------------------------------------------------------------------------------

Change = Callable[[Path, dict[str, str]], None]


def divide(folder: Path, kind: str) -> dict[str, str]:
    """Two files with an index, which comes back."""
    name, ending = kind.split(".")
    places: dict[str, str] = {}
    for number, names in enumerate((list(STATE)[:3], list(STATE)[3:]), start=1):
        file = f"{name}-{number:05}-of-00002.{ending}"
        part = {each: STATE[each] for each in names}
        if ending == "bin":
            torch.save(part, folder / file)
        else:
            safetensors.torch.save_file(part, folder / file)
        places |= dict.fromkeys(names, file)
    write_index(folder, kind, places)
    return places


def write_index(folder: Path, kind: str, places: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{kind}.index.json").write_text(json.dumps(index))


KINDS = ("model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("kind", KINDS)
def test_several_files_are_one(kind: str, tmp_path: Path) -> None:
    divide(tmp_path, kind)
    require_same(open_weights(tmp_path), STATE)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_index_says_is_held(kind: str, tmp_path: Path) -> None:
    places = divide(tmp_path, kind)
    first, second = sorted(set(places.values()))

    def refused(message: str, **changes: str) -> None:
        write_index(tmp_path, kind, places | changes)
        with pytest.raises(InputError, match=message):
            _ = open_weights(tmp_path).shapes

    name = next(iter(STATE))
    refused(f"the tensor {name} in {second}, found it in {first}", **{name: second})
    refused(f"the tensor other in {second}, found it in none", other=second)
    refused(r"third\.bin is missing, which .* names", other="third.bin")
    refused(r"files of its own folder, found '\.\./x'", other="../x")
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    refused(f"the tensor .* is in {first} and in {second}")


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert open_weights(tmp_path).origin.endswith(".bin")
    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors")
    require_same(open_weights(tmp_path), STATE)


# --- other formats --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["checkpoint-500", "snapshots/1f", "models--a--b/snapshots/1f"])
def test_a_checkpoint_further_down_is_named(place: str, tmp_path: Path) -> None:
    for name, record in {place: '{"model_type": "llama"}', "1_Pooling": "{}"}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(record)
    with pytest.raises(InputError, match=rf"is missing; there is one in .*{place}; import that"):
        PretrainedFolder(tmp_path)


def test_what_is_no_folder_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such folder\. Download a model .* hf download"):
        PretrainedFolder(tmp_path / "Helsinki-NLP" / "opus-mt-en-de")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json is a file; name the folder that holds it"):
        PretrainedFolder(tmp_path / "config.json")


@pytest.mark.parametrize("kind", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", None])
def test_quantised_folders_are_named(kind: str | None, tmp_path: Path) -> None:
    quantised = {"quant_method": kind} if kind else {"bits": 4}
    config = {"model_type": "llama", "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = kind or r'\{"bits": 4\}'
    with pytest.raises(InputError, match=rf"quantization_config is {told}: the weights are quant"):
        read_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_short_numbers_are_seen_before_they_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(4).to(dtype)}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path).shapes["w"].dtype == dtype
