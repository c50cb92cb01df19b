"""Cross-check: the same cases on several runtimes, to tell a graph bug from a runtime bug.

A fault on every runtime is the graph's; a fault on one runtime is that runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from transferry.export.blame.backends import BACKENDS, Backend
from transferry.export.blame.plain_decoder import plain_model
from transferry.export.checks.check import Check, Findings
from transferry.export.oracle.cases import cross_check_cases
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.graph_runner import RUNTIMES
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Case, Tolerance, Truth, compare, observe
from transferry.runtime.proof.report import CrossCheck, sum_up

SERVED = "onnxruntime as served"
# On the CPU, where every bundle can be opened.
UNOPTIMISED = f"onnxruntime {RUNTIMES['onnxruntime'].version()} cpu, unoptimised"

LONGEST_REASON = 160

# Gives the runtime's name, with its version, and the model opened in it until the stack closes.
Opener = Callable[[ExitStack], tuple[str, ObservableDecoder[Any] | ObservableEncoder]]


def cross_checks(
    oracle: Oracle,
    served: ServedModel,
    bundle: Bundle,
    backends: Sequence[type[Backend]] = BACKENDS,
) -> list[Check]:
    """Returns a check of a few small cases for the served model and for every other runtime.

    A runtime that is absent or fails raises nothing; its result has the reason.
    """
    cases = [(case, oracle.truth(case)) for case in cross_check_cases(oracle.config)]
    variant = served.variant
    unoptimised = SessionOptions(optimisation="disable")
    openers: list[tuple[str, Opener]] = [
        (SERVED, lambda _: (SERVED, served)),
        (UNOPTIMISED, lambda _: (UNOPTIMISED, open_model(bundle, variant, unoptimised))),
        *((backend.name, partial(_opened, backend, bundle, variant)) for backend in backends),
    ]

    def check(name: str, opener: Opener) -> Check:
        def run(so_far: Findings) -> Iterator[Findings]:
            yield Findings(runtimes=[_run(name, opener, cases, oracle.tolerance)], steps=1)

        return Check(name, run, 1)

    return [check(*each) for each in openers]


def _opened(
    kind: type[Backend], bundle: Bundle, variant: Variant, stack: ExitStack
) -> tuple[str, Any]:
    backend = stack.enter_context(closing(kind(bundle, variant)))
    return backend.name, plain_model(variant, backend)


def _run(
    name: str, opener: Opener, expected: Sequence[tuple[Case, Truth]], tolerance: Tolerance
) -> CrossCheck:
    comparisons, failures = [], []
    with ExitStack() as opened:
        try:
            name, model = opener(opened)
        except Exception as reason:  # noqa: BLE001 - reported, whatever a runtime raises
            return CrossCheck(name, absent=_brief(reason))
        for case, truth in expected:
            try:
                found = observe(model, case)
            except Exception as reason:  # noqa: BLE001 - as above
                failures.append(f"{case.name}: {_brief(reason)}")
            else:
                comparisons += compare(case, truth, found, tolerance)
    absent = ""
    if failures:
        absent = f"{len(failures)} of {len(expected)} cases fail, the first {failures[0]}"
    return CrossCheck(name, sum_up(comparisons, tolerance), absent)


def _brief(reason: Exception) -> str:
    text = " ".join(str(reason).split())
    if not isinstance(reason, TransferryError):
        text = f"{type(reason).__name__}: {text}"
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
