"""Export: makes a bundle in a temporary folder, verifies it there and renames it into place."""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from torch import nn

from transferry.build_model.allocator import large_blocks_returned, return_memory
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.mapped_weights import MappedWeights
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.own.model import OwnModel
from transferry.export.arithmetic import KEPT
from transferry.export.blame.cross_check import ReferenceBackend, plain_model
from transferry.export.bundle_folder import foreign_bundle
from transferry.export.checks.claims import default_generation
from transferry.export.checks.numbers import compare_cases
from transferry.export.make import add_one_graph, describe, make
from transferry.export.oracle.cases import cross_check_cases, fitting, room, source_of
from transferry.export.oracle.effort import Effort, parameters, recorded_length, recorded_sources
from transferry.export.oracle.oracle import Oracle
from transferry.export.recipes import RECIPES, Recipe, recipe_of
from transferry.export.rewrite.calibration import CALIBRATION, Calibration
from transferry.export.rewrite.calibration import calibrate as calibrate_model
from transferry.export.trace.graph import Traces
from transferry.export.trace.search_graph import require_one_graph
from transferry.export.trace.store import Places, write_graphs
from transferry.export.verify import Done, Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST, Manifest
from transferry.runtime.bundle.specs import PORTABLE, REFERENCE, Variant
from transferry.runtime.errors import LOG, ParityError
from transferry.runtime.installation import installed_versions
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.folders import replace_folder, staged_folder
from transferry.runtime.io.outputs import require_new
from transferry.runtime.io.sealed_folder import records
from transferry.runtime.ort.cuda import cuda_obstacle
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Provider, SessionOptions, kernels
from transferry.runtime.precision import FLOAT32, Precision
from transferry.runtime.proof.compare import Comparison, Tolerance
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.recorded import Reference, check_reference
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.tables import counted

ANSWER_LENGTH = 64  # most tokens of an answer that an encoder-decoder is calibrated on
# Bytes of weights from which on they are mapped: reading mapped weights again and again takes a
# sixth of the time of an export, and a smaller model is kept in float64, too.
MAPPED = KEPT // 2
MADE_BY = ("transferry", "torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")
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
    """Verifies a variant of a bundle whose manifest is unwritten; of reduced precision on texts.

    Raises:
        ParityError: The graphs are invalid or differ from torch.
    """
    check_graphs(bundle, variant)
    if missing := _missing(variant):
        say(f"variant {variant.name} is not verified: {missing}")
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


def _missing(variant: Variant) -> str:
    """Returns the reason why this machine cannot run a variant; empty if it can."""
    if "cpu" not in variant.providers and (obstacle := cuda_obstacle()) is not None:
        return obstacle.missing
    if Precision.of(variant.precision).kernels and kernels().remedy:
        return f"transferry-kernels {kernels().found}"
    return ""


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

    The manifest may still be unwritten. Of a `large` model the evaluator computes one layer.
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


def one_layer(model: Transformer) -> Transformer:
    """Returns a model with the first layer of each stack, which shares all weights with it."""
    config = model.config
    shallow = copy.copy(model)
    shallow._modules = dict(model._modules)
    for name in ("encoder", "decoder"):
        if (layers := getattr(model, name)) is not None:
            setattr(shallow, name, nn.ModuleList(list(layers)[:1]))
    shallow.config = replace(
        config,
        encoder_layers=min(1, config.encoder_layers),
        decoder_layers=min(1, config.decoder_layers),
        windows=config.windows[:1],  # of one stack
        unrotated=tuple(layer for layer in config.unrotated if layer == 0),
    )
    return shallow


