"""cpu-int8-kernels: which chains become operators of the package, and which stay."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from tests.export.conftest import BYTES, exported, graphs_of, written
from tests.export.rewrite.test_kv_cache_int8 import GROUPED, LLAMA, SENTENCES, WRITER
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.bundle import Contents, check_graphs, prove_variant
from transferry.export.checks.graphs import graphs_claim, tokens_claim
from transferry.export.checks.weights import weights_claim
from transferry.export.rewrite import kernels
from transferry.export.rewrite.calibration import Calibration, calibrate
from transferry.export.rewrite.kernels import GRAPHS, insert_kernels
from transferry.export.trace.editing import KERNELS
from transferry.export.trace.graph import Graph
from transferry.export.trace.store import WEIGHTS, Places, write_graphs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import UsageError

NAME = "cpu-int8-kernels"
READER: dict[str, Any] = {"architecture": "encoder-only", "decoder_layers": 0}
Change = Callable[[ir.Graph], None]


def calibrated(**options: Any) -> tuple[Transformer, Calibration]:
    """A small model whose widths have kernels by default, and its calibration."""
    torch.manual_seed(0)
    shape = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "d_ff": 48}
    model = Transformer(ModelConfig(vocabulary_size=301, max_positions=64, **(shape | options)))
    return model.eval(), calibrate(model, BYTES.special, SENTENCES, 10)


def with_wide(calibration: Calibration, *wide: int) -> Calibration:
    inputs = calibration.activations.items()
    activations = {name: dataclasses.replace(each, wide=wide) for name, each in inputs}
    return dataclasses.replace(calibration, activations=activations)


def kernels_of(graph: Graph) -> dict[str, int]:
    return Counter(node.op_type for node in graph.model.graph if node.domain == KERNELS)


def counts(text: str) -> dict[str, int]:
    """Reads "3 Linear, Embed"."""
    parts = (each.rpartition(" ") for each in text.split(", "))
    return {kind: int(count or 1) for count, _, kind in parts}


# Models


BOTH = {
    "encoder": "Embed, 3 Linear, EncoderAttention, LinearNorm, FeedForward, 2 LinearToHeads",
    "decoder": "Embed, 2 Linear, SelfAttention, CrossAttention, 2 LinearNorm, FeedForward",
}
# In pre-norm only the last norm follows a residual connection that nothing else reads.
PRE_NORM = {
    "encoder": "5 Linear, EncoderAttention, LinearNorm, 2 LinearToHeads",
    "decoder": "5 Linear, SelfAttention, CrossAttention, LinearNorm",
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "post-norm": ({}, BOTH),
    "pre-norm": ({"norm_order": "pre"}, PRE_NORM),
    "GELU, an embedding without a factor": (
        {**READER, "activation": "gelu", "scale_embedding": False},
        {"encoder": "Embed, 5 Linear, EncoderAttention, 2 LinearNorm"},
    ),
    "narrow heads": (
        {**READER, "heads": 4},
        {"encoder": "Embed, 4 Linear, LinearNorm, FeedForward"},
    ),
    "a writer": (WRITER, {"decoder": "Embed, Linear, SelfAttention, LinearNorm, FeedForward"}),
    "a writer with windows, a soft cap and a narrow layer": (
        {**WRITER, "windows": (5,), "attention_softcap": 5.0, "d_ff": 40},
        {"decoder": "Embed, 2 Linear, LinearNorm"},
    ),
    "rotary, grouped, RMSNorm, SwiGLU": (
        {**WRITER, **GROUPED, **LLAMA, "d_model": 64, "heads": 4},
        {"decoder": "7 Linear"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_chains_that_match_become_kernels(name: str, tmp_path: Path) -> None:
    """And onnx finds types and shapes of the graphs right."""
    options, expected = MODELS[name]
    model, calibration = calibrated(**options)
    graphs = graphs_of(model, NAME, with_wide(calibration))
    found = {key: dict(count) for key, graph in graphs.items() if (count := kernels_of(graph))}
    search = {"lm_head": "Linear", "top_k": "LinearRank", "exp_sums": "ExpSums"}
    wanted = {**expected, **(search if model.decoder else {})}
    assert found == {key: counts(text) for key, text in wanted.items()}
    bundle = written(tmp_path, model, NAME, graphs)
    check_graphs(bundle, bundle.variant())
    assert weights_claim(model, bundle, bundle.variant(), with_wide(calibration)).problem == ""


def test_an_lm_head_of_several_operators_ranks_nothing() -> None:
    model, calibration = calibrated(**WRITER, output_softcap=5.0)
    graphs = graphs_of(model, NAME, calibration)
    assert "top_k" not in graphs
    assert kernels_of(graphs["exp_sums"]) == {"ExpSums": 1}


def test_wide_inputs_stay_beside_a_kernel() -> None:
    """Their Gemm reads the kernel's product, which then joins no norm."""
    model, calibration = calibrated(**READER)
    (graph,) = graphs_of(model, NAME, with_wide(calibration, 1, 4)).values()
    assert kernels_of(graph) == counts("Embed, 7 Linear, EncoderAttention")
    assert sum(node.op_type == "Gemm" for node in graph.model.graph) == 7


