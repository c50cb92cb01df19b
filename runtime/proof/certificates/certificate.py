"""Certificates: passed parity reports, bound to the bytes and the kind of machine they verified.

The folder `certificates` of a bundle, which the manifest does not list, holds one for each cell,
that is for each verified way of computing.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.generation_options import (
    GenerationOptions,
    generation_options,
    options_of_json,
)
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.hardware import instruction_sets
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.ort.cuda import cuda_compute_capability
from transferry.runtime.ort.graph_runner import RUNTIMES
from transferry.runtime.ort.session import SessionOptions, provider_settings, tf32
from transferry.runtime.proof.certificates.envelope import (
    FOLDER,
    MALFORMED,
    Envelope,
    envelopes,
    no_certificate,
    read_statement,
    statement,
)
from transferry.runtime.proof.certificates.signature import PrivateKey, PublicKey
from transferry.runtime.proof.report import ParityReport

Strength = Literal["run", "recorded"]
# Where 30 rows agree, up to a tenth of all rows may still be wrong (docs/parity.md).
LEAST_ROWS = 30
# Fields of GenerationOptions that make no other search of one: how long, up to which text and with
# which seed it runs decides no code path, nor do lines, a search each; scores are left out only
# where the tokens are compared too. n_best and prefix are compared apart.
SAME_SEARCH = (
    *("max_length", "max_total_length", "stop", "seed", "split_lines", "scores"),
    *("n_best", "prefix"),
)


@dataclass(frozen=True)
class Cell:
    """One way of computing: everything that decides which kernels run on which graphs.

    Attributes:
        variant: Name of the variant.
        provider: "cpu" or "cuda".
        optimisation: How far onnxruntime may rewrite the graphs.
        hardware: The CPU's instruction sets, or the GPU's compute capability.
        settings: Settings of the provider, TF32 among them.
    """

    variant: str
    provider: str
    optimisation: str
    hardware: str
    settings: Mapping[str, str]

    @classmethod
    def of(cls, variant: Variant, options: SessionOptions) -> Cell:
        """Returns the cell of a session on this machine."""
        hardware = "+".join(instruction_sets()) or "unknown"
        if options.provider == "cuda":
            hardware = f"sm_{cuda_compute_capability(options.device_id)}"
        settings = {k: v for k, v in provider_settings(options).items() if k != "device_id"}
        return cls(variant.name, options.provider, options.optimisation, hardware, settings)

    def __str__(self) -> str:
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        return (
            f"variant {self.variant}, provider {self.provider}, optimisation "
            f"{self.optimisation}, {self.hardware}{settings}"
        )


@dataclass(frozen=True)
class Verified:
    """Recorded facts of a verification.

    Attributes:
        cell: The way of computing.
        threads: Threads of a session.
        tf32: Whether products may be rounded to TF32: "on", "off", or "none" on the CPU.
        date: Given by whoever verified, YYYY-MM-DD.
        graphs: sha256 of the variant's graphs, by name.
        against: "the run" or "the recorded answers".
        run: sha256 of the weights of the run; empty for "the recorded answers".
        versions: Versions of the packages that decide the numbers.
        text: Number and sha256 of the lines that the searches ran on.
        batch_rows: Rows that were computed at once; no larger batch was verified.
        searches: Fields of GenerationOptions of each search.
        result: The report's tolerance, stages, searches, task metrics and self-test, in short.
        tasks: Names of the tasks whose results were compared.
    """

    cell: Cell
    threads: int
    tf32: str
    date: str
    graphs: Mapping[str, str]
    against: str
    run: str
    versions: Mapping[str, str]
    text: Mapping[str, Any]
    batch_rows: Annotated[int, Meta(ge=1)]
    searches: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    tasks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Certificate(Verified):
    """Result of a verification, bound to the files that were verified.

    Attributes:
        manifest: sha256 of the bundle's manifest.
        files: sha256 of every other file, by its path inside the bundle.
        envelope: The file, with its signatures.
        signer: Id of the key whose signature was checked; empty if unchecked.
    """

    manifest: str
    files: Mapping[str, str]
    envelope: Envelope
    signer: str = ""

    @property
    def strength(self) -> Strength:
        """Whether torch was compared, or only its recorded answers."""
        return _strength(self.against)

    def covers(self, options: GenerationOptions) -> bool:
        """Whether a search like this was verified."""
        wanted = search_kind(options)
        verified = (generation_options(options_of_json(item)) for item in self.searches)
        return any(search_kind(one) == wanted and one.n_best >= options.n_best for one in verified)

    @classmethod
    def of(cls, envelope: Envelope, origin: str, signer: str = "") -> Certificate:
        """Parses the payload of an envelope; raises InputError for anything else."""
        try:
            files, record = read_statement(envelope.payload)
            if unknown := record.keys() - Verified.__dataclass_fields__:
                raise ValueError(f"unknown field {min(unknown)!r}")
            said = msgspec.convert(record, Verified)
            for item in said.searches:
                generation_options(options_of_json(item))
            rest: dict[str, Any] = {"envelope": envelope, "signer": signer}
            return cls(**vars(said), manifest=files.pop(MANIFEST), files=files, **rest)
        except (*MALFORMED, UsageError) as error:
            raise no_certificate(origin, error) from error

    def sha256(self) -> str:
        """Returns the hash of the file, which results cite."""
        return hashlib.sha256(self.envelope.content).hexdigest()

    def signature(self) -> str:
        """Names the signer; without a trusted key, the signer that the file claims."""
        if self.signer:
            return f"signed by {self.signer}"
        if self.envelope.signatures:
            return f"signature of {self.envelope.signatures[0][0]} not checked"
        return "unsigned"

    def __str__(self) -> str:
        return f"certificate of {self.date} for {self.cell}, {self.signature()}"

    def summary(self) -> dict[str, str]:
        """Returns the facts that identify the certificate, for a page."""
        return {
            "date": self.date,
            "cell": str(self.cell),
            "sha256": self.sha256(),
            "signature": self.signature(),
            "manifest": self.manifest,
            "run": self.run,
        }

    def changed(self, bundle: Bundle) -> str:
        """Describes how this bundle differs from the verified one; empty if it does not."""
        files = {name: record.sha256 for name, record in bundle.manifest.files.items()}
        for name in sorted({*self.files, *files}):
            if self.files.get(name) != files.get(name):
                return f"{name} is not the file that was verified"
        variant = bundle.manifest.variants.get(self.cell.variant)
        if variant is None:
            return f"the bundle has no variant {self.cell.variant}"
        if self.graphs != _graphs(bundle, variant):
            return f"its graphs are not those of variant {variant.name}"
        if self.manifest != bundle.sha256:
            return f"{MANIFEST} is not the one that was verified"
        return ""


def _strength(against: str) -> Strength:
    return "run" if against == "the run" else "recorded"


def require_no_stronger(
    bundle: Bundle, variant: Variant, options: SessionOptions, strength: Strength, signed: bool
) -> None:
    """Refuses to replace a certificate against the run, or a signed one, by a weaker one.

    Raises:
        UsageError: A stronger certificate of this cell holds.
        InputError: A certificate cannot be read.
    """
    cell = Cell.of(variant, options)
    for one in certificates(bundle):
        if one.cell != cell or one.changed(bundle):
            continue
        if one.strength == "run" != strength:
            raise UsageError(
                f"the certificate of {one.date} is against the checkpoint, and the new one against "
                "the recorded answers is weaker: give --checkpoint, or --force to replace it"
            )
        if one.envelope.signatures and not signed:
            raise UsageError(
                f"the certificate of {one.date} is signed, and the new one is not: give --sign, "
                "or --force to replace it"
            )


def certify(
    bundle: Bundle,
    variant: Variant,
    options: SessionOptions,
    report: ParityReport,
    date: str,
    *,
    key: PrivateKey | None = None,
    force: bool = False,
) -> Certificate | None:
    """Writes the certificate of a report into the bundle; removes it if the report failed.

    Args:
        bundle: The bundle.
        variant: The variant that was verified.
        options: How it was opened.
        report: The result.
        date: Date of the verification, YYYY-MM-DD.
        key: Key that signs the certificate. Default: it is unsigned.
        force: Overwrite a stronger certificate, or certify fewer than `LEAST_ROWS` rows.

    Raises:
        UsageError: The date is not a date, the text has too few rows, or a stronger certificate
            holds.
        InputError: The bundle cannot be written.
    """
    check_date(date)
    if report.passed and not force:
        _require_rows(report)
        strength = _strength(str(report.settings["against"]))
        require_no_stronger(bundle, variant, options, strength, key is not None)
    path = bundle.folder / FOLDER / _file_name(Cell.of(variant, options))
    if path.parent.is_symlink():
        raise InputError(
            f"{path.parent} is a link, and no certificate leaves the bundle; remove it"
        )
    try:
        if not report.passed:
            path.unlink(missing_ok=True)
            return None
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; make the bundle writable, or verify a "
            "copy of it"
        ) from error
    verified = _verified(bundle, variant, options, report, date)
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
    files[MANIFEST] = bundle.sha256
    envelope = Envelope.seal(statement(files, asdict(verified)), key)
    with atomic_file(path) as file:
        file.write(envelope.content)
    return Certificate.of(envelope, str(path), key.public.key_id if key else "")


def _verified(
    bundle: Bundle, variant: Variant, options: SessionOptions, report: ParityReport, date: str
) -> Verified:
    return Verified(
        Cell.of(variant, options),
        options.threads,
        tf32(options),
        date,
        _graphs(bundle, variant),
        str(report.settings["against"]),
        str(report.settings.get("run_sha256", "")),
        _versions(report),
        {k: report.settings[k] for k in ("rows", "text_sha256") if k in report.settings},
        int(report.settings["batch_rows"]),
        [dict(item) for item in report.searches],
        _summary(report),
        list(report.settings.get("tasks", ())),
    )


def _summary(report: ParityReport) -> dict[str, Any]:
    """Returns the report's tolerance and results, with counts in place of lists."""
    record = report.to_dict()
    return {
        **{name: record[name] for name in ("tolerance", "stages")},
        "decisions": [
            {**item, **{name: len(item[name]) for name in ("ties", "tolerated", "defects")}}
            for item in record["decisions"]
        ],
        "task_metrics": record["task_metrics"],
        "self_test": {
            "planted": len(report.self_test),
            "change_an_answer": sum(item.changes_answer for item in report.self_test),
            "caught": sum(bool(item.caught_by) for item in report.self_test),
        },
    }


