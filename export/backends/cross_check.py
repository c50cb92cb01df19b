"""The same cases through several runtimes: is the graph wrong, or what runs it?

A fault in every row of the table is the graph's; a fault in one runtime's rows is that runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import onnxruntime

from transferry.export.backends.backends import BACKENDS, Backend
from transferry.export.backends.plain_decoder import plain_model
from transferry.export.parity.oracle import Done, Oracle
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import Case, Tolerance, Truth, compare, observe
from transferry.runtime.parity.report import CrossCheck, sum_up

SERVED = "onnxruntime as served"
# On the CPU, where every bundle can be opened.
UNOPTIMISED = f"onnxruntime {onnxruntime.__version__} cpu, unoptimised"
# How often `cross_check` calls `done`.
RUNTIMES = 2 + len(BACKENDS)

LONGEST_REASON = 160

Model = ObservableDecoder[Any] | ObservableEncoder
# Gives the runtime's name, with its version, and the model opened in it.
Opener = Callable[[], AbstractContextManager[tuple[str, Model]]]


def cross_check(
    oracle: Oracle,
    served: Model,
    bundle: Bundle,
    variant: Variant,
    cases: Sequence[Case],
    done: Done = lambda runtimes: None,
    backends: Sequence[type[Backend]] = BACKENDS,
) -> list[CrossCheck]:
    """Runs the same cases in every runtime that is here.

    Args:
        oracle: Knows what is true, and the tolerance.
        served: The variant, opened as it will be served.
        bundle: The bundle.
        variant: The variant.
        cases: What to run, such as `cases.cross_check_cases`; the slowest runtime is numpy.
        done: Called with 1 after each runtime.
        backends: Runtimes besides onnxruntime.

    Returns:
        Of each runtime a row a stage. One that is absent, or fails, has a row that tells why,
        after the rows of the cases that it did run: it does not raise.
    """
    expected = [(case, oracle.truth(case)) for case in cases]
    openers: list[tuple[str, Opener]] = [
        (SERVED, lambda: nullcontext((SERVED, served))),
        (UNOPTIMISED, partial(_unoptimised, bundle, variant)),
        *((backend.name, partial(_opened, backend, bundle, variant)) for backend in backends),
    ]
    opinions = []
    for name, opener in openers:
        opinions += _ask(name, opener, expected, oracle.tolerance)
        done(1)
    return opinions


@contextmanager
def _unoptimised(bundle: Bundle, variant: Variant) -> Iterator[tuple[str, Model]]:
    yield UNOPTIMISED, open_model(bundle, variant, SessionOptions(optimisation="disable"))


@contextmanager
def _opened(kind: type[Backend], bundle: Bundle, variant: Variant) -> Iterator[tuple[str, Model]]:
    with closing(kind(bundle, variant)) as backend:
        yield backend.name, plain_model(variant, backend)


def _ask(
    name: str, opener: Opener, expected: Sequence[tuple[Case, Truth]], tolerance: Tolerance
) -> list[CrossCheck]:
    comparisons, failures = [], []
    with ExitStack() as opened:
        try:
            name, model = opened.enter_context(opener())
        except Exception as reason:  # noqa: BLE001 - whatever a runtime raises is what is reported
            return [CrossCheck(name, "", absent=_brief(reason))]
        for case, truth in expected:
            try:
                found = observe(model, case)
            except Exception as reason:  # noqa: BLE001 - as above
                failures.append(f"{case.name}: {_brief(reason)}")
            else:
                comparisons += compare(case, truth, found, tolerance)
    opinions = [
        CrossCheck(name, stage.name, stage.tensors, stage.error, stage.ratio, stage.faults)
        for stage in sum_up(comparisons, tolerance)
    ]
    if failures:
        told = f"{len(failures)} of {len(expected)} cases fail, the first {failures[0]}"
        opinions.append(CrossCheck(name, "", absent=told))
    return opinions


def _brief(reason: Exception) -> str:
    text = " ".join(str(reason).split())
    if not isinstance(reason, TransferryError):
        text = f"{type(reason).__name__}: {text}"
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
