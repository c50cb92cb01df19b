"""The certificates in a bundle: reading, listing and issuing them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.ort.graph_runner import RUNTIMES
from transferry.runtime.ort.session import SessionOptions, tf32
from transferry.runtime.proof.certificates.certificate import (
    LEAST_ROWS,
    TEXT,
    Cell,
    Certificate,
    Verified,
    check_date,
    graphs_of,
    own_versions,
)
from transferry.runtime.proof.certificates.envelope import (
    FOLDER,
    Envelope,
    names,
    read_envelope,
    statement,
)
from transferry.runtime.proof.certificates.signature import PrivateKey, Trust
from transferry.runtime.proof.certificates.strength import STRENGTHS, Strength
from transferry.runtime.proof.report import ParityReport

_VERSIONS = (*RUNTIMES, "transferry-kernels", "torch", "onnx")  # settings of a report


def read_certificates(
    bundle: Bundle, own: Cell | None = None, trusted: Trust | None = None
) -> Iterator[tuple[str, Certificate | str]]:
    """Yields the name of each file in `certificates`, and its certificate or the reason against it.

    Raises InputError if the certificate of the way of computing `own` cannot be read. Certificates
    without the signatures that `trusted` demands are not even parsed.
    """
    for name in names(bundle.folder):
        if name.startswith(".") or not name.endswith(".json"):
            yield name, "is no certificate"
            continue
        try:
            envelope = read_envelope(bundle.folder, name)
            if trusted is not None and (refusal := envelope.refusal(trusted)):
                yield name, refusal
                continue
            signers = envelope.signers(trusted.keys) if trusted else []
            origin = str(bundle.folder / FOLDER / name)
            found = Certificate.of(envelope, origin, ", ".join(signers))
        except InputError as error:
            if own is not None and name == own.file_name:
                raise
            yield name, f"cannot be read: {error}"
            continue
        yield name, found


def certificates(bundle: Bundle, own: Cell | None = None) -> list[Certificate]:
    """Returns the readable certificates in the order of names; raises as `read_certificates`."""
    found = [found for _, found in read_certificates(bundle, own)]
    return [one for one in found if isinstance(one, Certificate)]


def describe(
    bundle: Bundle, trusted: Trust | None = None
) -> Sequence[tuple[str, str, str, str, str, str]]:
    """Returns date, reference, cell, rows, signature and validity of each certificate.

    Without `trusted` keys no signature is checked.
    """
    found = []
    for name, each in read_certificates(bundle):
        if isinstance(each, str):
            found.append(("", "", name, "", "", each))
            continue
        refusal = each.envelope.refusal(trusted) if trusted else ""
        signers = each.envelope.signers(trusted.keys) if trusted else []
        one = replace(each, signer=", ".join(signers)) if not refusal else each
        signature, rows = refusal or one.signature(), one.rows()
        worth = "refused" if refusal else one.changed(bundle) or one.holds()
        found.append((one.date, one.compared, str(one.cell), rows, signature, worth))
    return found


def require_no_stronger(
    bundle: Bundle, variant: Variant, options: SessionOptions, strength: Strength, signed: bool
) -> None:
    """Raises UsageError where a stronger certificate of this cell holds, or a signed one.

    Raises InputError if the certificate of this cell cannot be read.
    """
    cell = Cell.of(variant, options)
    for one in certificates(bundle, cell):
        if one.cell != cell or one.changed(bundle):
            continue
        if STRENGTHS.index(one.strength) > STRENGTHS.index(strength):
            remedy = "give --checkpoint" if strength == "recorded" else "export the bundle again"
            raise UsageError(
                f"the certificate of {one.date} is against {one.compared}, and the new one is "
                f"weaker ({strength}): {remedy}, or --force to replace it"
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

    The `date` of the verification is YYYY-MM-DD. Without a key the certificate is unsigned.
    `force` overwrites a stronger certificate, or certifies fewer than `LEAST_ROWS` rows.

    Raises:
        UsageError: The date is not a date, the text has too few rows, or a stronger certificate
            holds.
        InputError: The bundle cannot be written.
    """
    check_date(date)
    if report.passed and variant.cache is not None and not report.searches:
        raise UsageError(
            "no search was verified, and a certificate without one covers no answer: give --text"
        )
    if report.passed and not force:
        rows = int(report.settings.get("rows", LEAST_ROWS))
        require_rows(rows, int(report.settings.get("distinct_rows", rows)))
        strength = report.strength or "recorded"
        require_no_stronger(bundle, variant, options, strength, key is not None)
    cell = Cell.of(variant, options)
    path = bundle.folder / FOLDER / cell.file_name
    if path.parent.is_symlink():
        raise InputError(
            f"{path.parent} is a link, and no certificate leaves the bundle; remove it"
        )
    try:
        if not report.passed:
            for name, found in read_certificates(bundle):  # copies hold as well
                if isinstance(found, Certificate) and found.cell == cell:
                    (path.parent / name).unlink()
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


