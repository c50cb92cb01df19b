"""The compared sides: the engine and CTranslate2, with one interface, text in and text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ctranslate2_model import CTranslate2Model
from rounds import fastest
from sentences import Answer, engine_answers
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.session import SessionOptions

# Rows per batch to try. For the engine a row is a hypothesis, for CTranslate2 a sentence, as in
# their own options.
BATCH_ROWS = {"engine": (64, 128, 192, 256, 384, 512, 768), "ctranslate2": (8, 16, 32, 64, 128)}
# A batch that is less than this share slower is preferred if it is smaller: it takes less memory,
# and differences of this size are noise.
SLACK = 0.02
# Arguments: texts, options of the search, rows per batch.
Answering = Callable[[Sequence[str], GenerationOptions, int], list[Answer]]


@dataclass(frozen=True)
class Side:
    """A model of one side, and its use of the hardware.

    Attributes:
        name: The side.
        folder: The bundle, or the CTranslate2 model.
        kind: The bundle's variant, or CTranslate2's compute type.
        tokenizer: Folder of the tokenizer for CTranslate2.
        replicas: Concurrent batches.
        threads: Threads per batch.
    """

    name: Literal["engine", "ctranslate2"]
    folder: str
    kind: str
    tokenizer: str = ""
    replicas: int = 1
    threads: int = 1

    def tune(
        self,
        texts: Sequence[str],
        options: GenerationOptions,
        sentences: int | None = None,
        repeats: int = 3,
    ) -> Tuned:
        """Opens the side in each layout; returns the fastest, with the smallest batch as fast.

        Args:
            texts: Texts to tune on.
            options: Options of the search.
            sentences: Sentences per batch, if not to be tuned.
            repeats: Timed runs of each setting.
        """
        opened = {side: side.open() for side in self._layouts()}
        sizes = BATCH_ROWS[self.name]
        if sentences is not None:
            sizes = (sentences * (options.beam if self.name == "engine" else 1),)
        side, rows = fastest(
            {
                (side, rows): partial(answer, texts, options, rows)
                for rows in sizes
                for side, answer in opened.items()
            },
            repeats,
            SLACK,
        )
        return Tuned(side, rows, opened[side])

    def _layouts(self) -> list[Side]:
        cores = usable_cores()
        layouts = dict.fromkeys([(cores, 1), (1, cores)])
        return [replace(self, replicas=count, threads=threads) for count, threads in layouts]

    def open(self) -> Answering:
        """Opens the model."""
        if self.name == "engine":
            return self._open_engine()
        return CTranslate2Model(
            Path(self.folder), Path(self.tokenizer), self.kind, self.replicas, self.threads
        ).answer

    def _open_engine(self) -> Answering:
        engine = Engine.load(
            self.folder,
            SessionOptions(threads=self.threads),
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
    """An open side in its fastest layout, with its fastest rows per batch."""

    side: Side
    batch_rows: int
    answer: Answering

    def settings(self) -> dict[str, int]:
        """Returns the chosen settings."""
        return {
            "replicas": self.side.replicas,
            "threads": self.side.threads,
            "batch_rows": self.batch_rows,
        }
