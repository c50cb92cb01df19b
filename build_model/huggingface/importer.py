"""Import of a checkpoint: read, converted, and written as a run whole or not at all."""

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
from transferry.build_model.huggingface.weights import Converted, convert_weights
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import replace_folder, staged_folder
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

# Settings of transformers' `generate` that a run does not keep: they are options of transferry.
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
    """A checkpoint, converted.

    Attributes:
        kind: Its model_type.
        config: Shape of our model.
        weights: Its weights, and what was left out.
        tokenizer: Its tokenizer.
        generation: Fields of GenerationOptions that become the bundle's defaults.
        ignored: Settings of `generate` that do not.
    """

    kind: str
    config: ModelConfig
    weights: Converted
    tokenizer: AnyTokenizer
    generation: dict[str, Any]
    ignored: dict[str, Any]

    def to_text(self) -> str:
        """Summary for the user."""
        left_out, computed = self.weights.left_out, self.weights.computed
        imported = self.weights.parameters - computed
        lines = [
            f"{self.kind}, {self.config.architecture}: imported {imported:,} of "
            f"{imported + sum(left_out.values()):,} parameters"
        ]
        if left_out:
            counts = ", ".join(f"{what} {count:,}" for what, count in left_out.items())
            lines.append(f"left out: {counts}")
        if computed:
            lines.append(f"computed: {computed:,} numbers of positions")
        if self.kind == "bert" and not self.config.output_transform:
            lines.append("no masked language model head: only --task embed works")
        if self.generation:
            kept = ", ".join(f"{name} {value}" for name, value in self.generation.items())
            lines.append(f"generation defaults: {kept}")
        if self.ignored:
            names = ", ".join(f"{name} {value}" for name, value in self.ignored.items())
            lines.append(f"ignored settings of generate, set them on `transferry run`: {names}")
        return "\n".join(lines)


def read_checkpoint(folder: Path) -> Imported:
    """Reads a folder that `save_pretrained` of transformers wrote.

    Raises:
        InputError: A file is missing or damaged, a setting is unsupported, or a tensor does not
            fit.
        UsageError: The tokenizer's library is not installed.
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
            f"{tokenizer.vocabulary_size} ids; take both from one checkpoint"
        )
    generation, ignored = {}, {}
    if shape.decoder_layers:
        if suppress := _suppressed(checkpoint, shape.vocabulary_size):
            generation["suppress"] = suppress
        ignored = {
            name: value
            for name in SEARCH_SETTINGS
            if (value := checkpoint.generation.get(name, config.get(name))) is not None
        }
    weights = convert_weights(family, shape, checkpoint.tensors(), str(folder))
    return Imported(kind, shape, weights, tokenizer, generation, ignored)


def _suppressed(checkpoint: Checkpoint, vocabulary_size: int) -> tuple[int, ...]:
    """Tokens in `bad_words_ids`; generation_config.json takes precedence, as in `generate`."""
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
    """Imports a checkpoint as a run, which export accepts like a trained one.

    Args:
        folder: Folder that `save_pretrained` of transformers wrote.
        out: The run.
        force: Replace an existing run.
        say: Receives the summary.

    Raises:
        InputError: As `read_checkpoint`; or the run cannot be written.
        UsageError: `out` is not empty and `force` is off, or it holds something else than a run.
    """
    run_folder.check_folder(out, force=force)
    imported = read_checkpoint(folder)
    with staged_folder(out) as staged:
        run.save_config(staged, imported.config, None, imported.generation)
        imported.tokenizer.save(staged)
        run.save_tensors(staged / run.WEIGHTS, imported.weights.state)
        run_folder.remember(staged, {"huggingface": folder})
        replace_folder(staged, out)
    say(imported.to_text())
