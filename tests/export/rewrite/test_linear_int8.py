"""Linear layers in int8: every layer is quantised, and computes exactly by its scales."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from tests.export.conftest import exported_layers, in_onnxruntime
from transferry.export.rewrite.calibration import Activation
from transferry.export.rewrite.fusion import Fusion
from transferry.export.rewrite.linear_int8 import Int8Kernels, int8_rows
from transferry.export.rewrite.rounded_weights import quantised
from transferry.export.trace.editing import drop_unused, replace_lookups
from transferry.runtime.bundle.bundle import Bundle


@pytest.fixture(scope="module")
def graphs(all_variants: Bundle) -> dict[str, ir.Model]:
    specs = all_variants.variant("cpu-int8").graphs
    return {name: ir.load(all_variants.graph(spec)) for name, spec in specs.items()}


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_every_linear_layer_is_quantised_and_every_input_once(graphs: dict[str, ir.Model]) -> None:
    """Query, key and value share one quantised input, and so do all cross-attentions."""
    counts = {name: operators(model) for name, model in graphs.items()}
    layers = {"encoder": 6 + 2 * 2, "decoder": 2 * (4 + 2 + 2), "lm_head": 1}
    cross = 2 * 2  # keys and values, which are rounded too
    inputs = {"encoder": 4 + 1 + cross, "decoder": 2 * (2 + 2 + 2), "lm_head": 1}
    for name, count in counts.items():
        assert count["MatMulIntegerToFloat"] == layers.get(name, 0), name
        assert count["QuantizeLinear"] == inputs.get(name, 0), name
        assert not count.keys() & {"FusedGemm", "DynamicQuantizeLinear"}
        # Of the wide inputs; the LM head shares its integers with lookups and has none.
        assert count["Gemm"] == (0 if name == "lm_head" else layers.get(name, 0))


def test_the_same_export_gives_the_same_bytes(
    all_variants: Bundle, export_all: Callable[[Path], Bundle], tmp_path: Path
) -> None:
    again = export_all(tmp_path / "again")
    assert again.manifest == all_variants.manifest


class Layers(nn.Module):
    """tokens -> output of a feed-forward network, and optionally that of its ReLU.

    Attributes:
        reads: The other reader of the ReLU: "nothing", "linear", "float", or "output".
    """

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.embedding = nn.Embedding(9, 4)
        self.inner, self.outer, self.other = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        inner = self.inner(self.embedding(tokens)).relu()
        y = self.outer(inner)
        if self.reads == "linear":
            y = y + self.other(inner)
        if self.reads == "float":
            y = y + inner[..., :4]
        return (y, inner) if self.reads == "output" else (y,)


def rounded(x: Tensor, activation: Activation) -> Tensor:
    """x quantised: integers minus the zero point, in float64."""
    steps = x.double() / activation.scale
    # No value halfway between two integers, or the test itself would depend on rounding.
    assert ((steps - steps.floor() - 0.5).abs() > 1e-4).all()
    low, high = -activation.zero_point, 255 - activation.zero_point
    return steps.round().clamp(low, high)


def emulated(x: Tensor, linear: nn.Linear, activation: Activation) -> Tensor:
    """The exact product of integers times both scales, plus the bias and wide inputs."""
    wide, weight = list(activation.wide), linear.weight.detach().clone()
    exact = x[..., wide].double() @ weight[:, wide].double().T + linear.bias
    weight[:, wide] = 0
    integers, scales = quantised(weight.numpy())
    product = rounded(x, activation) @ torch.from_numpy(integers).double().T
    return product * activation.scale * torch.from_numpy(scales).double() + exact


@pytest.mark.parametrize(
    ("reads", "zero", "other_zero", "wide", "relus"),
    [
        ("nothing", 0, 0, (), 0),
        ("nothing", 0, 0, (1, 4), 1),
        ("nothing", 128, 0, (), 1),
        ("linear", 0, 0, (), 0),
        ("linear", 0, 0, (2,), 1),
        ("linear", 0, 128, (), 1),
        ("float", 0, 0, (), 1),
        ("output", 0, 0, (5,), 1),
    ],
)
def test_arithmetic_is_what_the_scales_say(
    reads: str, zero: int, other_zero: int, wide: tuple[int, ...], relus: int
) -> None:
    """The ReLU is dropped exactly where every reader quantises all inputs with zero point 0."""
    torch.manual_seed(0)
    module = Layers(reads)
    exported = exported_layers(module, y=4, **({"inner": 6} if reads == "output" else {}))
    graph = exported.model
    activations = {"inner.weight": Activation(0.011, 128, 2.0, 1)}
    for name, point in (("outer", zero), ("other", other_zero)):
        scale = 0.0073 if point else 0.0037
        activations[f"{name}.weight"] = Activation(scale, point, 1.0, 1, wide)
    linears = Fusion(exported, Int8Kernels(activations)).run()
    assert linears == 3 - (reads != "linear")
    replace_lookups(graph.graph, "embedding.weight", int8_rows)
    drop_unused(graph.graph)
    count = operators(graph)
    assert count["Relu"] == relus
    assert count["QuantizeLinear"] == 2 + (reads == "linear" and zero != other_zero)

    ids = torch.arange(9).view(3, 3)
    with torch.inference_mode():
        integers, scales = quantised(module.embedding.weight.numpy())
        x = torch.from_numpy(integers * scales[:, None])[ids]
        inner = emulated(x, module.inner, activations["inner.weight"])
        assert (inner < 0).any()
        inner = inner.relu()
        y = emulated(inner, module.outer, activations["outer.weight"])
        if reads == "linear":
            y = y + emulated(inner, module.other, activations["other.weight"])
        if reads == "float":
            y = y + inner[..., :4]
    expected = [y, inner] if reads == "output" else [y]
    for one, other in zip(in_onnxruntime(graph)(ids.numpy()), expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-6, atol=1e-6)


class Lookup(nn.Module):
    """tokens -> embeddings times 2, which is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.embedding(tokens) * 2
        return y


def test_lookup_is_scales_times_integers() -> None:
    torch.manual_seed(0)
    module = Lookup()
    graph = exported_layers(module, x=32).model
    replace_lookups(graph.graph, "another.weight", int8_rows)
    assert operators(graph)["Gather"] == 1, "another embedding stays as it is"
    replace_lookups(graph.graph, "embedding.weight", int8_rows)
    drop_unused(graph.graph)
    assert "embedding.weight" not in graph.graph.initializers
    ids = np.arange(50).reshape(5, 10)
    (found,) = in_onnxruntime(graph)(ids)
    integers, scales = quantised(module.embedding.weight.detach().numpy())
    assert found.tobytes() == (integers * scales[:, None] * 2)[ids].tobytes()
