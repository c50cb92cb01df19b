"""Peak memory of `transferry import`: a random Llama of some size, in each format of weights.

python benchmarks/import_memory.py --layers 18
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from transferry.build_model.importing.formats.tensors import meta
from transferry.build_model.importing.formats.writer import tensor_writer

WIDTH, INNER, VOCABULARY = 1024, 2816, 32000
# What the measured process runs; it prints bytes before and after. Not ru_maxrss, which a process
# inherits from the one that started it.
WORK = """
import re, sys
from pathlib import Path
from transferry.build_model.importing.huggingface.importer import import_checkpoint
def peak():
    found = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
before = peak()
import_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), force=True)
print(before, peak())
"""


def shapes(layers: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of a Llama without numbers."""
    sizes: dict[str, list[int]] = {"model.norm.weight": [WIDTH]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        sizes[name] = [VOCABULARY, WIDTH]
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{layer}.{name}.weight"] = [WIDTH]
        for name in "qkvo":
            sizes[f"{layer}.self_attn.{name}_proj.weight"] = [WIDTH, WIDTH]
        for name in ("gate", "up"):
            sizes[f"{layer}.mlp.{name}_proj.weight"] = [INNER, WIDTH]
        sizes[f"{layer}.mlp.down_proj.weight"] = [WIDTH, INNER]
    return {name: meta(size, dtype) for name, size in sizes.items()}


def make(
    folder: Path, layers: int, dtype: torch.dtype, *, pickled: bool, std: float = 1.0
) -> dict[str, Tensor]:
    """Writes the folder; returns its tensors without numbers."""
    config = dict(
        **dict(model_type="llama", vocab_size=VOCABULARY, hidden_size=WIDTH),
        **dict(intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=16),
        **dict(max_position_embeddings=512, bos_token_id=1, eos_token_id=2),
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ids = {f"t{number}": number for number in range(VOCABULARY - 1)} | {"a": VOCABULARY - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="t0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    found = shapes(layers, dtype)
    if pickled:
        state = {name: (std * torch.randn(each.shape)).to(dtype) for name, each in found.items()}
        torch.save(state, folder / "pytorch_model.bin")
        return found
    with tensor_writer(folder / "model.safetensors", found) as file:
        for name, each in found.items():
            file[name] = (std * torch.randn(each.shape)).to(dtype)
    return found


def main() -> None:
    """Prints one row per format, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=18)
    layers = parser.parse_args().layers
    rows = []
    for pickled in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            with tempfile.TemporaryDirectory() as place:
                folder, run = Path(place) / "theirs", Path(place) / "run"
                folder.mkdir()
                found = make(folder, layers, dtype, pickled=pickled)
                begun = time.perf_counter()
                command = [sys.executable, "-c", WORK, str(folder), str(run)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                before, peak = map(int, done.stdout.split())
                row = {
                    "format": f"{'pytorch_model.bin' if pickled else 'safetensors'} "
                    f"{str(dtype).removeprefix('torch.')}",
                    "parameters": sum(each.numel() for each in found.values()),
                    "largest_bytes": max(each.nbytes for each in found.values()),
                    "before_bytes": before,
                    "peak_bytes": peak,
                    "run_bytes": (run / "model.safetensors").stat().st_size,
                    "seconds": round(time.perf_counter() - begun, 1),
                }
            print(f"{row['format']:27} peak {peak >> 20} MiB, {before >> 20} before")
            rows.append(row)
    print(json.dumps({"import_memory": rows}))


if __name__ == "__main__":
    main()
