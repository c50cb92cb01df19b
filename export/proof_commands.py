"""The commands that prove graphs: verify, report and audit.

Each imports what it needs when it runs, so that --help is instant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from transferry.runtime.console.fields import fields_as_options, given, together
from transferry.runtime.console.group import FilePath, command
from transferry.runtime.console.progress import progress, say, show, show_verdict
from transferry.runtime.console.shared_options import (
    BUNDLE_DEFAULTS,
    FILE,
    MACHINE,
    SEARCH,
    TOKENS,
    batch_options,
    configurable,
    optimisation_option,
    option,
    provider_option,
    require_option,
    session_options,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.tasks.generate import token_or_text
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.io.atomic import require_writable
from transferry.runtime.io.outputs import foreign_junit, foreign_page
from transferry.runtime.precision import PRECISIONS

if TYPE_CHECKING:
    from transferry.runtime.proof.report import ParityReport

PAGE = FilePath("", foreign=foreign_page)
JUNIT = FilePath("", foreign=foreign_junit)
REPORT = "Report"
CERTIFICATE, COMPARISON = "Certificate", "Comparison"
# A search that is verified; stop strings choose no token, and its texts are lines.
VERIFIED = (*TOKENS, "stop", "split_lines")


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses an output file in a missing folder with InputError, before any work is done."""
    if path is not None:
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path}: cannot be written: there is no such folder; name another")
        require_writable(path)
    return path


def page_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses a page that cannot be made or written before any work is done.

    Raises ModuleNotFoundError where a package that pages need is not installed.
    """
    if path is not None:
        import_module("transferry.export.report.page")
    return writable(context, parameter, path)


# The pages of a verification.
report_options = together(
    option(
        *("--report", "page"),
        panel=REPORT,
        type=PAGE,
        callback=page_file,
        help="Write the report as an HTML file.",
    ),
    option(
        "--junit",
        panel=REPORT,
        type=JUNIT,
        callback=writable,
        help="Write the report as JUnit XML.",
    ),
    option(
        *("--json", "as_json"),
        panel=REPORT,
        is_flag=True,
        help="Print the whole report as JSON on stdout.",
    ),
    option("--verbose", is_flag=True, help="Print the time of each check on stderr."),
)


def show_report(report: ParityReport, *, as_json: bool, verbose: bool) -> None:
    """Prints a report, as text or as JSON; with `verbose` the time of each check too."""
    from transferry.runtime.proof.views import report_text, times_text

    if verbose and report.times:
        say(times_text(report))
    if as_json:
        show(json.dumps(report.to_dict(), indent=1))
    else:
        show_verdict(report_text(report))


def require_passed(report: ParityReport, *, as_json: bool) -> None:
    """Raises ParityError for a report that failed; its text has already shown the faults."""
    if not report.passed and not as_json:
        raise ParityError(f"{report.bundle} {report.verdict}")
    report.require()


search_options = together(
    option(
        "--suppress",
        panel=SEARCH,
        multiple=True,
        help="Text that the search never outputs, as for `run`; a number is a token id.",
    ),
    fields_as_options(
        GenerationOptions, leave_out=VERIFIED, defaults=BUNDLE_DEFAULTS, panel=SEARCH
    ),
)
certify_options = together(
    option(
        "--certify",
        panel=CERTIFICATE,
        metavar="[DATE]",
        is_flag=False,
        flag_value="today",
        help="Write a certificate with this date, YYYY-MM-DD. Default date: today's.",
    ),
    option(
        "--sign",
        panel=CERTIFICATE,
        metavar="KEY",
        type=FILE,
        help="Sign the certificate with this private key (PEM, Ed25519 or ECDSA P-256; "
        "passphrase in TRANSFERRY_KEY_PASSPHRASE).",
    ),
    option(
        "--batch-rows",
        panel=CERTIFICATE,
        type=click.IntRange(1, 65_536),
        help="Rows per batch; a certificate covers no more. Default: by variant.",
    ),
    option(
        "--force",
        panel=CERTIFICATE,
        is_flag=True,
        help="Overwrite a stronger certificate, or certify fewer than 30 rows.",
    ),
)
_compared = partial(option, panel=COMPARISON)


def given_search(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that `search_options` gave; raises UsageError if they conflict."""
    search = given(options, GenerationOptions, leave_out=VERIFIED)
    GenerationOptions(**search)
    texts = tuple(map(token_or_text, options["suppress"]))
    return search | ({"suppress": texts} if texts else {})


