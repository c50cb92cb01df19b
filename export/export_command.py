"""The command `export`. It imports what it needs when it runs, so that --help is instant."""

from dataclasses import replace
from pathlib import Path

import click

from transferry.runtime.console.group import command
from transferry.runtime.console.progress import progress, say, teller
from transferry.runtime.console.shared_options import (
    FILE,
    OUTPUT,
    card_options,
    configurable,
    explicit,
    option,
)
from transferry.runtime.errors import UsageError


@command(
    epilog="""\b
Examples:
  transferry export runs/ende --out bundles/ende
  transferry export opus-mt-en-de --out bundles/opus
  transferry export runs/ende --out bundles/ende --variant cpu-fp32 \\
    --variant cpu-int8 --calibrate sample.en
"""
)
@configurable
@click.argument("checkpoint", metavar="CHECKPOINT", type=FILE)
@option("--out", type=OUTPUT, required=True, help="Bundle folder.")
@option(
    "--tokenizer",
    type=FILE,
    help="Of a module: a tokenizer.json, SentencePiece model, list of words, or folder with one.",
)
@option(
    "--keep",
    type=OUTPUT,
    help="Checkpoint folder for a CHECKPOINT that is imported. Default: a temporary one.",
)
@card_options
@option("--force", is_flag=True, help="Replace the bundle in --out, the checkpoint in --keep.")
@option(
    "--text",
    type=FILE,
    help="Sentences for the recorded answers. Default: the checkpoint's validation samples.",
)
@option(
    "--variant",
    "variants",
    multiple=True,
    default=("cpu-fp32",),
    help="Variant to add to portable: cpu-fp32, cpu-int8, cpu-int8-kernels, cpu-int8-blocks, "
    "cpu-int4, portable-int8, cuda-fp16 or cuda-bf16; portable alone adds none. Repeatable.",
)
@option("--calibrate", type=FILE, help="Text similar to later input, to calibrate cpu-int8.")
@option(
    "--one-graph",
    is_flag=True,
    help="Add portable/generate.onnx: the whole search, for any runtime to call once.",
)
@option(
    "--one-graph-beam",
    type=click.IntRange(1, 64),
    help="Beams of its search, which implies --one-graph. Default: 1, greedy search.",
)
@option("--quiet", is_flag=True, help="Print no progress.")
def export(
    checkpoint: Path,
    out: Path,
    keep: Path | None,
    tokenizer: Path | None,
    force: bool,
    text: Path | None,
    variants: tuple[str, ...],
    calibrate: Path | None,
    one_graph: bool,
    one_graph_beam: int | None,
    quiet: bool,
    **card: str | None,
) -> None:
    """Export CHECKPOINT as a verified bundle.

    CHECKPOINT is a folder of `train` or `import`, any folder that `import` reads, or
    MODULE:FUNCTION, a function that returns a torch module. A bundle holds graphs, weights,
    tokenizer and reference answers. If an answer differs from torch's, the command writes nothing
    and exits with 4.
    """
    from transferry.build_model.checkpoint_folder import is_pretrained
    from transferry.export.bundle_folder import foreign_bundle
    from transferry.export.recipes import recipe_of
    from transferry.runtime.io.folders import names_function
    from transferry.runtime.io.lines import some_lines
    from transferry.runtime.io.outputs import require_new

    own = names_function(str(checkpoint))
    if own and "variants" not in explicit(click.get_current_context()):
        variants = ()  # fusion knows the reference's modules
    recipes = [recipe_of(name, calibrated=calibrate is not None) for name in variants]
    if calibrate and not any(recipe.precision.calibrated for recipe in recipes):
        raise UsageError("--calibrate has no effect without --variant cpu-int8; add it")
    require_new(out, foreign_bundle, force=force)
    imports = is_pretrained(checkpoint)
    texts = some_lines(text) if text else None
    typical = some_lines(calibrate) if calibrate else []
    from transferry.build_model.checkpoint import load_samples
    from transferry.export.bundle import Contents, export_bundle
    from transferry.export.subject.reference import load_reference
    from transferry.export.trace.graph import Traces

    if texts is None:
        texts = [] if imports or own else load_samples(checkpoint)
    with progress(quiet) as show_phase:
        importing = {"force": force, "say": teller(quiet), "show": show_phase}
        trained = load_reference(
            checkpoint, keep, beside=out, importing=importing, tokenizer=tokenizer
        )
        bundle = export_bundle(
            replace(trained, card=trained.card.stating(**card)),
            out,
            Contents(
                texts=texts,
                variants=variants,
                calibrate=typical,
                one_graph=one_graph_beam or int(one_graph),
            ),
            force=force,
            traces=click.get_current_context().ensure_object(Traces),
            say=teller(quiet),
            done=show_phase,
        )
    size = sum(record.size for record in bundle.manifest.files.values())
    say(f"{out}: {len(bundle.manifest.files) + 1} files, {size / 1e6:.1f} MB, verified")
