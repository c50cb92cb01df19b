"""The variant that is served by default."""

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.ort.graph_runner import runs
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.proof.certificates.signature import Trust
from transferry.runtime.proof.certificates.standing import standing


def fastest(bundle: Bundle, options: SessionOptions, trusted: Trust | None = None) -> Variant:
    """Returns the fastest variant that is verified for this way of computing.

    Without such a variant, the fastest that is verified elsewhere; without any certificate, the
    fastest in the model's own precision, which export has compared with the recorded answers.
    Reduced precision answers differently, so without a certificate it must be named. Certificates
    that trusted keys did not sign do not count.

    Raises:
        InputError: A certificate cannot be read.
    """
    named = bundle.manifest.variants.values()
    variants = [each for each in named if options.device in each.providers and runs(options, each)]
    # A variant for this device alone is faster than one for several.
    variants.sort(
        key=lambda v: (Precision.of(v.precision).slowness, len(v.providers), not v.in_place)
    )
    for status in ("verified", "elsewhere"):
        for variant in variants:
            if standing(bundle, variant, options, trusted).status == status:
                return variant
    return next((variant for variant in variants if variant.exact), bundle.variant())
