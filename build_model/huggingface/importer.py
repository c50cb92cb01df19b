"""A checkpoint becomes a run: read, carried over, and written whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transferry.build_model import checkpoint as run
from transferry.build_model import run_folder
from transferry.build_model.config import ModelConfig
from transferry.build_model.huggingface.folder import Checkpoint
from transferry.build_model.huggingface.tables import FAMILIES
from transferry.build_model.huggingface.vocabularies import TOKENIZERS
from transferry.build_model.huggingface.weights import Carried, carry_over
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import replace_folder, staged_folder
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

# What `generate` of transformers goes by and a run does not: how to search is said to transferry.
SEARCH_SETTINGS = (
    "do_sample",
    "early_stopping",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beams",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
)


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was read of a checkpoint.

    Attributes:
        kind: Its model_type.
        config: The shape of our model.
        carried: The weights, and what was left out of them.
        tokenizer: The tokenizer.
        generation: Fields of GenerationOptions that a bundle makes its defaults.
        not_taken: Settings of the search that are not.
    """

    kind: str
    config: ModelConfig
    carried: Carried
    tokenizer: AnyTokenizer
    generation: dict[str, Any]
    not_taken: dict[str, Any]

    def to_text(self) -> str:
        """Tells a person what became of the model."""
        left_out, parameters = self.carried.left_out, self.carried.parameters
        lines = [
            f"{self.kind}, {self.config.architecture}: "
            f"{parameters - self.carried.made + sum(left_out.values()):,} parameters in the file, "
            f"{parameters - self.carried.made:,} of them imported"
        ]
        if self.carried.made:
            lines.append(f"made by formula: {self.carried.made:,} numbers of positions")
        if left_out:
            parts = ", ".join(f"{part} {count:,}" for part, count in left_out.items())
            lines.append(f"left out: {parts}")
        if self.kind == "bert" and not self.config.output_transform:
            lines.append("there is no head of a masked language model: for --task embed only")
        if self.generation:
            kept = ", ".join(f"{name} {value}" for name, value in self.generation.items())
            lines.append(f"defaults of generation: {kept}")
        if self.not_taken:
            names = ", ".join(f"{name} {value}" for name, value in self.not_taken.items())
            lines.append(f"settings of the search, left to `transferry run`: {names}")
        return "\n".join(lines)


def read_checkpoint(folder: Path) -> Imported:
    """Reads a folder that `save_pretrained` of transformers wrote.

    Raises:
        InputError: A file is missing or damaged, a setting is not supported, or a tensor does not
            fit.
        UsageError: The library that the tokenizer needs is not installed.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    kind = config.choice("model_type", {name: name for name in FAMILIES}, "")
    config.only("quantization_config", None)
    family = FAMILIES[kind]
    try:
        shape = family.shape(config, checkpoint.names())
    except UsageError as error:
        raise InputError(f"{config.path}: {error}") from error
    tokenizer = TOKENIZERS[kind](checkpoint, shape)
    if tokenizer.vocabulary_size != shape.vocabulary_size:
        raise InputError(
            f"{config.path}: vocab_size is {shape.vocabulary_size}, but the tokenizer has "
            f"{tokenizer.vocabulary_size} ids; the two are not of one checkpoint"
        )
    generation, not_taken = {}, {}
    if shape.decoder_layers:
        if suppress := _suppressed(checkpoint, shape.vocabulary_size):
            generation["suppress"] = suppress
        not_taken = {
            name: value
            for name in SEARCH_SETTINGS
            if (value := checkpoint.generation.get(name, config.get(name))) is not None
        }
    carried = carry_over(family, shape, checkpoint.tensors(), str(folder))
    return Imported(kind, shape, carried, tokenizer, generation, not_taken)


def _suppressed(checkpoint: Checkpoint, vocabulary_size: int) -> tuple[int, ...]:
    """The tokens that `bad_words_ids` forbids, as `generate` finds them."""
    settings = checkpoint.generation
    if settings.get("bad_words_ids") is None:
        settings = checkpoint.config
    words = settings.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(
        isinstance(word, list)
        and len(word) == 1
        and type(word[0]) is int
        and 0 <= word[0] < vocabulary_size
        for word in words
    ):
        settings.refuse("bad_words_ids", words, "lists of one token each")
    return tuple(sorted({word[0] for word in words}))


def import_checkpoint(
    folder: Path,
    out: Path,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Turns a checkpoint into a run, as training leaves it, which export takes.

    Args:
        folder: What `save_pretrained` of transformers wrote.
        out: The run.
        force: Replace a run that is there.
        say: Takes what became of the model.

    Raises:
        InputError: See `read_checkpoint`; or the run cannot be written.
        UsageError: `out` holds something and `force` is off, or what it holds is no run.
    """
    run_folder.check_folder(out, force=force)
    imported = read_checkpoint(folder)
    with staged_folder(out) as staged:
        run.save_config(staged, imported.config, None, imported.generation)
        imported.tokenizer.save(staged)
        run.save_tensors(staged / run.WEIGHTS, imported.carried.state)
        run_folder.remember(staged, {"huggingface": folder})
        replace_folder(staged, out)
    say(imported.to_text())
