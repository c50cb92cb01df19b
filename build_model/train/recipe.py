"""The recipe of `transferry train`: its options, checked without loading torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transferry.build_model.model.shape import TransformerConfig
from transferry.build_model.train.presets import PRESETS, Preset
from transferry.build_model.train.train_config import TrainConfig, require_fitting
from transferry.build_model.train.vocabulary import require_encoding, require_vocabulary
from transferry.runtime.errors import Option, UsageError
from transferry.runtime.settings import listed
from transferry.runtime.tokenizer.byte_pair import PASSAGES, SOURCES, Tokenizer


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


@dataclass(frozen=True)
class TrainingRecipe:
    """Everything that determines a trained model.

    Attributes:
        train: Training text: pairs for an encoder-decoder, else a text file. None is the built-in
            corpus, written into the checkpoint.
        valid: Validation text. None holds out a part of the training text, or is the built-in
            corpus.
        tokenizer: A tokenizer to use instead of training a vocabulary, unless vocabulary_size or
            encoding is given.
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
        architecture = options["architecture"] or preset.architecture
        sides = ("source", "target", "pairs")
        wanted = sides if architecture == "encoder-decoder" else ("text",)
        named = [name for name in (*sides, "text") if options[name] is not None]
        if options["builtin"] and named:
            raise UsageError(f"--builtin and --{named[0]} exclude each other; leave one out")
        if unfit := [name for name in named if name not in wanted]:
            fitting = [
                name
                for name, each in PRESETS.items()
                if (each.architecture == "encoder-decoder") is (unfit[0] in sides)
            ]
            raise UsageError(
                f"--{unfit[0]} and architecture {architecture} exclude each other; use "
                f"--{', --'.join(wanted)}, or --preset {listed(fitting, 'or')}"
            )
        valid = [f"valid_{name}" for name in (*sides, "text") if name not in wanted]
        if unfit := [name for name in valid if options[name] is not None]:
            flags = " or ".join(f"--valid-{name}" for name in wanted)
            raise UsageError(
                Option(unfit[0]),
                f" has no effect on architecture {architecture}: use {flags}, or leave it out",
            )
        if options["encoding"] is not None and options["vocabulary_size"] is not None:
            raise UsageError(
                f"--encoding {options['encoding']} and --vocabulary-size "
                f"{options['vocabulary_size']} exclude each other; leave one out"
            )

        def changes(config: type[Any]) -> dict[str, Any]:
            # The tokenizer determines the size of the vocabulary.
            names = {field.name for field in dataclasses.fields(config)} - {"vocabulary_size"}
            given = {name: options.get(name) for name in names}
            return {name: value for name, value in given.items() if value is not None}

        return cls(
            _data(options, sides, wanted),
            _data(options, sides, wanted, "valid_"),
            preset,
            changes(TransformerConfig),
            changes(TrainConfig),
            vocabulary_size=options["vocabulary_size"],
            encoding=options["encoding"],
            skip_bad=options["skip_bad"],
        )

    def configs(self) -> tuple[TransformerConfig, TrainConfig]:
        """Returns shape and settings; the size of the vocabulary is 1 until the text is read.

        Raises:
            UsageError: A setting is out of range, or they do not fit each other.
        """
        shape = self.preset.shape(1, **self.model_changes)
        train_config = self.preset.train_config(**self.train_changes)
        require_fitting(shape, train_config)
        if self.encoding is not None:
            require_encoding(self.encoding)
        if self.vocabulary_size is not None:
            masked = shape.architecture == "encoder-only"
            require_vocabulary(self.vocabulary_size, PASSAGES if masked else SOURCES)
        return shape, train_config


def _data(
    options: Mapping[str, Any], sides: tuple[str, ...], wanted: tuple[str, ...], prefix: str = ""
) -> PairFiles | Path | None:
    """Returns the training data, or with the prefix the validation data; None if left out."""
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
