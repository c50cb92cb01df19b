"""The command line. Each command imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

if __name__ == "__main__":  # signals are handled before the imports below
    import runpy

    runpy.run_module("transferry", run_name="__main__", alter_sys=True)

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from transferry.build_model.config import IMPORTED_FIELDS, ModelConfig, TrainConfig
from transferry.build_model.presets import PRESETS
from transferry.runtime.console.fields import fields_as_options, given
from transferry.runtime.console.options import (
    AS_JSON,
    BUNDLE_DEFAULTS,
    FILE,
    FORCE,
    JUNIT,
    MERGED,
    OUTPUT,
    PAGE,
    QUIET,
    REPLAY,
    TOKENS,
    TRUSTED_KEY,
    Commands,
    batch_options,
    beside_bundle,
    certify_options,
    check_settings,
    configurable,
    explicit,
    given_search,
    job_options,
    open_job,
    option,
    require_one_stream,
    require_option,
    search_options,
    session_options,
    writable,
)
from transferry.runtime.console.progress import progress, run_job, say, show, show_summary, teller
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.errors import ParityError, ProviderError
from transferry.runtime.jobs.options import JobOptions

PRESET_DEFAULTS = {
    name: "from the preset" for preset in PRESETS.values() for name in preset.model | preset.train
}
CERTIFICATE = ("date", "against", "cell", "rows", "signature", "worth")


@click.group(
    cls=Commands,
    epilog="""\b
Exit codes: 0 done, 2 wrong usage, 3 bad input, checkpoint or bundle, 4 parity failed,
5 the provider cannot run, 6 done, but some rows hold an error, 130 interrupted.
""",
)
@click.version_option(package_name="transferry")
def main() -> None:
    """Carry a trained Transformer from PyTorch to ONNX Runtime, with proof of parity."""


@main.command(
    epilog="""\b
Example:
  transferry train --source train.en.gz --target train.de.gz \\
      --valid-source val.en.gz --valid-target val.de.gz --preset small --out runs/ende
  transferry train --out runs/ende --resume
  transferry train --text book.txt --preset prose --out runs/book
Several GPUs: torchrun --nproc-per-node 4 -m transferry.cli train ...
"""
)
@configurable
@option("--source", type=FILE, help="Training sentences, one per line, plain or gzip.")
@option("--target", type=FILE, help="Translations of --source, line by line.")
@option("--pairs", type=FILE, help="Sentences and translations in one .tsv or .jsonl file.")
@option("--text", type=FILE, help="Plain text, for a decoder-only or encoder-only model.")
@option("--builtin", is_flag=True, help="Train on the built-in corpus.")
@option("--valid-source", type=FILE, help="Validation sentences.")
@option("--valid-target", type=FILE, help="Translations of --valid-source.")
@option("--valid-pairs", type=FILE, help="Validation pairs in one .tsv or .jsonl file.")
@option("--valid-text", type=FILE, help="Validation text. Default: the last tenth of --text.")
@option("--skip-bad", is_flag=True, help="Drop and count unusable pairs instead of stopping.")
@option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="small",
    help="Model shape and training settings to start from.",
)
@option(
    "--vocabulary-size",
    type=click.IntRange(1, 10_000_000),
    help="Size of the trained vocabulary. Default: from the preset.",
)
@option(
    "--encoding",
    help="tiktoken encoding to cut down to the corpus instead of training a vocabulary: "
    "cl100k_base or o200k_base.",
)
@option("--out", type=OUTPUT, required=True, help="Run folder.")
@option("--resume", is_flag=True, help="Continue the interrupted run in --out.")
@option("--force", is_flag=True, help="Replace the run in --out.")
@option("--device", default="auto", help="Device to train on: cpu, cuda or auto.")
@option("--quiet", is_flag=True, help="Print no progress.")
@fields_as_options(TrainConfig, defaults=PRESET_DEFAULTS)
@fields_as_options(
    ModelConfig, leave_out=["vocabulary_size", *IMPORTED_FIELDS], defaults=PRESET_DEFAULTS
)
@click.pass_context
def train(context: click.Context, /, **options: Any) -> None:
    """Train a Transformer on sentence pairs or on text.

    --preset sets the shape of the model and the training settings; the other options override
    single ones. The run folder holds the weights, the tokenizer, metrics.jsonl, curves.png and
    settings.toml.
    """
    from transferry.build_model import run_folder
    from transferry.build_model.distributed import leader
    from transferry.build_model.recipe import Recipe

    out, resume, quiet = options["out"], options["resume"], options["quiet"]
    if resume:
        options = run_folder.recall(out, options, explicit(context))
        check_settings(context, out / run_folder.SETTINGS)
    recipe, leads = Recipe.from_options(options), leader()
    with run_folder.training(out, force=options["force"], resume=resume, leads=leads):
        remember = partial(run_folder.remember, out, options)
        if leads and not resume:
            remember()
        talk, device = teller(quiet or not leads), options["device"]
        marks = recipe.follow(
            out, device=device, resume=resume, quiet=quiet, say=talk, begun=remember
        )
    if marks is not None:
        say(f"{marks}; {out}")


@main.command(
    "import",
    epilog="""\b