@command(
    epilog="""\b
Examples:
  transferry verify bundles/ende --checkpoint runs/ende --text a.en --certify
  transferry verify bundles/ende --checkpoint runs/ende --self-test
  transferry verify bundles/ende --json        # on a host without torch
"""
)
@configurable
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@_compared(
    "--checkpoint",
    type=FILE,
    help="Source of BUNDLE, to compare with its torch model, as for `export`.",
)
@_compared(
    "--text",
    type=FILE,
    help="Sentences, one per line. Default: the checkpoint's validation samples.",
)
@_compared(
    "--target",
    type=FILE,
    help="Translations of --text, for BLEU; of an embedder, the lines that --text looks for.",
)
@_compared("--self-test", is_flag=True, help="Plant faults in copies; each must be caught.")
@_compared(
    "--cross-check",
    is_flag=True,
    help="Also run other runtimes, to tell a graph bug from a runtime bug.",
)
@session_options
@option(
    "--device",
    "device_id",
    panel=MACHINE,
    type=click.IntRange(0, 1024),
    default=0,
    help="Number of the GPU.",
)
@certify_options
@report_options
@option("--quiet", is_flag=True, help="Print no progress.")
@search_options
def verify(bundle_folder: Path, **options: Any) -> None:
    """Prove that BUNDLE answers as torch does, or exit with 4.

    With --checkpoint, torch and ONNX Runtime compute the same inputs: every tensor over a sweep of
    sizes, and on --text teacher-forced answers, greedy search, beam search, sampling, and the
    search that you describe with --beam and the other search options. Without --checkpoint, the
    bundle is compared with the answers recorded at export, without torch. If a tensor is wrong, the
    report names the torch module in which the fault begins.
    """
    checkpoint, text, target = (options[name] for name in ("checkpoint", "text", "target"))
    date, force = options["certify"], options["force"]
    search = given_search(options)
    of_torch = ("text", "target", "self_test", "cross_check", "batch_rows", *search)
    reason = "without torch only the recorded answers are compared"
    require_option(options, "checkpoint", for_options=of_torch, reason=reason)
    require_option(options, "text", for_options=["target"], reason="it belongs to the text")
    require_option(options, "certify", for_options=["sign"], reason="it signs the certificate")
    from transferry.build_model.checkpoint_folder import is_pretrained
    from transferry.export.report.write import write_report
    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.io.folders import names_function
    from transferry.runtime.io.lines import some_lines
    from transferry.runtime.ort.open_model import open_model
    from transferry.runtime.ort.session import SessionOptions
    from transferry.runtime.proof.certificates import stored as certificates
    from transferry.runtime.proof.certificates.certificate import check_date
    from transferry.runtime.proof.certificates.signature import load_private_key
    from transferry.runtime.proof.certificates.standing import fastest
    from transferry.runtime.proof.certificates.strength import STRENGTHS

    own = checkpoint and names_function(str(checkpoint))
    imports = checkpoint and is_pretrained(checkpoint)  # or it is refused, before torch is loaded
    if own and options["self_test"]:
        raise UsageError(
            f"--self-test knows the weights of the reference alone, not those of {checkpoint}; "
            "plant faults in its graphs with audit --plant"
        )
    texts, targets = (some_lines(path) if path else None for path in (text, target))
    if date:
        date = check_date(date)
    key = load_private_key(options["sign"]) if options["sign"] else None
    bundle, session = Bundle.load(bundle_folder), SessionOptions(**given(options, SessionOptions))
    if date:
        require_writable(bundle_folder / "certificates")
    named = options["variant"]
    variant = bundle.variant(named) if named else fastest(bundle, session)
    # Before the work; a report may still turn out weaker.
    if date and not force:
        reached = STRENGTHS[-1 if checkpoint else 0]
        certificates.require_no_stronger(bundle, variant, session, reached, bool(key))
    if checkpoint is None:
        from transferry.runtime.proof.recorded import verify_recorded

        report = verify_recorded(bundle, open_model(bundle, variant, session))
    else:
        with progress(options["quiet"]) as show_phase:
            show_phase("loading torch and the checkpoint", 0, 1)
            from transferry.build_model.checkpoint import load_samples
            from transferry.export.oracle.cases import fitting
            from transferry.export.subject.reference import load_reference
            from transferry.export.trace.graph import Traces
            from transferry.export.verify import Request, verify_against

            trained = load_reference(checkpoint, tokenizer=bundle.tokenizer)
            samples = [] if imports or own else load_samples(checkpoint)
            if texts is None:
                texts = fitting(samples, trained.tokenizer, trained.model.config)
            if date and not force:
                certificates.require_rows(len(texts), certificates.distinct_rows(texts))
            report = verify_against(
                trained,
                bundle,
                open_model(bundle, variant, session),
                Request(
                    texts,
                    targets,
                    cross_check=options["cross_check"],
                    plant_faults=options["self_test"],
                    batches=batch_options(options["batch_rows"]),
                    search=search or None,
                ),
                traces=click.get_current_context().ensure_object(Traces),
                done=show_phase,
            )
    show_report(report, as_json=options["as_json"], verbose=options["verbose"])
    issued = (bundle, variant, session, report, date)
    certificate = certificates.certify(*issued, key=key, force=force) if date else None
    files = {"page": options["page"], "junit": options["junit"]}
    write_report(report, **files, date=date, certificate=certificate)
    require_passed(report, as_json=options["as_json"])
    if certificate is not None:
        say(f"{certificate}, in {bundle_folder}")


