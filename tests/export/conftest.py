"""Fixtures of the export's tests: the random run and its bundle, and both as decoders."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.conftest import THOROUGH, Once, make_run
from tests.traced import TRACES, unverified, verify
from tests.traced import exported as exported
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export import bundle as exporting
from transferry.export.bundle import Contents
from transferry.export.checks.numbers import compare_cases
from transferry.export.make import describe, make
from transferry.export.oracle.cases import random_case, sizes, vocabulary
from transferry.export.oracle.oracle import Oracle
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import Calibration, Histogram, LinearObserver
from transferry.export.rewrite.kv_scales import KVRanges, fold_kv_scales
from transferry.export.trace.graph import Graph, export_graph
from transferry.export.trace.store import write_graphs
from transferry.export.verify import Request
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.bundle.specs import GraphSpec, TensorSpec
from transferry.runtime.io.sealed_folder import records
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Case, Tolerance
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, SOURCES, SpecialTokens, Tokenizer

BYTES = Tokenizer("bytes", r"\S+|\s+", {byte: rank for rank, byte in enumerate(SINGLE_BYTES)})


def sweep(config: ModelConfig) -> Iterator[Case]:
    """Cases that reveal a frozen size, and the whole vocabulary."""
    yield from sizes(config, seed=0)
    yield from vocabulary(config, seed=0)


# Shared: perturb a copy of the model.
loaded = cache(load_checkpoint)


@pytest.fixture(scope="session")
def checkpoint(run_folder: Path) -> Checkpoint:
    return loaded(run_folder)


@pytest.fixture(scope="session")
def texts(run_folder: Path) -> list[str]:
    return load_samples(run_folder)


@pytest.fixture(scope="session")
def sources(checkpoint: Checkpoint, texts: list[str]) -> list[list[int]]:
    tokenizer = checkpoint.tokenizer
    return [[*tokenizer.encode(text), tokenizer.special.eos_id] for text in texts]


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return Bundle.load(bundle_folder)


@pytest.fixture(scope="session")
def decoder(bundle: Bundle) -> PortableDecoder:
    return PortableDecoder(bundle, bundle.variant(), SessionOptions())


@pytest.fixture(scope="session")
def oracle(checkpoint: Checkpoint) -> Oracle:
    return Oracle.of(checkpoint.model, checkpoint.tokenizer.special, Tolerance())


ARCHITECTURES = {"both": "", "writer": "writer_", "reader": "reader_"}


@pytest.fixture(scope="session", params=ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def pair(request: pytest.FixtureRequest) -> tuple[Checkpoint, Bundle]:
    """The checkpoint and the bundle of each architecture."""
    run, bundle = (f"{request.param}{name}_folder" for name in ("run", "bundle"))
    checkpoint = loaded(request.getfixturevalue(run))
    return checkpoint, Bundle.load(request.getfixturevalue(bundle))


@pytest.fixture(scope="session", autouse=True)
def _shared_traces(traces: None) -> None:
    """These tests pass `TRACES`, on disk, to exports and verifications."""


def graphs_of(
    model: Transformer, name: str = "cpu-fp32", calibration: Calibration | None = None
) -> dict[str, Graph]:
    """The graphs of a variant, traced once for all tests."""
    return make(model, RECIPES[name], TRACES, calibration)


def opened(bundle: Bundle, name: str | None = None) -> ServedModel:
    """A variant, by default the first, in onnxruntime on the CPU."""
    return open_model(bundle, bundle.variant(name), SessionOptions())


def verified(
    checkpoint: Checkpoint,
    bundle: Bundle,
    texts: Sequence[str],
    name: str | None = None,
    **settings: Any,
) -> ParityReport:
    """The full proof of a variant, by default the first."""
    request = Request(texts, **settings)
    return verify(checkpoint, bundle, opened(bundle, name), request)


def require_torchs_answers(
    model: Transformer,
    served: ServedModel,
    special: SpecialTokens = SOURCES,
    sizes: Sequence[tuple[int, int, int]] = ((1, 1, 0), (3, 7, 0), (2, 5, 4)),
) -> None:
    """Compares random cases of each batch, source and past: every tensor is torch's."""
    cases = [random_case(model.config, *size, seed=number) for number, size in enumerate(sizes)]
    found = compare_cases(Oracle.of(model, special, Tolerance()), served, cases)
    assert len(found) >= 2 * len(cases)
    assert [f"{item.case}: {item.tensor}: {item.fault}" for item in found if item.fault] == []


def exported_layers(module: torch.nn.Module, **widths: int) -> Graph:
    """The graph of a module: tokens [batch, source] -> each output [batch, source, width]."""
    tokens = TensorSpec("tokens", "source", "int64", ("batch", "source"))
    outputs = [
        TensorSpec(name, "hidden", "float32", ("batch", "source", width))
        for name, width in widths.items()
    ]
    return export_graph(module, GraphSpec("layers.onnx", (tokens,), tuple(outputs)))