Example:
  transferry import opus-mt-en-de --out runs/opus
""",
)
@configurable
@click.argument("huggingface", metavar="FOLDER", type=FILE)
@option("--out", type=OUTPUT, required=True, help="Run folder.")
@option("--adapter", type=FILE, help="Folder of a LoRA adapter of PEFT to merge into the weights.")
@option("--force", is_flag=True, help="Replace the run in --out.")
@option("--quiet", is_flag=True, help="Do not list what was imported and what was left out.")
def import_(huggingface: Path, out: Path, adapter: Path | None, force: bool, quiet: bool) -> None:
    """Import a checkpoint of Hugging Face, Marian or fairseq from FOLDER as a run.

    FOLDER holds config.json, weights and the tokenizer. Features that cannot be converted are named
    and refused; see docs/import.md, which lists the model types.
    """
    from transferry.build_model.huggingface.importer import import_checkpoint

    import_checkpoint(huggingface, out, adapter=adapter, force=force, say=teller(quiet))


@main.command(
    epilog="""\b
Example:
  transferry export runs/ende --out bundles/ende
  transferry export runs/ende --out bundles/ende --variant cpu-fp32 \\
    --variant cpu-int8 --calibrate sample.en
"""
)
@configurable
@click.argument("run_folder", metavar="RUN", type=FILE)
@option("--out", type=OUTPUT, required=True, help="Bundle folder.")
@option("--force", is_flag=True, help="Replace the bundle in --out.")
@option(
    "--text",
    type=FILE,
    help="Sentences for the recorded reference answers. Default: validation samples kept in RUN.",
)
@option(
    "--variant",
    "variants",
    multiple=True,
    default=("cpu-fp32",),
    help="Variant to add to the portable one: cpu-fp32, cpu-int8, cpu-int4, cuda-fp16, cuda-bf16; "
    "portable for that one alone; repeatable.",
)
@option(
    "--calibrate",
    type=FILE,
    help="Text similar to later input, to calibrate the value ranges of cpu-int8.",
)
@option("--quiet", is_flag=True, help="Print no progress.")
def export(
    run_folder: Path,
    out: Path,
    force: bool,
    text: Path | None,
    variants: tuple[str, ...],
    calibrate: Path | None,
    quiet: bool,
) -> None:
    """Export a trained RUN as a bundle, and verify it.

    A bundle holds graphs, weights, tokenizer and reference answers. If a graph's answers differ
    from torch's, nothing is written and the exit code is 4.
    """
    from transferry.build_model.checkpoint import load_checkpoint, load_samples
    from transferry.export.bundle import export_bundle, require_replaceable
    from transferry.runtime.files import read_lines

    require_replaceable(out, force=force)
    bundle = export_bundle(
        load_checkpoint(run_folder),
        out,
        texts=list(read_lines(text)) if text is not None else load_samples(run_folder),
        variants=variants,
        calibrate=list(read_lines(calibrate)) if calibrate is not None else (),
        force=force,
        say=teller(quiet),
    )
    size = sum(record.size for record in bundle.manifest.files.values())
    say(f"{out}: {len(bundle.manifest.files) + 1} files, {size / 1e6:.1f} MB, verified")


@main.command(
    epilog="""\b
Example:
  transferry verify bundles/ende --checkpoint runs/ende --text test.en.gz --certify 2026-11-21
  transferry verify bundles/ende --checkpoint runs/ende --text text.en --self-test
  transferry verify bundles/ende --json        # on a host without torch
