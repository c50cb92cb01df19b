"""A checkpoint becomes a bundle: made in a temporary folder, verified there, renamed into place."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.config import ModelConfig
from transferry.export.backends.backends import ReferenceBackend
from transferry.export.backends.plain_decoder import plain_model
from transferry.export.graphs.external_data import write_graphs
from transferry.export.optimise.calibration import Calibration
from transferry.export.optimise.calibration import calibrate as calibrate_model
from transferry.export.parity.cases import fitting, random_sources, room, source_of
from transferry.export.parity.oracle import Judge
from transferry.export.variants import PORTABLE, MadeVariant, make_variant, recipe_of
from transferry.runtime.bundle import (
    MANIFEST,
    REFERENCE,
    Bundle,
    FileRecord,
    Manifest,
    Variant,
)
from transferry.runtime.decoding.options import options_of_json
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.files import atomic_file, replace_folder, sha256, staged_folder
from transferry.runtime.ort.cuda import cuda_obstacle
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Provider, SessionOptions
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.parity.recorded import Reference, check_reference
from transferry.runtime.parity.report import ParityReport

MADE_BY = ("transferry", "torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")

# Recorded searches run over this many sources, of at most this many tokens out.
RECORDED_SOURCES = 8
RECORDED_LENGTH = 64


def export_bundle(
    checkpoint: Checkpoint,
    out: Path,
    *,
    texts: Sequence[str] = (),
    variants: Sequence[str] = (),
    calibrate: Sequence[str] = (),
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Exports a checkpoint, verifies what came out, and puts it in place.

    The same checkpoint, texts and package versions give the same bytes.

    Args:
        checkpoint: What was trained.
        out: The bundle's folder.
        texts: Sentences for the recorded reference; random tokens where none fits the model.
        variants: Those beside the portable one, by name.
        calibrate: Sentences that show what range activations have; for int8 variants.
        force: Replace a bundle that is there.
        say: Takes a line at each stage.

    Returns:
        The bundle, as it lies in `out`.

    Raises:
        UsageError: `out` exists and `force` is off, there is no such variant, one in int8 is not
            calibrated.
        InputError: The folder cannot be written.
        ParityError: The graphs are not valid or do not answer as torch does; `out` is untouched.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists already; add --force to replace it, or name another folder")
    if out.exists() and not (out / MANIFEST).exists():
        raise UsageError(f"{out} exists and is no bundle, so it is not replaced; name another")
    for name in variants:  # known now rather than after the work
        recipe_of(name, calibrated=bool(calibrate))
    with staged_folder(out) as folder:
        names = [PORTABLE, *variants]
        bundle = _write(checkpoint, folder, texts, names, calibrate, say)
        say("verifying")
        check_graphs(bundle)
        for variant in bundle.manifest.variants.values():
            if "cpu" not in variant.providers and (obstacle := cuda_obstacle()) is not None:
                say(f"variant {variant.name} is not verified: {obstacle.missing}")
                continue
            check_bundle(bundle, variant).require()
        # Last, so that what was not verified can never be loaded.
        with atomic_file(folder / MANIFEST) as file:
            file.write(bundle.manifest.to_json().encode())
        replace_folder(folder, out)
    return Bundle.load(out)


def require_exported_from(checkpoint: Checkpoint, bundle: Bundle) -> None:
    """Does nothing if a bundle has the shape and the tokenizer of a run.

    Raises:
        InputError: It has others.
    """
    config = checkpoint.model.config
    if ModelConfig.from_dict(dict(bundle.manifest.model)) != config:
        raise InputError(
            f"{bundle.folder} holds a model of shape {dict(bundle.manifest.model)}, but the run "
            f"has {config.to_dict()}; give the run that the bundle was exported from"
        )
    if bundle.tokenizer != checkpoint.tokenizer:
        raise InputError(
            f"{bundle.folder} and the run do not have the same tokenizer; give the run that the "
            "bundle was exported from"
        )


def check_graphs(bundle: Bundle) -> None:
    """Lets onnx check every graph: structure, types and shapes.

    Raises:
        ParityError: A graph is not valid.
    """
    for variant in bundle.manifest.variants.values():
        for graph in variant.graphs.values():
            try:
                onnx.checker.check_model(str(bundle.graph(graph)), full_check=True)
            except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
                raise ParityError(f"{graph.file} is not a valid ONNX graph: {error}") from error


def check_bundle(
    bundle: Bundle, variant: Variant | None = None, tolerance: Tolerance | None = None
) -> ParityReport:
    """Holds a variant against the recorded answers, the portable one in onnx itself too.

    Args:
        bundle: The bundle; a manifest need not be written yet.
        variant: Which variant; the portable by default.
        tolerance: What passes; by default what the variant's precision allows.
    """
    variant = variant or bundle.variant()
    tolerance = tolerance or Tolerance.of(variant.precision)
    provider: Provider = "cpu" if "cpu" in variant.providers else "cuda"
    reference = Reference.load(bundle.folder / REFERENCE)
    special = bundle.tokenizer.special
    model = open_model(bundle, variant, SessionOptions(provider))
    comparisons, decisions = check_reference(
        reference, model, special, tolerance, exact=variant.exact
    )
    if variant.name == PORTABLE:
        numbers_only = Reference(reference.cases, (), ())
        second = plain_model(variant, ReferenceBackend(bundle, variant))
        opinions, _ = check_reference(numbers_only, second, special, tolerance)
        comparisons = [*comparisons, *opinions]
    settings = {"variant": variant.name, "provider": provider}
    return ParityReport(str(bundle.folder), settings, tolerance, comparisons, decisions)


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    texts: Sequence[str],
    names: Sequence[str],
    calibrate: Sequence[str],
    say: Callable[[str], None],
) -> Bundle:
    """Writes everything but the manifest."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    calibration = None
    if calibrate:
        say(f"calibrating on {len(calibrate)} sentences")
        calibration = calibrated(checkpoint, calibrate)
    made: list[MadeVariant] = []
    for name in dict.fromkeys(names):
        say(f"exporting variant {name}")
        made.append(make_variant(model, name, calibration))
    write_graphs(
        [
            (graph.model, folder / graph.spec.file)
            for variant in made
            for graph in variant.graphs.values()
        ]
    )
    tokenizer.save(folder)

    say("recording what torch answers")
    special = tokenizer.special
    sources = [
        source_of(text, tokenizer, model.config, number)
        for number, text in enumerate(fitting(texts, tokenizer, model.config), start=1)
    ][:RECORDED_SOURCES]
    if not sources:
        sources = random_sources(model.config, RECORDED_SOURCES)
    judge = Judge(model, special, Tolerance())
    generation = options_of_json(checkpoint.generation)
    judge.record(sources, RECORDED_LENGTH, generation).save(folder / REFERENCE)

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(
        architecture=model.config.architecture,
        model=model.config.to_dict(),
        generation={"max_length": min(256, model.config.max_positions), **generation},
        variants={variant.name: variant.described() for variant in made},
        files={
            path.relative_to(folder).as_posix(): FileRecord(sha256(path), path.stat().st_size)
            for path in files
        },
        versions=_versions(),
    )
    return Bundle(folder, manifest, tokenizer)


def calibrated(checkpoint: Checkpoint, texts: Sequence[str]) -> Calibration:
    """Measures what ranges activations have on texts; see `calibration.calibrate`."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    sources = [
        source_of(text, tokenizer, config, number)
        for number, text in enumerate(fitting(texts, tokenizer, config), start=1)
    ]
    length = room(config, sources, RECORDED_LENGTH) if sources else 0
    return calibrate_model(checkpoint.model, tokenizer.special, sources, length)


def _versions() -> dict[str, str]:
    versions = {}
    for name in MADE_BY:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