def check_one_layer(checkpoint: Checkpoint) -> list[Comparison]:
    """Compares onnx's evaluator with torch on the portable graphs of one layer."""
    model = one_layer(checkpoint.model)
    oracle = Oracle.of(model, checkpoint.tokenizer.special, Tolerance())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, config = RECIPES[PORTABLE], model.config
        graphs = make(model, recipe)
        write_graphs([(graph.model, folder / graph.spec.file) for graph in graphs.values()])
        variants = {PORTABLE: (variant := describe(recipe, graphs))}
        files = records(folder)
        manifest = Manifest(config.architecture, config.to_dict(), {}, variants, files, {})
        bundle = Bundle(folder, manifest, checkpoint.tokenizer)
        evaluator = plain_model(variant, ReferenceBackend(bundle, variant))
        return compare_cases(oracle, evaluator, cross_check_cases(config))


@dataclass(frozen=True)
class Contents:
    """Contents of a bundle besides the portable variant.

    Attributes:
        texts: Sentences for the recorded reference; random tokens if no sentence fits the model.
        variants: Names of other variants.
        calibrate: Sentences that an int8 variant is calibrated on.
        one_graph: Beams of a search to add as one graph, 1 for greedy search; 0 leaves it out.
    """

    texts: Sequence[str] = ()
    variants: Sequence[str] = ()
    calibrate: Sequence[str] = ()
    one_graph: int = 0

    def recipes(self) -> list[Recipe]:
        """Returns the recipes of all variants, each once; raises UsageError as `recipe_of`."""
        names = dict.fromkeys([PORTABLE, *self.variants])
        return [recipe_of(name, calibrated=bool(self.calibrate)) for name in names]


def export_bundle(
    checkpoint: Checkpoint,
    out: Path,
    contents: Contents = Contents(),
    *,
    force: bool = False,
    traces: Traces | None = None,
    prove: Proof = prove_variant,
    say: Say = LOG.info,
    done: Done = lambda phase, done, total: None,
) -> Bundle:
    """Exports a checkpoint as a verified bundle; the same inputs and versions give the same bytes.

    Args:
        checkpoint: The trained model and its tokenizer.
        out: Folder of the bundle.
        contents: Contents besides the portable variant.
        force: Replace an existing bundle.
        traces: Graphs traced before; receives those of this export. Default: none.
        prove: Verification of each variant.
        say: Receives a line at each stage.
        done: As for `verify_against`.

    Raises:
        UsageError: `out` exists and `force` is off, there is no such variant, an int8 variant is
            not calibrated, or one graph cannot keep a generation default.
        InputError: The folder cannot be written.
        ParityError: The graphs are invalid or differ from torch; `out` is untouched.
    """
    require_new(out, foreign_bundle, force=force)
    config, generation = checkpoint.model.config, default_generation(checkpoint)
    if contents.one_graph:
        require_one_graph(config.architecture, generation, contents.one_graph)
    recipes = contents.recipes()
    with staged_folder(out) as folder, _mapped_if_large(checkpoint.model, folder.parent):
        calibration = None
        if contents.calibrate:
            say(f"calibrating on {counted(len(contents.calibrate), 'sentence')}")
            calibration = calibrated(checkpoint, contents.calibrate)
            end_phase(checkpoint.model)
        making = _Making(checkpoint, folder, calibration, traces or Traces(), say)
        variants = making.variants(recipes, contents.one_graph)
        checkpoint.tokenizer.save(folder)
        say("recording reference answers of torch")
        making.references(recipes, contents.texts)
        bundle = Bundle(folder, _manifest(checkpoint, variants, folder), checkpoint.tokenizer)
        say("verifying")
        texts = [*contents.texts, *contents.calibrate]
        for variant in variants.values():
            prove(checkpoint, bundle, variant, texts, say, done)
            end_phase(checkpoint.model)
        # Last, so that an unverified bundle can never be loaded.
        with atomic_file(folder / MANIFEST) as file:
            file.write(bundle.manifest.to_json().encode())
        require_new(out, foreign_bundle, force=force)  # again, minutes later
        replace_folder(folder, out)
    return Bundle.load(out)


