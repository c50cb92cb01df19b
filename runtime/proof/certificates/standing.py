"""Whether a bundle's certificates cover a session, and the variant that is served by default."""

from dataclasses import dataclass, replace
from typing import Literal

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.graph_runner import versions
from transferry.runtime.ort.open_model import refusal
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.proof.certificates.certificate import (
    Cell,
    Certificate,
    own_versions,
    search_kind,
)
from transferry.runtime.proof.certificates.envelope import FOLDER
from transferry.runtime.proof.certificates.signature import Trust
from transferry.runtime.proof.certificates.stored import read_certificates
from transferry.runtime.proof.certificates.strength import GRAPHS, STRENGTHS, Strength

Status = Literal["verified", "elsewhere", "none"]


@dataclass(frozen=True)
class Standing:
    """Whether a bundle's certificates cover a session.

    Attributes:
        status: "verified": this cell, these bytes. "elsewhere": the same but for the hardware, the
            threads or the version of a package. "none": neither.
        certificate: The certificate that applies, if any.
        reason: Why the status is not "verified"; empty if it is.
    """

    status: Status
    certificate: Certificate | None
    reason: str = ""

    @property
    def rank(self) -> int:
        """Place of the certificate's strength in `STRENGTHS`; -1 without one."""
        return -1 if self.certificate is None else STRENGTHS.index(self.certificate.strength)

    def cite(self) -> str:
        """Returns a line that cites the certificate beside a result."""
        if self.certificate is None:
            return f"none: {self.reason}"
        one = self.certificate
        where = f"; here {self.reason}" if self.reason else ""
        return (
            f"of {one.date} against {one.compared} ({one.cell}, sha256 {one.sha256()}), "
            f"{one.signature()}{where}"
        )


def standing(
    bundle: Bundle, variant: Variant, options: SessionOptions, trusted: Trust | None = None
) -> Standing:
    """Finds the certificate that applies to a session.

    Certificates without the signatures that `trusted` demands are not even parsed. Raises
    InputError if the certificate of this way of computing cannot be read.
    """
    cell = Cell.of(variant, options)
    # Search, cache and screening are transferry's and numpy's.
    here = {**versions(options, variant), **own_versions()}
    reasons = []
    found: list[Standing] = []
    for name, certificate in read_certificates(bundle, cell, trusted):
        if isinstance(certificate, str):
            reasons.append(f"{FOLDER}/{name} {certificate}")
            continue
        if replace(certificate.cell, hardware=cell.hardware) != cell:
            continue
        if changed := certificate.changed(bundle):
            reasons.append(f"of {certificate.date}: {changed}")
            continue
        compared = (
            ("hardware", cell.hardware, certificate.cell.hardware),
            ("threads", options.threads, certificate.threads),
            *((name, used, certificate.versions.get(name)) for name, used in here.items()),
        )
        differences = [
            f"{name} {one}, not {other}" for name, one, other in compared if one != other
        ]
        status: Status = "elsewhere" if differences else "verified"
        found.append(Standing(status, certificate, "; ".join(differences)))
    if found:
        # Those of this machine first, then the strongest.
        return max(found, key=lambda one: (one.status == "verified", one.rank))
    return Standing("none", None, "; ".join(reasons) or f"nothing was verified for {cell}")


def require_standing(
    found: Standing, bundle: Bundle, strength: Strength = "checkpoint", *, signed: bool = False
) -> Certificate:
    """Returns the certificate of at least this strength that covers a session.

    Raises ParityError without one; where it had to be `signed`, the message says how to sign.
    """
    reason, certificate = found.reason, found.certificate
    if certificate is not None and found.rank < STRENGTHS.index(strength):
        graphs = certificate.claims.get(GRAPHS, "") if certificate.strength != "recorded" else ""
        why = f" ({graphs})" if graphs else ""
        reason = f"this session was verified against {certificate.compared} alone{why}"
        certificate = None
    if certificate is None:
        raise ParityError(
            f"{bundle.folder} has no certificate that holds here: {reason}. Verify it: "
            f"transferry verify {bundle.folder} --checkpoint CHECKPOINT --text FILE --certify DATE"
            f"{' --sign KEY' if signed else ''}"
        )
    return certificate


def require_search(certificate: Certificate, options: GenerationOptions) -> None:
    """Raises ParityError unless a search like this was verified."""
    if not certificate.covers(options):
        default, kind = search_kind(GenerationOptions()), search_kind(options)
        said = [f"{name} {value}" for name, value in kind.items() if value != default[name]]
        raise ParityError(
            f"the certificate of {certificate.date} covers no search with "
            f"{', '.join(said) or 'these options'}, n_best {options.n_best}. Give verify --certify "
            "the options of the search too, or choose one that it covers, such as greedy search or "
            "--beam 4"
        )


def require_task(certificate: Certificate, task: str) -> None:
    """Raises ParityError unless the task was verified."""
    if task not in certificate.tasks:
        raise ParityError(
            f"the certificate of {certificate.date} covers task "
            f"{' and '.join(certificate.tasks) or 'none'}, not {task}. Verify the bundle again "
            "with --text and --certify"
        )


def fastest(bundle: Bundle, options: SessionOptions, trusted: Trust | None = None) -> Variant:
    """Returns the fastest variant that is verified for this way of computing.

    Without such a variant, the fastest that is verified elsewhere; without any certificate, the
    fastest in the model's own precision, which export has compared with the recorded answers.
    Reduced precision answers differently, so without a certificate it must be named. Certificates
    that trusted keys did not sign do not count.

    Raises:
        InputError: A certificate cannot be read.
    """
    variants = [
        each
        for each in bundle.manifest.variants.values()
        if options.device in each.providers and refusal(options, each) is None
    ]
    # A variant for this device alone is faster than one for several.
    variants.sort(
        key=lambda v: (Precision.of(v.precision).slowness, len(v.providers), not v.in_place)
    )
    for status in ("verified", "elsewhere"):
        for variant in variants:
            if standing(bundle, variant, options, trusted).status == status:
                return variant
    return next((variant for variant in variants if variant.exact), bundle.variant())
