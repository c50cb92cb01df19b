"""The int8 KV cache: its scales, and two ways to read it that agree."""

import copy
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.export.conftest import BYTES, graphs_of, written
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.checks.weights import weights_claim
from transferry.export.rewrite.calibration import Calibration, calibrate, vocabulary_texts
from transferry.export.rewrite.kv_cache_int8 import _one_product, _producer, int8_decoder
from transferry.export.rewrite.kv_scales import HEADROOM, LARGEST, KVRanges, fold_kv_scales
from transferry.export.trace.editing import CONTRIB, argument, register
from transferry.export.trace.graph import Graph
from transferry.export.trace.in_place import FUSED_OPSET
from transferry.runtime.errors import InputError, ParityError
from transferry.runtime.ort.fused_decoder import AHEAD, FusedDecoder
from transferry.runtime.ort.session import SessionOptions

SENTENCES = [np.random.default_rng(row).integers(3, 300, 5 + row % 7).tolist() for row in range(12)]
TARGET = np.random.default_rng(1).integers(3, 300, (4, 24))
SOURCE = np.array([[9, 40, 77, 12, 2], [30, 8, 2, 0, 0], [5, 2, 0, 0, 0], [61, 62, 63, 2, 0]])
MASK = SOURCE != 0
# Fraction of the largest logit. On two ways to the same integers, a few halves round differently.
NEAR = 0.02

# Options that change how attention is exported. The first is the shape of a run that other tests
# export too.
WRITER: dict[str, Any] = {"architecture": "decoder-only", "encoder_layers": 0}
GROUPED: dict[str, Any] = {"positions": "rotary", "key_value_heads": 2, "bias": False}
LLAMA: dict[str, Any] = dict(norm="rms", norm_order="pre", activation="swiglu", tied=False)
OPTIONS: dict[str, dict[str, Any]] = {
    "both": {"heads": 2},
    "both, rotary and grouped": {**GROUPED, "decoder_layers": 1},
    "writer, rotary and grouped": dict(
        **WRITER, **GROUPED, **LLAMA, query_key_norm="head", divide_by_layer=True
    ),
    "writer, windowed": {**WRITER, **GROUPED, "windows": (5, 0), "query_key_norm": "all"},
}
Made = tuple[Transformer, Calibration, dict[str, Graph], FusedDecoder]


