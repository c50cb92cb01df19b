"""What is compared: the engine and CTranslate2, opened alike, text in and text out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rounds import fastest
from sentences import Answer, engine_answers
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.hardware import usable_cores

if TYPE_CHECKING:  # a side loads nothing of the other's
    from transferry.runtime.ort.session import Provider

# Texts, how to search, and how many rows to compute at once. For the engine a row is a beam, for
# CTranslate2 a sentence: each counts as it does by itself, and each is tuned.
BATCH_ROWS = {"engine": (64, 128, 192, 256, 384, 512, 768), "ctranslate2": (8, 16, 32, 64, 128)}
CUDA_BATCH_ROWS = (256, 512, 1024, 2048, 4096)
Answering = Callable[[Sequence[str], GenerationOptions, int], list[Answer]]


@dataclass(frozen=True)
class Side:
    """A model of one side, and how it shares the processor.

    Attributes:
        name: Whose it is.
        folder: The bundle, or the CTranslate2 model.
        kind: The bundle's variant, or CTranslate2's compute type.
        tokenizer: The folder of the tokenizer around a CTranslate2 model.
        replicas: Batches in progress at a time.
        threads: Threads of each.
        provider: Where the engine runs.
    """

    name: Literal["engine", "ctranslate2"]
    folder: str
    kind: str
    tokenizer: str = ""
    replicas: int = 1
    threads: int = 1
    provider: Provider = "cpu"

    def tune(self, texts: Sequence[str], options: GenerationOptions) -> Tuned:
        """Opens the side in each layout and returns the fastest, with its size of batches."""
        opened = {side: side.open() for side in self._layouts()}
        sizes = CUDA_BATCH_ROWS if self.provider == "cuda" else BATCH_ROWS[self.name]
        side, rows = fastest(
            {
                (side, rows): partial(answer, texts, options, rows)
                for side, answer in opened.items()
                for rows in sizes
            }
        )
        return Tuned(side, rows, opened[side])

    def _layouts(self) -> list[Side]:
        if self.provider == "cpu":
            cores = usable_cores()
            layouts = dict.fromkeys([(cores, 1), (1, cores)])
            return [replace(self, replicas=count, threads=threads) for count, threads in layouts]
        # With two replicas one waits for the GPU while the other prepares a step.
        return [replace(self, replicas=replicas) for replicas in (1, 2)]

    def load_library(self) -> None:
        """Imports what the side needs, so that `open` measures the model alone."""
        engine = "transferry.runtime.engine.engine"
        importlib.import_module(engine if self.name == "engine" else "ctranslate2")

    def open(self) -> Answering:
        """Opens the model."""
        if self.name == "engine":
            return self._open_engine()
        from ctranslate2_model import CTranslate2Model

        return CTranslate2Model(
            Path(self.folder), Path(self.tokenizer), self.kind, self.replicas, self.threads
        ).answer

    def _open_engine(self) -> Answering:
        from transferry.runtime.decoding.batching import BatchOptions
        from transferry.runtime.engine.engine import Engine
        from transferry.runtime.ort.session import SessionOptions

        engine = Engine.load(
            self.folder,
            SessionOptions(self.provider, self.threads),
            variant=self.kind,
            replicas=self.replicas,
        )

        def answer(
            texts: Sequence[str], options: GenerationOptions, batch_rows: int
        ) -> list[Answer]:
            engine.batches = BatchOptions(rows=batch_rows, tokens=batch_rows << 7)
            return engine_answers(engine, texts, options)

        return answer


@dataclass(frozen=True)
class Tuned:
    """A side as it is fastest, open, with the rows that it computes at once."""

    side: Side
    batch_rows: int
    answer: Answering

    def settings(self) -> dict[str, int]:
        """What was chosen."""
        return {
            "replicas": self.side.replicas,
            "threads": self.side.threads,
            "batch_rows": self.batch_rows,
        }
