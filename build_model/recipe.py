"""The training recipe behind `transferry train`: from files to a trained run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transferry.build_model import checkpoint
from transferry.build_model.config import ModelConfig, TrainConfig
from transferry.build_model.corpus import write_corpus
from transferry.build_model.data import (
    BadPair,
    Example,
    Pair,
    ReadReport,
    encode_pairs,
    read_pair_file,
    read_pairs,
)
from transferry.build_model.distributed import Process
from transferry.build_model.evaluation import Evaluation
from transferry.build_model.presets import PRESETS, Preset
from transferry.build_model.text import MaskedWindows, Windows, read_text
from transferry.build_model.train import Trainer, Validation, require_fitting
from transferry.build_model.vocabulary import (
    cut_encoding,
    require_encoding,
    require_vocabulary,
    train_bpe,
)
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import (
    PASSAGES,
    PROMPTS,
    SOURCES,
    SpecialTokens,
    Tokenizer,
)

# Number and length of the validation texts kept with the run.
SAMPLES, SAMPLE_CHARACTERS = 100, 200
# Without a validation text, one in so many tokens or pairs is held out, and at most so many pairs.
HELD_OUT, MOST_HELD_OUT = 10, 1000
BUILTIN = ("train", "valid")


@dataclass(frozen=True)
class PairFiles:
    """Files of one set of pairs: two files of lines, or one TSV or JSONL file.

    Attributes:
        source: File of texts, or of pairs.
        target: File of their translations; None where `source` has pairs.
        held_out: The pairs were held out of the training text, so one that is too long is skipped
            where bad pairs are.
    """

    source: Path
    target: Path | None = None
    held_out: bool = False

    def read(self, *, skip_bad: bool) -> tuple[list[Pair], ReadReport]:
        """Reads the pairs; raises as `read_pairs` and `read_pair_file`."""
        if self.target is None:
            return read_pair_file(self.source, skip_bad=skip_bad)
        return read_pairs(self.source, self.target, skip_bad=skip_bad)


@dataclass(frozen=True)
class Learned:
    """Text of a recipe, prepared for training.

    Attributes:
        tokenizer: Made from the text; when resuming, the run's own.
        examples: Training examples.
        validation: Validation examples.
        samples: Texts kept with the run, whose answers export records in the bundle.
    """

    tokenizer: Tokenizer
    examples: Sequence[Example]
    validation: Validation
    samples: Sequence[str]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained model.

    Attributes:
        train: Training text: pairs for an encoder-decoder, else a text file. None is the built-in
            corpus, written into the run.
        valid: Validation text. None holds out a part of the training text, or is the built-in
            corpus.
        preset: Shape and settings to start from.
        model_changes: Fields of ModelConfig that differ from the preset.
        train_changes: Fields of TrainConfig that differ from the preset.
        vocabulary_size: Size of the vocabulary to train; None is the preset's.
        encoding: A tiktoken encoding to cut down to the text instead of training a vocabulary.
        tokenizer: A tokenizer to use instead of training a vocabulary, unless one of the two
            options above is given.
        skip_bad: Drop and count unusable pairs instead of refusing the file.
    """

    train: PairFiles | Path | None
    valid: PairFiles | Path | None
    preset: Preset
    model_changes: dict[str, Any]
    train_changes: dict[str, Any]
    vocabulary_size: int | None = None
    encoding: str | None = None
    tokenizer: Tokenizer | None = None
    skip_bad: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Makes the recipe from the options of `transferry train`.

        Raises:
            UsageError: Options exclude each other, or there is no training text.
        """
        preset = PRESETS[options["preset"]]
        default = preset.model.get("architecture", "encoder-decoder")
        architecture = options["architecture"] or default
        sides = ("source", "target", "pairs")
        wanted = sides if architecture == "encoder-decoder" else ("text",)
        named = [name for name in (*sides, "text") if options[name] is not None]
        if options["builtin"] and named:
            raise UsageError(f"--builtin and --{named[0]} exclude each other; leave one out")
        if unfit := [name for name in named if name not in wanted]:
            raise UsageError(
                f"--{unfit[0]} and architecture {architecture} exclude each other; use "
                f"--{', --'.join(wanted)}"
            )
        valid = [f"valid_{name}" for name in (*sides, "text") if name not in wanted]
        if unfit := [name for name in valid if options[name] is not None]:
            raise UsageError(
                f"{unfit[0]} has no effect on architecture {architecture}: use "
                f"{' or '.join(f'valid_{name}' for name in wanted)}, or leave it out"
            )
        if options["encoding"] is not None and options["vocabulary_size"] is not None:
            raise UsageError(
                f"--encoding {options['encoding']} and --vocabulary-size "
                f"{options['vocabulary_size']} exclude each other; leave one out"
            )

        def given(prefix: str) -> PairFiles | Path | None:
            if options["builtin"]:
                return None
            source, target, pairs, text = (options[prefix + name] for name in (*sides, "text"))
            if wanted == ("text",):
                if options["text"] is None:
                    raise UsageError("give --text, or --builtin")
                return None if text is None else Path(text)
            if prefix and (source, target, pairs) == (None, None, None):
                return None
            if pairs is not None and source is None and target is None:
                return PairFiles(Path(pairs))
            if pairs is None and source is not None and target is not None:
                return PairFiles(Path(source), Path(target))
            flags = [f"--{prefix}{name}".replace("_", "-") for name in sides]
            raise UsageError(f"give {flags[0]} and {flags[1]}, or {flags[2]}, or --builtin")

        def changes(config: type[Any]) -> dict[str, Any]:
            # The tokenizer determines the size of the vocabulary.
            names = {field.name for field in dataclasses.fields(config)} - {"vocabulary_size"}
            given = {name: options.get(name) for name in names}
            return {name: value for name, value in given.items() if value is not None}

        return cls(
            given(""),
            given("valid_"),
            preset,
            changes(ModelConfig),
            changes(TrainConfig),
            vocabulary_size=options["vocabulary_size"],
            encoding=options["encoding"],
            skip_bad=options["skip_bad"],
        )

    def configs(self) -> tuple[ModelConfig, TrainConfig]:
        """Returns shape and settings; the size of the vocabulary is 1 until the text is read.

        Raises:
            UsageError: A setting is out of range, or they do not fit each other.
        """
        model_config = self.preset.model_config(1, **self.model_changes)
        train_config = self.preset.train_config(**self.train_changes)
        require_fitting(model_config, train_config)
        if self.encoding is not None:
            require_encoding(self.encoding)
        if self.vocabulary_size is not None:
            masked = model_config.architecture == "encoder-only"
            require_vocabulary(self.vocabulary_size, PASSAGES if masked else SOURCES)
        return model_config, train_config

    def follow(
        self,
        folder: Path,
        *,
        device: str,
        resume: bool,
        say: Callable[[str], None],
        show: Callable[..., None] | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> Evaluation | None:
        """Trains into `folder`; returns and raises as `Trainer.run`.

        Args:
            folder: Folder of the run; when resuming, of the run to continue.
            device: "cpu", "cuda" or "auto".
            resume: Continue the run in `folder`.
            say: Receives lines about what was read and made, and each validation.
            show: See `Trainer.run`.
            begun: See `Trainer.run`.
        """
        process = Process.start(device)
        try:
            trainer = self._trainer(
                folder, process, resume, say if process.rank == 0 else lambda line: None
            )
            return trainer.run(resume=resume, begun=begun, say=say, show=show)
        finally:
            process.stop()

    def _trainer(
        self, folder: Path, process: Process, resume: bool, say: Callable[[str], None]
    ) -> Trainer:
        corpus = folder / "corpus"
        fresh = None if resume else self.configs()  # before the text, which takes its time
        if process.rank == 0 and not resume and self.train is None:
            write_corpus(corpus)
        process.wait()
        if fresh is not None:
            model_config, train_config = fresh
        else:
            model_config, stored = checkpoint.load_config(folder)
            ends = {"max_steps", "max_minutes"} & self.train_changes.keys()
            train_config = TrainConfig.from_dict(
                stored.to_dict() | {name: self.train_changes[name] for name in ends}
            )
        tokenizer = Tokenizer.load(folder) if resume else None
        longest = min(model_config.max_positions, train_config.batch_tokens)
        if model_config.architecture == "encoder-decoder":
            learned = self._pairs(corpus, tokenizer, longest, say)
        else:
            learned = self._text(corpus, tokenizer, longest, model_config, say)
        tokenizer = learned.tokenizer
        say(f"vocabulary: {tokenizer.vocabulary_size} ids")
        model_config = dataclasses.replace(model_config, vocabulary_size=tokenizer.vocabulary_size)
        trainer = Trainer(
            folder,
            model_config,
            train_config,
            tokenizer,
            learned.examples,
            learned.validation,
            process,
        )
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        if process.rank == 0 and not resume:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save_samples(folder, learned.samples)
        say(f"model: {parameters:,} parameters, on {process.device}")
        return trainer

    def _pairs(
        self,
        corpus: Path,
        tokenizer: Tokenizer | None,
        longest: int,
        say: Callable[[str], None],
    ) -> Learned:
        """Prepares pairs for an encoder-decoder."""
        builtin = [PairFiles(corpus / f"{name}.en", corpus / f"{name}.de") for name in BUILTIN]
        train, valid = (self.train, self.valid) if self.train is not None else builtin
        assert isinstance(train, PairFiles)
        assert not isinstance(valid, Path)
        pairs, report = train.read(skip_bad=self.skip_bad)
        say(f"training pairs: {report}")
        if valid is None:
            pairs, valid_pairs = hold_out(pairs)
        else:
            valid_pairs, report = valid.read(skip_bad=self.skip_bad)
            say(f"validation pairs: {report}")
        if tokenizer is None:
            tokenizer = self._tokenizer([text for pair in pairs for text in pair], SOURCES)
        examples, report = encode_pairs(pairs, tokenizer, longest, skip_bad=self.skip_bad)
        if report.dropped:
            say(f"training pairs: {report}")
        if (valid is None or valid.held_out) and self.skip_bad:
            valid_pairs = [pair for pair in valid_pairs if _encodable(pair, tokenizer, longest)]
        if valid is None:
            say(f"validation pairs: {len(valid_pairs):,} of these, held out")
        # Not skipping: references and examples must stay aligned.
        valid_examples, _ = encode_pairs(valid_pairs, tokenizer, longest)
        return Learned(
            tokenizer,
            examples,
            Validation(valid_examples, [pair.target for pair in valid_pairs]),
            [pair.source for pair in valid_pairs[:SAMPLES]],
        )

    def _text(
        self,
        corpus: Path,
        tokenizer: Tokenizer | None,
        longest: int,
        model_config: ModelConfig,
        say: Callable[[str], None],
    ) -> Learned:
        """Prepares plain text for a decoder-only or encoder-only model."""
        masked = model_config.architecture == "encoder-only"
        train, valid = self.train or corpus / "train.en", self.valid
        if self.train is None:
            valid = corpus / "valid.en"
        assert isinstance(train, Path)
        assert not isinstance(valid, PairFiles)
        text = read_text(train)
        if tokenizer is None:
            tokenizer = self._tokenizer([text], PASSAGES if masked else PROMPTS)
        tokens = tokenizer.encode(text)
        say(f"training text: {tokenizer.describe(tokens)}")
        if valid is None:
            # The end of the text, so that no training window overlaps it.
            cut = len(tokens) - len(tokens) // HELD_OUT
            tokens, valid_tokens = tokens[:cut], tokens[cut:]
            valid_text = tokenizer.decode(valid_tokens)
        else:
            valid_text = read_text(valid)
            valid_tokens = tokenizer.encode(valid_text)
        say(f"validation text: {len(valid_tokens):,} tokens")

        def windows(tokens: Sequence[int]) -> Windows:
            if masked:
                ordinary = range(tokenizer.first_ordinary_id, tokenizer.vocabulary_size)
                return MaskedWindows(tokens, longest, tokenizer.special, ordinary)
            return Windows(tokens, longest)

        lines = [line[:SAMPLE_CHARACTERS] for line in valid_text.splitlines() if line.strip()]
        return Learned(
            tokenizer, windows(tokens), Validation(windows(valid_tokens)), lines[:SAMPLES]
        )

    def _tokenizer(self, lines: Sequence[str], special: SpecialTokens) -> Tokenizer:
        encoding = self.encoding
        if encoding is None and self.vocabulary_size is None:
            if self.tokenizer is not None:
                return self.tokenizer
            encoding = self.preset.encoding
        if encoding is not None:
            return cut_encoding(encoding, lines, special)
        return train_bpe(lines, self.vocabulary_size or self.preset.vocabulary_size, special)


def hold_out(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs into those for training and those for validation, evenly spread.

    A pair that occurs again is on one side alone.

    Raises:
        InputError: There are too few pairs.
    """
    different = list(dict.fromkeys(pairs))
    count = min(len(different) // HELD_OUT, MOST_HELD_OUT)
    if not count:
        raise InputError(
            f"expected at least {HELD_OUT} different pairs to hold out a part for validation, "
            f"found {len(different)}; give more, or --valid-pairs"
        )
    held = {different[number * len(different) // count] for number in range(count)}
    return [pair for pair in pairs if pair not in held], [p for p in different if p in held]


def _encodable(pair: Pair, tokenizer: Tokenizer, longest: int) -> bool:
    try:
        encode_pairs([pair], tokenizer, longest)
    except BadPair:
        return False
    return True
