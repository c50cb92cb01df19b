"""The command line: all commands, and here those of a host that serves a bundle.

Each command imports what it needs when it runs, so that --help is instant.
"""

if __name__ == "__main__":  # signals are handled before the imports below
    import runpy

    runpy.run_module("transferry", run_name="__main__", alter_sys=True)

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from transferry.build_model.commands import import_, train
from transferry.export.distillation.distil_command import distil
from transferry.export.export_command import export
from transferry.export.proof_commands import audit, report, verify
from transferry.runtime.console.fields import fields_as_options, given
from transferry.runtime.console.group import Commands, version_option
from transferry.runtime.console.progress import run_job, say, show, show_summary
from transferry.runtime.console.shared_options import (
    AS_JSON,
    BUNDLE_DEFAULTS,
    FILE,
    FORCE,
    MERGED,
    OUTPUT,
    QUIET,
    ROWS,
    SEARCH,
    TOKENS,
    TRUSTED_KEYS,
    job_options,
    open_job,
    option,
    require_one_stream,
    task_options,
    tasks_by,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import InputError, ProviderError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.jobs.job_options import JobOptions

# Where each shell looks by itself, below the home folder; zsh only if its fpath names the folder.
COMPLETIONS = {
    "bash": ".local/share/bash-completion/completions/transferry",
    "zsh": ".zfunc/_transferry",
    "fish": ".config/fish/completions/transferry.fish",
}
CERTIFICATE = ("date", "against", "cell", "rows", "signature", "worth")


@click.group(
    cls=Commands,
    epilog="""\b
Exit codes: 0 done, 2 wrong usage, 3 bad input, checkpoint or bundle,
4 parity failed, 5 the provider cannot run, 6 done, but some rows hold an
error, 130 interrupted.
""",
)
@version_option
def main() -> None:
    """Carry a trained Transformer from PyTorch to ONNX Runtime, with proof of parity."""


for made in (train, distil, import_, export, verify, report, audit):
    main.add_command(made)


@main.command(
    epilog="""\b
Examples:
  transferry run bundles/ende test.en.gz -o test.de.jsonl --beam 4
  transferry run bundles/ende rows.parquet --column en -o rows.de.parquet
  cat test.en | transferry run bundles/ende - -o - > test.de
"""
)
@job_options
@option(
    "--task",
    panel=ROWS,
    type=click.Choice(tasks_by("run")),
    help="Task for each row. Default: by the bundle's head, else generate, embed if encoder-only.",
)
@task_options("run")
@fields_as_options(GenerationOptions, leave_out=TOKENS, defaults=BUNDLE_DEFAULTS, panel=SEARCH)
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
Examples:
  transferry score bundles/ende test.en.gz --target test.de.gz -o scores.jsonl
  transferry score bundles/book text.txt
"""
)
@job_options
@task_options("score")
def score(**options: Any) -> None:
    """Compute the log-probability of each row of INPUT, or of each pair.

    Nothing is generated. Each row gets the log-probability of every token given those before it,
    and their total, in nats. The perplexity of the whole file is printed last on stderr and
    written to OUT.summary.json. The same command continues an interrupted job, as with `run`.
    """
    run_job(open_job(JobOptions("score", **given(options, JobOptions)), options), options)


@main.command(
    epilog="""\b
Examples:
  transferry merge de.1.jsonl de.2.jsonl de.3.jsonl -o de.jsonl
  transferry merge embeddings.*.npy -o embeddings.npy
  transferry merge de.*.parquet -o s3://corpora/de.parquet
"""
)
@click.argument("parts", metavar="PART...", nargs=-1, required=True, type=FILE)
@option("-o", "--out", type=MERGED, required=True, help="Output of all partitions; - is stdout.")
@option("--keep-parts", is_flag=True, help="Leave a folder of the parts, with a manifest.")
@FORCE
@AS_JSON
@QUIET
def merge(
    parts: tuple[Path, ...], out: Any, keep_parts: bool, force: bool, as_json: bool, quiet: bool
) -> None:
    """Join the outputs of `run --partition` from several machines.

    Every partition must be given once, in any order, complete, unchanged and of the same job: OUT
    then equals the output of one machine. Each PART needs its PART.summary.json beside it. With
    --keep-parts, or a URL for OUT, OUT is a folder of the parts in order.
    """
    from transferry.runtime.jobs.merge import merge as join

    require_one_stream(out, as_json=as_json)
    show_summary(
        out, join(parts, out, force=force, keep_parts=keep_parts), quiet=quiet, as_json=as_json
    )


@main.command(
    epilog="""\b
Examples:
  transferry inspect bundles/ende
  transferry inspect bundles/ende --graphs
  transferry inspect bundles/ende --vectors
"""
)
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@TRUSTED_KEYS
@option("--graphs", is_flag=True, help="Show every file, and every tensor of every graph.")
@option("--json", "as_json", is_flag=True, help="Print the manifest and certificates as JSON.")
@option("--vectors", "as_vectors", is_flag=True, help="Print texts with ids, logits and answers.")
def inspect(
    bundle_folder: Path,
    trusted_key: tuple[Path, ...],
    require_signatures: int,
    graphs: bool,
    as_json: bool,
    as_vectors: bool,
) -> None:
    """Show the contents of BUNDLE, after checking the hash of every file."""
    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.proof.certificates.signature import Trust
    from transferry.runtime.proof.certificates.stored import describe
    from transferry.runtime.proof.recorded import vectors
    from transferry.runtime.tables import facts

    bundle = Bundle.load(bundle_folder)
    if as_vectors:
        for vector in vectors(bundle):
            show(json.dumps(vector))
        return
    rows = describe(bundle, Trust.load(trusted_key, require_signatures))
    if as_json:
        record = json.loads(bundle.manifest.to_json())
        record["certificates"] = [dict(zip(CERTIFICATE, row, strict=True)) for row in rows]
        show(json.dumps(record, indent=1))
        return
    show(bundle.manifest.to_text() if graphs else bundle.manifest.summary(bundle.extras))
    show("" if rows else "\nno certificate; see verify --certify")
    for date, against, cell, count, signature, worth in rows:
        told = f"{date} against {against}, {count} rows, {signature}: {worth}"
        stray = [("no certificate", f"{cell} {worth}")]
        show(facts([("certificate", told), ("", cell)] if date else stray))


@main.command(
    epilog="""\b
Examples:
  transferry sign bundles/ende --key mine.key
  transferry sign bundles/ende --key mine.key --trusted-key colleague.pub
"""
)
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@option("--key", required=True, type=FILE, help="Private key (PEM), as of verify --sign.")
@option("--variant", help="Sign the certificates of this variant alone. Default: all.")
@TRUSTED_KEYS
def sign(
    bundle_folder: Path,
    key: Path,
    variant: str | None,
    trusted_key: tuple[Path, ...],
    require_signatures: int,
) -> None:
    """Add a signature to the certificates of BUNDLE, beside those that they have.

    Neither torch nor the checkpoint is needed: every file is hashed and compared with the
    certificate. With --trusted-key, only certificates that those keys signed are countersigned.
    """
    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.proof.certificates.signature import Trust, load_private_key
    from transferry.runtime.proof.certificates.stored import sign as add_signature

    trusted = Trust.load(trusted_key, require_signatures)
    found = Bundle.load(bundle_folder)
    for each in add_signature(found, load_private_key(key), variant=variant, trusted=trusted):
        say(f"{each}, {each.rows()} rows, against {each.compared}: {each.holds()}")


@main.command(
    epilog="""\b
Examples:
  transferry page bundles/ende --out site
  transferry page bundles/ende --out site --title "To German" --no-webgpu
  transferry page bundles/ende --out site --variant portable-int8
"""
)
@click.argument("bundle_folder", metavar="BUNDLE", type=FILE)
@option("--out", type=OUTPUT, required=True, help="Folder of the site.")
@option("--title", default="", help="Heading of the page. Default: the name of BUNDLE.")
@option(
    "--variant",
    type=click.Choice(["portable", "portable-int8"]),
    default="portable",
    help="Graphs of the page; portable-int8 has a quarter of the size.",
)
@option(
    "--onnxruntime-web",
    "runtime",
    type=FILE,
    help="Folder of the npm package. Default: node_modules here.",
)
@option("--webgpu/--no-webgpu", default=True, help="Use WebGPU in browsers that have it.")
@FORCE
def page(bundle_folder: Path, out: Path, **options: Any) -> None:
    """Write a static site that runs BUNDLE in the browser.

    The site holds the graphs of a variant, onnxruntime-web and a page, and asks no other host for
    anything. Serve the folder on https or on localhost; after the first visit it works offline.
    """
    from transferry.runtime.page.site import write_site

    site = write_site(bundle_folder, out, **options)
    say(f"{out}: {site.summary()}\ntry it with: python -m http.server --directory {out}")


@main.command(
    epilog="""\b
Examples:
  transferry doctor
  transferry doctor --json
"""
)
@option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(as_json: bool) -> None:
    """Test every provider with a small computation and suggest fixes."""
    from transferry.runtime.doctor import diagnose, to_text

    checks = diagnose()
    record = [dataclasses.asdict(check) for check in checks]
    show(json.dumps(record, indent=1) if as_json else to_text(checks))
    if faults := [check.name for check in checks if check.status == "fault"]:
        raise ProviderError(f"not working: {', '.join(faults)}")


@main.command(
    epilog="""\b
Examples:
  transferry completion bash --install
  transferry completion fish > ~/.config/fish/completions/transferry.fish
"""
)
@click.argument("shell", type=click.Choice([*COMPLETIONS]))
@option("--install", is_flag=True, help="Write it to where SHELL looks, below the home folder.")
def completion(shell: str, install: bool) -> None:
    """Print the script that completes commands and options in SHELL."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    # click reads the version of bash only to warn about versions before 4.4.
    made = kind(main, {}, "transferry", "_TRANSFERRY_COMPLETE")
    script = made.source_template % made.source_vars()
    if not install:
        show(script.rstrip("\n"))
        return
    path = Path.home() / COMPLETIONS[shell]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent}: cannot be made: {error.strerror}") from error
    with atomic_file(path) as file:
        file.write(script.encode())
    left = f"a new {shell} completes"
    if shell == "zsh":
        line = f"fpath=({path.parent} $fpath); autoload -Uz compinit; compinit"
        left = f"add to ~/.zshrc, if it is not there: {line}"
    say(f"{path}; {left}")
