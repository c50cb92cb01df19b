"""Any mutation of any file of a folder that is imported: a right import, or an error in words."""

import contextlib
import io
import json
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.build_model.importing.formats import test_adapters
from tests.build_model.importing.huggingface.drawn import (
    TYPES,
    Drawn,
    byte_level_tokenizer,
    transformers,
)
from tests.build_model.importing.huggingface.small_models import (
    bert_vocabulary,
    sentencepiece_model,
)
from tests.build_model.importing.huggingface.tokenizer import test_chat_import, test_languages
from tests.build_model.importing.huggingface.tokenizer.test_separate_vocabularies import (
    write as write_marian,
)
from tests.build_model.importing.toolkits import test_marian
from tests.build_model.importing.toolkits.test_sentence_transformers import sentence_folder
from tests.fuzz.models import ODD
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.test_documents import Place, mutations, places, replaced, require_survived
from transferry.build_model.importing.huggingface.folder import PretrainedFolder, Settings
from transferry.build_model.importing.huggingface.generation import (
    SAME_TOKENS,
    SEARCH_SETTINGS,
    TOKENS,
    generation_defaults,
)
from transferry.build_model.importing.huggingface.importer import FAMILIES
from transferry.build_model.importing.toolkits.sentence_transformers import (
    read_sentence_transformers,
)
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import TransferryError

torch = pytest.importorskip("torch")

EXAMPLES = settings().max_examples // 4 + 1  # an import takes a tenth of a second


