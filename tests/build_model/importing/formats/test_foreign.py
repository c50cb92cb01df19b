"""A refusal of a folder of another tool names its content, and the command or source that helps."""

import re
from pathlib import Path

import pytest

from tests.commands import call

X = b"x"
ADAPTER = b'{"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "peft_type": "LORA"}'
ARGOS = b'{"from_code": "en", "to_code": "de", "package_version": "1.9"}'
QUANTISED = b'{"model_type": "llama", "quantization": {"bits": 4}}'
MODEL = b'{"model_type": "llama"}'

# Files that each tool writes, and the parts of the refusal.
FOLDERS: dict[str, tuple[dict[str, bytes], str]] = {
    "CTranslate2": (
        {"model.bin": X, "config.json": b'{"bos_token": "<s>"}', "shared_vocabulary.json": b"[]"},
        "found model.bin, a model that CTranslate2 converted; export the folder that it was",
    ),
    "OpenNMT-py": (
        {"model_step_10000.pt": X},
        "found model_step_10000.pt, a checkpoint of OpenNMT-py,|transferry export MODULE:FUNCTION",
    ),
    "Argos": (
        {"metadata.json": ARGOS, "model/model.bin": X, "model/config.json": b"{}"},
        "a package of Argos Translate,|hf download Helsinki-NLP/opus-mt-en-de --local-dir",
    ),
    "Argos, packed": ({"en_de.argosmodel": X}, "en_de.argosmodel, a package of Argos Translate"),
    "spaCy": (
        {"meta.json": b"{}", "config.cfg": X, "transformer/model": X},
        'a pipeline of spaCy,|nlp.get_pipe("transformer").model.transformer.save_pretrained',
    ),
    "GGUF": ({"model-Q4_K_M.gguf": X}, "model-Q4_K_M.gguf, weights of llama.cpp|gguf_file"),
    "MLX": ({"config.json": MODEL, "weights.00.npz": X}, "weights of MLX;|--dequantize"),
    "MLX, quantised": (
        {"config.json": QUANTISED, "model.safetensors": X},
        "weights of MLX, quantised;|mlx_lm.convert --hf-path |--dequantize",
    ),
    "Keras": ({"model.keras": X}, "weights of Keras;|export_to_transformers"),
    "KerasHub": (
        {"config.json": b'{"registered_name": "keras_hub>Gemma"}', "model.weights.h5": X},
        "found model.weights.h5, weights of Keras;|export_to_transformers",
    ),
    "SavedModel": ({"saved_model.pb": X}, "a SavedModel of TensorFlow"),
    "Bergamot": (
        {"model.ende.intgemm.alphas.bin": X, "lex.50.50.ende.s2t.bin": X, "vocab.ende.spm": X},
        "found model.ende.intgemm.alphas.bin, a model of Bergamot|model.npz",
    ),
    "shortlist": ({"lex.s2t.bin.gz": X}, "found lex.s2t.bin.gz, a shortlist of Bergamot"),
    "vocabulary": ({"vocab.spm": X}, "a vocabulary of SentencePiece alone; copy the model too"),
    "safetensors": ({"model.safetensors": X}, "weights alone;|the whole folder, with config.json"),
    "pickle": ({"pytorch_model.bin": X}, "weights alone;|the whole folder, with config.json"),
    "LoRA": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": X},
        "the folder of meta-llama/Llama-3.2-1B,|transferry import MODEL --adapter ",
    ),
    "LoRA, damaged": ({"adapter_config.json": b"["}, "the folder of MODEL, for which it was made"),
    "optimum": ({"config.json": MODEL, "model.onnx": X}, "ONNX graphs alone;|transferry audit "),
    "ONNX": ({"onnx/decoder.onnx": X}, "found onnx/decoder.onnx, ONNX graphs alone"),
    "OpenVINO": ({"config.json": MODEL, "openvino_model.xml": X}, "OpenVINO's graphs alone"),
    "TensorFlow": ({"config.json": MODEL, "tf_model.h5": X}, "TensorFlow's weights alone|from_tf="),
    "TensorFlow 1": ({"bert_model.ckpt.index": X}, "a checkpoint of TensorFlow; convert it"),
    "Flax": ({"config.json": MODEL, "flax_model.msgpack": X}, "Flax's weights alone|from_flax="),
    "fairseq": ({"dict.en.txt": X, "model.pt": X}, "a dictionary of fairseq;|MODULE:FUNCTION"),
    "DeepSpeed": ({"zero_to_fp32.py": X}, "a checkpoint of DeepSpeed in parts; join them"),
    "FSDP": ({"pytorch_model_fsdp_0/x": X}, "a checkpoint of FSDP in parts; join them"),
    "NeMo": ({"model.nemo": X}, "a model of NeMo"),
    "Meta": ({"consolidated.00.pth": X}, "in their authors' own format"),
    "variant": ({"model.fp16.safetensors": X}, "rename the file that you want to model.safet"),
    "part": ({"model-00001-of-00002.safetensors": X}, "one file of several;|the index"),
    "other name": ({"adapter.bin": X}, "found adapter.bin, weights under another name"),
    "module": ({"best.pth": X}, "a PyTorch file;|transferry export MODULE:FUNCTION --out BUNDLE"),
    "archive": ({"opus.zip": X}, "found opus.zip, an archive; unpack it"),
    "nothing": ({"readme.md": X}, "config.json is missing; expected a folder that save_pretrained"),
    "model without weights": (
        {"config.json": MODEL},
        "expected it or pytorch_model.bin, found nei",
    ),
    "model without a kind": (
        {"config.json": b"{}", "model.safetensors": X},
        "model_type must be named, found none; add that of the model's kind",
    ),
}


@pytest.mark.parametrize("tool", FOLDERS)
def test_a_folder_of_another_tool_is_named(tool: str, tmp_path: Path) -> None:
    files, message = FOLDERS[tool]
    for name, content in files.items():
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_bytes(content)
    refused = call("export", tmp_path / "theirs", "--out", tmp_path / "bundle")
    assert refused.exit_code == 3
    told = refused.stderr.replace(str(tmp_path), "").strip()
    assert re.search(".*".join(map(re.escape, message.split("|"))), told), told
    assert len(told) < 400
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-Q4_K_M.gguf", r"found model-Q4_K_M\.gguf, weights of llama\.cpp"),
        ("en_de.argosmodel", "a package of Argos"),
        ("model.tar.gz", "an archive; unpack it, and export the folder"),
        ("weights", "is a file; name the folder that holds it"),
    ],
)
def test_a_file_in_place_of_a_folder_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(X)
    for command in ("import", "export"):
        refused = call(command, tmp_path / name, "--out", tmp_path / "out")
        assert refused.exit_code == 3
        assert re.search(message, refused.stderr), refused.stderr