def sign(
    bundle: Bundle, key: PrivateKey, *, variant: str | None = None, trusted: Trust | None = None
) -> list[Certificate]:
    """Adds a signature to the certificates of a bundle that fit its files; returns them.

    `variant` names the only one whose certificates are signed; `trusted` keys must have signed
    before. Raises InputError if there is no such certificate, or it cannot be written.
    """
    signed, reasons = list[Certificate](), []
    for name, found in read_certificates(bundle, None, trusted):
        why = found if isinstance(found, str) else found.changed(bundle)
        if isinstance(found, str) or why:
            reasons.append(f"; {FOLDER}/{name} {why}")
        elif variant in (None, found.cell.variant):
            envelope = found.envelope.signed(key)
            path = bundle.folder / FOLDER / name
            with atomic_file(path) as file:
                file.write(envelope.content)
            # The ids in the file are claims.
            signers = envelope.signers([*(trusted.keys if trusted else ()), key.public])
            signed.append(Certificate.of(envelope, str(path), ", ".join(dict.fromkeys(signers))))
    if not signed:
        told = f" for variant {variant}" if variant else ""
        raise InputError(
            f"{bundle.folder}: no certificate{told} to sign{''.join(reasons)}; see verify --certify"
        )
    return signed


def _verified(
    bundle: Bundle, variant: Variant, options: SessionOptions, report: ParityReport, date: str
) -> Verified:
    return Verified(
        Cell.of(variant, options),
        options.threads,
        tf32(options),
        date,
        graphs_of(bundle, variant),
        str(report.settings["against"]),
        str(report.settings.get("run_sha256", "")),
        report.skipped,
        _versions(report),
        {name: report.settings[name] for name in TEXT if name in report.settings},
        int(report.settings["batch_rows"]),
        [dict(item) for item in report.searches],
        _summary(bundle, report),
        list(report.settings.get("tasks", ())),
    )


def _summary(bundle: Bundle, report: ParityReport) -> dict[str, Any]:
    """Returns the model's card, and the report's tolerance and results with counts for lists."""
    record = report.to_dict()
    return {
        **{name: record[name] for name in ("tolerance", "stages")},
        "card": bundle.manifest.card.to_dict(),
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


def distinct_rows(texts: Sequence[str]) -> int:
    """Returns the number of rows of text that differ in more than white space."""
    return len({" ".join(text.split()) for text in texts})


def require_rows(rows: int, distinct: int) -> None:
    """Raises UsageError for fewer different rows of text than `LEAST_ROWS`."""
    if distinct < LEAST_ROWS:
        kind, equal = ("different ", f" among {rows}") if distinct < rows else ("", "")
        raise UsageError(
            f"expected at least {LEAST_ROWS} {kind}rows of text for a certificate, found "
            f"{distinct}{equal}: give --text with more, or --force to certify fewer"
        )


def _versions(report: ParityReport) -> dict[str, str]:
    settings = report.settings
    return {
        **own_versions(),
        "onnxruntime": RUNTIMES["onnxruntime"].version(),
        **{name: str(settings[name]) for name in _VERSIONS if name in settings},
    }
