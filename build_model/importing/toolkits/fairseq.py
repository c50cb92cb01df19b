"""Transformers that fairseq trained: model.pt with its arguments, dict.*.txt beside it.

Names and formulas are those of github.com/facebookresearch/fairseq: models/transformer and
modules/sinusoidal_positional_embedding.py. A target begins with the end token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.formats.pickled import PickledFile, load_pickled
from transferry.build_model.importing.huggingface.encoder_decoder import MARIAN
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.tables import (
    BUFFER,
    Family,
    Table,
    parts,
    without_first,
)
from transferry.build_model.importing.toolkits.source import Source, pair, split_at_blanks
from transferry.build_model.model.config import Activation, ModelConfig
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer, SpecialTokens

# What every dictionary of fairseq begins with (data/dictionary.py); positions are counted from the
# id after that of padding.
SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
PAD, END = 1, 2
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "swish": "swish",
}
_FALSE = (
    *("adaptive_input", "char_inputs", "cross_self_attention", "layernorm_embedding"),
    *("merge_src_tgt_embed", "no_cross_attention", "no_decoder_final_norm"),
    *("no_token_positional_embeddings",),
)
_SPM = ("sentencepiece.bpe.model", "spm.model", "sentencepiece.model")


def read_fairseq(folder: Path) -> Source:
    """Reads a folder with a model of fairseq's.

    Raises:
        InputError: A file is missing or damaged, would run code, or an argument is unsupported.
        UsageError: The tokenizer's library is not installed.
    """
    path = _model(folder)
    arguments = Settings(path, _arguments(path))
    tensors = PickledFile(path, "model")
    try:
        config = _shape(arguments, tensors)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
    tokenizer, note = _tokenizer(folder, config.vocabulary_size)
    return Source(
        kind="fairseq",
        family=Family("fairseq Transformer", lambda settings, names: config, _TABLE, (), _computed),
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        generation={"suppress": (PAD,)},
        note=note,
    )


def _model(folder: Path) -> Path:
    found = sorted(folder.glob("*.pt"))
    for name in ("model.pt", "checkpoint_best.pt"):
        if (folder / name) in found:
            return folder / name
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(f"{folder}: expected model.pt or one other .pt file, found {names}")
    return found[0]


def _arguments(path: Path) -> dict[str, Any]:
    """The arguments of the training: `args` in older files, `cfg` in newer ones."""
    content = load_pickled(path)
    record = content if isinstance(content, dict) else {}
    found = record.get("args")
    if found is None and isinstance(cfg := record.get("cfg"), dict):
        found = cfg.get("model")
    if isinstance(found, argparse.Namespace):
        found = vars(found)
    if not isinstance(found, dict) or "model" not in record:
        raise InputError(
            f"{path}: expected a checkpoint of fairseq with its arguments and its model, found "
            f"{', '.join(map(str, record)) or type(content).__name__}"
        )
    return {str(name): value for name, value in found.items()}


def _shape(arguments: Settings, tensors: PickledFile) -> ModelConfig:
    kind = arguments.get("arch", arguments.get("_name", ""))
    if not str(kind).startswith("transformer") or str(kind).startswith("transformer_lm"):
        arguments.refuse("arch", kind, "transformer and its sizes")
    for name in _FALSE:
        arguments.only(name, False)
    for name in ("adaptive_softmax_cutoff", "encoder_layers_to_keep", "decoder_layers_to_keep"):
        arguments.only(name, None)
    arguments.only("base_layers", 0)
    width = arguments.whole("encoder_embed_dim")
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        arguments.only(name, width)
    for name in ("attention_heads", "ffn_embed_dim"):
        arguments.only(f"decoder_{name}", arguments.whole(f"encoder_{name}"))
    before, learned = (
        arguments.flag(f"encoder_{name}", False) for name in ("normalize_before", "learned_pos")
    )
    arguments.only("decoder_normalize_before", before)
    arguments.only("decoder_learned_pos", learned)
    if not arguments.flag("share_all_embeddings", False):
        supported = "true: one dictionary for source and target"
        arguments.refuse("share_all_embeddings", False, supported)
    longest = min(arguments.whole(f"max_{side}_positions", 1024) for side in ("source", "target"))
    embedding = tensors.shapes.get("encoder.embed_tokens.weight")
    if embedding is None:
        raise InputError(
            f"{arguments.path}: expected the tensor encoder.embed_tokens.weight, found none"
        )
    return ModelConfig(
        vocabulary_size=embedding.shape[0],
        d_model=width,
        heads=arguments.whole("encoder_attention_heads"),
        encoder_layers=arguments.whole("encoder_layers"),
        decoder_layers=arguments.whole("decoder_layers"),
        d_ff=arguments.whole("encoder_ffn_embed_dim"),
        max_positions=longest,
        norm_order="pre" if before else "post",
        positions="learned",
        activation=arguments.choice("activation_fn", _ACTIVATIONS, "relu"),
        scale_embedding=not arguments.flag("no_scale_embedding", False),
    )


_TABLE: Table = {
    **{name: place for name, place in MARIAN.items() if ".layers." in name},
    "encoder.embed_tokens.weight": "embedding.weight",
    "decoder.embed_tokens.weight": "embedding.weight",
    "decoder.output_projection.weight": "embedding.weight",
    "encoder.embed_positions.weight": without_first(PAD + 1, "positions"),
    "decoder.embed_positions.weight": without_first(PAD + 1, "positions"),
    "encoder.layer_norm.*": "encoder_norm.*",
    "decoder.layer_norm.*": "decoder_norm.*",
    # Of versions before 0.9: queries, keys and values in one.
    **{
        f"{stack}.layers.#.{theirs}.in_proj_{kind}": parts(
            lambda config: [config.d_model] * 3,
            *(f"{stack}.#.{ours}.{name}.{kind}" for name in ("query", "key", "value")),
        )
        for stack, theirs, ours in (
            ("encoder", "self_attn", "self_attention"),
            ("decoder", "self_attn", "self_attention"),
            ("decoder", "encoder_attn", "cross_attention"),
        )
        for kind in ("weight", "bias")
    },
    **{
        f"{stack}.{name}": BUFFER
        for stack in ("encoder", "decoder")
        for name in ("version", "embed_positions._float_tensor", "embed_positions.weights")
    },
}


def positions(length: int, width: int) -> Tensor:
    """Returns fairseq's sinusoids, in float32 as it computes them.

    All sines come before all cosines, rates fall from 1 to exactly 1 / 10000, and the first
    position is that after the id of padding.

    Returns:
        [length, width]
    """
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(PAD + 1, PAD + 1 + length, dtype=torch.float)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _computed(config: ModelConfig) -> dict[str, Tensor]:
    return {"positions": positions(config.max_positions, config.d_model)}


def _tokenizer(folder: Path, size: int) -> tuple[AnyTokenizer, str]:
    """Tokenizer, and what to know of it."""
    path = _dictionary(folder)
    tokens = [*SYMBOLS]
    for number, line in enumerate(read_bytes(path).decode(errors="replace").split("\n"), start=1):
        if not line.strip("\r"):
            continue
        token, blank, count = line.rstrip("\r").rpartition(" ")
        if not blank or not count.isdigit():
            raise InputError(f"{path}, line {number}: expected a token and a count, found {line!r}")
        tokens.append(token)
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens) or len(tokens) != size:
        raise InputError(
            f"{path}: expected {size - len(SYMBOLS)} different tokens, as the embedding has rows "
            f"besides {', '.join(SYMBOLS)}, found {len(ids) - len(SYMBOLS)}; take both from "
            "one model"
        )
    for special in SYMBOLS[:3]:  # so that text is text
        del ids[special]
    ends = SpecialTokens(pad_id=PAD, bos_id=END, eos_id=END, after=(END,))
    for model in (folder / name for name in _SPM):
        if model.exists():
            return pair(model, model, ids, ends, size), ""
    note = (
        f"tokenizer: tokens of {path.name} between blanks; give text that is split like the "
        "training data (Moses, BPE codes), as fairseq-interactive reads it"
    )
    return split_at_blanks(ids, ends, size, str(path)), note


def _dictionary(folder: Path) -> Path:
    found = sorted(folder.glob("dict.*txt"))
    if not found:
        raise InputError(f"{folder}: expected dict.LANGUAGE.txt, found none; copy it there")
    if any(read_bytes(path) != read_bytes(found[0]) for path in found[1:]):
        raise InputError(
            f"{folder}: expected one dictionary for source and target, found "
            f"{' and '.join(path.name for path in found)} that differ; only shared ones can be "
            "imported"
        )
    return found[0]
