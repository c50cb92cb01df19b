"""Folders of any model class of transformers, as people have them: old, renamed, rounded, sharded.

`write` draws a configuration, saves the model with the class, and ages the folder: names, types
and files of weights, further tensors, keys of config.json, missing files. What transformers reads
from the aged folder is the reference.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto import modeling_auto

from tests.build_model.importing.huggingface.drawn import (
    AFTER_PADDING,
    TYPES,
    exact,
    randomise,
    transformers,
)
from tests.build_model.importing.huggingface.encoder_types import ENCODERS
from tests.build_model.importing.huggingface.small_models import change, gpt2_vocabulary
from tests.build_model.importing.huggingface.tokenizer.test_tokenizer_classes import write_folder
from tests.end_to_end.types.test_imported_types import CLASSES, OWN
from transferry.build_model.importing.huggingface.decoder_only import FAMILIES as DECODERS
from transferry.build_model.importing.huggingface.encoder_decoder import FAMILIES as SEQUENCES

Draw = random.Random
LONGEST = 64
# Heads that no task serves.
UNSERVED = ("Config", "ForMultipleChoice", "ForNextSentencePrediction")
# Heads that a folder must name, since tensors of several have the same names.
# Tensors that a folder may lack.
WITHOUT = "pooler|final_logits_bias"
HEADS = ("Classification", "QuestionAnswering")
T5_KINDS = ("t5", "mt5", "umt5")
# Tokenizers of further kinds that people put into folders of a type.
LLAMA_LIKE = (*DECODERS, "eurobert", "modernbert")


def classes_of(kind: str) -> list[str]:
    """Returns the names of transformers' model classes of a type."""
    tables = [name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES")]
    found: set[str] = set()
    for table in tables:
        if table != "CONFIG_MAPPING_NAMES":
            named = getattr(modeling_auto, table).get(kind, ())
            found |= {named} if isinstance(named, str) else {*named}
    return sorted(
        name
        for name in found
        if not name.endswith(UNSERVED)
        and not (kind in SEQUENCES and name.endswith("ForCausalLM"))
        and getattr(transformers, name).config_class.model_type == kind
    )


# --- Weights --------------------------------------------------------------------------------------


def bare(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """As of a model saved without its head."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def prefixed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """As of a model saved within another."""
    heads = (
        *("cls.", "lm_head", "classifier", "vocab_", "generator_", "score", "qa_outputs"),
        *("decoder.weight", "decoder.bias", "head.", "discriminator", "final_logits", "dense."),
        *("classification_head", "pre_classifier", "lm_predictions", "mask_predictions"),
        *("predictions", "sop_classifier"),
    )
    return {
        name if name.startswith((prefix, *heads)) else prefix + name: tensor
        for name, tensor in tensors.items()
    }


def gamma(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """With the names of norms in the exports of TensorFlow."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def named(name: str) -> str:
        for new, former in old.items():
            name = name.replace(new, former)
        return name

    return {named(name): tensor for name, tensor in tensors.items()}


def same(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return tensors


NAMES = (same, same, same, bare, prefixed, gamma)


def more_tensors(kind: str, model: Any, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Constants and copies that versions of transformers have saved beside the weights."""
    positions = torch.arange(LONGEST)[None]
    for name in tensors:
        if name.endswith("embeddings.word_embeddings.weight"):
            yield name.replace("word_embeddings.weight", "position_ids"), positions
        if name.endswith("self_attn.q_proj.weight") and kind in DECODERS and kind != "opt":
            yield name.replace("q_proj.weight", "rotary_emb.inv_freq"), torch.ones(4)
        if name.endswith("attn.c_attn.weight"):
            yield name.replace("c_attn.weight", "bias"), torch.ones(1, 1, 64, 64).tril().bool()
            yield name.replace("c_attn.weight", "masked_bias"), torch.tensor(-1e4)
        if name.endswith("attention.query_key_value.weight"):
            start = name.removesuffix("query_key_value.weight")
            yield start + "bias", torch.ones(1, 1, 64, 64).tril().bool()
            yield start + "masked_bias", torch.tensor(-1e4)
            yield start + "rotary_emb.inv_freq", torch.ones(4)
    # Weights that several modules share, under each name.
    state = model.state_dict()
    for name, tensor in state.items():
        shared = name not in tensors and any(
            tensor.data_ptr() == state[other].data_ptr() for other in tensors if other in state
        )
        if shared and tensor.is_floating_point():
            yield name, tensor


def rounded(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def store(folder: Path, tensors: dict[str, Tensor], draw: Draw) -> str:
    """Writes the weights into one file or two, of safetensors or of torch."""
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    pickled, sharded = draw.choice([False, False, True]), draw.choice([False, False, True])
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")

    def save(part: dict[str, Tensor], path: Path) -> None:
        if pickled:
            torch.save(part, path)
        else:
            save_file({n: t.clone() for n, t in part.items()}, path, {"format": "pt"})

    if not sharded:
        save(tensors, folder / f"{stem}.{ending}")
        return ending
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"{stem}-{number:05}-of-00002.{ending}"
        save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return f"sharded {ending}"


# --- Settings -------------------------------------------------------------------------------------

NOISE: dict[str, Any] = {
    "_name_or_path": "models/base",
    "finetuning_task": "mnli",
    "gradient_checkpointing": False,
    "transformers_version": "4.6.0.dev0",
    "use_cache": True,
    "output_past": True,
    "_num_labels": 3,
    "torchscript": False,
    "pruned_heads": {},
    "pretraining_tp": 1,
    "directionality": "bidi",
    "pooler_type": "first_token_transform",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "max_length": 20,
    "num_beams": 1,
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
}


def minimal(record: dict[str, Any], usual: dict[str, Any]) -> None:
    """Keeps what differs from transformers' defaults, as older versions wrote it."""
    for key in [*record]:
        kept = ["model_type", "architectures", "vocab_size", "is_encoder_decoder"]
        if key not in kept and key in usual and usual[key] == record[key]:
            del record[key]


def noisy(record: dict[str, Any], usual: dict[str, Any]) -> None:
    for key, value in NOISE.items():
        record.setdefault(key, value)


def older(record: dict[str, Any], usual: dict[str, Any]) -> None:
    """Names and places of settings before version 5."""
    if "dtype" in record:
        record["torch_dtype"] = record.pop("dtype")
    found = record.get("rope_parameters")
    nested = isinstance(found, dict) and "rope_type" not in found
    if not isinstance(found, dict) or nested:
        return
    found, neox = dict(record.pop("rope_parameters")), record["model_type"] == "gpt_neox"
    outer = {
        "rope_theta": "rotary_emb_base" if neox else "rope_theta",
        "partial_rotary_factor": "rotary_pct" if neox else "partial_rotary_factor",
    }
    record |= {name: found.pop(key) for key, name in outer.items() if key in found}
    kind = found.pop("rope_type")
    record["rope_scaling"] = None if kind == "default" else {"type": kind, **found}


def untyped(record: dict[str, Any], usual: dict[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        record.pop(key, None)
    record["torch_dtype"] = "float32"


def nameless(record: dict[str, Any], usual: dict[str, Any]) -> None:
    """Without the class, which AutoModel does not need."""
    record.pop("architectures", None)


AGES: tuple[Callable[[dict[str, Any], dict[str, Any]], None], ...] = (
    minimal,
    noisy,
    older,
    untyped,
    nameless,
)
OTHER_FILES = {
    "README.md": "---\nlicense: mit\nlanguage: en\ntags:\n- x\n---\n# A model\n",
    ".gitattributes": "*.bin filter=lfs\n",
    "training_args.bin": "x",
    "flax_model.msgpack": "x",
    "tf_model.h5": "x",
    "rust_model.ot": "x",
    "trainer_state.json": "{}",
    "all_results.json": "{}",
    "vocab.bak": "x",
}
OPTIONAL = ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json")


# --- Folders --------------------------------------------------------------------------------------


def write_tokenizer(kind: str, folder: Path, draw: Draw, *, scored: bool) -> Any:
    """Writes a tokenizer of a type, for a model with scores of texts or tokens or for another."""
    if kind in LLAMA_LIKE and kind not in OWN and draw.choice([True, False]) and kind != "gpt2":
        gpt2_vocabulary(folder)
    elif kind in CLASSES:
        write_folder(folder, "mBART-50" if kind == "mbart" and scored else CLASSES[kind])
    else:
        OWN.get(kind, gpt2_vocabulary)(folder)
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        settings.write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    change(settings, model_max_length=LONGEST)
    own = {"model_type": kind, "pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
    (folder / "config.json").write_text(json.dumps(own))
    made = transformers.AutoTokenizer.from_pretrained(folder)
    made.save_pretrained(folder)
    return made


class Folder:
    """A folder, with the model and tokenizer that transformers reads from it.

    Attributes:
        path: The folder.
        kind: model_type.
        name: Class of the model.
        changes: What was done to it, for messages.
        valid: Whether transformers finds every weight there.
        model: transformers' model in float64.
        tokenizer: transformers' tokenizer.
    """

    def __init__(self, kind: str, name: str, seed: int, path: Path, *, old: bool = True) -> None:
        self.path, self.kind, self.name = path, kind, name
        self.changes: list[str] = []
        draw = Draw(f"{kind} {name} {seed}")
        path.mkdir(parents=True)
        made = write_tokenizer(kind, path, draw, scored=name.endswith(HEADS))
        model = self._model(draw, made)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            randomise(model)
        own = draw.choice([True, False])
        model.save_pretrained(path, save_original_format=not own)
        tensors = load_file(path / "model.safetensors")
        if old:
            self._age(draw, model, tensors)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = self._read(getattr(transformers, name))

    def generator(self) -> Any:
        """The class of the type with logits, which reads the folder of a model without."""
        return self._read(getattr(transformers, TYPES[self.kind][0]))

    def _model(self, draw: Draw, made: Any) -> Any:
        model_class = getattr(transformers, self.name)
        chosen = TYPES[self.kind][1](draw)
        if draw.random() < 0.3:  # the defaults of transformers, but for sizes
            chosen = {key: each for key, each in chosen.items() if type(each) is int}
        if "decoder_vocab_size" in chosen:
            del chosen["decoder_vocab_size"]
        for key, value in chosen.items():
            if key.endswith(("layers", "n_layer")) and type(value) is int:
                chosen[key] = min(value, 2)
            if key in ("layer_types", "no_rope_layers") and value:
                chosen[key] = value[:2]
        end = made.sep_token_id if self.kind in ENCODERS else made.eos_token_id
        end = made.eos_token_id if end is None else end
        pad = end if made.pad_token_id is None else made.pad_token_id
        pad = 1 if self.kind in AFTER_PADDING else pad
        ids = {"pad_token_id": pad, "eos_token_id": end, "bos_token_id": made.bos_token_id}
        start = pad if self.kind in ("marian", *T5_KINDS, "pegasus") else end
        ids |= {"decoder_start_token_id": start}
        places = "n_positions" if self.kind in ("gpt2", *T5_KINDS) else "max_position_embeddings"
        longest = LONGEST + (2 if self.kind in AFTER_PADDING else 0)
        sizes = {
            places: longest,
            "vocab_size": 1 + max(*made.get_vocab().values(), pad, made.vocab_size),
        }
        if self.name.endswith("Classification"):
            sizes["num_labels"] = 1 if draw.random() < 0.25 else 3
            if self.name.endswith("TokenClassification"):
                sizes["num_labels"] = 3
        config = model_class.config_class(**chosen | ids | sizes)
        return model_class(config).eval()

    def _age(self, draw: Draw, model: Any, tensors: dict[str, Tensor]) -> None:
        prefix = f"{model.base_model_prefix}."
        if draw.choice([True, False]):
            more = {n: t for n, t in more_tensors(self.kind, model, tensors) if n not in tensors}
            tensors |= more
            self.changes += [f"and {len(more)} more tensors"] * bool(more)
        renamed = draw.choice(NAMES)
        tensors = renamed(tensors, prefix)
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        tensors = rounded(tensors, dtype)
        self.changes += [renamed.__name__, str(dtype), store(self.path, tensors, draw)]
        path = self.path / "config.json"
        record = json.loads(path.read_text())
        if dtype is not torch.float32:
            record["dtype"] = str(dtype).removeprefix("torch.")
        usual = type(model.config)().to_dict()
        for age in AGES:
            if draw.random() < 0.3 and not (age is nameless and self.name.endswith(HEADS)):
                age(record, usual)
                self.changes.append(age.__name__)
        path.write_text(json.dumps(record))
        for name in OPTIONAL[:2]:
            if draw.random() < 0.3 and (self.path / name).exists():
                (self.path / name).unlink()
                self.changes.append(f"no {name}")
        for name, text in OTHER_FILES.items():
            if draw.random() < 0.2:
                (self.path / name).write_text(text)

    def _read(self, model_class: Any) -> Any:
        read, told = model_class.from_pretrained(
            self.path, output_loading_info=True, dtype=torch.float32
        )
        unread = {name for name in told["missing_keys"] if not re.search(WITHOUT, name)}
        self.valid = not unread and not told["mismatched_keys"]
        read = read.double()
        read.config.dtype = None  # else parts of some classes are made in that type
        with exact():
            model = model_class(read.config).eval().double()
        model.load_state_dict(read.state_dict())
        for name, buffer in read.named_buffers():  # float32 numbers by design
            if name.endswith("embed_positions.weights"):
                model.get_submodule(name.rpartition(".")[0]).weights = buffer.double()
        return model