def llama(folder: Path) -> None:
    """Two files with an index, a chat template, added tokens."""
    size = test_chat_import.write(folder, "llama 3")
    Drawn("llama", 0, folder, size, depth=1)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    special = {"bos_token": "<|begin_of_text|>", "additional_special_tokens": ["<|eot_id|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text("{}")
    generation = {"max_length": 9, "eos_token_id": [2, 5], "bad_words_ids": [[3], [4, 5]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def pickled(folder: Path) -> None:
    """tokenizer.model and pytorch_model.bin, divided."""
    settings: dict[str, Any] = {"vocab_size": 330, "model_type": "bpe", "byte_fallback": True}
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(**settings))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true, "add_eos_token": false}')
    Drawn("mistral", 0, folder, 340, depth=1)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def old_pickle(folder: Path) -> None:
    """A pickle of before torch 1.6, and T5's tokenizer.json."""
    byte_level_tokenizer(folder, "", "</s>")
    Drawn("t5", 0, folder, 293, depth=1)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    old = {"_use_new_zipfile_serialization": False}
    torch.save(state, folder / "pytorch_model.bin", **old)


def bert(folder: Path) -> None:
    size = bert_vocabulary(folder)
    Drawn("bert", 0, folder, size, depth=1)
    made = transformers.BertTokenizer.from_pretrained(folder)
    made.save_pretrained(folder)


def nllb(folder: Path) -> None:
    test_languages.nllb(folder)
    Drawn("m2m_100", 0, folder, 480, depth=1)


def m2m(folder: Path) -> None:
    test_languages.m2m(folder)
    Drawn("m2m_100", 0, folder, 250, depth=1)


def marian(folder: Path) -> None:
    write_marian(folder, larger="source")


def adapted(folder: Path) -> None:
    """A Llama with an adapter inside of its folder."""
    llama(folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = config["intermediate_size"], config["hidden_size"]
    factors = test_adapters.factors("model.layers.0.mlp.gate_proj", *sizes)
    adapter = test_adapters.save_adapter(folder / "adapter", factors, target_modules=["gate_proj"])
    torch.save(factors, adapter / "adapter_model.bin")


def npz(folder: Path) -> None:
    test_marian.save_marian(folder)


FOLDERS: dict[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (llama, pickled, old_pickle, bert, nllb, m2m, marian, adapted, npz)
}


def command(name: str) -> tuple[str, ...]:
    adapter = ("--adapter", "adapted/adapter") if name == "adapted" else ()
    return ("import", name, *adapter, "--out", "new", "--quiet")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("imports")
    pristine = folder / "pristine"
    for name, make in FOLDERS.items():
        (pristine / name).mkdir(parents=True)
        make(pristine / name)
    (folder / "outside").write_text("dear to somebody\n")
    shutil.copytree(pristine, folder / "work")
    sandbox = Sandbox()
    yield Place(folder / "work", pristine, sandbox)
    sandbox.close()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_unchanged_folders_are_imported(place: Place, name: str) -> None:
    place.restore()
    ended = place.sandbox.run(place.folder, *command(name))
    assert ended.code == 0, ended


@st.composite
def inner(draw: st.DrawFn, content: bytes) -> bytes:
    """Other bytes than these, with the container around them intact half of the time."""
    if draw(st.booleans()):
        return draw(mutations(content))
    if content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = draw(st.sampled_from(sorted(members)))
        members[name] = draw(mutations(members[name]))
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w") as archive:
            for each, value in members.items():
                archive.writestr(each, value)
        return written.getvalue()
    if content[8:9] == b"{":  # safetensors: the size of its header, the header, the data
        (size,) = struct.unpack("<Q", content[:8])
        header = draw(mutations(content[8 : 8 + size]))
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    return draw(mutations(content))


@pytest.mark.parametrize("name", FOLDERS)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_changed_folder_is_imported_or_refused(
    place: Place, name: str, data: st.DataObject
) -> None:
    place.restore()
    folder = place.folder / name
    if name == "adapted" and data.draw(st.booleans()):  # else the pickle beside it is not read
        (folder / "adapter" / "adapter_model.safetensors").unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files), label="file")
    path.write_bytes(data.draw(inner(path.read_bytes())))
    require_survived(place, name, command(name))


@pytest.mark.parametrize("kind", TYPES)
def test_an_odd_value_of_config_json_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    Drawn(kind, 0, tmp_path, depth=2)
    checkpoint = PretrainedFolder(tmp_path)
    config, names = dict(checkpoint.config.values), checkpoint.names()
    for path in filter(None, places(config)):
        for odd in ODD:
            changed = replaced(config, path, partial(put, odd))
            began = time.process_time()
            with contextlib.suppress(TransferryError):
                FAMILIES[kind].shape(Settings(tmp_path, changed), names)
            assert time.process_time() - began < 5, (path, odd)


def test_an_odd_value_of_sentence_transformers_is_read_or_refused(tmp_path: Path) -> None:
    poolings, dense = ("mean", "cls"), [torch.nn.Linear(64, 5)]
    sentence_folder(tmp_path, *poolings, dense=dense, normalise=True)
    for path in sorted(tmp_path.rglob("*.json")):
        content = json.loads(path.read_text())
        more = {"pooling_mode": "mean", "default_prompt_name": "query", "activation_fn": "x"}
        whole = content if isinstance(content, list) else {**content, **more}
        for place in filter(None, places(whole)):
            for odd in (*ODD, "sentence_transformers.base.modules.dense.Dense", [["a"]]):
                path.write_text(json.dumps(replaced(whole, place, partial(put, odd))))
                with contextlib.suppress(TransferryError):
                    read_sentence_transformers(tmp_path)
        path.write_text(json.dumps(content))
    assert read_sentence_transformers(tmp_path) is not None


def put(value: Any, inside: Any, key: Any) -> None:
    inside[key] = value


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_an_odd_setting_of_generate_is_read_or_refused(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text("{}")
    layers = int(architecture == "encoder-decoder")
    shape = ModelConfig(97, 8, 2, layers, 1, 8, architecture=architecture)  # type: ignore[arg-type]
    for name in [*SEARCH_SETTINGS, *TOKENS, *SAME_TOKENS, "unknown"]:
        for odd in (*ODD, [1 << 40], [[1, -1]], ["a"], [[[]]], "true"):
            checkpoint = PretrainedFolder(tmp_path)
            checkpoint.generation.values[name] = odd
            with contextlib.suppress(TransferryError):
                fields, _ = generation_defaults(checkpoint, shape)
                GenerationOptions(**fields)