def test_a_model_without_a_kernel_is_refused() -> None:
    model, calibration = calibrated(**WRITER, d_model=40, d_ff=24)
    assert graphs_of(model, "cpu-int8", calibration)
    with pytest.raises(UsageError, match=r"cpu-int8-kernels: no operator .* --variant cpu-int8$"):
        graphs_of(model, NAME, calibration)


# Conditions: one node of cpu-int8's graphs is changed, and loses its kernel.


@pytest.fixture(scope="module")
def plain() -> dict[str, Graph]:
    """The graphs of the variant of a model in post-norm, before they have kernels."""
    model, calibration = calibrated()
    with patch.object(kernels, "insert_kernels", return_value=1):
        graphs = graphs_of(model, NAME, with_wide(calibration))
    return {name: graphs[name] for name in GRAPHS}


def nodes_of(graph: ir.Graph, kind: str) -> list[ir.Node]:
    return [node for node in graph.all_nodes() if node.op_type == kind]


def attribute(kind: str, name: str, value: Any, place: int = 0) -> Change:
    """Sets an attribute of one of the nodes of a kind."""

    def change(graph: ir.Graph) -> None:
        setting = ir.convenience.convert_attribute(name, value)
        nodes_of(graph, kind)[place].attributes[name] = setting

    return change


def edge(kind: str, index: int, source: str | np.generic | NDArray[Any], place: int = 0) -> Change:
    """Makes one of the nodes of a kind read an input of the graph, or a new constant."""

    def change(graph: ir.Graph) -> None:
        if isinstance(source, str):
            value = next(each for each in graph.inputs if each.name == source)
        else:
            value = ir.Value(name="changed", const_value=ir.tensor(np.asarray(source)))
            graph.register_initializer(value)
        nodes_of(graph, kind)[place].replace_input_with(index, value)

    return change


def read_too(kind: str, place: int = 0) -> Change:
    """Gives the graph the output of one of the nodes of a kind."""
    return lambda graph: graph.outputs.append(nodes_of(graph, kind)[place].outputs[0])


def residual_from_before(graph: ir.Graph) -> None:
    """Around the feed-forward network and the attention before it."""
    _, attention, network = nodes_of(graph, "Add")
    network.replace_input_with(0, attention.inputs[0])