@command(
    epilog="""\b
Examples:
  transferry report fp32.json int8.json -o variants.html
  transferry report cpu.json cuda.json -o machines.html
"""
)
@click.argument("records", metavar="REPORT...", type=FILE, nargs=-1, required=True)
@option(
    *("-o", "--out", "--output", "output"),
    type=PAGE,
    required=True,
    callback=page_file,
    help="HTML file.",
)
def report(records: tuple[Path, ...], output: Path) -> None:
    """Write reports of `verify --json` as one HTML page, side by side.

    The reports may be of several variants of a bundle and of several machines. Exits with 4 if a
    report failed.
    """
    from transferry.export.report.write import write_page

    failed = write_page(records, output)
    say(f"{output}: {len(records)} {'report' if len(records) == 1 else 'reports'}")
    if failed:
        raise ParityError(f"failed: {', '.join(map(str, failed))}; {output} says why")


@command(
    epilog="""\b
Examples:
  transferry audit onnx/opus-en-de --reference opus-en-de --text test.en
  transferry audit onnx/gpt2 --reference gpt2 --text a.txt --plant --atol 1e-3
  transferry audit model.onnx --reference mymodel:audited --junit audit.xml
"""
)
@configurable
@click.argument("graphs", metavar="FOLDER", type=FILE)
@option(
    "--reference",
    required=True,
    metavar="FOLDER|MODULE:FUNCTION",
    help="Source of the graphs: a folder for `import`, a checkpoint, or a function that returns a "
    "torch module and its inputs.",
)
@option("--text", type=FILE, help="Texts, one per line.")
@option(
    "--names", type=FILE, help="TOML file that names the inputs and outputs of a single ONNX file."
)
@option(
    "--suffix",
    default="",
    help="Suffix of the graphs in a folder with several of each kind, such as _quantized.",
)
@option(
    "--precision",
    type=click.Choice([name for name, row in PRECISIONS.items() if row.foreign or not row.rounded]),
    help="Precision to judge the graphs by. Default: from operators and stored weights.",
)
@option(
    "--padding",
    "paddings",
    type=click.Choice(["left", "right"]),
    multiple=True,
    help="Padded side of batches; repeatable. Default: both if the reference can, else right.",
)
@option("--plant", is_flag=True, help="Plant faults in copies of the graphs; each must be caught.")
@option(
    "--atol",
    type=click.FloatRange(0, min_open=True, max=1e6),
    help="List the planted faults that pass this tolerance.",
)
@provider_option()
@option("--threads", type=click.IntRange(1, 1024), default=1, help="Threads of a session.")
@optimisation_option()
@report_options
@option("--quiet", is_flag=True, help="Print no progress.")
def audit(graphs: Path, reference: str, **options: Any) -> None:
    """Prove that graphs of another tool answer as torch does, or exit with 4.

    FOLDER is a folder of optimum or of onnxruntime-genai's builder, or one ONNX file. The audit
    compares tensors with torch in float64 over a sweep of sizes, tokens of greedy and beam search
    on --text, and each row with itself in padded batches. Sizes that do not run, outputs that
    differ from their declaration and runs that differ are faults too, as are other tokenizers,
    labels and generation settings beside the graphs than in --reference.
    """
    if options["atol"] is not None and not options["plant"]:
        raise UsageError("--atol has no effect without --plant")
    from transferry.export.audit import audit as audited
    from transferry.export.audit_function import FunctionGraph, audit_function, called
    from transferry.export.report.write import write_report
    from transferry.export.subject.beside import beside_graphs
    from transferry.export.subject.foreign import ForeignFolder
    from transferry.export.subject.layout import read_layout, read_whole
    from transferry.export.subject.reference import load_reference, named_function
    from transferry.runtime.io.lines import some_lines
    from transferry.runtime.ort.session import SessionOptions

    texts = some_lines(options["text"]) if options["text"] else []
    session = SessionOptions(**given(options, SessionOptions))
    planting: dict[str, Any] = {name: options[name] for name in ("plant", "atol")}
    with progress(options["quiet"]) as show_phase:
        if (function := named_function(reference)) is not None:
            for name in ("text", "names", "paddings", "suffix"):
                if options[name]:
                    raise UsageError(
                        f"--{name.removesuffix('s') if name == 'paddings' else name} has no "
                        f"effect with --reference {reference}, which gives the inputs; leave it out"
                    )
            whole = read_whole(graphs)
            precision = options["precision"] or whole.precision()
            graph = FunctionGraph(whole, session, *called(function, reference))
            report = audit_function(graphs, graph, precision, **planting, done=show_phase)
        else:
            layout = read_layout(graphs, options["names"], options["suffix"])
            trained = load_reference(Path(reference))
            beside = beside_graphs(graphs, Path(reference), texts)
            folder = ForeignFolder(layout, session, trained, options["paddings"], beside)
            planting["precision"] = options["precision"]
            report = audited(graphs, folder, texts, **planting, done=show_phase)
    show_report(report, as_json=options["as_json"], verbose=options["verbose"])
    files = {"page": options["page"], "junit": options["junit"]}
    write_report(report, **files, date=None, certificate=None)
    require_passed(report, as_json=options["as_json"])
