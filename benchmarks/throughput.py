"""How fast is the engine compared with CTranslate2, on the same weights?

    pip install ".[export,peers]"
    python benchmarks/throughput.py CHECKPOINT BUNDLE TEXT [--variants portable] [--beams 1,4]
        [--batches 1,8,32] [--rows 500] [--rounds 9] [--fixed-length 32] [--quick]

On the CPU, text in and text out on both sides, with the same tokenizer, search and sentences. The
CTranslate2 model is converted from CHECKPOINT, whose export is BUNDLE. For each variant and beam:
the answers are compared; batch size and threads of each side are tuned; rounds are interleaved.
`--batches` adds rows for so many sentences per batch, the same on both sides, with only the threads
tuned: for those who wait for an answer. `ratio` is the engine's tokens per second over
CTranslate2's, by median time. The last line is JSON, for throughput.jsonl, from which `make docs`
makes the tables of the pages. `--quick` takes about two minutes for a variant and beam size of
preset small.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ctranslate2_model import CTranslate2Model, import_ctranslate2, write_ctranslate2
from rounds import compare, environment, fastest, interleaved, processor
from sentences import Answer, engine_answers, fixed_sentences, read_sentences, search_options
from transferry.build_model.checkpoint import load_checkpoint
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

# Rows per batch to try. For the engine a row is a hypothesis, for CTranslate2 a sentence, as in
# their own options.
BATCH_ROWS = {"engine": (64, 128, 192, 256, 384, 512, 768), "ctranslate2": (8, 16, 32, 64, 128)}
# A batch that is less than this share slower is preferred if it is smaller: it takes less memory,
# and differences of this size are noise.
SLACK = 0.02
# Seconds after which a comparison of settings is repeated no more.
TUNING_SECONDS = 15.0
# Arguments: texts, options of the search, rows per batch.
Answering = Callable[[Sequence[str], GenerationOptions, int], list[Answer]]


@dataclass(frozen=True)
class Side:
    """A model of one side, and its use of the hardware.

    Attributes:
        folder: The bundle, or the CTranslate2 model.
        kind: The bundle's variant, or CTranslate2's compute type.
        tokenizer: Folder of the tokenizer for CTranslate2.
    """

    name: Literal["engine", "ctranslate2"]
    folder: str
    kind: str
    tokenizer: str = ""
    replicas: int = 1
    threads: int = 1
    processes: int = 1

    def tune(
        self,
        texts: Sequence[str],
        options: GenerationOptions,
        sentences: int | None = None,
        repeats: int = 3,
    ) -> Tuned:
        """Returns the fastest layout, with the smallest batch as fast.

        The layouts are compared at one size of batch, and all sizes in the fastest layout.
        """
        sizes = BATCH_ROWS[self.name]
        if sentences is not None:
            sizes = (sentences * (options.beam if self.name == "engine" else 1),)
        middle, opened = sizes[len(sizes) // 2], {side: side.open() for side in self._layouts()}
        work = {side: partial(one, texts, options, middle) for side, one in opened.items()}
        side = fastest(work, repeats, SLACK, TUNING_SECONDS)
        answer = opened[side]
        trials = {rows: partial(answer, texts, options, rows) for rows in sizes}
        rows = middle if len(sizes) == 1 else fastest(trials, repeats, SLACK, TUNING_SECONDS)
        return Tuned(side, rows, answer)

    def _layouts(self) -> list[Side]:
        cores = usable_cores()
        layouts = dict.fromkeys([(cores, 1, 1), (1, cores, 1), (cores, 1, cores)])
        return [
            replace(self, replicas=count, threads=threads, processes=processes)
            for count, threads, processes in layouts
            if processes == 1 or self.name == "engine"
        ]

    def open(self) -> Answering:
        """Opens the model."""
        if self.name == "engine":
            return self._open_engine()
        return CTranslate2Model(
            Path(self.folder), Path(self.tokenizer), self.kind, self.replicas, self.threads
        ).answer

    def _open_engine(self) -> Answering:
        engine = Engine(
            self.folder,
            SessionOptions(threads=self.threads),
            variant=self.kind,
            replicas=self.replicas,
            processes=self.processes,
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
            "processes": self.side.processes,
            "batch_rows": self.batch_rows,
        }


def numbers(text: str) -> list[int]:
    """Reads "1,4"."""
    return [int(part) for part in text.split(",")]


def compute_type(precision: str) -> str:
    """CTranslate2's compute type for a variant's precision; raises UsageError where it has none."""
    if precision == "float32":
        return precision
    if "int8" in precision:
        return "int8"
    raise UsageError(
        f"expected a variant of precision float32 or int8, found {precision}; choose others with "
        "--variants"
    )


class Comparison:
    """The engine compared with CTranslate2, one cell per variant and beam size."""

    def __init__(self, arguments: argparse.Namespace, models: Path) -> None:
        self.arguments, self.models = arguments, models
        self.checkpoint = load_checkpoint(arguments.run)
        self.bundle = Bundle.load(arguments.bundle)
        if self.bundle.manifest.model != self.checkpoint.model.config.to_dict():
            raise UsageError(
                f"{arguments.bundle} must be an export of {arguments.run}, found another model; "
                "give its checkpoint"
            )
        self.positions = int(self.bundle.manifest.model["max_positions"])
        if arguments.fixed_length:
            self.texts = self.fixed(arguments.rows, arguments.fixed_length)
        else:
            self.texts = read_sentences(arguments.text, arguments.rows)
        self._answers: dict[tuple[Side, int], list[Answer]] = {}

    def fixed(self, rows: int, length: int) -> list[str]:
        """Sentences of one length, cut from the whole text."""
        lines = read_sentences(self.arguments.text)
        return fixed_sentences(lines, self.bundle.tokenizer, rows, length)

    def search(self, beam: int) -> dict[str, Any]:
        """Arguments of `search_options`."""
        length = self.arguments.fixed_length
        longest = length or min(self.arguments.max_length, self.positions)
        return {"beam": beam, "max_length": longest, "min_length": length}

    def precision(self, variant: str) -> str:
        """CTranslate2's compute type for a variant."""
        return compute_type(self.bundle.variant(variant).precision)

    def engine(self, variant: str) -> Side:
        """The engine's side."""
        return Side("engine", str(self.arguments.bundle), variant)

    def ctranslate2(self, precision: str) -> Side:
        """CTranslate2's side, converted on first use."""
        folder = self.models / precision
        if not folder.exists():
            write_ctranslate2(self.checkpoint, folder, precision)
        return Side("ctranslate2", str(folder), precision, str(self.arguments.bundle))

    def answers(self, side: Side, beam: int) -> list[Answer]:
        """Answers of a side, computed once."""
        if (side, beam) not in self._answers:
            found = side.open()(self.texts, search_options(**self.search(beam)), 32)
            length = self.arguments.fixed_length
            if any(len(answer.tokens) != length for answer in found if length):
                raise InputError(
                    f"expected answers of {length} tokens, found others from {side.name}, so the "
                    "work differs; leave out --fixed-length"
                )
            self._answers[side, beam] = found
        return self._answers[side, beam]

    def same_tokens(self, variant: str, beam: int) -> dict[str, str]:
        """Counts rows in which two sides have the same tokens, such as "499/500"; prints the rest.

        The sides are compared in float32; with a reduced precision, also each side with itself in
        float32.
        """
        exact = variant
        if self.precision(variant) != "float32":
            variants = self.bundle.manifest.variants.values()
            exact = next(one.name for one in variants if one.precision == "float32")
        pairs = [(self.engine(exact), self.ctranslate2("float32"))]
        if exact != variant:
            pairs += [
                (self.engine(variant), self.engine(exact)),
                (self.ctranslate2(self.precision(variant)), self.ctranslate2("float32")),
            ]
        found = {}
        for pair in pairs:
            mine, theirs = (self.answers(side, beam) for side in pair)
            names = " and ".join(f"{side.name} {side.kind}" for side in pair)
            rows = [row for row, one in enumerate(mine) if one.tokens != theirs[row].tokens]
            found[names] = f"{len(mine) - len(rows)}/{len(mine)}"
            print(f"beam {beam}: the same tokens in {found[names]} rows of {names}")
            # Differences by precision alone are expected.
            for row in rows if pair == pairs[0] else ():
                print(f"  row {row + 1}: {self.texts[row]}")
                for side, answer in zip(pair, (mine[row], theirs[row]), strict=True):
                    print(f"    {side.name}: {answer.text} {list(answer.tokens)}")
        return found

    def cell(self, variant: str, beam: int, sentences: int | None = None) -> dict[str, Any]:
        """Measures one variant and beam size, with the fastest sentences per batch by default."""
        search, texts = self.search(beam), self.texts
        options = search_options(**search)
        same = self.same_tokens(variant, beam)
        sides = (self.engine(variant), self.ctranslate2(self.precision(variant)))
        repeats = 1 if self.arguments.quick else 3
        tuned: dict[str, Tuned] = {
            side.name: side.tune(texts, options, sentences, repeats) for side in sides
        }
        settings = {name: one.settings() for name, one in tuned.items()}
        held = "" if sentences is None else f", {sentences} sentences per batch"
        print(f"{variant}, beam {beam}{held}: fastest with {settings}", flush=True)
        work = {
            name: partial(one.answer, texts, options, one.batch_rows) for name, one in tuned.items()
        }
        # Also warms both up.
        tokens = {name: sum(len(one.tokens) for one in run()) for name, run in work.items()}
        times = interleaved(work, self.arguments.rounds)
        return {
            "kinds": {side.name: side.kind for side in sides},
            **search,
            "sentences_per_batch": sentences,
            "same_tokens": same,
            "settings": settings,
            **compare(times, tokens, len(texts), "ctranslate2"),
        }