@contextlib.contextmanager
def _mapped_if_large(model: Transformer, folder: Path) -> Iterator[None]:
    """Keeps the weights of a large model in a file instead of memory."""
    if 4 * parameters(model) <= MAPPED:
        yield
        return
    with large_blocks_returned():
        model.mapped = model.mapped or MappedWeights(model.parameters(), folder)
        yield


@dataclass(frozen=True)
class _Making:
    """Writes variants and recorded answers of a checkpoint into a folder."""

    checkpoint: Checkpoint
    folder: Path
    calibration: Calibration | None
    traces: Traces
    say: Say

    def variants(self, recipes: Sequence[Recipe], one_graph: int) -> dict[str, Variant]:
        """Writes graphs and weights; returns the manifest's entries by name."""
        model, described = self.checkpoint.model, dict[str, Variant]()
        written: dict[Path, Places] = {}
        for recipe in recipes:
            self.say(f"exporting variant {recipe.name}")
            graphs = make(model, recipe, self.traces, self.calibration)
            if one_graph and recipe.name == PORTABLE:
                self.say("composing the search as one graph")
                special = self.checkpoint.tokenizer.special
                generation = default_generation(self.checkpoint)
                add_one_graph(graphs, model.config, special, generation, one_graph)
            # One variant at a time: its graphs hold the weights that are not the model's.
            files = [(graph.model, self.folder / graph.spec.file) for graph in graphs.values()]
            write_graphs(files, written)
            described[recipe.name] = describe(recipe, graphs)
            del graphs, files
            end_phase(model)
        return described

    def references(self, recipes: Sequence[Recipe], texts: Sequence[str]) -> None:
        """Writes the recorded answers, and the calibration beside those of int8 variants."""
        self._record(texts, FLOAT32).save(self.folder / REFERENCE)
        for recipe in recipes:
            path = self.folder / recipe.reference
            if self.calibration is not None and recipe.precision.calibrated:
                self.calibration.save(path.with_name(CALIBRATION))
            if recipe.precision.rounded and not path.exists():
                self._record(texts, recipe.precision).save(path)
            end_phase(self.checkpoint.model)

    def _record(self, texts: Sequence[str], precision: Precision) -> Reference:
        """Returns torch's answers to the first texts that fit, and to random tokens."""
        model, special = self.checkpoint.model, self.checkpoint.tokenizer.special
        calibration = self.calibration if precision.rounded else None
        sources = recorded_sources(model, _sources(self.checkpoint, texts))
        oracle = Oracle.of(
            model, special, Tolerance(), precision=precision, calibration=calibration
        )
        return oracle.record(sources, recorded_length(model), self.checkpoint.generation)


def calibrated(checkpoint: Checkpoint, texts: Sequence[str]) -> Calibration:
    """Calibrates a checkpoint on texts; see `calibration.calibrate`."""
    config, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    if config.architecture == "decoder-only":
        # The whole text: a decoder continues it, and searches take far longer.
        whole = [tokenizer.special.wrap(tokenizer.encode(text)) for text in texts if text.strip()]
        sources = [ids[: config.max_positions] for ids in whole]
    else:
        sources = _sources(checkpoint, texts)
    length = room(config, sources, ANSWER_LENGTH) if sources else 0
    return calibrate_model(checkpoint.model, tokenizer.special, sources, length)


def _sources(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    return [
        source_of(text, tokenizer, config, number)
        for number, text in enumerate(fitting(texts, tokenizer, config), start=1)
    ]


def _manifest(checkpoint: Checkpoint, variants: Mapping[str, Variant], folder: Path) -> Manifest:
    config = checkpoint.model.config
    versions = installed_versions(*MADE_BY)
    needed = any(Precision.of(variant.precision).kernels for variant in variants.values())
    if needed and not kernels().remedy:  # the variant was verified with it
        versions["transferry-kernels"] = kernels().version
    return Manifest(
        architecture=config.architecture,
        model=config.to_dict(),
        generation=default_generation(checkpoint),
        variants=variants,
        files=records(folder),
        versions=versions,
        head=checkpoint.head,
        card=checkpoint.card,
    )
