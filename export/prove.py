"""Verification of an exported bundle, before it is renamed into place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx

from transferry.build_model.allocator import return_memory
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.own.model import OwnModel
from transferry.export.blame.backends import ReferenceBackend
from transferry.export.blame.one_layer import check_one_layer
from transferry.export.blame.plain_decoder import plain_model
from transferry.export.oracle.effort import Effort, parameters
from transferry.export.recipes import RECIPES
from transferry.export.verify import Done, Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.cuda import cuda_obstacle
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Provider, SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.recorded import Reference, check_reference
from transferry.runtime.proof.report import ParityReport

LARGE = 1 << 28  # parameters: 1 GiB in float32
MUCH = 1 << 26  # bytes of weights from which on memory is freed between phases
Say = Callable[[str], None]
# See `prove_variant`.
Proof = Callable[[Checkpoint, Bundle, Variant, Sequence[str], Say, Done], None]
TOO_FEW = "on too few answers to tell it from chance: verify the variant before you deploy it"


def end_phase(model: Transformer) -> None:
    """Frees the memory of a phase of the export, if the model is large."""
    model.release()
    if 4 * parameters(model) >= MUCH:
        return_memory()


def prove_variant(
    checkpoint: Checkpoint,
    bundle: Bundle,
    variant: Variant,
    texts: Sequence[str],
    say: Say,
    done: Done,
) -> None:
    """Verifies a variant of a bundle whose manifest is unwritten.

    Args:
        checkpoint: The trained model and its tokenizer.
        bundle: The bundle.
        variant: One of its variants.
        texts: Sentences that a variant of reduced precision is judged by.
        say: Receives a line about a check that is left out.
        done: As for `verify_against`.

    Raises:
        ParityError: The graphs are invalid or differ from torch.
    """
    check_graphs(bundle, variant)
    if "cpu" not in variant.providers and (obstacle := cuda_obstacle()) is not None:
        say(f"variant {variant.name} is not verified: {obstacle.missing}")
        return
    own = isinstance(checkpoint.model, OwnModel)  # whose layers are unknown
    large = checkpoint if parameters(checkpoint.model) > LARGE and not own else None
    check_bundle(bundle, variant, large=large).require()
    if not Precision.of(variant.precision).rounded:
        return
    # Few bits are judged by the answers, as `verify` does.
    model = open_model(bundle, variant, SessionOptions())
    effort = Effort.at_export(checkpoint.model, model.batches)
    report = verify_against(
        checkpoint,
        bundle,
        model,
        Request(effort.texts(checkpoint, texts), effort=effort),
        done=lambda phase, *steps: done(f"{phase} {variant.name}", *steps),
    )
    if not effort.loss:
        for metric in report.task_metrics:
            if not metric.passed:
                say(f"variant {variant.name}: {metric}, {TOO_FEW}")
        report = replace(report, task_metrics=[])
    report.require()


def check_graphs(bundle: Bundle, variant: Variant) -> None:
    """Raises ParityError if onnx.checker finds structure, types or shapes of a graph invalid."""
    for graph in variant.graphs.values():
        try:
            onnx.checker.check_model(str(bundle.graph(graph)), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ParityError(f"{graph.file} is not a valid ONNX graph: {error}") from error


def check_bundle(
    bundle: Bundle, variant: Variant | None = None, large: Checkpoint | None = None
) -> ParityReport:
    """Compares a variant with the recorded answers, the portable one in onnx's evaluator too.

    Args:
        bundle: The bundle; its manifest may still be unwritten.
        variant: The variant. Default: the portable one.
        large: Checkpoint of a large model; the evaluator then computes one layer.
    """
    variant = variant or bundle.variant()
    tolerance = Tolerance.of(variant.precision)
    provider: Provider = "cpu" if "cpu" in variant.providers else "cuda"
    reference, special = Reference.of(bundle, variant), bundle.tokenizer.special
    model = open_model(bundle, variant, SessionOptions(provider))
    given, one = (special, tolerance), OneGraph.of(bundle, variant, model.options)
    comparisons, decisions = check_reference(reference, model, *given, exact=variant.exact, one=one)
    del model  # as large as the weights
    portable = not RECIPES[variant.name].fused
    if portable and large is not None:
        end_phase(large.model)
        comparisons += check_one_layer(large)
    elif portable:
        numbers_only = Reference(reference.cases, (), ())
        second = plain_model(variant, ReferenceBackend(bundle, variant))
        comparisons += check_reference(numbers_only, second, *given)[0]
    settings = {"variant": variant.name, "provider": provider}
    return ParityReport(str(bundle.folder), settings, tolerance, comparisons, decisions)
