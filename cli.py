"""The command line. Each command imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource as Origin

from transferry.build_model.config import PRESETS, ModelConfig, TrainConfig
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.errors import (
    BadRowsError,
    InputError,
    ParityError,
    ProviderError,
    TransferryError,
    UsageError,
)
from transferry.runtime.jobs.options import JobOptions, RayOptions
from transferry.runtime.settings import field_helps

if TYPE_CHECKING:
    from transferry.runtime.engine.engine import Engine
    from transferry.runtime.jobs.job import Job, Summary
    from transferry.runtime.ort.session import SessionOptions
    from transferry.runtime.parity.report import ParityReport

Command = TypeVar("Command", bound=Callable[..., Any])

EPILOG = """\b
Exit codes: 0 done, 2 wrong usage, 3 bad input, checkpoint or bundle, 4 parity failed,
5 the provider asked for cannot run, 6 finished, but some rows hold an error, 130 interrupted.
"""
FILE = click.Path(path_type=Path)
# Of GenerationOptions what holds ids: the first is said as text, the other by the bundle.
TOKENS = ("prefix", "suppress")
CERTIFICATE = ("date", "against", "cell", "rows", "worth")
# Of JobOptions what a command says in its own way.
OWN = ("task", "generation", "target")
NOT_OF_SCORE = (*OWN, "prefix", "pooling", "normalise", "mask", "top", "canary")
# Between two lines where there is no terminal, and between two looks of a bar, in seconds.
LOG_EVERY, SHOW_EVERY = 30.0, 0.2


class Failure(click.ClickException):
    """A message for stderr and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class


