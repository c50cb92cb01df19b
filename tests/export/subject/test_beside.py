"""Audit of the files beside graphs: as transformers writes them they pass, each fault is found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.build_model.importing.huggingface.drawn import transformers
from tests.build_model.importing.huggingface.small_models import bert_model, save
from tests.commands import call, done
from tests.conftest import make_bundle
from tests.export.subject.graphs import masked_model, saved
from transferry.build_model.checkpoint import load_checkpoint, load_samples
from transferry.export.audit import Audit, audit
from transferry.export.faults.foreign_faults import BESIDE, foreign_faults
from transferry.export.subject.beside import GENERATION, GROUPS, beside_graphs
from transferry.export.subject.bundle_copy import add, constant
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.layout import read_layout
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.ort.session import SessionOptions

Change = Callable[[dict[str, Any]], object]
TEXTS = ["hello world, this is a test", "Straße"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    labels = {"id2label": {0: "bad", 1: "good", 2: "so-so"}}
    save("bert", folder / "bert", lambda size: classifier(size, labels))
    for kind in ("gpt2", "llama", "marian"):
        save(kind, folder / kind)
    (folder / "llama" / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ eos_token }}"
    )
    return folder


def classifier(size: int, labels: dict[str, Any]) -> Any:
    config = bert_model(size).config
    config.num_labels, config.id2label = 3, labels["id2label"]
    config.label2id = {name: number for number, name in config.id2label.items()}
    return transformers.BertForSequenceClassification(config)


def files_of(model: Path, folder: Path) -> Path:
    """A folder of the files beside the weights."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    return folder


def problems(folder: Path, reference: Path) -> tuple[dict[str, str], str]:
    claims, told = beside_graphs(folder, reference, TEXTS).examined
    return {claim.name: claim.problem for claim in claims if claim.problem}, told


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "marian"])
def test_files_of_transformers_are_equal(kind: str, models: Path, tmp_path: Path) -> None:
    """Written again, as exporters do."""
    folder = files_of(models / kind, tmp_path / "graphs")
    assert problems(folder, models / kind)[0] == {}
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if kind != "marian":
        tokenizer.save_pretrained(folder)
    found, told = problems(folder, models / kind)
    assert found == {}
    assert "texts equal" in told
    assert "not covered: " in told  # no preprocessor
    # As transformers.js has them: the graphs in a subfolder.
    (folder / "onnx").mkdir()
    assert problems(folder / "onnx", models / kind) == (found, told)


def edited(path: Path, change: Change) -> None:
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def swapped(table: dict[str, Any], first: int, second: int) -> None:
    """Swaps the values of two keys, by their places."""
    one, other = list(table)[first], list(table)[second]
    table[one], table[other] = table[other], table[one]