def check_date(date: str) -> None:
    """Raises UsageError unless this is a date as YYYY-MM-DD, tomorrow's at the latest."""
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"expected a date as YYYY-MM-DD, found {date!r} ({error})") from error
    # Tomorrow: somewhere on earth it has begun.
    latest = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1)
    if day > latest:
        raise UsageError(
            f"expected the date of the verification, found {date}, which is in the future"
        )


def _require_rows(report: ParityReport) -> None:
    """Raises UsageError for fewer rows of text than `LEAST_ROWS`."""
    rows = int(report.settings.get("rows", LEAST_ROWS))
    if rows < LEAST_ROWS:
        raise UsageError(
            f"expected at least {LEAST_ROWS} rows of text for a certificate, found {rows}: give "
            "--text with more, or --force to certify fewer"
        )


def certificates(bundle: Bundle) -> list[Certificate]:
    """Returns all certificates of a bundle, in the order of their names.

    Raises:
        InputError: One of them cannot be read.
    """
    return [Certificate.of(envelope, str(path)) for path, envelope in envelopes(bundle.folder)]


def search_kind(options: GenerationOptions) -> dict[str, Any]:
    """Returns the options that decide the code paths of a search."""
    fields = {name: value for name, value in asdict(options).items() if name not in SAME_SEARCH}
    # The forced token, such as the token of a language, decides no kernel.
    fields["forced_begin"] = options.forced_begin is not None
    return {**fields, "prefix": bool(options.prefix)}


