"""A Llama of transformers in llama.cpp: conversion to GGUF, and greedy answers in batches.

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python gguf

The package is compiled on the machine, for its instruction sets. Its high-level class answers one
prompt at a time, so batches go through `llama_decode`, a sequence for each row.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from transferry.runtime.errors import UsageError
from transferry.runtime.hardware import usable_cores

# Formats of llama.cpp, by their names there; 4 bits in blocks of 32 with one scale.
FORMATS = {"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
# Tensors of a layer, by their names in transformers.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, path: Path) -> None:
    """Writes a Llama of transformers as GGUF in float32, without a tokenizer.

    Args:
        model: Folder of the model.
        path: The file.

    Raises:
        UsageError: The model is no plain Llama, which is the one architecture converted here.
    """
    import gguf

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("attention_bias"):
        raise UsageError(f"{model}: expected a Llama without biases, found {config['model_type']}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    groups = config["num_key_value_heads"]
    rotary = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(rotary.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    weights = load_file(model / "model.safetensors")
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if "lm_head.weight" in weights:
        names["output"] = "lm_head"
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{new}": f"model.layers.{layer}.{old}" for old, new in LAYER.items()}
    for name, old in names.items():
        weight = weights[f"{old}.weight"].astype(np.float32)
        kind = name.rpartition(".")[2]
        if kind in ("attn_q", "attn_k"):
            weight = _interleaved(weight, heads if kind == "attn_q" else groups)
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Orders the rows of each head for rotations of neighbours, as in Su et al. (2021).

    transformers rotates features i and i + d_head / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(pairs.reshape(rows, columns))


class LlamaCppModel:
    """A GGUF model on the CPU, all threads on one batch, as by default."""

    def __init__(self, source: Path, kind: str, rows: int, length: int) -> None:
        """Opens a model in one of `FORMATS`.

        Args:
            source: File in float32; another format is written beside it.
            kind: The format.
            rows: Most prompts of a batch.
            length: Most tokens of a prompt and its answer.
        """
        import llama_cpp

        self._library: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = source
        if kind != "f32":
            path = source.with_name(f"{kind}.gguf")
            wanted = llama_cpp.llama_model_quantize_default_params()
            wanted.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{FORMATS[kind]}")
            names = str(source).encode(), str(path).encode()
            if llama_cpp.llama_model_quantize(*names, ctypes.byref(wanted)):
                raise UsageError(f"{source}: llama.cpp cannot write it as {kind}")
        chosen = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), chosen)
        if not self._model:
            raise UsageError(f"{path}: llama.cpp cannot load it")
        options = llama_cpp.llama_context_default_params()
        # A cache for each sequence, which the header recommends where prompts have no common
        # beginning; its length is rounded up by the library.
        options.n_seq_max, options.kv_unified = rows, False
        options.n_ctx = rows * -(-length // 256) * 256
        options.n_batch = rows * length
        if kind == "f32":  # where its own choice is a cache in float16
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.n_threads = options.n_threads_batch = usable_cores()
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise UsageError(f"{path}: llama.cpp cannot make a context of {options.n_ctx} tokens")
        self._batch = llama_cpp.llama_batch_init(rows * length, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Returns `new` tokens for each prompt of a batch, greedily."""
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_clear(memory, True)
        tokens = self._step(prompts, 0)
        answers, read = [[token] for token in tokens], len(prompts[0])
        for position in range(read, read + new - 1):
            tokens = self._step([[token] for token in tokens], position)
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return answers

    def _step(self, rows: Sequence[Sequence[int]], start: int) -> list[int]:
        """Reads the same number of tokens for each row; returns the likeliest next ones."""
        batch, last, index = self._batch, [], 0
        for row, tokens in enumerate(rows):
            for position, token in enumerate(tokens, start):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = position == start + len(tokens) - 1
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        if code := self._library.llama_decode(self._context, batch):
            raise UsageError(f"llama_decode of {index} tokens gave {code}")
        found = []
        for at in last:
            logits = self._library.llama_get_logits_ith(self._context, at)
            found.append(int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax()))
        return found