"""
)
@configurable
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@option("--checkpoint", type=FILE, help="Run that BUNDLE was exported from; compare with torch.")
@option(
    "--text",
    type=FILE,
    help="Sentences to run through both, one per line. Default: validation samples kept in the "
    "run.",
)
@option(
    "--target", type=FILE, help="Reference translations of --text, to compare BLEU and perplexity."
)
@session_options
@option("--device-id", type=click.IntRange(0, 1024), default=0, help="Number of the GPU.")
@option("--self-test", is_flag=True, help="Plant faults in copies of BUNDLE; each must be caught.")
@option(
    "--cross-check",
    is_flag=True,
    help="Also run other runtimes, to tell a graph bug from a runtime bug.",
)
@option(
    "--replay",
    type=REPLAY,
    callback=beside_bundle,
    help="Output for `replay` if a fault is located. Default: BUNDLE.fault.npz.",
)
@certify_options
@option("--report", "page", type=PAGE, callback=writable, help="Write the report as an HTML file.")
@option("--junit", type=JUNIT, callback=writable, help="Write the report as JUnit XML.")
@option("--json", "as_json", is_flag=True, help="Print the whole report as JSON on stdout.")
@option("--quiet", is_flag=True, help="Print no progress.")
@search_options
def verify(bundle_folder: Path, **options: Any) -> None:
    """Prove that BUNDLE answers as torch does, or exit with 4.

    With --checkpoint, torch and ONNX Runtime compute the same inputs: encoder, first step and later
    steps over a sweep of sizes, and on --text greedy search, beam search, sampling, the search that
    --beam and the like describe, and teacher-forced answers. Without it, the bundle is compared
    with the answers recorded at export, and torch is not needed. If a tensor is wrong, the torch
    module in which the fault begins is named.
    """
    checkpoint, text, target = (options[name] for name in ("checkpoint", "text", "target"))
    date, force = options["certify"], options["force"]
    search = given_search(options)
    of_torch = ("text", "target", "self_test", "cross_check", "replay", "batch_rows", *search)
    reason = "without torch only the recorded answers are compared"
    require_option(options, "checkpoint", for_options=of_torch, reason=reason)
    require_option(options, "text", for_options=["target"], reason="what it translates")
    require_option(options, "certify", for_options=["sign"], reason="it signs the certificate")
    from transferry.export.report.write import write_report
    from transferry.runtime.bundle import Bundle
    from transferry.runtime.files import read_lines, require_writable
    from transferry.runtime.ort.open_model import open_model
    from transferry.runtime.ort.session import SessionOptions
    from transferry.runtime.parity import certificate as certificates
    from transferry.runtime.parity import statement
    from transferry.runtime.parity.signature import load_private_key

    if date:
        statement.check_date(date)
    key = load_private_key(options["sign"]) if options["sign"] else None
    bundle, session = Bundle.load(bundle_folder), SessionOptions(**given(options, SessionOptions))
    if date:
        require_writable(bundle_folder / "certificates")
    named = options["variant"]
    variant = bundle.variant(named) if named else certificates.fastest(bundle, session)
    if date and not force:
        strength: certificates.Strength = "run" if checkpoint else "recorded"
        certificates.require_no_stronger(bundle, variant, session, strength, bool(key))
    if checkpoint is None:
        from transferry.runtime.parity.recorded import verify_recorded

        report = verify_recorded(bundle, open_model(bundle, variant, session))
    else:
        from transferry.build_model.checkpoint import load_checkpoint, load_samples
        from transferry.export.parity.cases import fitting
        from transferry.export.verify import verify_against

        trained = load_checkpoint(checkpoint)
        kept = fitting(load_samples(checkpoint), trained.tokenizer, trained.model.config)
        with progress("verifying", options["quiet"]) as done:
            report = verify_against(
                trained,
                bundle,
                open_model(bundle, variant, session),
                list(read_lines(text)) if text else kept,
                list(read_lines(target)) if target else None,
                cross_check=options["cross_check"],
                plant_faults=options["self_test"],
                replay=options["replay"],
                batches=batch_options(options["batch_rows"]),
                search=search or None,
                done=done,
            )
    issued = (bundle, variant, session, report, date)
    certificate = certificates.certify(*issued, key=key, force=force) if date else None
    show(json.dumps(report.to_dict(), indent=1) if options["as_json"] else report.to_text())
    files = {"page": options["page"], "junit": options["junit"]}
    write_report(report, **files, date=date, certificate=certificate)
    report.require()
    if certificate is not None:
        say(f"{certificate}, in {bundle_folder}")


@main.command(
    epilog="""\b
Example:
  transferry replay bundles/ende.fault.npz
"""
)
@click.argument("fault", metavar="FILE", type=FILE)
def replay(fault: Path) -> None:
    """Rerun the operators at which `verify` located a fault.

    They run on the same input, as served and in onnx's reference evaluator, to tell a graph bug
    from a runtime bug. Exits with 4 while the served graph is wrong.
    """
    from transferry.export.debug.replay import replay as run_again

    result = run_again(fault)
    show(result.to_text())
    if not result.passed:
        raise ParityError(f"{fault} still shows the fault")


@main.command(
    epilog="""\b
Example:
  transferry run bundles/ende test.en.gz -o test.de.jsonl --beam 4
  transferry run bundles/ende rows.parquet --column en -o rows.de.parquet
  cat test.en | transferry run bundles/ende - -o - > test.de
