"""Export: makes a bundle in a temporary folder, verifies it there and renames it into place."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from transferry.build_model.allocator import large_blocks_returned, return_memory
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.mapped_weights import MappedWeights
from transferry.build_model.model.transformer import Transformer
from transferry.export.arithmetic import KEPT
from transferry.export.blame.backends import ReferenceBackend
from transferry.export.blame.one_layer import check_one_layer
from transferry.export.blame.plain_decoder import plain_model
from transferry.export.bundle_folder import require_replaceable
from transferry.export.checks.claims import default_generation
from transferry.export.oracle.cases import fitting, random_sources, room, source_of
from transferry.export.oracle.effort import (
    RECORDED_SOURCES,
    Effort,
    parameters,
    recorded_length,
    recorded_sources,
)
from transferry.export.oracle.oracle import Oracle
from transferry.export.recipes import RECIPES, recipe_of, reference_file
from transferry.export.rewrite.calibration import CALIBRATION, Calibration
from transferry.export.rewrite.calibration import calibrate as calibrate_model
from transferry.export.trace.graph import Traces
from transferry.export.trace.greedy_graph import require_one_graph
from transferry.export.trace.store import Places, write_graphs
from transferry.export.variants import add_one_graph, describe, make_variant
from transferry.export.verify import Done, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST, Manifest
from transferry.runtime.bundle.specs import PORTABLE, REFERENCE, Variant
from transferry.runtime.decoding.generation_options import options_of_json
from transferry.runtime.errors import ParityError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.folders import replace_folder, staged_folder
from transferry.runtime.io.sealed_folder import FileRecord
from transferry.runtime.io.whole import sha256
from transferry.runtime.ort.cuda import cuda_obstacle
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Provider, SessionOptions
from transferry.runtime.precision import FLOAT32, Precision
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.recorded import Reference, check_reference
from transferry.runtime.proof.report import ParityReport

ANSWER_LENGTH = 64  # most tokens of an answer that an encoder-decoder is calibrated on
LARGE = 1 << 28  # parameters: 1 GiB in float32
# Bytes of weights from which on they are mapped: reading mapped weights again and again takes a
# sixth of the time of an export, and a smaller model is kept in float64, too.
MAPPED = KEPT // 2
MUCH = 1 << 26  # bytes of weights from which on what a phase leaves in memory is freed
TOO_FEW = "on too few answers to tell it from chance: verify the variant before you deploy it"
MADE_BY = ("transferry", "torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")


def export_bundle(
    checkpoint: Checkpoint,
    out: Path,
    *,
    texts: Sequence[str] = (),
    variants: Sequence[str] = (),
    calibrate: Sequence[str] = (),
    one_graph: int = 0,
    force: bool = False,
    traces: Traces | None = None,
    say: Callable[[str], None] = lambda line: None,
    done: Done = lambda phase, done, total: None,
) -> Bundle:
    """Exports a checkpoint as a verified bundle.

    The same checkpoint, texts and package versions give the same bytes.

    Args:
        checkpoint: The trained model and its tokenizer.
        out: Folder of the bundle.
        texts: Sentences for the recorded reference; random tokens if none fits the model.
        variants: Variants besides the portable one.
        calibrate: Sentences that an int8 variant is calibrated on.
        one_graph: Beams of a search to add as one graph, 1 for greedy search; 0 for none.
        force: Replace an existing bundle.
        traces: Graphs traced before; receives those of this export. Default: none.
        say: Receives a line at each stage.
        done: As for `verify_against`.

    Returns:
        The bundle in `out`.

    Raises:
        UsageError: `out` exists and `force` is off, there is no such variant, an int8 variant is
            not calibrated, or one graph cannot keep a generation default.
        InputError: The folder cannot be written.
        ParityError: The graphs are invalid or differ from torch; `out` is untouched.
    """
    require_replaceable(out, force=force)
    generation = default_generation(checkpoint)  # before any work, as what follows
    if one_graph:
        require_one_graph(checkpoint.model.config.architecture, generation, one_graph)
    for name in variants:
        recipe_of(name, calibrated=bool(calibrate))
    model = checkpoint.model
    with staged_folder(out) as folder, contextlib.ExitStack() as large:
        if 4 * parameters(model) > MAPPED:
            large.enter_context(large_blocks_returned())
            model.mapped = model.mapped or MappedWeights(model.parameters(), folder.parent)
        calibration = None
        if calibrate:
            say(f"calibrating on {len(calibrate)} sentences")
            calibration = calibrated(checkpoint, calibrate)
            end_phase(model)
        variants = list(dict.fromkeys([PORTABLE, *variants]))
        described: dict[str, Variant] = {}
        written: dict[Path, Places] = {}
        traces = traces or Traces()
        for name in variants:
            say(f"exporting variant {name}")
            graphs = make_variant(model, name, calibration, traces)
            if one_graph and name == PORTABLE:
                say("composing the search as one graph")
                special = checkpoint.tokenizer.special
                add_one_graph(graphs, model.config, special, generation, one_graph)
            # One variant at a time: its graphs hold the weights that are not the model's.
            write_graphs(
                [(each.model, folder / each.spec.file) for each in graphs.values()], written
            )
            described[name] = describe(name, graphs)
            del graphs
            end_phase(model)
        del traces
        checkpoint.tokenizer.save(folder)
        say("recording reference answers of torch")
        _reference(checkpoint, texts).save(folder / REFERENCE)
        for name in variants:
            path, precision = folder / reference_file(RECIPES[name]), RECIPES[name].precision
            if calibration is not None and precision.calibrated:
                calibration.save(path.with_name(CALIBRATION))
            if precision.rounded:
                _reference(checkpoint, texts, precision, calibration).save(path)
            end_phase(model)
        bundle = Bundle(folder, _manifest(checkpoint, described, folder), checkpoint.tokenizer)
        say("verifying")
        check_graphs(bundle)
        for variant in described.values():
            verify_variant(checkpoint, bundle, variant, [*texts], [*calibrate], say, done)
            end_phase(model)
        # Last, so that an unverified bundle can never be loaded.
        with atomic_file(folder / MANIFEST) as file:
            file.write(bundle.manifest.to_json().encode())
        require_replaceable(out, force=force)  # again, minutes later
        replace_folder(folder, out)
    return Bundle.load(out)


def end_phase(model: Transformer) -> None:
    """Frees what a phase of the export has left in memory, where that is much."""
    model.release()
    if 4 * parameters(model) >= MUCH:
        return_memory()


def verify_variant(
    checkpoint: Checkpoint,
    bundle: Bundle,
    variant: Variant,
    texts: Sequence[str],
    calibrate: Sequence[str],
    say: Callable[[str], None],
    done: Done,
) -> None:
    """Verifies a variant of an unfinished bundle; see `export_bundle`.

    Raises:
        ParityError: Its graphs differ from torch.
    """
    if "cpu" not in variant.providers and (obstacle := cuda_obstacle()) is not None:
        say(f"variant {variant.name} is not verified: {obstacle.missing}")
        return
    large = checkpoint if parameters(checkpoint.model) > LARGE else None
    check_bundle(bundle, variant, large=large).require()
    if not Precision.of(variant.precision).rounded:
        return
    # Few bits are judged by what they do to answers, as `verify` does.
    model = open_model(bundle, variant, SessionOptions())
    effort = Effort.at_export(checkpoint.model, model.batches)
    report = verify_against(
        checkpoint,
        bundle,
        model,
        effort.texts(checkpoint, [*texts, *calibrate]),
        effort=effort,
        done=partial(_of_variant, done, variant.name),
    )
    if not effort.loss:
        for metric in report.task_metrics:
            if not metric.passed:
                say(f"variant {variant.name}: {metric}, {TOO_FEW}")
        report = replace(report, task_metrics=[])
    report.require()


def _of_variant(done: Done, variant: str, phase: str, finished: int, total: int) -> None:
    done(f"{phase} {variant}", finished, total)


def check_graphs(bundle: Bundle) -> None:
    """Runs onnx.checker over every graph: structure, types and shapes.

    Raises:
        ParityError: A graph is invalid.
    """
    for variant in bundle.manifest.variants.values():
        for graph in variant.graphs.values():
            try:
                onnx.checker.check_model(str(bundle.graph(graph)), full_check=True)
            except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
                raise ParityError(f"{graph.file} is not a valid ONNX graph: {error}") from error


def check_bundle(
    bundle: Bundle,
    variant: Variant | None = None,
    tolerance: Tolerance | None = None,
    large: Checkpoint | None = None,
) -> ParityReport:
    """Compares a variant with the recorded answers, the portable one in onnx's evaluator too.

    Args:
        bundle: The bundle; its manifest may still be unwritten.
        variant: The variant. Default: the portable one.
        tolerance: Default: that of the variant's precision.
        large: The run of a large model, of which the evaluator computes one layer.
    """
    variant = variant or bundle.variant()
    tolerance = tolerance or Tolerance.of(variant.precision)
    provider: Provider = "cpu" if "cpu" in variant.providers else "cuda"
    reference = Reference.of(bundle, variant)
    special = bundle.tokenizer.special
    model = open_model(bundle, variant, SessionOptions(provider))
    comparisons, decisions = check_reference(
        reference,
        model,
        special,
        tolerance,
        exact=variant.exact,
        one=OneGraph.of(bundle, variant, model.options),
    )
    del model  # as large as the weights
    portable = not RECIPES[variant.name].fused
    if portable and large is not None:
        end_phase(large.model)
        comparisons += check_one_layer(large)
    elif portable:
        numbers_only = Reference(reference.cases, (), ())
        second = plain_model(variant, ReferenceBackend(bundle, variant))
        comparisons += check_reference(numbers_only, second, special, tolerance)[0]
    settings = {"variant": variant.name, "provider": provider}
    return ParityReport(str(bundle.folder), settings, tolerance, comparisons, decisions)


def calibrated(checkpoint: Checkpoint, texts: Sequence[str]) -> Calibration:
    """Calibrates a checkpoint on texts; see `calibration.calibrate`."""
    config, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    if config.architecture == "decoder-only":
        # The text as it stands: it is what the model continues, and searches take far longer.
        whole = [tokenizer.special.wrap(tokenizer.encode(text)) for text in texts if text.strip()]
        sources = [ids[: config.max_positions] for ids in whole]
    else:
        sources = _sources(checkpoint, texts)
    length = room(config, sources, ANSWER_LENGTH) if sources else 0
    return calibrate_model(checkpoint.model, tokenizer.special, sources, length)


def _sources(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of the texts that fit the model."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    return [
        source_of(text, tokenizer, config, number)
        for number, text in enumerate(fitting(texts, tokenizer, config), start=1)
    ]


def _reference(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    precision: Precision = FLOAT32,
    calibration: Calibration | None = None,
) -> Reference:
    """Returns torch's answers to the first texts that fit, or to random tokens."""
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    sources = recorded_sources(checkpoint.model, _sources(checkpoint, texts))
    oracle = Oracle(
        checkpoint.model, special, Tolerance(), precision=precision, calibration=calibration
    )
    return oracle.record(
        sources or random_sources(config, RECORDED_SOURCES),
        recorded_length(checkpoint.model),
        options_of_json(checkpoint.generation),
    )


def _manifest(checkpoint: Checkpoint, variants: Mapping[str, Variant], folder: Path) -> Manifest:
    """Returns the manifest of the files in a folder."""
    config = checkpoint.model.config
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    versions = {}
    for name in MADE_BY:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return Manifest(
        architecture=config.architecture,
        model=config.to_dict(),
        generation=default_generation(checkpoint),
        variants=variants,
        files={
            path.relative_to(folder).as_posix(): FileRecord(sha256(path), path.stat().st_size)
            for path in files
        },
        versions=versions,
        head=checkpoint.head,
    )
