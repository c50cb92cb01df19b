"""What the tests of the export share: the random run and its bundle, and both as decoders."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.build_model.transformer import Transformer
from transferry.export import bundle as exporting
from transferry.export import variants
from transferry.export.bundle import export_bundle
from transferry.export.graphs.fused import export_slot_graphs
from transferry.export.graphs.portable import Graph
from transferry.export.optimise.calibration import Calibration, Histogram, Linears
from transferry.export.optimise.kv_scales import Ranges, in_units
from transferry.export.parity.oracle import Judge
from transferry.runtime.bundle import Bundle
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import Tolerance


@pytest.fixture(scope="session")
def checkpoint(run_folder: Path) -> Checkpoint:
    """Shared: perturb a copy of the model."""
    return load_checkpoint(run_folder)


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
def judge(checkpoint: Checkpoint) -> Judge:
    return Judge(checkpoint.model, checkpoint.tokenizer.special, Tolerance())


Exporter = Callable[..., dict[str, Graph]]


def copied(graphs: dict[str, Graph]) -> Exporter:
    """Stands for an exporter: tracing takes seconds, and what was traced fits all weights."""

    def export(model: Transformer, prefix: str) -> dict[str, Graph]:
        weights = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
        copies = {}
        for name, graph in graphs.items():
            cloned = graph.model.clone()
            for key in cloned.graph.initializers.keys() & weights.keys():
                cloned.graph.initializers[key].const_value = ir.tensor(weights[key], name=key)
            copies[name] = Graph(cloned, replace(graph.spec, file=f"{prefix}{name}.onnx"))
        return copies

    return export


@pytest.fixture(scope="session")
def portable_traced(bundle: Bundle) -> Exporter:
    """The portable graphs of the run, not traced anew."""
    specs = bundle.variant().graphs
    return copied({name: Graph(ir.load(bundle.graph(spec)), spec) for name, spec in specs.items()})


@pytest.fixture(scope="session")
def slots_traced(checkpoint: Checkpoint) -> Exporter:
    """The graphs of the run with the cache in place, traced once for each type of the cache."""
    traced = {
        stored: copied(export_slot_graphs(checkpoint.model, "", stored=stored))
        for stored in (None, "int8")
    }

    def export(model: Transformer, prefix: str, *, stored: str | None = None) -> dict[str, Graph]:
        return traced[stored](model, prefix)

    return export


@pytest.fixture(scope="session")
def calm(checkpoint: Checkpoint) -> Checkpoint:
    """The run as a model that 8 bits suffice for: trained ones do not blow errors up as wide
    random weights do, and no token's embedding is three times as large as others."""
    model = copy.deepcopy(checkpoint.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embedding"):
                parameter.mul_(0.25)
        model.embedding.weight[checkpoint.tokenizer.special.eos_id] /= 3.0
    return replace(checkpoint, model=model)


def widest(checkpoint: Checkpoint, texts: Sequence[str]) -> Calibration:
    """Stands for `calibrated`: ranges that clip nothing, of tokens from the whole vocabulary.

    What is verified are random tokens, and to random weights no text is typical of them.
    """
    assert texts
    generator = torch.Generator().manual_seed(0)
    vocabulary = checkpoint.model.config.vocabulary_size
    pairs = [
        torch.randint(0, vocabulary, (2, 8, length), generator=generator) for length in range(8, 24)
    ]

    def run(model: Transformer, see: Callable[[str, Tensor, Tensor], None]) -> None:
        with torch.inference_mode(), Linears(model, see):
            for source, target in pairs:
                model(source, torch.ones_like(source, dtype=torch.bool), target)

    ranges, inputs = Ranges(checkpoint.model), defaultdict[str, Histogram](Histogram)
    run(checkpoint.model, lambda name, _, found: ranges.see(name, found))
    units = ranges.units()
    scaled = in_units(checkpoint.model, units)
    run(scaled, lambda name, given, _: inputs[name].add(given.numpy()))
    found = {name: histogram.activation() for name, histogram in inputs.items()}
    activations = {
        name: replace(each, scale=1.1 * each.largest / (127 if each.zero_point else 255))
        for name, each in found.items()
    }
    return Calibration(activations, units)


@pytest.fixture(scope="session")
def calibration(calm: Checkpoint, texts: list[str]) -> Calibration:
    """What the int8 variant of `export_all` is made with."""
    return widest(calm, texts)


@pytest.fixture(scope="session")
def export_all(
    calm: Checkpoint,
    texts: list[str],
    portable_traced: Exporter,
    slots_traced: Exporter,
) -> Callable[..., Bundle]:
    """Exports `calm` with every variant that a CPU runs; greedy search is screened."""

    def export(out: Path, **options: Any) -> Bundle:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(variants, "export_graphs", portable_traced)
            patch.setattr(variants, "export_slot_graphs", slots_traced)
            patch.setattr(variants, "SMALLEST_VOCABULARY", 1)
            patch.setattr(exporting, "calibrated", widest)
            names = ["cpu-fp32", "cpu-int8"]
            return export_bundle(calm, out, texts=texts, variants=names, calibrate=texts, **options)

    return export


@pytest.fixture(scope="session")
def all_variants(
    export_all: Callable[[Path], Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """The bundle of `export_all`. Copy it before changing anything in it."""
    return export_all(tmp_path_factory.mktemp("bundles") / "all")
