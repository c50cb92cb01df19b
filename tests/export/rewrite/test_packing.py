"""Linear layers of a CPU variant's encoder read tokens alone, and give each the same bits."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.export.conftest import BYTES, exported_layers, graphs_of, random_reader
from transferry.build_model.model.parts.disentangled import Convolution, Disentangled
from transferry.build_model.model.transformer import Transformer
from transferry.export.rewrite import fusion
from transferry.export.rewrite.calibration import calibrate
from transferry.export.rewrite.fusion import FloatKernels, Fusion
from transferry.export.trace.graph import Graph

PRODUCTS = ("Gemm", "FusedGemm", "MatMulIntegerToFloat", "MatMulNBits")
HEAD = dict(head_widths=(16, 3), head_activations=("gelu", "none"), head_biases=(False, True))
DISTANCES = Disentangled(
    span=4,
    longest=12,
    content_to_position=True,
    position_to_content=True,
    shared=True,
    norm=True,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("cpu-fp32", {}),
    "int8": ("cpu-int8", {}),
    "blocks": ("cpu-int8-blocks", {}),
    "int4": ("cpu-int4", {}),
    "distances": ("cpu-fp32", dict(positions="none", relative_buckets=8)),
    "rotary, pre-norm": ("cpu-fp32", dict(positions="rotary", norm_order="pre", windows=(3, 0))),
    "head of a text": ("cpu-fp32", dict(pooling=("mean",), lm_head=False, **HEAD)),
    "late pooling": ("cpu-fp32", dict(pooling=("max",), late_pooling=True, lm_head=False, **HEAD)),
    "convolution": (
        "cpu-fp32",
        dict(
            positions="none",
            disentangled=DISTANCES,
            convolution=Convolution(width=3, groups=2, activation="tanh"),
        ),
    ),
    "with a decoder": ("cpu-int8", dict(architecture="encoder-decoder", decoder_layers=1)),
}


def encoder_of(model: Transformer, variant: str) -> ir.Model:
    rng = np.random.default_rng(0)
    sentences = [rng.integers(4, 40, size).tolist() for size in (3, 5, 9)]
    int8 = variant == "cpu-int8"
    calibration = calibrate(model, BYTES.special, sentences, 5) if int8 else None
    return graphs_of(model, variant, calibration)["encoder"].model


def run(model: ir.Model, feeds: list[NDArray[Any]], *more: str) -> dict[str, NDArray[Any]]:
    """Runs a graph; returns its outputs, and further values by name."""
    names = [str(value.name) for value in model.graph.inputs]
    proto = ir.to_proto(model)
    given = [each.name for each in proto.graph.output]
    for name in more:
        proto.graph.output.add().name = name
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    found = session.run(None, dict(zip(names, feeds, strict=True)))
    return dict(zip([*given, *more], found, strict=True))


def batch(*lengths: int) -> list[NDArray[Any]]:
    columns = -(-max(lengths) // 4) * 4
    mask = np.arange(columns) < np.array(lengths)[:, None]
    ids = np.random.default_rng(len(lengths)).integers(4, 40, mask.shape)
    return [np.where(mask, ids, 0), mask]


def of_tokens(values: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns an output at tokens; keys and values have heads in front of positions."""
    if values.ndim == 2:
        return values
    return values[mask] if values.ndim == 3 else values.swapaxes(1, 2)[mask]


@pytest.mark.parametrize("name", MODELS)
def test_products_read_tokens_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, changes = MODELS[name]
    model = random_reader(**changes)
    packed = encoder_of(model, variant)
    monkeypatch.setattr(fusion, "_is_of_positions", lambda graph: False)
    padded = encoder_of(model, variant)
    assert "NonZero" not in {node.op_type for node in padded.graph}
    products = [node for node in packed.graph if node.op_type in PRODUCTS]
    shown = [str(node.outputs[0].name) for node in products]
    for lengths in ([1], [2], [7], [8, 8], [1, 11, 4, 5], [3, 2, 12, 12, 1, 7, 9]):
        source, mask = batch(*lengths)
        found, expected = run(packed, [source, mask], *shown), run(padded, [source, mask])
        for output, values in expected.items():
            given = of_tokens(found[output], mask)
            np.testing.assert_array_equal(given, of_tokens(values, mask), output)
        # A row for each token, or for each text where the head reads one vector of it; at 4 bits
        # one more. Tables of relative positions have rows of their own.
        rows = [len(found[each]) for each in shown if "disentangled" not in changes]
        allowed = {mask.sum() + (variant == "cpu-int4"), mask.sum(), len(mask)}
        assert {*rows} <= allowed and (not rows or max(rows) >= mask.sum())


def test_infinities_of_a_text_stay_there() -> None:
    model = random_reader()
    with torch.no_grad():
        model.embedding.weight[39] = torch.inf
    graph = encoder_of(model, "cpu-fp32")
    source, mask = batch(5, 3, 8, 2)
    source[source == 39] = 4
    whole = run(graph, [source, mask])["hidden"]
    source[[0, 2], 0] = 39
    found = run(graph, [source, mask])["hidden"]
    assert np.isnan(found[0, :5]).all()
    for row in (1, 3):
        np.testing.assert_array_equal(found[row][mask[row]], whole[row][mask[row]])


class Cut(nn.Module):
    """A linear layer that reads other than all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.one, self.two = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        return self.one(x), self.two(x.cumsum(dim=1)[:, :1])


def test_layers_of_other_positions_leave_padding_in() -> None:
    graph: Graph = exported_layers(Cut(), one=6, two=6)
    mask = ir.Value(name="mask", shape=graph.model.graph.inputs[0].shape)
    mask.dtype = ir.DataType.BOOL
    graph.model.graph.inputs.append(mask)
    assert Fusion(graph, FloatKernels(with_relu=True), packed=True).run() == 2
    assert "NonZero" not in {node.op_type for node in graph.model.graph}


@pytest.mark.parametrize("variant", ["portable", "cpu-fp32"])
@pytest.mark.parametrize("pooling", ["mean", "weighted", "root-mean", "last", "max", "splade-sum"])
def test_a_pooled_vector_has_the_same_bits_alone(variant: str, pooling: str) -> None:
    graph = encoder_of(random_reader(pooling=(pooling,)), variant)
    lengths = np.random.default_rng(0).integers(1, 24, 12)
    source, mask = batch(*lengths)
    whole = run(graph, [source, mask])["head"]
    for row, length in enumerate(lengths):
        columns = -(-length // 4) * 4
        alone = run(graph, [each[row : row + 1, :columns] for each in (source, mask)])["head"]
        np.testing.assert_array_equal(alone[0], whole[row])