# By condition: the graph, what is changed in it, and the kernels that are lost.
APART = {"FeedForward": -1, "LinearNorm": 1, "Linear": 1}
NORM = {"LinearNorm": -1, "Linear": 1}
SELF, CROSS = {"SelfAttention": -1}, {"CrossAttention": -1}
ENCODER = {"EncoderAttention": -1}
HEADS = {"LinearToHeads": -1, "Linear": 1}
QUERY = {"Linear": -1}
EMBED = {"Embed": -1}
CONDITIONS: dict[str, tuple[str, Change, dict[str, int]]] = {
    "a norm over other axes": ("encoder", attribute("LayerNormalization", "axis", 1), NORM),
    "a norm in half": ("encoder", attribute("LayerNormalization", "stash_type", 10), NORM),
    "a computed weight of a norm": ("encoder", edge("LayerNormalization", 1, "source"), NORM),
    "a sum that others read": ("encoder", read_too("Add", 1), NORM),
    "a product that others read": ("encoder", read_too("MatMulIntegerToFloat", 3), NORM),
    "a hidden layer that others read": (
        "encoder",
        read_too("MatMulIntegerToFloat", 4),
        APART,
    ),
    "a residual from before": ("encoder", residual_from_before, APART),
    "another zero of the product": ("encoder", edge("MatMulIntegerToFloat", 4, np.uint8(3)), QUERY),
    "a zero of the weight": (
        "encoder",
        edge("MatMulIntegerToFloat", 5, np.ones(32, np.int8)),
        QUERY,
    ),
    "a computed scale": ("encoder", edge("MatMulIntegerToFloat", 3, "source"), QUERY),
    "a weight as it is": ("encoder", attribute("Transpose", "perm", [0, 1]), QUERY),
    "keys rounded to other steps": ("encoder", edge("QuantizeLinear", 1, np.float32(2), 5), HEADS),
    "keys read before rounding": ("encoder", read_too("MatMulIntegerToFloat", 6), HEADS),
    "heads in other order": ("encoder", attribute("Transpose", "perm", [0, 2, 3, 1], -1), HEADS),
    "another scale of attention": ("encoder", attribute("Attention", "scale", 0.5), ENCODER),
    "causal attention": ("encoder", attribute("Attention", "is_causal", 1), ENCODER),
    "a soft cap": ("encoder", attribute("Attention", "softcap", 5.0), ENCODER),
    "a mask that is finite": ("encoder", edge("Where", 1, np.float32(-1e9)), ENCODER),
    "a mask of something else": ("encoder", edge("Not", 0, "source"), ENCODER),
    "scales of other tokens": ("encoder", edge("Gather", 1, "source_mask", 1), EMBED),
    "a computed factor": ("encoder", edge("Mul", 1, "source", 1), EMBED),
    "positions from 1 on": ("encoder", edge("Range", 0, np.int64(1)), EMBED),
    "an embedding that others read": ("encoder", read_too("Add"), EMBED),
    "positions of tokens": ("decoder", edge("Gather", 1, "target", -1), EMBED),
    "a choice by another input": ("decoder", edge("If", 0, "target"), SELF),
    "the bias of the source": ("decoder", edge("Add", 1, "source_bias", 1), SELF),
    "the bias of the target": ("decoder", edge("Add", 1, "bias", 3), CROSS),
    "a softmax over rows": ("decoder", attribute("Softmax", "axis", 2), SELF),
    "cells of another input": ("decoder", edge("ScatterND", 1, "positions"), SELF),
    "a window": ("decoder", attribute("GroupQueryAttention", "local_window_size", 4), SELF),
    "a cap": ("decoder", attribute("GroupQueryAttention", "softcap", 5.0), SELF),
    "another factor": ("decoder", attribute("GroupQueryAttention", "scale", 0.5, -1), CROSS),
    "other kept keys": ("decoder", edge("Identity", 0, "past.0.keys"), CROSS),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_chain_that_computes_otherwise_stays(name: str, plain: dict[str, Graph]) -> None:
    graph, change, lost = CONDITIONS[name]
    found = []
    for edit in (None, change):
        model = ir.from_proto(ir.to_proto(plain[graph].model))
        if edit is not None:
            edit(model.graph)
        changed = dataclasses.replace(plain[graph], model=model)
        assert insert_kernels(changed)
        found.append(kernels_of(changed))
    before, after = found
    assert before == counts(BOTH[graph])
    differing = {kind: after[kind] - before[kind] for kind in before if after[kind] != before[kind]}
    assert differing == lost
    read = {value.name for node in model.graph for value in node.inputs if value is not None}
    made = {value.name for node in model.graph for value in node.outputs}
    given = {*model.graph.initializers, *(value.name for value in model.graph.inputs)}
    assert read <= made | given, "each value that a node reads is still there"


# Claims, and the files.


@pytest.fixture(scope="module")
def small() -> tuple[Transformer, Calibration]:
    model, calibration = calibrated()
    return model, with_wide(calibration)


def other_epsilon(graph: ir.Graph) -> None:
    attribute("FeedForward", "epsilon", 1.1e-5)(graph)


def caches_exchanged(graph: ir.Graph) -> None:
    (node,) = nodes_of(graph, "SelfAttention")
    keys, values = node.inputs[1:3]
    node.replace_input_with(1, values)
    node.replace_input_with(2, keys)


def weights_exchanged(graph: ir.Graph) -> None:
    """Of two layers of one shape."""
    one, other = nodes_of(graph, "LinearNorm")
    for node, weight in ((one, other.inputs[3]), (other, one.inputs[3])):
        node.replace_input_with(3, weight)


def weight_off(graph: ir.Graph) -> None:
    value = nodes_of(graph, "LinearNorm")[0].inputs[3]
    assert value is not None and value.const_value is not None
    array = value.const_value.numpy().copy()
    array[0, 0] += 1 if array[0, 0] < 9 else -1
    value.const_value = ir.Tensor(array, name=value.name)


def positions_of_tokens(graph: ir.Graph) -> None:
    edge("Embed", 1, "target")(graph)


def rounded_tokens(graph: ir.Graph) -> None:
    edge("Linear", 0, "target")(graph)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (None, ""),
        (other_epsilon, "decoder: FeedForward .*: attribute epsilon is "),
        (caches_exchanged, "decoder: SelfAttention .*: input 1 is past.0.values, export writes"),
        (weights_exchanged, "decoder: LinearNorm .*: input 3 is decoder.0.cross_attention.output"),
        (weight_off, "1 of 1,024 entries of decoder.0.self_attention.output.weight.int8 .* differ"),
        (positions_of_tokens, "decoder: Embed .* reads token ids"),
        (rounded_tokens, "decoder: Linear .* reads token ids"),
    ],
)
def test_a_changed_kernel_is_named(
    small: tuple[Transformer, Calibration], tmp_path: Path, change: Change | None, claim: str
) -> None:
    model, calibration = small
    graphs = graphs_of(model, NAME, calibration)
    if change is not None:
        change(graphs["decoder"].model.graph)
    bundle = written(tmp_path, model, NAME, graphs)
    variant = bundle.variant()
    fresh = graphs_of(model, NAME, calibration)
    tokens = tokens_claim(model.config, bundle, variant).problem
    weights = weights_claim(model, bundle, variant, calibration).problem
    same = graphs_claim(fresh, bundle, variant).problem
    assert re.match(claim or r"\Z", tokens or weights or same)
    assert bool(same) == (change not in (None, weight_off)), "any but a weight's entry"