def in_onnxruntime(model: ir.Model) -> Callable[[NDArray[Any]], Any]:
    """Opens a graph; the result gives its outputs for tokens."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return lambda tokens: session.run(None, {"tokens": tokens})


def written(folder: Path, model: Transformer, name: str, graphs: dict[str, Graph]) -> Bundle:
    """A variant on disk, as a bundle without anything else."""
    write_graphs([(graph.model, folder / graph.spec.file) for graph in graphs.values()])
    config, described = model.config, {name: describe(RECIPES[name], graphs)}
    files = records(folder)
    manifest = Manifest(config.architecture, config.to_dict(), {}, described, files, {})
    return Bundle(folder, manifest, BYTES)


def calmed(checkpoint: Checkpoint) -> Checkpoint:
    """The run with narrower weights, as trained models have: wide ones amplify rounding errors."""
    model = copy.deepcopy(checkpoint.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embedding"):
                parameter.mul_(0.25)
        model.embedding.weight[checkpoint.tokenizer.special.eos_id] /= 3.0
    return replace(checkpoint, model=model)


@pytest.fixture(scope="session")
def calm(checkpoint: Checkpoint) -> Checkpoint:
    """The encoder-decoder with weights for which 8 bits suffice on any processor."""
    return calmed(checkpoint)


@pytest.fixture(scope="session")
def calm_writer(writer_run_folder: Path) -> Checkpoint:
    """The decoder-only run with such weights."""
    return calmed(load_checkpoint(writer_run_folder))


def widest(checkpoint: Checkpoint, texts: Sequence[str]) -> Calibration:
    """Stands for `calibrated`: ranges that clip nothing, of tokens from the whole vocabulary.

    Verification feeds random tokens, and no text is typical of these.
    """
    assert texts
    generator = torch.Generator().manual_seed(0)
    vocabulary = checkpoint.model.config.vocabulary_size
    pairs = [
        torch.randint(0, vocabulary, (2, 8, length), generator=generator) for length in range(8, 24)
    ]

    def run(model: Transformer, report: Callable[[str, Tensor, Tensor], None]) -> None:
        with torch.inference_mode(), LinearObserver(model, report):
            for source, target in pairs:
                model(source, torch.ones_like(source, dtype=torch.bool), target)

    ranges, inputs = KVRanges(checkpoint.model), defaultdict[str, Histogram](Histogram)
    run(checkpoint.model, lambda name, _, output: ranges.add(name, output))
    scales = ranges.scales()
    folded = fold_kv_scales(checkpoint.model, scales)
    run(folded, lambda name, x, _: inputs[name].add(x.numpy()))
    found = {name: histogram.activation() for name, histogram in inputs.items()}
    activations = {
        name: replace(
            each,
            scale=1.1 * each.largest / (127 if each.zero_point else 255),
            # Two of each layer but a tied LM head, whose integers are looked up too.
            wide=() if name == "embedding.weight" else (1, 4),
        )
        for name, each in found.items()
    }
    return Calibration(activations, scales)


@pytest.fixture(scope="session")
def recurrent(once: Once) -> Checkpoint:
    """A run with SSRUs in its decoder. Its end token is likelier still, so that answers end."""
    shape: dict[str, Any] = {"decoder_cell": "ssru", "norm_order": "pre"}
    checkpoint = load_checkpoint(once("ssru-run", lambda to: make_run(to, SOURCES, **shape)))
    with torch.no_grad():
        checkpoint.model.embedding.weight[checkpoint.tokenizer.special.eos_id] *= 2.0
    return checkpoint


@pytest.fixture(scope="session")
def calm_recurrent(recurrent: Checkpoint) -> Checkpoint:
    """The recurrent run with weights for which 8 bits suffice."""
    return calmed(recurrent)


@pytest.fixture(scope="session")
def recurrent_variants(recurrent: Checkpoint, texts: list[str], once: Once) -> Bundle:
    """The bundle of `recurrent` with `cpu-fp32`; in float16 in a run of all tests."""
    names = ("cpu-fp32", "cuda-fp16")[: 1 + THOROUGH]
    make = partial(export_screened, recurrent, names=names, texts=texts, one_graph=1)
    return Bundle.load(once("ssru-variants", make))


@pytest.fixture(scope="session")
def calm_recurrent_variants(calm_recurrent: Checkpoint, texts: list[str], once: Once) -> Bundle:
    """The bundle of `calm_recurrent` with variants in integers."""
    names = "cpu-int8", "cpu-int4"
    make = partial(export_screened, calm_recurrent, names=names, texts=texts)
    return Bundle.load(once("calm-ssru-variants", make))


@pytest.fixture(scope="session")
def calibration(calm: Checkpoint, texts: list[str]) -> Calibration:
    """The calibration of the int8 variant of `export_all`."""
    return widest(calm, texts)


def export_screened(
    checkpoint: Checkpoint,
    out: Path,
    *,
    names: Sequence[str] = ("cpu-fp32", "cpu-int8", "cpu-int4"),
    texts: Sequence[str],
    one_graph: int = 0,
) -> Bundle:
    """Exports variants, that in float32 for a CPU with screened greedy search, unverified."""
    contents = Contents(texts, names, calibrate=texts, one_graph=one_graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transferry.export.rewrite.lm_head.SMALLEST_VOCABULARY", 1)
        patch.setattr(exporting, "calibrated", widest)
        return unverified(checkpoint, out, contents)


@pytest.fixture(scope="session")
def export_all(calm: Checkpoint, texts: list[str]) -> Callable[..., Bundle]:
    """Exports `calm` with every variant for a CPU, with screened greedy search."""
    return partial(export_screened, calm, texts=texts)


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification exports anew, and must find what `export_all` exported."""
    monkeypatch.setattr("transferry.export.rewrite.lm_head.SMALLEST_VOCABULARY", 1)


@pytest.fixture(scope="session")
def all_variants(export_all: Callable[[Path], Bundle], once: Once) -> Bundle:
    """The bundle of `export_all`. Copy it before changing anything in it."""
    return Bundle.load(once("all-variants", export_all))


def random_reader(**changes: Any) -> Transformer:
    """An encoder of two layers of two heads, whose weights depend on the seed alone."""
    shape: dict[str, Any] = dict(vocabulary_size=40, d_model=16, heads=2, d_ff=24, max_positions=24)
    shape |= dict(architecture="encoder-only", encoder_layers=2, decoder_layers=0)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**(shape | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()