FAULTS: dict[str, tuple[str, str, Change, str]] = {
    "two ids": ("llama", "tokenizer.json", lambda t: swapped(t["model"]["vocab"], -2, -1), "token"),
    "two ids of GPT-2": ("gpt2", "vocab.json", lambda t: swapped(t, -2, -1), "tokenizer"),
    "two pieces": ("marian", "vocab.json", lambda t: swapped(t, 9, 10), "tokenizer"),
    "two pieces of targets": (
        *("marian", "vocab.json", lambda t: t.update(St=t["Ze"], Ze=t["St"])),
        "tokenizer",
    ),
    "blanks before a special token": (
        *("llama", "tokenizer.json", lambda t: t["added_tokens"][1].update(lstrip=True)),
        "tokenizer",
    ),
    "token of the template": (
        *("llama", "tokenizer_config.json", lambda c: c.update(bos_token="</s>")),
        "tokenizer",
    ),
    "blanks before punctuation": (
        *("marian", "tokenizer_config.json"),
        *(lambda c: c.update(clean_up_tokenization_spaces=True), "tokenizer"),
    ),
    "end token": ("gpt2", "config.json", lambda c: c.update(eos_token_id=3), "labels"),
    "end of an answer": ("llama", GENERATION, lambda c: c.update(eos_token_id=7), "labels"),
    "beams": ("marian", GENERATION, lambda c: c.update(num_beams=7), "generation"),
    "labels": ("bert", "config.json", lambda c: swapped(c["id2label"], 0, 1), "labels"),
    "token that the model lacks": (
        *("llama", "tokenizer_config.json", lambda c: c.update(extra_special_tokens=["hello"])),
        "tokenizer",
    ),
    "special tokens split": (
        *("llama", "tokenizer_config.json", lambda c: c.update(split_special_tokens=True)),
        "tokenizer",
    ),
    "special tokens of Marian split": (
        *("marian", "tokenizer_config.json", lambda c: c.update(split_special_tokens=True)),
        "tokenizer",
    ),
    "side of padding": (
        *("llama", "tokenizer_config.json", lambda c: c.update(padding_side="right")),
        "tokenizer",
    ),
    "no segments": (
        *("bert", "tokenizer_config.json"),
        *(lambda c: c.update(model_input_names=["input_ids", "attention_mask"]), "tokenizer"),
    ),
    "token that Marian lacks": (
        *("marian", "tokenizer_config.json"),
        *(lambda c: c.update(extra_special_tokens={"x": "hello"}), "tokenizer"),
    ),
    "length": ("bert", "tokenizer_config.json", lambda c: c.update(model_max_length=12), "token"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_beside_the_graphs_is_found(name: str, models: Path, tmp_path: Path) -> None:
    kind, file, change, group = FAULTS[name]
    folder = files_of(models / kind, tmp_path / "graphs")
    path = folder / file
    if not path.exists():
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    edited(path, change)
    found, told = problems(folder, models / kind)
    assert len(found) == 1, found
    assert next(iter(found)).startswith(group)
    assert "differ" in told


def test_a_changed_word_list_and_template_are_found(models: Path, tmp_path: Path) -> None:
    folder = files_of(models / "bert", tmp_path / "graphs")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    words = (models / "bert" / "vocab.txt").read_text().splitlines()
    words[-1], words[-2] = words[-2], words[-1]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    assert "tokenizer beside the graphs" in problems(folder, models / "bert")[0]
    chat = files_of(models / "llama", tmp_path / "chat")
    (chat / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "chat template" in problems(chat, models / "llama")[0]["tokenizer beside the graphs"]


def test_settings_of_generation_may_have_moved(models: Path, tmp_path: Path) -> None:
    """From config.json, where older folders have them, to generation_config.json."""
    folder = files_of(models / "marian", tmp_path / "graphs")
    shutil.copytree(models / "marian", tmp_path / "old")
    settings = json.loads((folder / "generation_config.json").read_text())
    (tmp_path / "old" / "generation_config.json").unlink()
    edited(tmp_path / "old" / "config.json", lambda c: c.update(settings))
    assert problems(folder, tmp_path / "old")[0] == {}
    edited(folder / "generation_config.json", lambda c: c.update(num_beams=7))
    assert list(problems(folder, tmp_path / "old")[0]) == ["generation settings beside the graphs"]


def test_modules_of_sentence_transformers_are_compared(tmp_path: Path) -> None:
    save("bert", tmp_path / "embedder", lambda size: bert_model(size, kind="BertModel"))
    files_of(tmp_path / "embedder", tmp_path / "graphs")
    for name in ("embedder", "graphs"):
        (tmp_path / name / "1_Pooling").mkdir()
        modules = {"": "Transformer", "1_Pooling": "Pooling"}
        kinds = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(modules.items())
        ]
        (tmp_path / name / "modules.json").write_text(json.dumps(kinds))
        pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
        (tmp_path / name / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert problems(tmp_path / "graphs", tmp_path / "embedder")[0] == {}
    edited(
        tmp_path / "graphs" / "1_Pooling" / "config.json",
        lambda c: c.update(pooling_mode_mean_tokens=False, pooling_mode_cls_token=True),
    )
    (found,) = problems(tmp_path / "graphs", tmp_path / "embedder")[0].items()
    assert found[0] == "sentence-transformers beside the graphs"
    assert "pooling" in found[1]


def test_a_checkpoint_covers_the_graphs_alone(run_folder: Path, tmp_path: Path) -> None:
    claims, told = beside_graphs(tmp_path, run_folder, TEXTS).examined
    assert claims == []
    assert all(group in told for group in GROUPS)


def test_an_audit_compares_the_files_and_plants_faults_in_them(
    traces: None, tmp_path: Path
) -> None:
    save("bert", tmp_path / "bert")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "bert").save_pretrained(tmp_path / "bert")
    done("import", tmp_path / "bert", "--out", tmp_path / "run")
    bundle = make_bundle(tmp_path / "run", tmp_path / "bundle")
    graphs = files_of(tmp_path / "bert", tmp_path / "graphs")
    (tmp_path / "made").mkdir()
    masked_model(Bundle.load(bundle), tmp_path / "made")
    shutil.copy(tmp_path / "made" / "model.onnx", graphs)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on\nhello world\n")
    arguments = ("audit", graphs, "--reference", tmp_path / "bert", "--text", text, "--quiet")
    assert "Compared: graphs; tokenizer: " in done(*arguments).stdout.replace("\n", " ")

    checkpoint = load_checkpoint(tmp_path / "run")
    beside = beside_graphs(graphs, tmp_path / "bert", TEXTS)
    subject = ForeignFolder(read_layout(graphs), SessionOptions(), checkpoint, ["right"], beside)
    gate = Audit.of(checkpoint, TEXTS[:1], "float32").gate(subject, "float32")
    faults = [fault for fault in foreign_faults(True) if fault.kind in BESIDE]
    results = [each for each in gate.plant(faults, tmp_path / "copy") if each is not None]
    assert {each.kind: each.caught_by for each in results} == {
        "two ids of the tokenizer swapped": "tokenizer beside the graphs",
        "another padding token": "labels and special tokens beside the graphs",
    }
    edited(graphs / "config.json", lambda c: c.update(pad_token_id=5))
    failed = call(*arguments)
    assert failed.exit_code == 4
    assert "pad_token_id is 5, the reference has 0" in failed.stdout.replace("\n", " ")


def test_weights_that_a_cast_widens_are_of_int8(
    reader_bundle_folder: Path, reader_run_folder: Path, tmp_path: Path
) -> None:
    """Cast, Mul and MatMul: no operator of integers, but stored in 8 bits."""
    path = masked_model(Bundle.load(reader_bundle_folder), tmp_path / "graphs")
    model = ir.load(path)
    for node in [each for each in model.graph if each.op_type == "Transpose"]:
        weights = node.inputs[0]
        if weights is None or weights.const_value is None:
            continue
        array = weights.const_value.numpy()
        scale = np.abs(array).max(axis=1, keepdims=True) / 127
        stored = constant(weights, np.round(array / scale).astype(np.int8))
        widened = add(weights, "Cast", stored, to=1)
        node.replace_input_with(0, add(weights, "Mul", widened, constant(weights, scale)))
    model.graph.sort()
    saved(model, path)
    layout = read_layout(tmp_path / "graphs")
    assert layout.precision() == "int8"
    subject = ForeignFolder(layout, SessionOptions(), load_checkpoint(reader_run_folder), ["right"])
    assert audit(tmp_path, subject, load_samples(reader_run_folder)[:4]).faults == []