def test_both_variants_have_one_file_of_weights(
    small: tuple[Transformer, Calibration], tmp_path: Path
) -> None:
    sizes = set()
    for names in (["cpu-int8"], [NAME], ["cpu-int8", NAME]):
        places: dict[Path, Places] = {}
        for name in names:
            graphs = graphs_of(*small[:1], name, small[1]).values()
            folder = tmp_path / "+".join(names)
            folder.mkdir(exist_ok=True)
            files = [(graph.model, folder / graph.spec.file) for graph in graphs]
            write_graphs(files, places)
        (weights,) = folder.rglob(WEIGHTS)
        sizes.add(weights.stat().st_size)
    assert len(sizes) == 1


@pytest.mark.optional("transferry_kernels")
def test_an_export_is_verified_and_answers_as_cpu_int8(
    calm: Checkpoint, texts: list[str], tmp_path: Path
) -> None:
    names = ["cpu-int8", NAME]

    def prove(checkpoint: Checkpoint, bundle: Bundle, variant: Variant, *given: Any) -> None:
        if variant.name == NAME:
            prove_variant(checkpoint, bundle, variant, *given)

    exported(calm, tmp_path / "bundle", Contents(texts, names, calibrate=texts), prove=prove)
    found = []
    for name in names:
        with Engine(tmp_path / "bundle", variant=name) as engine:
            results = engine.generate(texts, beam=2)
            found.append([result.hypotheses[0].tokens for result in results])
    same = sum(one == other for one, other in zip(*found, strict=True))
    assert same >= len(texts) - 1, "but for a value at a border of two integers"
