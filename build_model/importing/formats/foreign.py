"""Folders and files of other tools: what they hold, and the command or source that helps."""

import json
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import read_bytes

ADAPTER_CONFIG = "adapter_config.json"
_MOST_JSON, _MOST_SHOWN = 1 << 20, 80
_SAVED = "load it with transformers and write it anew with save_pretrained"
_ONNX = (
    "ONNX graphs alone; export the PyTorch checkpoint that they were exported from, or check them "
    "beside it: transferry audit {place} --reference CHECKPOINT"
)
_BERGAMOT = (
    "of Bergamot (Firefox Translations), in Marian's int8; export the folder with the model.npz "
    "that it was made from: github.com/browsermt/students"
)
_OWN = "; or give the module itself: transferry export MODULE:FUNCTION --out BUNDLE"
_KERAS = (
    "weights of Keras; write them for transformers with KerasHub's "
    "model.export_to_transformers(FOLDER), and export that"
)
_ARGOS = (
    "a package of Argos Translate, with CTranslate2's weights; export OPUS-MT's model of the pair "
    "instead: hf download Helsinki-NLP/opus-mt-{from_code}-{to_code} --local-dir FOLDER"
)
_ALONE = (
    "weights alone; copy or download the whole folder, with config.json and the tokenizer" + _OWN
)
_OF_4 = (
    "write PyTorch's with transformers 4: from_pretrained(FOLDER, from_{}=True) and save_pretrained"
)
# By patterns, each with a match; the message names the first. {names} are fields of that match if
# it is JSON. The most telling rows come first.
_FOREIGN: dict[tuple[str, ...], str] = {
    ("*.argosmodel",): _ARGOS.format(from_code="FROM", to_code="TO"),
    ("metadata.json", "model/model.bin"): _ARGOS,
    ("model.bin", "*vocabulary*"): (
        "a model that CTranslate2 converted; export the folder that it was converted from (--model "
        "or --model_dir of the converter)"
    ),
    ("meta.json", "config.cfg"): (
        "a pipeline of spaCy, which only spaCy runs; of one with a transformer, write that and "
        'export it: nlp.get_pipe("transformer").model.transformer.save_pretrained(FOLDER)'
    ),
    ("*intgemm*",): f"a model {_BERGAMOT}",
    ("lex*.bin*",): f"a shortlist {_BERGAMOT}",
    (ADAPTER_CONFIG,): (
        "an adapter without its model; give the folder of {base_model_name_or_path}, for which it "
        "was made: transferry import MODEL --adapter {place} --out CHECKPOINT"
    ),
    ("dict.*txt",): (
        "a dictionary of fairseq; convert the model with the script of its model type in "
        f"transformers, and export the folder that save_pretrained writes{_OWN}"
    ),
    ("*_step_*.pt",): (
        "a checkpoint of OpenNMT-py, which transformers cannot read; export OPUS-MT's model of the "
        f"pair instead{_OWN}"
    ),
    ("*.gguf",): (
        "weights of llama.cpp (GGUF); export the folder that they were made from, or "
        "load them with gguf_file of transformers' from_pretrained and use save_pretrained"
    ),
    ("weights*.npz",): (
        "weights of MLX; export the folder that they were converted from, or dequantise with "
        "mlx_lm.convert --hf-path {place} --mlx-path FOLDER --dequantize"
    ),
    ("*.keras",): _KERAS,
    ("*.weights.h5",): _KERAS,
    ("tf_model*",): f"TensorFlow's weights alone; {_OF_4.format('tf')}",
    ("flax_model*",): f"Flax's weights alone; {_OF_4.format('flax')}",
    ("saved_model.pb",): (
        "a SavedModel of TensorFlow; export the PyTorch checkpoint of the same model"
    ),
    ("*.ckpt*.index",): (
        "a checkpoint of TensorFlow; convert it with the script of its model type in transformers "
        "4, convert_…_tf_checkpoint_to_pytorch"
    ),
    ("zero_to_fp32.py",): (
        "a checkpoint of DeepSpeed in parts; join them: python zero_to_fp32.py . . "
        "--safe_serialization"
    ),
    ("pytorch_model_fsdp*",): (
        "a checkpoint of FSDP in parts; join them: accelerate merge-weights"
    ),
    ("*.nemo",): "a model of NeMo; export it for transformers with NeMo first",
    ("openvino_*.xml",): (
        "OpenVINO's graphs alone; export the PyTorch checkpoint that they were made from"
    ),
    ("consolidated*",): (
        "weights in their authors' own format; export the folder with model.safetensors that was "
        "published beside them"
    ),
    ("*-of-*",): (
        "one file of several; copy or download the index too, model.safetensors.index.json or "
        "pytorch_model.bin.index.json"
    ),
    ("model.*.safetensors",): (
        "weights of a variant; rename the file that you want to model.safetensors"
    ),
    ("*.onnx",): _ONNX,
    ("onnx/*.onnx",): _ONNX,
    ("model.safetensors",): _ALONE,
    ("pytorch_model.bin",): _ALONE,
    ("*.safetensors",): f"safetensors under another name; {_SAVED}{_OWN}",
    ("*.bin",): f"weights under another name; {_SAVED}",
    ("*.pt",): f"a PyTorch file; {_SAVED}{_OWN}",
    ("*.pth",): f"a PyTorch file; {_SAVED}{_OWN}",
    ("*.spm",): (
        "a vocabulary of SentencePiece alone; copy the model too: model.npz of Marian, or "
        "config.json, model.safetensors and vocab.json of transformers"
    ),
    ("*.zip",): "an archive; unpack it, and export the folder",
    ("*.tar*",): "an archive; unpack it, and export the folder",
}


def instead(path: Path) -> str:
    """Describes a file, or a folder without the usual files, and what to do; "" if unknown."""
    for patterns, remedy in _FOREIGN.items():
        if path.is_file():
            found = [path] if len(patterns) == 1 and fnmatch(path.name, patterns[0]) else []
        else:
            matches = [sorted(path.glob(pattern)) for pattern in patterns]
            found = [each[0] for each in matches if each]
        if len(found) == len(patterns):
            name = found[0].relative_to(path.parent if path.is_file() else path)
            return f"found {name}, {remedy.format_map(_fields(found[0]) | {'place': path})}"
    return ""


def _fields(path: Path) -> dict[str, Any]:
    """Returns the texts of a JSON file by name; a name in capitals for an unknown one."""
    known = defaultdict[str, Any](lambda: "MODEL")
    if path.suffix == ".json":
        try:
            record = json.loads(read_bytes(path, _MOST_JSON))
        except (InputError, ValueError, RecursionError):
            record = {}
        texts = record.items() if isinstance(record, dict) else ()
        known |= {name: text[:_MOST_SHOWN] for name, text in texts if isinstance(text, str)}
    return known
