"""Checkpoints of others, as the fuzz tests import them."""

import json
from pathlib import Path
from typing import Any

from tests.runtime.tokenizer.vocabularies import byte_level
from transferry.build_model.train.corpus import builtin_pairs


def gpt2(folder: Path) -> None:
    """A checkpoint as transformers writes it, of one layer and random weights."""
    import safetensors.torch
    import torch

    folder.mkdir()
    texts = (pair.source for pair in builtin_pairs(50, seed=2))
    byte_level(texts, 300).model.save(str(folder))
    ids = json.loads((folder / "vocab.json").read_text())
    ids["<|endoftext|>"] = end = len(ids)
    (folder / "vocab.json").write_text(json.dumps(ids))
    shape = dict(n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=end + 1)
    config = shape | dict(model_type="gpt2", bos_token_id=end, eos_token_id=end)
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        **{f"{name}.{kind}": (32,) for name in ("ln_1", "ln_2") for kind in ("weight", "bias")},
        "attn.c_attn.weight": (32, 96),
        "attn.c_attn.bias": (96,),
        "attn.c_proj.weight": (32, 32),
        "attn.c_proj.bias": (32,),
        "mlp.c_fc.weight": (32, 128),
        "mlp.c_fc.bias": (128,),
        "mlp.c_proj.weight": (128, 32),
        "mlp.c_proj.bias": (32,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (end + 1, 32),
        "wpe.weight": (64, 32),
        **{f"h.0.{name}": size for name, size in layer.items()},
        "ln_f.weight": (32,),
        "ln_f.bias": (32,),
    }
    torch.manual_seed(0)
    tensors = {f"transformer.{name}": torch.randn(size) for name, size in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, 0.5, -1e308, "", "O", "\0", "\x1b[2J"),
    *("../../x", "/etc/passwd", "portable", "x" * 10_000, [], {}, [[]], [0], {"a": 1}, [None] * 99),
)
