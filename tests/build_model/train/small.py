"""The smallest tokenizer and model, and the metrics of their trainings."""

import json
from pathlib import Path
from typing import Any

from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, Tokenizer

BYTES = Tokenizer("bytes", r".", {byte: rank for rank, byte in enumerate(SINGLE_BYTES)})
LAYERS: dict[str, Any] = dict(d_model=16, heads=2, encoder_layers=1, decoder_layers=1, d_ff=32)
SHAPE: dict[str, Any] = dict(vocabulary_size=BYTES.vocabulary_size, **LAYERS)


def records(folder: Path) -> list[dict[str, float]]:
    """The metrics, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]