def describe(
    bundle: Bundle, trusted: PublicKey | None = None
) -> Sequence[tuple[str, str, str, str, str, str]]:
    """Returns date, reference, cell, rows, signature and validity of each certificate.

    Args:
        bundle: The bundle.
        trusted: Key that must have signed them. Default: no signature is checked.
    """
    found = []
    for each in certificates(bundle):
        refusal = each.envelope.refusal(trusted) if trusted else ""
        one = replace(each, signer=trusted.key_id) if trusted and not refusal else each
        signature, rows = refusal or one.signature(), str(one.text.get("rows", 0))
        worth = "refused" if refusal else one.changed(bundle) or "holds"
        found.append((one.date, one.against, str(one.cell), rows, signature, worth))
    return found


def _file_name(cell: Cell) -> str:
    settings = [f"{name}={value}" for name, value in sorted(cell.settings.items())]
    parts = [cell.variant, cell.provider, cell.optimisation, cell.hardware, *settings]
    return ".".join(parts) + ".json"


def _graphs(bundle: Bundle, variant: Variant) -> dict[str, str]:
    files = bundle.manifest.files
    return {name: files[graph.file].sha256 for name, graph in variant.graphs.items()}


def _versions(report: ParityReport) -> dict[str, str]:
    settings = report.settings
    return {
        "transferry": importlib.metadata.version("transferry"),
        "onnxruntime": RUNTIMES["onnxruntime"].version(),
        "numpy": np.__version__,
        **{name: str(settings[name]) for name in (*RUNTIMES, "torch", "onnx") if name in settings},
    }
