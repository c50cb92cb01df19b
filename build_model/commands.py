"""The commands that make a checkpoint: training and importing.

Each imports what it needs when it runs, so that --help is instant.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from transferry.build_model.model.shape import TransformerConfig
from transferry.build_model.train.presets import PRESETS
from transferry.build_model.train.train_config import TrainConfig
from transferry.runtime.console.fields import Command, fields_as_options, together
from transferry.runtime.console.group import command
from transferry.runtime.console.progress import progress, say, teller
from transferry.runtime.console.shared_options import (
    FILE,
    OUTPUT,
    card_options,
    check_settings,
    configurable,
    explicit,
    option,
)

PRESET_DEFAULTS = {
    name: "preset" for preset in PRESETS.values() for name in preset.model | preset.train
}
DATA = "Data"
# Training and validation data of an encoder-decoder.
_data = partial(option, panel=DATA, type=FILE)
training_pairs_options = together(
    _data("--source", help="Training sentences, one per line, plain or gzip."),
    _data("--target", help="Translations of --source, line by line."),
    _data("--pairs", help="Sentences and translations in one .tsv or .jsonl file."),
)
validation_pairs_options = together(
    _data("--valid-source", help="Validation sentences."),
    _data("--valid-target", help="Translations of --valid-source."),
    _data(
        "--valid-pairs",
        help="Validation pairs in one file. Default: a tenth of the training pairs, at most 1,000.",
    ),
)


def training_options(
    preset: str,
    *,
    presets: Iterable[str] = PRESETS,
    vocabulary: str = "preset",
    leave_out: Sequence[str] = (),
) -> Callable[[Command], Command]:
    """Adds the options of a training, besides those of its data."""
    return together(
        option(
            "--preset",
            panel=DATA,
            type=click.Choice(list(presets)),
            default=preset,
            help="Model shape and training settings to start from.",
        ),
        option(
            "--vocabulary-size",
            panel=DATA,
            type=click.IntRange(1, 10_000_000),
            help=f"Size of the trained vocabulary. Default: {vocabulary}.",
        ),
        option(
            "--encoding",
            panel=DATA,
            help="tiktoken encoding to cut down to the corpus: cl100k_base or o200k_base.",
        ),
        option("--out", type=OUTPUT, required=True, help="Checkpoint folder."),
        option("--resume", is_flag=True, help="Continue the interrupted training in --out."),
        option("--force", is_flag=True, help="Replace the checkpoint in --out."),
        option("--device", default="auto", help="Device to train on: cpu, cuda or auto."),
        option("--quiet", is_flag=True, help="Print no progress."),
        fields_as_options(TrainConfig, defaults=PRESET_DEFAULTS, panel="Training"),
        fields_as_options(
            TransformerConfig,
            leave_out=["vocabulary_size", *leave_out],
            defaults=PRESET_DEFAULTS,
            panel="Shape of the model",
        ),
    )


@command(
    epilog="""\b
Examples:
  transferry train --source train.en.gz --target train.de.gz \\
      --valid-source val.en.gz --valid-target val.de.gz --out runs/ende
  transferry train --out runs/ende --resume
  transferry train --text book.txt --preset prose --out runs/book
Several GPUs: torchrun --nproc-per-node 4 -m transferry.cli train ...
"""
)
@configurable
@training_pairs_options
@_data("--text", help="Plain text, for a decoder-only or encoder-only model.")
@option("--builtin", panel=DATA, is_flag=True, help="Train on the built-in corpus.")
@validation_pairs_options
@_data("--valid-text", help="Validation text. Default: the last tenth of --text.")
@option(
    "--skip-bad",
    panel=DATA,
    is_flag=True,
    help="Drop and count unusable pairs instead of stopping.",
)
@training_options("small")
@click.pass_context
def train(context: click.Context, /, **options: Any) -> None:
    """Train a Transformer on sentence pairs or on text.

    --preset sets the shape of the model and the training settings; the other options override
    single ones. The checkpoint holds the weights, the tokenizer, metrics.jsonl, curves.png and
    settings.toml.
    """
    from transferry.build_model import checkpoint_folder
    from transferry.build_model.train.recipe import TrainingRecipe

    out, resume, quiet = options["out"], options["resume"], options["quiet"]
    if resume:
        options = checkpoint_folder.recall(out, options, explicit(context))
        check_settings(context, out / checkpoint_folder.SETTINGS)
        checkpoint_folder.require_state(out)
    recipe, leads = TrainingRecipe.from_options(options), checkpoint_folder.leader()
    if not resume:
        recipe.configs()
    with checkpoint_folder.training(out, force=options["force"], resume=resume, leads=leads):
        from transferry.build_model.train.follow import follow

        remember = partial(checkpoint_folder.remember, out, options)
        if leads and not resume:
            remember()
        talk, device = teller(quiet or not leads), options["device"]
        if resume:
            talk(checkpoint_folder.recalled(out, options))
        with progress(quiet or not leads, "steps") as show:
            marks = follow(
                recipe, out, device=device, resume=resume, say=talk, show=show, begun=remember
            )
    if marks is not None:
        say(f"{marks}; {out}")


@command(
    "import",
    epilog="""\b
Examples:
  transferry import opus-mt-en-de --out runs/opus
  transferry import Llama-3.2-1B --adapter lora --out runs/llama
""",
)
@configurable
@click.argument("huggingface", metavar="FOLDER", type=FILE)
@option("--out", type=OUTPUT, required=True, help="Checkpoint folder.")
@option("--adapter", type=FILE, help="Folder of a LoRA adapter of PEFT to merge into the weights.")
@option(
    "--ignore-setting",
    metavar="KEY",
    multiple=True,
    help="Setting to leave out though it may change answers; repeatable.",
)
@card_options
@option(
    "--score-tokens",
    metavar="YES,NO",
    help="Import a decoder as a reranker: the logit of one token, less another's, scores a pair.",
)
@option("--force", is_flag=True, help="Replace the checkpoint in --out.")
@option("--quiet", is_flag=True, help="Do not print the summary of imported and omitted parts.")
def import_(
    huggingface: Path,
    out: Path,
    adapter: Path | None,
    ignore_setting: tuple[str, ...],
    score_tokens: str | None,
    force: bool,
    quiet: bool,
    **card: str | None,
) -> None:
    """Import a model of Hugging Face or Marian from FOLDER as a checkpoint.

    FOLDER holds config.json, weights and the tokenizer. Unsupported features are refused
    by name; docs/import.md lists the model types.
    """
    from transferry.build_model.importing.huggingface.importer import import_pretrained

    told = teller(quiet)
    with progress(quiet) as show:
        import_pretrained(
            huggingface,
            out,
            adapter=adapter,
            ignored=ignore_setting,
            scores=score_tokens.split(",") if score_tokens else (),
            force=force,
            say=told,
            show=show,
            **card,
        )
