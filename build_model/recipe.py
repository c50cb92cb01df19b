"""From files to a trained run: what `transferry train` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transferry.build_model import checkpoint
from transferry.build_model.config import Preset, TrainConfig
from transferry.build_model.corpus import write_corpus
from transferry.build_model.data import (
    Pair,
    ReadReport,
    encode_pairs,
    read_pair_file,
    read_pairs,
)
from transferry.build_model.distributed import Process
from transferry.build_model.evaluation import Evaluation
from transferry.build_model.train import Trainer, Validation
from transferry.build_model.vocabulary import cut_encoding, train_bpe
from transferry.runtime.tokenizer import Tokenizer

# Validation sentences kept with the run, for the answers that export records in the bundle.
SAMPLES = 8


@dataclass(frozen=True)
class PairFiles:
    """Where one set of pairs lies: two files of lines, or one TSV or JSONL file."""

    source: Path
    target: Path | None = None

    def read(self, *, skip_bad: bool) -> tuple[list[Pair], ReadReport]:
        """Reads the pairs; `build_model.data` says what is an error."""
        if self.target is None:
            return read_pair_file(self.source, skip_bad=skip_bad)
        return read_pairs(self.source, self.target, skip_bad=skip_bad)


@dataclass(frozen=True)
class Recipe:
    """All that decides a trained model.

    Attributes:
        train: The pairs to learn from; None takes the built-in corpus, written into the run.
        valid: The pairs that it is marked by; None likewise.
        preset: Shape and settings to start from.
        model_changes: Fields of ModelConfig that differ from the preset.
        train_changes: Fields of TrainConfig that differ from the preset.
        vocabulary_size: Size of a vocabulary trained from the pairs; None takes the preset's.
        encoding: A tiktoken encoding to cut down to what the pairs use, instead of training one.
        skip_bad: Drop and count pairs that cannot be used, instead of refusing the file.
    """

    train: PairFiles | None
    valid: PairFiles | None
    preset: Preset
    model_changes: dict[str, Any]
    train_changes: dict[str, Any]
    vocabulary_size: int | None = None
    encoding: str | None = None
    skip_bad: bool = False

    def follow(
        self,
        folder: Path,
        *,
        device: str,
        resume: bool,
        quiet: bool,
        say: Callable[[str], None],
    ) -> Evaluation | None:
        """Trains into `folder`; `Trainer.run` says what comes back and what is raised.

        Args:
            folder: Where the run is written; it must hold one already when resuming.
            device: "cpu", "cuda" or "auto".
            resume: Continue the run that lies in `folder`.
            quiet: No progress bar.
            say: Takes a line on what was read and made.
        """
        process = Process.start(device)
        try:
            return self._follow(
                folder,
                process,
                resume=resume,
                quiet=quiet,
                say=say if process.rank == 0 else lambda line: None,
            )
        finally:
            process.stop()

    def _follow(
        self,
        folder: Path,
        process: Process,
        *,
        resume: bool,
        quiet: bool,
        say: Callable[[str], None],
    ) -> Evaluation | None:
        corpus = folder / "corpus"
        if process.rank == 0 and not resume and None in (self.train, self.valid):
            write_corpus(corpus)
        process.wait()
        train = self.train or PairFiles(corpus / "train.en", corpus / "train.de")
        valid = self.valid or PairFiles(corpus / "valid.en", corpus / "valid.de")
        pairs, report = train.read(skip_bad=self.skip_bad)
        say(f"training pairs: {_describe(report)}")
        valid_pairs, report = valid.read(skip_bad=self.skip_bad)
        say(f"validation pairs: {_describe(report)}")
        if resume:
            tokenizer = Tokenizer.load(folder)
            model_config, stored = checkpoint.load_config(folder)
            ends = {"max_steps", "max_minutes"} & self.train_changes.keys()
            train_config = TrainConfig.from_dict(
                stored.to_dict() | {name: self.train_changes[name] for name in ends}
            )
        else:
            tokenizer = self._tokenizer(pairs)
            model_config = self.preset.model_config(tokenizer.vocabulary_size, **self.model_changes)
            train_config = self.preset.train_config(**self.train_changes)
        say(f"vocabulary: {tokenizer.vocabulary_size} ids")

        longest = min(model_config.max_positions, train_config.batch_tokens)
        examples, report = encode_pairs(pairs, tokenizer, longest, skip_bad=self.skip_bad)
        if report.dropped:
            say(f"training pairs: {_describe(report)}")
        # References must stay beside their examples, so over-long validation pairs are refused.
        valid_examples, _ = encode_pairs(valid_pairs, tokenizer, longest)
        trainer = Trainer(
            folder,
            model_config,
            train_config,
            tokenizer,
            examples,
            Validation(valid_examples, [pair.target for pair in valid_pairs]),
            process,
        )
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        if process.rank == 0 and not resume:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save_samples(folder, [pair.source for pair in valid_pairs[:SAMPLES]])
        say(f"model: {parameters:,} parameters, on {process.device}")
        return trainer.run(resume=resume, quiet=quiet)

    def _tokenizer(self, pairs: Sequence[Pair]) -> Tokenizer:
        lines = [text for pair in pairs for text in pair]
        if self.encoding is not None:
            return cut_encoding(self.encoding, lines)
        return train_bpe(lines, self.vocabulary_size or self.preset.vocabulary_size)


def _describe(report: ReadReport) -> str:
    dropped = "".join(f", {count} {reason}" for reason, count in report.dropped.items())
    return f"{report.kept:,} of {report.read:,} kept{dropped}"
