"""Certificates: passed parity reports, bound to the bytes and the kind of machine they verified.

The folder `certificates` of a bundle, which the manifest does not list, holds one for each cell,
that is for each verified way of computing.
"""

import datetime
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import Meta

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.generation_options import (
    GenerationOptions,
    generation_options,
)
from transferry.runtime.errors import UsageError
from transferry.runtime.hardware import instruction_sets
from transferry.runtime.ort.cuda import cuda_compute_capability, tensorrt_version
from transferry.runtime.ort.session import SessionOptions, provider_settings
from transferry.runtime.proof.certificates.envelope import (
    MALFORMED,
    Envelope,
    no_certificate,
    read_statement,
)
from transferry.runtime.proof.certificates.strength import Strength, strength_of

# Where 30 rows agree, up to a tenth of all rows may still be wrong (docs/parity.md).
LEAST_ROWS = 30
TEXT = ("rows", "distinct_rows", "text_sha256")  # settings of a report
EARLIEST = datetime.date(2026, 1, 1)  # no bundle of this format is older
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
        provider: "cpu", "cuda" or "tensorrt".
        optimisation: How far onnxruntime may rewrite the graphs.
        hardware: The CPU's instruction sets, or the GPU's compute capability, and TensorRT's
            version.
        settings: Settings of the provider, TF32 among them.
    """

    variant: str
    provider: str
    optimisation: str
    hardware: str
    settings: Mapping[str, str]

    @classmethod
    def of(cls, variant: Variant, options: SessionOptions) -> Self:
        """Returns the cell of a session on this machine."""
        hardware = "+".join(instruction_sets()) or "unknown"
        if options.device == "cuda":
            hardware = f"sm_{cuda_compute_capability(options.device_id)}"
        if options.provider == "tensorrt":
            hardware += f"+tensorrt_{tensorrt_version()}"
        settings = {k: v for k, v in provider_settings(options).items() if k != "device_id"}
        return cls(variant.name, options.provider, options.optimisation, hardware, settings)

    @property
    def file_name(self) -> str:
        """Name of the certificate's file."""
        settings = [f"{name}={value}" for name, value in sorted(self.settings.items())]
        parts = [self.variant, self.provider, self.optimisation, self.hardware, *settings]
        return ".".join(parts) + ".json"

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
        against: "the checkpoint" (formerly "the run") or "the recorded answers".
        run: sha256 of the weights of the checkpoint; empty for "the recorded answers".
        claims: What was not compared, by claim; empty where everything was.
        versions: Versions of the packages that decide the numbers.
        text: Number, distinct number and sha256 of the lines that the searches ran on.
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
    claims: Mapping[str, str]
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
        """Strength of the verification."""
        return strength_of(self.against, self.claims)

    @property
    def compared(self) -> str:
        """Name of the other side of the comparison, for people."""
        return f"the {self.strength}{' answers' if self.strength == 'recorded' else ''}"

    def covers(self, options: GenerationOptions) -> bool:
        """Whether a search like this was verified."""
        wanted = search_kind(options)
        verified = (generation_options(item) for item in self.searches)
        return any(search_kind(one) == wanted and one.n_best >= options.n_best for one in verified)

    @classmethod
    def of(cls, envelope: Envelope, origin: str, signer: str = "") -> Self:
        """Parses the payload of an envelope; raises InputError for anything else."""
        try:
            files, record = read_statement(envelope.payload)
            if unknown := record.keys() - Verified.__dataclass_fields__:
                raise ValueError(f"unknown field {min(unknown)!r}")
            said = msgspec.convert(record, Verified)
            for item in said.searches:
                generation_options(item)
            _day(said.date)
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
        return f"certificate of {self.date} for variant {self.cell.variant}, {self.signature()}"

    def rows(self) -> str:
        """Returns the number of rows of text, and of different ones where rows repeat."""
        rows = self.text.get("rows", 0)
        distinct = self.text.get("distinct_rows", rows)
        return str(rows) if distinct == rows else f"{rows} ({distinct} different)"

    def holds(self) -> str:
        """Says that the certificate holds, what was not compared, and an impossible date."""
        skipped = [f"{name} ({reason})" for name, reason in self.claims.items() if reason]
        told = [f"not compared: {', '.join(skipped)}"] if skipped else []
        told += ["dated in the future"] if _day(self.date) > _tomorrow() else []
        return "; ".join(["holds", *told])

    def summary(self) -> dict[str, str]:
        """Returns the facts that identify the certificate, for a page."""
        return {
            "date": self.date,
            "strength": self.strength,
            "cell": str(self.cell),
            "sha256": self.sha256(),
            "signature": self.signature(),
            "manifest": self.manifest,
            "checkpoint": self.run,
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
        if self.graphs != graphs_of(bundle, variant):
            return f"its graphs are not those of variant {variant.name}"
        if self.manifest != bundle.sha256:
            return f"{MANIFEST} is not the one that was verified"
        if variant.cache is not None and not self.searches:
            return "it covers no search, and the model generates"
        return ""


def check_date(date: str) -> str:
    """Returns the date, with "today" resolved, as YYYY-MM-DD.

    Raises UsageError for anything else, a day later than tomorrow, or before there were bundles.
    """
    if date == "today":
        date = datetime.datetime.now().astimezone().date().isoformat()
    if _day(date) > _tomorrow():
        raise UsageError(
            f"expected the date of the verification, found {date}, which is in the future"
        )
    return date


def _tomorrow() -> datetime.date:
    """Returns the latest date: somewhere on earth tomorrow has begun."""
    return datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1)


def _day(date: str) -> datetime.date:
    """Parses a date; raises UsageError for anything else, and before there were bundles."""
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"expected a date as YYYY-MM-DD, found {date!r} ({error})") from error
    if day < EARLIEST:
        raise UsageError(f"expected the date of the verification, found {date}, before any bundle")
    return day


def search_kind(options: GenerationOptions) -> dict[str, Any]:
    """Returns the options that decide the code paths of a search."""
    fields = {name: value for name, value in asdict(options).items() if name not in SAME_SEARCH}
    # The forced token, such as the token of a language, decides no kernel.
    fields["forced_begin"] = options.forced_begin is not None
    return {**fields, "prefix": bool(options.prefix)}


def graphs_of(bundle: Bundle, variant: Variant) -> dict[str, str]:
    """Returns the sha256 of a variant's graphs, by name."""
    files = bundle.manifest.files
    return {name: files[graph.file].sha256 for name, graph in variant.graphs.items()}


def own_versions() -> dict[str, str]:
    """Returns the versions that decide search, cache and screening, whatever runs the graphs."""
    return {"transferry": importlib.metadata.version("transferry"), "numpy": np.__version__}
