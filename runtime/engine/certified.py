"""Opening a variant with the certificates that cover it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.open_model import Model, open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.certificate import Certificate, Strength, require_standing, standing
from transferry.runtime.parity.report import ParityReport
from transferry.runtime.parity.signature import PublicKey


def open_certified(
    bundle: Bundle,
    variant: Variant,
    options: SessionOptions,
    strength: Strength | None,
    trusted: PublicKey | None,
    prove: Callable[[Bundle, Model], ParityReport],
) -> tuple[Model, str, Certificate | None]:
    """Opens a variant on one device, cites its certificate, and returns one that is required."""
    found = standing(bundle, variant, options, trusted)
    signed = trusted is not None
    required = require_standing(found, bundle, strength, signed=signed) if strength else None
    model = open_model(bundle, variant, options)
    if found.status != "elsewhere":
        return model, found.cite(), required
    prove(bundle, model).require()
    return model, f"{found.cite()}; the recorded answers came out here too", required


def covered(
    batches: BatchOptions | None, default: BatchOptions, required: Sequence[Certificate]
) -> BatchOptions:
    """Returns limits within what certificates cover; raises ParityError if more was asked for."""
    most = min(certificate.batch_rows for certificate in required)
    if batches is not None and batches.rows > most:
        raise ParityError(
            f"batches of {batches.rows} rows were not verified, of {most} at most: lower "
            f"--batch-rows, or verify with --batch-rows {batches.rows}"
        )
    batches = batches or default
    return replace(batches, rows=min(batches.rows, most))