def model_of(options: dict[str, Any]) -> Transformer:
    torch.manual_seed(0)
    shape = {"d_model": 32, "heads": 4, "encoder_layers": 1, "decoder_layers": 2, "d_ff": 48}
    config = {"vocabulary_size": 400, "max_positions": 64, **shape, **options}
    model = Transformer(ModelConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embedding"):
                parameter.mul_(0.5)  # random weights blow errors up as trained ones do not
    return model


@pytest.fixture(scope="module", params=OPTIONS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    model = model_of(OPTIONS[request.param])
    calibration = calibrate(model, BYTES.special, SENTENCES, 10)
    graphs = graphs_of(model, "cpu-int8", calibration)
    bundle = written(tmp_path_factory.mktemp("int8"), model, "cpu-int8", graphs)
    # With each layer's own divisor, and norms of keys that took up the scales of the cache.
    assert weights_claim(model, bundle, bundle.variant(), calibration).problem == ""
    decoder = FusedDecoder(bundle, bundle.variant(), SessionOptions())
    return model, calibration, graphs, decoder


# Scales


@torch.no_grad()
def answered(model: Transformer, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    logits: Tensor = copy.deepcopy(model).double()(source, mask, target)
    return logits


def test_folded_scales_change_no_logit(made: Made) -> None:
    model, calibration, _, _ = made
    given = [torch.from_numpy(each) for each in (SOURCE, MASK, TARGET)]
    if not model.encoder:
        given[:2] = [each[:, :0] for each in given[:2]]
    before = model.embedding.weight.clone()
    expected = answered(fold_kv_scales(model, {}), *given)
    found = answered(fold_kv_scales(model, calibration.kv_scales), *given)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(model.embedding.weight, before)


def test_measured_keys_and_values_fill_the_integers(made: Made) -> None:
    """Up to the headroom, at every angle of rotary positions."""
    model, calibration, _, _ = made
    attentions = model.config.decoder_layers * (2 if model.encoder else 1)
    assert len(calibration.kv_scales) == attentions
    scaled = fold_kv_scales(model, calibration.kv_scales)
    sizes: dict[str, float] = {}
    with torch.inference_mode():
        for ids in vocabulary_texts(model):
            source, target = (torch.tensor([each], dtype=torch.int64) for each in ids)
            mask = torch.ones_like(source, dtype=torch.bool)
            cross = scaled.cross(scaled.encode(source, mask)) if scaled.encoder else []
            _, present = scaled.decode(target, mask, cross, scaled.empty_past(1))
            for kind, layers in (("cross", cross), ("self", present)):
                for number, layer in enumerate(layers):
                    for part, tensor in zip(("keys", "values"), layer, strict=True):
                        name = f"{kind} {number} {part}"
                        sizes[name] = max(sizes.get(name, 0), float(tensor.abs().max()))
    assert len(sizes) == 2 * len(calibration.kv_scales)
    for name, size in sizes.items():
        assert 0.5 < size / (LARGEST / HEADROOM) < 1.00001, name


def test_rotary_pairs_have_one_scale() -> None:
    model = model_of(OPTIONS["both, rotary and grouped"])
    ranges = KVRanges(model)
    name = "decoder.0.self_attention.{}.weight"
    keys = torch.zeros(1, 1, 16)
    keys[0, 0, 0], keys[0, 0, 4], keys[0, 0, 9] = 3.0, 4.0, -2.0  # of two heads of 8
    ranges.add(name.format("key"), keys)
    ranges.add(name.format("value"), -keys)
    ranges.add("decoder.0.self_attention.query.weight", keys * 9)
    (scale,) = ranges.scales().values()
    step = HEADROOM / LARGEST
    expected = torch.ones(2, 8)
    expected[0, [0, 4]], expected[1, [1, 5]] = 5 * step, 2 * step
    torch.testing.assert_close(scale.keys, expected)
    expected = torch.ones(2, 8)
    expected[0, 0], expected[0, 4], expected[1, 1] = 3 * step, 4 * step, 2 * step
    torch.testing.assert_close(scale.values, expected)


def test_keys_that_are_not_finite_are_refused() -> None:
    ranges = KVRanges(model_of(OPTIONS["both"]))
    with pytest.raises(InputError, match=r"finite outputs of decoder\.1\.cross_attention\.key"):
        ranges.add("decoder.1.cross_attention.key.weight", torch.full((1, 32), torch.nan))


# The graphs


def test_every_attention_has_both_branches(made: Made) -> None:
    model, _, graphs, _ = made
    graph = graphs["decoder"].model.graph
    choices = [node for node in graph if node.op_type == "If"]
    assert len(choices) == model.config.decoder_layers * (2 if model.encoder else 1)
    for number, choice in enumerate(choices):
        one, several = (choice.attributes[f"{name}_branch"].as_graph() for name in ("then", "else"))
        assert [node.op_type for node in one].count("GroupQueryAttention") == 1
        assert [node.op_type for node in several].count("Softmax") == 1
        # Queries, keys and values come from one product, except where keys are turned or normed.
        packed = "Split" in [node.op_type for node in several]
        itself = not (model.encoder and number % 2)
        assert packed == (itself and model.config.positions != "rotary")
    outside = {node.op_type for node in graph}
    assert not outside & {"Softmax", "GroupQueryAttention", "TensorScatter"}
    # The branch for a single query reads no float copy of the cache.
    for node in graph:
        if node.op_type == "Cast":
            assert node.inputs[0] is not None
            assert node.inputs[0].dtype != ir.DataType.INT8 or "embedding" in str(node.inputs[0])


@pytest.mark.parametrize("biased", [3, 2, 0])
def test_one_product_has_the_bits_of_three(biased: int) -> None:
    """Also of a query that is divided; where one of three has no bias, nothing changes."""
    rng, outputs, graph = np.random.default_rng(0), (32, 16, 16), ir.Graph([], [], nodes=[])
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(["rows", 24]))
    zero, tape = register(graph, "zero", np.uint8(117)), ir.tape.Tape(graph)
    for number, count in enumerate(outputs):
        held: list[NDArray[Any] | np.generic] = [
            rng.integers(-64, 65, (count, 24), dtype=np.int8),
            np.float32(0.037 if number else 0.037 / 8),
            rng.uniform(0.001, 0.1, count).astype(np.float32),
            rng.standard_normal(count, np.float32),
        ]
        weight, scale, scales, bias = (
            register(graph, f"{name}.{number}", each)
            for name, each in zip(("weight", "scale", "scales", "bias"), held, strict=True)
        )
        inputs = [x, tape.op("Transpose", [weight], {"perm": [1, 0]}), scale, scales, zero, None]
        given = [*inputs, bias if number < biased else None]
        layer = tape.op("MatMulIntegerToFloat", given, domain=CONTRIB)
        layer.type, layer.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["rows", count])
        heads = register(graph, f"heads.{number}", np.array([-1, 2, count // 2]))
        split = ir.Value(name=f"y{number}", type=layer.type)
        graph.outputs.append(tape.op("Reshape", [layer, heads], output=split))
    graph.inputs.append(x)
    graph.opset_imports.update({"": FUSED_OPSET, CONTRIB: 1})
    model = ir.Model(graph, ir_version=10)

    def answers() -> list[bytes]:
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        return [
            each.tobytes()
            for rows in (1, 3, 40)
            for each in session.run(
                None, {"x": np.random.default_rng(rows).integers(0, 256, (rows, 24), np.uint8)}
            )
        ]

    before = answers()
    query, *updates = graph.outputs
    packed = _one_product(argument(_producer(query), 0), updates)
    assert (packed is not None) == (biased != 2)
    assert [node.op_type for node in graph].count("MatMulIntegerToFloat") == (3, 1)[biased != 2]
    assert answers() == before


def test_a_missed_attention_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(OPTIONS["both"])
    calibration = calibrate(model, BYTES.special, SENTENCES[:1], 4)

    def misses_one(*given: Any) -> tuple[Graph, int]:
        decoder, found = int8_decoder(*given)
        return decoder, found - 1

    monkeypatch.setattr("transferry.export.rewrite.kv_cache_int8.int8_decoder", misses_one)
    with pytest.raises(ParityError, match=r"expected 4 attentions .*, found 3"):
        graphs_of(model, "cpu-int8", calibration)


# The engine


def fed(decoder: FusedDecoder, state: Any, target: NDArray[np.int64]) -> tuple[Any, list[Any]]:
    """Feeds a token at a time; returns the logits of each step."""
    found = []
    for place in range(target.shape[1]):
        output, state = decoder.step(target[:, place : place + 1], state)
        found.append(output.all_logits[:, 0].copy())
    return state, found


def distance(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


def test_one_token_at_a_time_is_as_all_at_once(made: Made) -> None:
    """Over enough columns to make the cache grow, with sources of unequal length."""
    _, _, _, decoder = made
    assert TARGET.shape[1] > 2 * AHEAD
    state, steps = fed(decoder, decoder.start(SOURCE, MASK), TARGET[:, :1])
    state.calls.clear()  # of the batches before
    state, others = fed(decoder, state, TARGET[:, 1:])
    steps += others
    assert {single for _, single, _ in state.calls} == {True}
    output, several = decoder.step(TARGET, decoder.start(SOURCE, MASK))
    assert {single for _, single, _ in several.calls} == {False}
    assert distance(np.stack(steps, axis=1), output.all_logits) < NEAR
    for name, tensor in decoder.tensors(several).items():
        assert distance(decoder.tensors(state)[name], tensor) < NEAR, name


def test_beams_that_become_one_see_no_column_of_the_others(made: Made) -> None:
    """The cache then has gaps, so the branch for a single query must not be taken."""
    _, _, _, decoder = made
    state, _ = fed(decoder, decoder.start(SOURCE, MASK), TARGET[:, :2])
    state = decoder.select(state, np.arange(4).repeat(2))
    beams = TARGET[:, 2:6].reshape(4, 2, 2)
    state, _ = fed(decoder, state, beams.reshape(8, 2))
    state = decoder.select(state, np.array([1, 3, 5, 7]))
    state.calls.clear()
    state, (found, _) = fed(decoder, state, TARGET[:, 6:8])
    assert {single for _, single, _ in state.calls} == {False}
    kept = np.concatenate([TARGET[:, :2], beams[:, 1], TARGET[:, 6:7]], axis=1)
    _, expected = fed(decoder, decoder.start(SOURCE, MASK), kept)
    assert distance(found, expected[-1]) < NEAR