class Commands(click.Group):
    """Turns what goes wrong into a message and an exit code, in this one place."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Keeps what was said, for whoever has to say it again."""
        context.meta[__name__] = shlex.join(["transferry", *arguments])
        return super().parse_args(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        """Runs the command."""
        # A scheduler's SIGTERM ends as Ctrl-C does: temporary files go, and 130 comes back.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().invoke(context)
        except TransferryError as error:
            raise Failure(str(error), error.exit_code) from error
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "transferry":
                raise
            message = f"{context.invoked_subcommand} needs {error.name}, which is not installed"
            remedy = 'pip install "transferry[export]"'
            raise Failure(f"{message}; {remedy}", UsageError.exit_code) from error
        except KeyboardInterrupt as error:
            click.echo(f"interrupted{': ' if error.args else ''}{error}", err=True)
            context.exit(130)


def configurable(command: Command) -> Command:
    """Adds --config: settings from a TOML file, below what the command line says."""

    def read(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        from transferry.runtime.settings import read_settings

        try:
            values = read_settings(path)
        except InputError as error:
            raise click.BadParameter(str(error)) from error
        # As the user writes them: --json is the parameter as_json.
        known = {
            str(option.name).removeprefix("as_"): option.name for option in context.command.params
        }
        if unknown := sorted(values.keys() - known.keys()):
            raise click.BadParameter(
                f"{path} sets {', '.join(unknown)}, which {context.info_name} does not have"
            )
        context.default_map = {known[name]: value for name, value in values.items()}

    return click.option(
        "--config",
        type=FILE,
        callback=read,
        is_eager=True,
        expose_value=False,
        help="Settings from a TOML file, such as max-length = 100; the command line wins.",
    )(command)


def fields_as_options(
    config: type[Any], *, leave_out: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Adds an option for each field of a dataclass, its help taken from the docstring."""
    hints, helps = get_type_hints(config), field_helps(config)
    # What has no default of its own to be told from: --no-... is for those of a bundle.
    by_bundle = config is GenerationOptions
    by_preset = {name for preset in PRESETS.values() for name in preset.model | preset.train}

    def add(command: Command) -> Command:
        for field in reversed(dataclasses.fields(config)):
            if field.name in leave_out:
                continue
            hint = hints[field.name]
            if NoneType in get_args(hint):
                (hint,) = (item for item in get_args(hint) if item is not NoneType)
            flag = f"--{field.name.replace('_', '-')}"
            kind: Any = click.Choice(get_args(hint)) if get_origin(hint) is Literal else hint
            text = helps[field.name]
            if field.name in by_preset:
                text = f"{text} The preset's by default."
            elif field.default is not False and field.default not in (None, ""):
                text = f"{text} Default {field.default}."
            if hint is bool:
                either = field.default or field.name in by_preset or by_bundle
                name = f"{flag}/--no-{flag[2:]}" if either else flag
                command = click.option(name, is_flag=True, default=None, help=text)(command)
            else:
                command = click.option(flag, type=kind, default=None, help=text)(command)
        return command

    return add


def given(
    values: dict[str, Any], config: type[Any], *, leave_out: Sequence[str] = ()
) -> dict[str, Any]:
    """The values that were set of those that `fields_as_options` asks for."""
    names = {field.name for field in dataclasses.fields(config)} - set(leave_out)
    return {name: value for name, value in values.items() if name in names and value is not None}


def say(line: str) -> None:
    """Tells a person something; stdout is for data."""
    click.echo(line, err=True)


@click.group(cls=Commands, epilog=EPILOG, context_settings={"max_content_width": 100})
@click.version_option(package_name="transferry")
def main() -> None:
    """Carry a trained Transformer from PyTorch to ONNX Runtime, and prove that nothing was lost."""


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
@click.option("--source", type=FILE, help="Training sentences, a line each, plain or gzip.")
@click.option("--target", type=FILE, help="Their translations, line by line.")
@click.option("--pairs", type=FILE, help="Both in one .tsv or .jsonl file instead.")
@click.option("--text", type=FILE, help="Plain text, for a decoder-only or encoder-only model.")
@click.option("--builtin", is_flag=True, help="Train on the built-in corpus instead.")
@click.option("--valid-source", type=FILE, help="Validation sentences.")
@click.option("--valid-target", type=FILE, help="Their translations.")
@click.option("--valid-pairs", type=FILE, help="Both in one .tsv or .jsonl file instead.")
@click.option(
    "--valid-text", type=FILE, help="Validation text; the last tenth of --text if left out."
)
@click.option("--skip-bad", is_flag=True, help="Drop and count bad pairs instead of stopping.")
@click.option("--preset", type=click.Choice(list(PRESETS)), default="small", show_default=True)
@click.option("--vocabulary-size", type=int, help="Ids to train; the preset's by default.")
@click.option("--encoding", help="Cut cl100k_base or o200k_base to the corpus instead.")
@click.option("--out", type=FILE, required=True, help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Continue the run in --out where it was saved.")
@click.option("--force", is_flag=True, help="Replace the run in --out.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option("--quiet", is_flag=True, help="No progress.")
@fields_as_options(TrainConfig)
@fields_as_options(ModelConfig, leave_out=["vocabulary_size"])
@click.pass_context
def train(context: click.Context, /, **options: Any) -> None:
    """Train a Transformer on pairs of text, or on text.

    Shape and settings start from --preset; each can be changed by an option below. The run's
    folder holds the weights, the tokenizer, metrics.jsonl, curves.png and settings.toml.
    """
    from transferry.build_model import run_folder
    from transferry.build_model.checkpoint import STATE
    from transferry.build_model.distributed import leader
    from transferry.build_model.recipe import Recipe

    out, resume, quiet = options["out"], options["resume"], options["quiet"]
    if resume:
        said = {
            name: value
            for name, value in options.items()
            if context.get_parameter_source(name) in (Origin.COMMANDLINE, Origin.DEFAULT_MAP)
        }
        options = run_folder.recall(out, options, said)
    recipe = Recipe.from_options(options)
    if leader() and not resume:
        run_folder.make_folder(out, force=options["force"])
    try:
        if leader():
            run_folder.remember(out, options)
        marks = recipe.follow(
            out,
            device=options["device"],
            resume=resume,
            quiet=quiet,
            say=say if leader() and not quiet else lambda line: None,
        )
    except (TransferryError, KeyboardInterrupt) as error:
        if (out / STATE).exists():
            if isinstance(error, KeyboardInterrupt):
                command = f"transferry train --out {shlex.quote(str(out))} --resume"
                raise KeyboardInterrupt(f"continue with: {command}") from error
        elif leader() and not resume:
            # Nothing to continue, so nothing that a second attempt would have to replace.
            shutil.rmtree(out, ignore_errors=True)
        raise
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
@click.option("--out", type=FILE, required=True, help="Folder of the run.")
@click.option("--force", is_flag=True, help="Replace the run in --out.")
@click.option("--quiet", is_flag=True, help="Do not tell what was imported and what left out.")
def import_(huggingface: Path, out: Path, force: bool, quiet: bool) -> None:
    """Import a checkpoint of Hugging Face's transformers from FOLDER as a run.

    FOLDER holds config.json, model.safetensors and the tokenizer; its model_type is marian, gpt2,
    llama or bert. What cannot be carried over is refused by name: see docs/import.md.
    """
    from transferry.build_model.huggingface.importer import import_checkpoint

    import_checkpoint(huggingface, out, force=force, say=(lambda line: None) if quiet else say)


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
@click.option("--out", type=FILE, required=True, help="Folder of the bundle.")
@click.option("--force", is_flag=True, help="Replace the bundle in --out.")
@click.option(
    "--text",
    type=FILE,
    help="Sentences for the recorded reference answers; "
    "by default those that the run kept of its validation set.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    default=("cpu-fp32",),
    show_default=True,
    help="A variant beside the portable one, or portable for that alone: cpu-fp32, cpu-int8, "
    "cuda-fp16 or cuda-bf16; may be given several times.",
)
@click.option(
    "--calibrate", type=FILE, help="Text like that to come, for the ranges that cpu-int8 rounds to."
)
@click.option("--quiet", is_flag=True, help="No progress.")
def export(
    run_folder: Path,
    out: Path,
    force: bool,
    text: Path | None,
    variants: tuple[str, ...],
    calibrate: Path | None,
    quiet: bool,
) -> None:
    """Export a trained RUN as a bundle: graphs, weights, tokenizer and reference answers.

    The bundle is verified before it appears: a graph that does not answer as torch does leaves
    nothing behind, and the exit code is 4.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists already; add --force to replace it, or name another folder")
    from transferry.build_model.checkpoint import load_checkpoint, load_samples
    from transferry.export.bundle import export_bundle
    from transferry.runtime.files import read_lines

    checkpoint = load_checkpoint(run_folder)
    texts = list(read_lines(text)) if text is not None else load_samples(run_folder)
    bundle = export_bundle(
        checkpoint,
        out,
        texts=texts,
        variants=variants,
        calibrate=list(read_lines(calibrate)) if calibrate is not None else (),
        force=force,
        say=(lambda line: None) if quiet else say,
    )
    size = sum(record.size for record in bundle.manifest.files.values())
    say(f"{out}: {len(bundle.manifest.files) + 1} files, {size / 1e6:.1f} MB, verified")


def together(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of --help."""

    def add(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


# How a bundle is opened.
session_options = together(
    click.option(
        "--provider",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        show_default=True,
        help="Where to run; where it cannot, the exit code is 5.",
    ),
    click.option("--variant", help="By default the fastest that was verified."),
    click.option("--threads", type=int, default=1, show_default=True, help="Threads a replica."),
    click.option(
        "--optimisation",
        type=click.Choice(["disable", "basic", "extended", "all"]),
        default="all",
        show_default=True,
        help="How far onnxruntime may rewrite the graphs; part of what is verified.",
    ),
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="The summary as JSON on stdout.")
QUIET = click.option("--quiet", is_flag=True, help="No progress and no summary.")
# What a job is run with, besides its own options.
job_options = together(
    configurable,
    click.argument("bundle_folder", metavar="BUNDLE", type=FILE),
    click.argument("text", metavar="INPUT", type=FILE),
    click.option("-o", "--out", type=FILE, default=Path("-"), help="Answers; - is stdout."),
    session_options,
    click.option(
        "--device",
        default="0",
        show_default=True,
        help="Which GPUs, such as 0,1; all share the work.",
    ),
    click.option(
        "--replicas", type=int, help="Batches in progress a device; one a core by default."
    ),
    click.option(
        "--batch-rows",
        type=int,
        help="Rows stepped together, a beam of 4 being 4; by default what suits the variant.",
    ),
    click.option(
        "--require-certificate",
        is_flag=True,
        help="Refuse, with exit code 4, what was not verified for this way of computing.",
    ),
    fields_as_options(RayOptions),
    AS_JSON,
    QUIET,
)


def _session(options: dict[str, Any]) -> SessionOptions:
    from transferry.runtime.ort.session import SessionOptions

    names = ("provider", "threads", "device_id", "optimisation")
    return SessionOptions(**{name: options[name] for name in names})


def _devices(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in str(text).split(","))
    except ValueError as error:
        raise UsageError(
            f"--device must be numbers of GPUs, such as 0 or 0,1, found {text!r}"
        ) from error


@main.command(
    epilog="""\b
Example:
  transferry verify bundles/ende --checkpoint runs/ende --text test.en.gz --certify 2026-11-21
  transferry verify bundles/ende --variant portable --checkpoint runs/ende --self-test
  transferry verify bundles/ende --json        # on a host without torch
"""
)
@configurable
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@click.option("--checkpoint", type=FILE, help="The run it came from: compares with torch.")
@click.option(
    "--text",
    type=FILE,
    help="Sentences to answer with both, a line each; "
    "by default those that the run kept of its validation set.",
)
@click.option("--target", type=FILE, help="Their right answers, for BLEU and perplexity.")
@session_options
@click.option("--device-id", type=int, default=0, help="Which GPU.")
@click.option("--self-test", is_flag=True, help="Plant faults in copies: is each one caught?")
@click.option("--opinions", is_flag=True, help="Ask other runtimes too: graph or runtime wrong?")
@click.option(
    "--replay", type=FILE, help="Where to save what shows a fault; BUNDLE.fault.npz by default."
)
@click.option("--certify", metavar="DATE", help="Write a certificate of this date, YYYY-MM-DD.")
@click.option("--report", "page", type=FILE, help="The report as one HTML file.")
@click.option("--junit", type=FILE, help="The report as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="The whole report as JSON on stdout.")
@click.option("--quiet", is_flag=True, help="No progress.")
def verify(bundle_folder: Path, **options: Any) -> None:
    """Prove that BUNDLE answers as torch does, or exit with 4.

    With --checkpoint, torch and ONNX Runtime run the same inputs: encoder, first step and later
    steps over a sweep of sizes, and on --text greedy search, beam search, sampling and given
    answers. Without it, the bundle is held against the answers that were recorded at export, and
    torch is not needed. Where a tensor is wrong, the torch module is named in which it begins.
    """
    checkpoint, text = options["checkpoint"], options["text"]
    for name in ("text", "target", "self_test", "opinions", "replay"):
        if options[name] and checkpoint is None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} needs --checkpoint: without torch only the record counts")
    if options["target"] and text is None:
        raise UsageError("--target needs --text: the sentences that it answers")
    for path in filter(None, (options["page"], options["junit"])):
        if not path.absolute().parent.is_dir():  # known now rather than after the work
            raise InputError(f"{path}: cannot be written: there is no such folder; name another")
    from transferry.runtime.bundle import Bundle
    from transferry.runtime.files import atomic_file, read_lines
    from transferry.runtime.ort.open_model import open_model
    from transferry.runtime.parity.certificate import certify, check_date, fastest

    if options["certify"]:
        check_date(options["certify"])
    bundle, session = Bundle.load(bundle_folder), _session(options)
    variant = fastest(bundle, session)
    if options["variant"]:
        variant = bundle.variant(options["variant"])
    report: ParityReport
    if checkpoint is None:
        from transferry.runtime.parity.recorded import verify_recorded

        report = verify_recorded(bundle, open_model(bundle, variant, session))
    else:
        from transferry.build_model.checkpoint import load_checkpoint, load_samples
        from transferry.export.parity.cases import fitting
        from transferry.export.verify import verify_against

        trained = load_checkpoint(checkpoint)
        kept = fitting(load_samples(checkpoint), trained.tokenizer, trained.model.config)
        with _progress("verifying", options["quiet"]) as done:
            report = verify_against(
                trained,
                bundle,
                variant,
                session,
                list(read_lines(text)) if text else kept,
                done,
                targets=list(read_lines(options["target"])) if options["target"] else None,
                opinions=options["opinions"],
                plant_faults=options["self_test"],
                replay=options["replay"] or Path(f"{bundle_folder.absolute()}.fault.npz"),
            )
    certificate = None
    if options["certify"]:
        certificate = certify(bundle, variant, session, report, options["certify"])
    # All of it before the verdict: a verification that failed is the one to be looked at.
    click.echo(json.dumps(report.to_dict(), indent=1) if options["as_json"] else report.to_text())
    if options["junit"]:
        from transferry.runtime.parity.junit import to_junit

        with atomic_file(options["junit"]) as file:
            file.write(to_junit(report).encode())
    if options["page"]:
        from transferry.export.report.page import render_page

        record = {**report.to_dict(), "date": options["certify"]}
        record["certificate"] = certificate and certificate.summary()
        with atomic_file(options["page"]) as file:
            file.write(render_page(record).encode())
    report.require()
    if certificate is not None:
        say(f"certificate of {certificate.date} for {certificate.cell}, in {bundle_folder}")


@main.command(
    epilog="""\b
Example:
  transferry replay bundles/ende.fault.npz
"""
)
@click.argument("fault", metavar="FILE", type=FILE)
def replay(fault: Path) -> None:
    """Run once more the operators at which `verify` found a fault to begin, on the same input.

    They run as they were served, and on onnx's own evaluator: which of the two is wrong? The exit
    code is 4 as long as what is served is.
    """
    from transferry.export.debug.replay import replay as run_again

    result = run_again(fault)
    click.echo(result.to_text())
    if not result.passed:
        raise ParityError(f"{fault} still shows the fault")


@contextlib.contextmanager
def _progress(label: str, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on stderr that is told how many of how many are done; silent where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    bar: Any
    with click.progressbar(
        length=1, label=label, file=sys.stderr, item_show_func=lambda item: str(item or "")
    ) as bar:

        def show(done: int, total: int, note: str = "") -> None:
            bar.length = total
            bar.update(done - bar.pos, note)

        yield show


@contextlib.contextmanager
def _watching(job: Job, quiet: bool) -> Iterator[Callable[[Summary], None]]:
    """A bar on stderr, or a line now and then where that is no terminal; silent if wanted."""
    bar = sys.stderr.isatty() and str(job.source.path) != "-" and not quiet
    every, total, shown = (SHOW_EVERY if bar else LOG_EVERY), bar and job.count(), time.monotonic()
    with _progress("running", not bar) as show:

        def watch(summary: Summary) -> None:
            nonlocal shown
            if time.monotonic() - shown < every and summary.rows != total:
                return
            shown = time.monotonic()
            if bar:
                show(summary.rows, total, summary)
            elif not quiet:
                say(str(summary))

        yield watch


@main.command(
    epilog="""\b
Example:
  transferry run bundles/ende test.en.gz -o test.de.jsonl --beam 4
  transferry run bundles/ende rows.parquet --column en -o rows.de.parquet
  cat test.en | transferry run bundles/ende - -o - > test.de
"""
)
@job_options
@click.option(
    "--task",
    type=click.Choice(["generate", "embed", "fill-mask"]),
    default="generate",
    show_default=True,
    help="embed and fill-mask are an encoder-only bundle's.",
)
@fields_as_options(JobOptions, leave_out=OWN)
@fields_as_options(GenerationOptions, leave_out=TOKENS)
def run(**options: Any) -> None:
    """Answer every row of INPUT with BUNDLE, in order; - is stdin.

    What is finished is saved in OUT.job, so the same command again goes on where it was stopped,
    and ends with the same bytes. A row that cannot be answered (empty, longer than the model's
    positions) becomes an error on its own row, and the exit code is 6 once all others are
    answered. OUT.summary.json tells what was done, OUT.settings.toml how to do it again.
    """
    chosen = given(options, GenerationOptions, leave_out=TOKENS)
    GenerationOptions(**chosen)  # refuse a conflict before the bundle is opened
    common = given(options, JobOptions, leave_out=OWN)
    _do(JobOptions(options["task"], chosen, **common), options)


@main.command(
    epilog="""\b
Example:
  transferry score bundles/ende test.en.gz --target test.de.gz -o scores.jsonl
  transferry score bundles/book text.txt
"""
)
@job_options
@click.option("--target", type=FILE, help="The other side of the pairs, of an encoder-decoder.")
@fields_as_options(JobOptions, leave_out=NOT_OF_SCORE)
def score(**options: Any) -> None:
    """Tell how likely BUNDLE finds each row of INPUT, or each pair, without generating.

    A row has the log-probability of each token after those before it, and their total, in nats.
    The perplexity of the whole file comes last on stderr, and into OUT.summary.json. It goes on
    after an interruption as `run` does.
    """
    common = given(options, JobOptions, leave_out=NOT_OF_SCORE)
    _do(JobOptions("score", target=options["target"], **common), options)


def _do(chosen: JobOptions, options: dict[str, Any]) -> None:
    """Runs a job, and tells a person how it went."""
    from transferry.runtime.jobs.job import Job

    out, quiet, as_json = (options[name] for name in ("out", "quiet", "as_json"))
    if as_json and str(out) == "-":
        raise UsageError("--json and the answers cannot both go to standard output; add --out")
    fleet = RayOptions(**given(options, RayOptions))
    load = _loader(options)
    if fleet.engine == "ray":
        from transferry.runtime.jobs.ray_job import RayJob

        job: Job = RayJob(load, options["text"], out, chosen, fleet)
    else:
        job = Job(load(), options["text"], out, chosen)
    if not job.certificate.startswith("none") and not quiet:
        say(f"certificate {job.certificate}")
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name not in ("quiet", "force", "as_json")
    }
    try:
        with _watching(job, quiet) as watch:
            summary = job.run(watch, say=(lambda line: None) if quiet else say, settings=settings)
    except KeyboardInterrupt as error:
        command = click.get_current_context().meta[__name__]
        again = (f"{error}; continue with: {command}",) if error.args else ()
        raise KeyboardInterrupt(*again) from error
    _finish(out, summary, quiet=quiet, as_json=as_json)


def _finish(out: Path, summary: Summary, *, quiet: bool, as_json: bool) -> None:
    if not quiet:
        say(f"{out} was finished before: {summary}" if summary.finished_before else str(summary))
        if marks := summary.marks():
            say(", ".join(f"{name} {value}" for name, value in marks.items()))
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=1))
    if summary.bad_rows:
        raise BadRowsError(
            f"{summary.bad_rows} of {summary.rows} rows could not be answered and hold an error "
            f"instead, the first of them: {summary.first_error}"
        )


@main.command(
    epilog="""\b
Example:
  transferry merge test.de.1.jsonl test.de.2.jsonl test.de.3.jsonl -o test.de.jsonl
"""
)
@click.argument("parts", metavar="PART...", nargs=-1, required=True, type=FILE)
@click.option("-o", "--out", type=FILE, required=True, help="The answers of all shards.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@AS_JSON
@QUIET
def merge(parts: tuple[Path, ...], out: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Join what `run --shard` wrote on several machines, in any order given.

    Every shard must be there once, whole and unchanged, and of the same job: OUT is then what one
    machine would have written. Each PART needs its PART.summary.json beside it.
    """
    from transferry.runtime.jobs.merge import merge as join

    _finish(out, join(parts, out, force=force), quiet=quiet, as_json=as_json)


def _loader(options: dict[str, Any]) -> Callable[[], Engine]:
    """Opens the bundle, here or where a worker is."""
    from transferry.runtime.decoding.batching import BatchOptions
    from transferry.runtime.engine.engine import Engine

    rows = options["batch_rows"]
    by_ray = options["engine"] == "ray"
    return partial(
        Engine.load,
        options["bundle_folder"].absolute() if by_ray else options["bundle_folder"],
        provider=options["provider"],
        variant=options["variant"],
        threads=options["threads"],
        replicas=1 if by_ray and options["replicas"] is None else options["replicas"],
        device_ids=_devices(options["device"]),
        optimisation=options["optimisation"],
        batches=BatchOptions(rows=rows, tokens=rows << 7) if rows is not None else None,
        require_certificate=options["require_certificate"],
    )


@main.command(
    epilog="""\b
Example:
  transferry inspect bundles/ende
"""
)
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="The manifest, and the certificates.")
def inspect(bundle_folder: Path, as_json: bool) -> None:
    """Show what is in BUNDLE, after checking every file's hash."""
    from transferry.runtime.bundle import Bundle
    from transferry.runtime.parity.certificate import describe
    from transferry.runtime.tables import table

    bundle = Bundle.load(bundle_folder)
    rows = describe(bundle)
    if as_json:
        record = json.loads(bundle.manifest.to_json())
        record["certificates"] = [dict(zip(CERTIFICATE, row, strict=True)) for row in rows]
        click.echo(json.dumps(record, indent=1, ensure_ascii=False))
        return
    click.echo(bundle.manifest.to_text())
    certificates = table(CERTIFICATE, rows) if rows else "no certificate; see verify --certify"
    click.echo(f"\n{certificates}")


@main.command(
    epilog="""\b
Example:
  transferry doctor
"""
)
@click.option("--json", "as_json", is_flag=True, help="The checks as JSON.")
def doctor(as_json: bool) -> None:
    """Run a real product on every provider, and say in one line how to mend each fault."""
    from transferry.runtime.doctor import diagnose
    from transferry.runtime.tables import table

    checks = diagnose()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        rows = [(check.name, check.status, check.found) for check in checks]
        click.echo(table(("check", "status", "found"), rows))
        for check in checks:
            if check.remedy:
                click.echo(f"to mend {check.name}: {check.remedy}")
    if faults := [check.name for check in checks if check.status == "fault"]:
        raise ProviderError(f"not working: {', '.join(faults)}")


if __name__ == "__main__":
    main()
