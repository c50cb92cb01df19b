"""How fast does the trainer train, beside a plain loop over torch.nn.Transformer?

    python benchmarks/training.py train.en.gz train.de.gz [--preset mini] [--steps 40] [--rounds 5]

On the CPU. All sides make the same optimiser steps on the same batches, in interleaved rounds:

- `plain`: torch.nn.Transformer of the same shape between an embedding and an LM head, Adam.
- `trainer`: the steps of `transferry train`.
- `trainer, R-Drop` and `trainer, BPE dropout`: the same with `--r-drop 5`, `--bpe-dropout 0.1`.

`ratio` is a side's target tokens per second over those of `plain`, by median time; target tokens
are those of the corpus, which BPE dropout does not change here. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from environment import environment, processor
from rounds import compare, interleaved
from transferry.build_model.allocator import freed_memory_kept
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.data import Batch, collate, encode_pairs, read_pairs
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Validation
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.presets import PRESETS
from transferry.build_model.train.train_config import TrainConfig
from transferry.build_model.train.vocabulary import train_bpe
from transferry.runtime.errors import TransferryError
from transferry.runtime.tables import table

PLAIN = "plain"
PAPERS = ["mini", "small", "base", "big"]  # presets of the layers that torch.nn.Transformer has
HEADER = ("side", "target tokens/s", "ratio", "processor")


class PlainTransformer(nn.Module):
    """torch.nn.Transformer between an embedding and an LM head, with learned positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary_size, config.d_model)
        self.positions = nn.Embedding(config.max_positions, config.d_model)
        self.layers = nn.Transformer(
            config.d_model,
            config.heads,
            config.encoder_layers,
            config.decoder_layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
        )
        self.lm_head = nn.Linear(config.d_model, config.vocabulary_size)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits `[batch, target, vocabulary]`."""
        later = nn.Transformer.generate_square_subsequent_mask(batch.target_input.shape[1])
        padding = ~batch.source_mask
        hidden = self.layers(
            self._embedded(batch.source),
            self._embedded(batch.target_input),
            tgt_mask=later != 0,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.lm_head(hidden)
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(ids)
        return embedded + self.positions.weight[: ids.shape[1]]


def plain_steps(trainer: Trainer, batches: list[list[int]]) -> None:
    """Trains a new plain Transformer of the trainer's shape on batches of its examples."""
    config, pad_id = trainer.config, trainer.tokenizer.special.pad_id
    torch.manual_seed(config.seed)
    model = PlainTransformer(trainer.model.config).train()
    optimizer = torch.optim.Adam(model.parameters(), config.peak_learning_rate)
    for indices in batches:
        batch = collate([trainer.examples[index] for index in indices], pad_id, "cpu")
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            logits = model(batch)
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            batch.target_output.flatten(),
            ignore_index=pad_id,
            label_smoothing=config.label_smoothing,
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()


def trainer_steps(trainer: Trainer, batches: list[list[int]]) -> None:
    """Makes the trainer's own steps on batches of its examples."""
    trainer.model.train()
    with freed_memory_kept():
        for indices in batches:
            trainer._step(trainer.model, [indices])


def sides(
    source: Path, target: Path, preset: str, steps: int, precision: str, folder: Path
) -> tuple[dict[str, Callable[[], None]], int]:
    """Returns the work of each side by name, `PLAIN` first, and its target tokens."""
    chosen = PRESETS[preset]
    pairs, _ = read_pairs(source, target)
    tokenizer = train_bpe([text for pair in pairs for text in pair], chosen.vocabulary_size)
    model_config = chosen.model_config(tokenizer.vocabulary_size)
    examples, _ = encode_pairs(pairs, tokenizer, model_config.max_positions)

    def trainer(**changes: float) -> Trainer:
        config: TrainConfig = chosen.train_config(precision=precision, **changes)
        held_out = Validation(examples[:1])
        process = Process.start("cpu")
        return Trainer(folder, model_config, config, tokenizer, examples, held_out, process)

    usual = trainer()
    batches = [group[0] for group in usual._groups(0)[:steps]]
    pad_id = tokenizer.special.pad_id
    tokens = sum(examples[index].target_tokens(pad_id) for batch in batches for index in batch)
    steps_of = partial(trainer_steps, batches=batches)
    work: dict[str, Callable[[], None]] = {
        PLAIN: partial(plain_steps, usual, batches),
        "trainer": partial(steps_of, usual),
        "trainer, R-Drop": partial(steps_of, trainer(r_drop=5.0)),
        "trainer, BPE dropout": partial(steps_of, trainer(bpe_dropout=0.1)),
    }
    return work, tokens


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--preset", default="mini", choices=PAPERS)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    asked = vars(arguments)
    rounds = asked.pop("rounds")
    with tempfile.TemporaryDirectory() as folder:
        try:
            work, tokens = sides(**asked, folder=Path(folder))
        except TransferryError as error:
            parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
        for steps in work.values():
            steps()  # warmed up
        found = compare(interleaved(work, rounds), dict.fromkeys(work, tokens), 1, PLAIN)
    rows = [
        (
            name,
            found["tokens_per_second"][name],
            f"{found['ratio'].get(name, 1.0):.2f}",
            processor(),
        )
        for name in work
    ]
    print(f"\n{table(HEADER, rows)}\n")
    settings = {name: asked[name] for name in ("preset", "precision", "steps")}
    ratios = {name: found[name] for name in ("ratio", "ratio_range", "tokens_per_second")}
    here = {"threads": torch.get_num_threads(), **environment("torch")}
    print(json.dumps({**settings, "rounds": rounds, **ratios, **here}))


if __name__ == "__main__":
    main()