def cell_name(cell: Mapping[str, Any]) -> str:
    """Returns the name of a cell, such as "cpu-int8, beam 4, 8 sentences"."""
    held = cell["sentences_per_batch"]
    name = f"{cell['kinds']['engine']}, beam {cell['beam']}"
    return name if held is None else f"{name}, {held} sentences"


def report(cells: Sequence[Mapping[str, Any]]) -> str:
    """Formats the table."""
    speed = [
        (
            cell["kinds"]["engine"],
            cell["beam"],
            cell["sentences_per_batch"] or "tuned",
            next(iter(cell["same_tokens"].values())),
            cell["tokens_per_second"]["engine"],
            cell["tokens_per_second"]["ctranslate2"],
            f"{cell['ratio']['engine']:.3f}",
            "{:.3f} to {:.3f}".format(*cell["ratio_range"]["engine"]),
            processor(),
        )
        for cell in cells
    ]
    head = ("variant", "beam", "sentences per batch", "same rows in float32")
    sides = ("engine tokens/s", "CTranslate2 tokens/s", "ratio", "by round", "processor")
    return table((*head, *sides), speed)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variants", help="of the bundle, such as a,b; by default all of them")
    parser.add_argument("--beams", type=numbers, default=[1, 4])
    parser.add_argument(
        "--batches",
        type=numbers,
        default=[],
        help="sentences per batch of both sides, such as 1,8,32, beside the fastest of each",
    )
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)
    parser.add_argument(
        "--fixed-length",
        type=int,
        default=0,
        metavar="TOKENS",
        help="cut the text into sources of so many tokens, and make every answer as long",
    )
    parser.add_argument("--quick", action="store_true", help="100 rows, 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds = min(arguments.rows, 100), 3
    try:
        import_ctranslate2()
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(arguments, Path(folder))
            names = (arguments.variants or ",".join(comparison.bundle.manifest.variants)).split(",")
            cells = [
                comparison.cell(name, beam, sentences)
                for beam in arguments.beams
                for name in names
                for sentences in (None, *arguments.batches)
            ]
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    here = environment("ctranslate2", "tiktoken")
    print(f"\n{report(cells)}\n")
    record = json.dumps(
        {
            "name": arguments.bundle.name,
            "date": datetime.date.today().isoformat(),
            "ratio": {cell_name(cell): cell["ratio"]["engine"] for cell in cells},
            "cells": cells,
            "rows": len(comparison.texts),
            "rounds": arguments.rounds,
            **here,
            "model": comparison.bundle.manifest.model,
        }
    )
    print(record)


if __name__ == "__main__":
    main()
