"""The variant that is served if none is named."""

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.ort.graph_runner import runtime_of
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.proof.certificates.signature import PublicKey
from transferry.runtime.proof.certificates.standing import standing


def fastest(bundle: Bundle, options: SessionOptions, trusted: PublicKey | None = None) -> Variant:
    """Returns the variant to serve if none is named.

    It is the fastest of those for the provider that is verified for this way of computing, else the
    fastest that is verified elsewhere. If none has a certificate, it is the fastest in the model's
    own precision, which export has compared with the recorded answers: reduced precision answers
    differently, so without a certificate it must be named. Given a trusted key, certificates that
    it did not sign count for nothing.

    Raises:
        InputError: A certificate cannot be read.
    """
    named = bundle.manifest.variants.values()
    runs = runtime_of(options).runs
    variants = [each for each in named if options.provider in each.providers and runs(each)]
    # A variant for this provider alone is faster than one for several.
    variants.sort(
        key=lambda v: (Precision.of(v.precision).slowness, len(v.providers), not v.in_place)
    )
    for status in ("verified", "elsewhere"):
        for variant in variants:
            if standing(bundle, variant, options, trusted).status == status:
                return variant
    return next((variant for variant in variants if variant.exact), bundle.variant())