"""
)
@job_options
@option(
    "--task",
    type=click.Choice(["generate", "embed", "fill-mask", "classify", "rank", "tag"]),
    default="generate",
    help="What to do with each row; all but generate need an encoder-only bundle.",
)
@fields_as_options(JobOptions, leave_out=["task", "generation", "target"])
@fields_as_options(GenerationOptions, leave_out=TOKENS, defaults=BUNDLE_DEFAULTS)
def run(**options: Any) -> None:
    """Run BUNDLE on every row of INPUT and write the results in order.

    INPUT - is stdin. Finished chunks are saved in OUT.job: the same command continues an
    interrupted job, and the output has the same bytes. A row that cannot be processed (empty,
    longer than the model's positions) becomes an error in its place, and the exit code is 6 once
    all others are done. OUT.summary.json holds the counts, OUT.settings.toml the settings to
    repeat the job with --config.
    """
    generation = given(options, GenerationOptions, leave_out=TOKENS)
    GenerationOptions(**generation)  # refuse a conflict before the bundle is opened
    chosen = JobOptions(generation=generation, **given(options, JobOptions))
    run_job(open_job(chosen, options), options)


@main.command(
    epilog="""\b
Example:
  transferry score bundles/ende test.en.gz --target test.de.gz -o scores.jsonl
  transferry score bundles/book text.txt
"""
)
@job_options
@option("--target", type=FILE, help="Target side of the pairs, for an encoder-decoder.")
@fields_as_options(
    JobOptions,
    leave_out=[
        *("task", "generation", "target", "prefix", "chat", "system", "messages", "prompt_ids"),
        *("pooling", "normalise", "prompt", "pair", "mask", "top", "canary"),
    ],
)
def score(**options: Any) -> None:
    """Compute the log-probability of each row of INPUT, or of each pair.

    Nothing is generated. Each row gets the log-probability of every token given those before it,
    and their total, in nats. The perplexity of the whole file is printed last on stderr and
    written to OUT.summary.json. The same command continues an interrupted job, as with `run`.
    """
    run_job(open_job(JobOptions("score", **given(options, JobOptions)), options), options)


@main.command(
    epilog="""\b
Example:
  transferry merge test.de.1.jsonl test.de.2.jsonl test.de.3.jsonl -o test.de.jsonl
"""
)
@click.argument("parts", metavar="PART...", nargs=-1, required=True, type=FILE)
@option("-o", "--out", type=MERGED, required=True, help="Output of all partitions; - is stdout.")
@FORCE
@AS_JSON
@QUIET
def merge(parts: tuple[Path, ...], out: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Join the outputs of `run --partition` from several machines.

    Every partition must be given once, in any order, complete, unchanged and of the same job: OUT
    then equals the output of one machine. Each PART needs its PART.summary.json beside it.
    """
    from transferry.runtime.jobs.merge import merge as join

    require_one_stream(out, as_json=as_json)
    show_summary(out, join(parts, out, force=force), quiet=quiet, as_json=as_json)


@main.command(
    epilog="""\b
Example:
  transferry inspect bundles/ende
"""
)
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@TRUSTED_KEY
@option("--json", "as_json", is_flag=True, help="Print the manifest and certificates as JSON.")
def inspect(bundle_folder: Path, trusted_key: Path | None, as_json: bool) -> None:
    """Show the contents of BUNDLE, after checking the hash of every file."""
    from transferry.runtime.bundle import Bundle
    from transferry.runtime.parity.certificate import describe
    from transferry.runtime.parity.signature import load_public_key
    from transferry.runtime.tables import table

    bundle = Bundle.load(bundle_folder)
    rows = describe(bundle, load_public_key(trusted_key) if trusted_key else None)
    if as_json:
        record = json.loads(bundle.manifest.to_json())
        record["certificates"] = [dict(zip(CERTIFICATE, row, strict=True)) for row in rows]
        show(json.dumps(record, indent=1))
        return
    show(bundle.manifest.to_text())
    certificates = table(CERTIFICATE, rows) if rows else "no certificate; see verify --certify"
    show(f"\n{certificates}")


@main.command(
    epilog="""\b
Example:
  transferry doctor
"""
)
@option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(as_json: bool) -> None:
    """Test every provider with a small computation and suggest fixes."""
    from transferry.runtime.doctor import diagnose
    from transferry.runtime.tables import table

    checks = diagnose()
    if as_json:
        show(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        rows = [(check.name, check.status, check.found) for check in checks]
        show(table(("check", "status", "found"), rows))
        for check in checks:
            if check.remedy:
                show(f"to fix {check.name}: {check.remedy}")
    if faults := [check.name for check in checks if check.status == "fault"]:
        raise ProviderError(f"not working: {', '.join(faults)}")
