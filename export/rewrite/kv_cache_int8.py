"""The KV cache in int8: keys and values of the source and of earlier positions.

Every step reads the whole cache, mostly from main memory, so a step of a single query waits for its
size. The scales are folded into the weights (`kv_scales`), so quantising is rounding.

A step with one query per slot reads and writes the integers with GroupQueryAttention, which reads
only the columns that a slot has. That operator supports neither beams that share a slot nor several
tokens; for these the integers are cast to float32, which costs about as much as reading a quarter
of the memory saves. Both ways are branches of an If, and the engine chooses one per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.recipes import Recipe
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.fused import fused_graphs, require_all
from transferry.export.rewrite.kv_scales import KVScales, fold_kv_scales
from transferry.export.rewrite.linear_int8 import Int8Kernels, transposed
from transferry.export.trace.editing import (
    CONTRIB,
    alike,
    argument,
    cast,
    constant,
    described,
    rank,
    register,
    shared,
    size,
    transposed_from,
)
from transferry.export.trace.graph import CELL, Graph, Specs, Traces, spec
from transferry.export.trace.in_place import FUSED_OPSET
from transferry.runtime.bundle.specs import GraphSpec
from transferry.runtime.errors import ParityError

IR_VERSION = 10  # that of torch's exporter
ATTENTIONS = {"cross": "cross_attention", "past": "self_attention"}
UPDATES = 2  # index of the written values among ScatterND's inputs
FLOAT, INT8 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT8)


def int8(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes a fused variant with linear layers and KV cache in int8; see `make.Maker`."""
    assert calibration is not None, "recipe_of requires a calibration"
    kernels, scales = Int8Kernels(calibration.activations, model.release), calibration.kv_scales
    folded = fold_kv_scales(model, scales)
    graphs = fused_graphs(folded, recipe, traces, kernels, "int8" if scales else None)
    if scales:  # the graphs beside encoder and decoder were traced with an int8 cache
        if "encoder" in graphs:
            graphs["encoder"] = _rounded_encoder(graphs["encoder"])
        graphs["decoder"], attentions = int8_decoder(graphs["decoder"], model.config)
        require_all(recipe, "attentions of the decoder to read integers", len(scales), attentions)
        graphs["dequantise"] = _dequantise_graph(graphs["decoder"].spec, scales)
    return graphs


def _int8(specs: Specs) -> Specs:
    return tuple(
        replace(each, type="int8")
        if each.role in ("cross", "past", "present") and not each.name.endswith(CELL)
        else each
        for each in specs
    )


def _rounded_encoder(encoder: Graph) -> Graph:
    """Rounds the outputs before they are split into heads, which then moves fewer bytes."""
    for value in encoder.model.graph.outputs:
        split = _split_into_heads(value)
        if split is None:
            raise ParityError(
                f"{encoder.spec.file}: expected {value.name} to be split into heads, found another "
                "end; the exporter wrote it in another way"
            )
        _round_input(split, 0)
        split.outputs[0].type = value.type = INT8
    return replace(encoder, spec=replace(encoder.spec, outputs=_int8(encoder.spec.outputs)))


def _round_input(node: ir.Node, index: int) -> None:
    """Rounds an input of a node to the nearest of -128..127, ties to even."""
    graph, value = node.graph, argument(node, index)
    assert isinstance(graph, ir.Graph)
    one, zero = shared(graph, "one", np.float32(1)), shared(graph, "zero", np.int8(0))
    rounding = ir.node("QuantizeLinear", [value, one, zero])
    rounding.outputs[0].type, rounding.outputs[0].shape = INT8, value.shape
    graph.insert_before(node, rounding)
    node.replace_input_with(index, rounding.outputs[0])


def _dequantise_graph(decoder: GraphSpec, scales: Mapping[str, KVScales]) -> Graph:
    """Returns the graph that multiplies by the scales: state -> cross, past in float32."""
    graph = ir.Graph([], [], nodes=[], name="dequantise", opset_imports={"": FUSED_OPSET})
    tape = ir.tape.Tape(graph)
    outputs = tuple(
        replace(each, type="float32")
        for each in decoder.inputs
        if each.role in ATTENTIONS and each.type == "int8"
    )
    inputs = tuple(
        replace(each, name=f"state.{each.name}", role="state", type="int8") for each in outputs
    )
    for given, output in zip(inputs, outputs, strict=True):
        _, layer, kind = output.name.split(".")
        scale = getattr(scales[f"decoder.{layer}.{ATTENTIONS[output.role]}"], kind)
        factors = register(graph, f"scale.{output.name}", scale[:, None].numpy())
        state = described(ir.Value(), given)
        product = tape.op("Mul", [cast(tape, state, ir.DataType.FLOAT), factors])
        graph.inputs.append(state)
        graph.outputs.append(described(product, output))
    model = ir.Model(graph, ir_version=IR_VERSION)
    return Graph(model, GraphSpec("dequantise.onnx", inputs, outputs))


def int8_decoder(decoder: Graph, config: ModelConfig) -> tuple[Graph, int]:
    """Makes the decoder read and write integers; returns the number of attentions too."""
    graph, specs = decoder.model.graph, decoder.spec
    attentions = [_Attention(node) for node in graph if node.op_type == "Softmax"]
    crosses = [each for each in specs.inputs if each.role == "cross"]
    inputs = (*_int8(specs.inputs), spec("single", "bool"))
    if crosses:
        inputs = (*inputs, spec("source_length", "int64", "batch"))
    graph.inputs.extend(ir.Value() for _ in inputs[len(specs.inputs) :])
    values = {
        each.name: described(value, each) for value, each in zip(graph.inputs, inputs, strict=True)
    }
    # GroupQueryAttention takes each slot's columns with the new one, less one; the capacity; and
    # in cross-attention, which writes nothing, new keys and values of length 0.
    tape, int32 = ir.tape.Tape(), ir.DataType.INT32
    columns: dict[str, list[ir.Value]] = {}
    if not config.recurrent:
        earliest = shared(graph, "earliest", np.int64(0))
        past = cast(tape, tape.op("Gather", [values["positions"], earliest], {"axis": 1}), int32)
        capacity = tape.op("Shape", [values[specs.names("past")[0]]], {"start": 2, "end": 3})
        columns["self"] = [past, cast(tape, capacity, int32)]
    if crosses:
        last = tape.op("Sub", [values["source_length"], constant(graph, "one", [1])])
        capacity = tape.op("Shape", [values[crosses[0].name]], {"start": 2, "end": 3})
        columns["cross"] = [cast(tape, each, int32) for each in (last, capacity)]
    graph.insert_before(graph[0], tape.nodes)
    layer = 0
    for attention in attentions:
        kind = "self" if attention.writers else "cross"
        # Both count the token itself; none is -1 in one and 0 in the other.
        window = config.window(layer) if attention.writers else 0
        options = {"local_window_size": window or -1, "softcap": config.attention_softcap}
        attention.branch(values["single"], columns[kind], options)
        layer += bool(attention.writers)
    kept = (replace(each, name=f"kept.{each.name}", role="kept", type="int8") for each in crosses)
    outputs = (*_int8(specs.outputs), *kept)
    specs = replace(specs, inputs=inputs, outputs=outputs)
    return replace(decoder, spec=specs), len(attentions)


class _Attention:
    """Attention around a Softmax, as exported from `build_model.attention.attend`.

    Attributes:
        query: `[batch * target, heads * d_head]`, or with rotary positions
            `[batch, heads, target, d_head]`.
        memory: Keys and values `[batch, kv_heads, columns, d_head]`, the new ones included.
        joined: Outputs of the heads, concatenated `[batch * target, heads * d_head]`.
        readers: Uses of the keys, and uses of the values.
        writers: The nodes that write new keys and new values into the cache; none in
            cross-attention.
    """

    def __init__(self, softmax: ir.Node) -> None:
        scores = _producer(argument(_producer(argument(softmax, 0)), 0))
        while scores.op_type != "MatMul":  # capped
            (capped,) = (each for each in scores.inputs if each and each.producer() is not None)
            scores = _producer(capped)
        product = softmax.outputs[0].consumers()[0]
        keys = argument(_producer(argument(scores, 1)), 0)  # before the transpose
        query = _ungrouped(argument(scores, 0))
        self.memory = [_ungrouped(keys), _ungrouped(argument(product, 1))]
        self.heads, self.kv_heads = size(query, 1), size(self.memory[0], 1)
        self.d_head = size(query, 3)
        # With a single token both shapes hold the same numbers in the same order.
        split = _split_into_heads(query)
        self.query = query if split is None else argument(split, 0)
        self.joined = product.outputs[0]
        while rank(self.joined) != 2:
            self.joined = self.joined.consumers()[0].outputs[0]
        self.readers = [
            [use for use in value.uses() if use.node.op_type != "Shape"] for value in self.memory
        ]
        writers = [value.producer() for value in self.memory]
        self.writers = [writer for writer in writers if writer is not None]

    def branch(
        self, single: ir.Value, columns: Sequence[ir.Value], options: Mapping[str, float]
    ) -> None:
        """Replaces the attention by an If over the two ways to read integers.

        Args:
            single: Whether there is a single query per slot, bool `[]`.
            columns: Each slot's columns with the new one, less one `[batch]` int32, and the
                capacity `[1]` int32.
            options: Further attributes of GroupQueryAttention.
        """
        before = self.joined.consumers()[0]
        graph = before.graph
        assert isinstance(graph, ir.Graph)
        single_query = self._single_query(graph, columns, options)
        olds = [self.joined, *self._cast_to_float(graph)]
        nodes = _nodes_only_for(olds, graph)
        choice = ir.node("If", [single], num_outputs=3)
        for old, new in zip(olds, choice.outputs, strict=True):
            alike(new, old).name = old.name
            for node, index in old.uses():
                if node not in nodes:
                    node.replace_input_with(index, new)
        news = dict(zip(olds, choice.outputs, strict=True))
        graph.outputs[:] = [news.get(value, value) for value in graph.outputs]
        if not self.writers:
            graph.outputs.extend(choice.outputs[1:])
        graph.remove(nodes)
        graph.insert_before(before, choice)
        several = self._subgraph("several", nodes, olds)
        choice.attributes["then_branch"] = ir.AttrGraph("then_branch", single_query)
        choice.attributes["else_branch"] = ir.AttrGraph("else_branch", several)

    def _single_query(
        self, graph: ir.Graph, columns: Sequence[ir.Value], options: Mapping[str, float]
    ) -> ir.Graph:
        """Returns the branch for a single query per slot."""
        tape, width = ir.tape.Tape(), self.heads * self.d_head
        kv_width = self.kv_heads * self.d_head
        updates = [argument(writer, UPDATES) for writer in self.writers]
        packed = _one_product(self.query, updates)
        given = [packed] if packed is not None else [self.query, *updates]
        widths = [width + 2 * kv_width * (packed is not None), kv_width, kv_width]
        rows = [
            tape.op("Reshape", [value, constant(graph, "row", [-1, 1, last])])
            for value, last in zip(given, widths, strict=False)
        ]
        new: list[ir.Value | None] = [None] * (3 - len(rows))  # packed with the queries
        if not self.writers:
            numbers = ([0, 0], [0, kv_width], [1, 2])  # starts, ends, axes
            given = [rows[0], *(constant(graph, "nothing", each) for each in numbers)]
            new = [tape.op("Slice", given)] * 2
        states = [argument(writer, 0) for writer in self.writers] or self.memory
        one = shared(graph, "ones", np.ones(1, np.float32))
        attended, *states = tape.op_multi_out(
            "GroupQueryAttention",
            [*rows, *new, *states, *columns, *[None] * 5, one, one],
            {
                "num_heads": self.heads,
                "kv_num_heads": self.kv_heads,
                "scale": 1.0,  # the query is scaled already
                "kv_cache_bit_width": 8,
                "k_quant_type": "PER_TENSOR",
                "v_quant_type": "PER_TENSOR",
                **options,
            },
            domain=CONTRIB,
            num_outputs=3,
        )
        joined = tape.op("Reshape", [attended, constant(graph, "matrix", [-1, width])])
        return self._subgraph("single", tape.nodes, [joined, *states])

    def _cast_to_float(self, graph: ir.Graph) -> list[ir.Value]:
        """Casts the int8 cache to float before the existing MatMuls; returns the updated cache."""
        for value, readers in zip(self.memory, self.readers, strict=True):
            tape = ir.tape.Tape()
            floats = cast(tape, value, ir.DataType.FLOAT)
            graph.insert_before(readers[0].node, tape.nodes)
            for node, index in readers:
                node.replace_input_with(index, floats)
        for writer in self.writers:
            _round_input(writer, UPDATES)
            writer.outputs[0].type = INT8
        if self.writers:
            return self.memory
        # The engine binds these outputs to the inputs' own buffers, so nothing is copied.
        tape = ir.tape.Tape()
        kept = [alike(tape.op("Identity", [value]), value) for value in self.memory]
        for value, original in zip(kept, self.memory, strict=True):
            value.name = f"kept.{original.name}"
        graph.insert_before(self.joined.consumers()[0], tape.nodes)
        return kept

    def _subgraph(
        self, name: str, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]
    ) -> ir.Graph:
        # Names are unique across a graph and its branches.
        for number, value in enumerate(value for node in nodes for value in node.outputs):
            value.name = f"{self.joined.name}.{name}.{number}"
        for value, kind in zip(outputs, (FLOAT, INT8, INT8), strict=True):
            value.type = kind
        return ir.Graph([], outputs, nodes=nodes, name=name)


def _one_product(query: ir.Value, updates: Sequence[ir.Value]) -> ir.Value | None:
    """Makes int8 layers of one input one product, and splits it for the layers' readers.

    Every number stays the same: the sums of integers are exact, and each output has its own scale.
    onnxruntime joins the weights when it opens the graph.

    Returns:
        The product `[rows, outputs of all]`, or None unless the query `[rows, outputs]` and the
        updates, keys and values split into heads, are such layers.
    """
    splits = [node for each in updates if (node := each.producer()) and node.op_type == "Reshape"]
    layers = [query, *(argument(node, 0) for node in splits)]
    nodes = [node for each in layers if (node := each.producer()) is not None]
    given = [tuple(node.inputs) for node in nodes if node.op_type == "MatMulIntegerToFloat"]
    if not len(given) == len(layers) == 3 or len({each[0] for each in given}) > 1:
        return None
    if len(biases := [each[6] for each in given if each[6] is not None]) not in (0, 3):
        return None
    (x, _, query_scale, *_), (_, _, scale, _, zero, *_), _ = given
    tape = ir.tape.Tape()
    scales = [each[3] for each in given]
    # The query's divisor, a power of two.
    scales[0] = tape.op("Mul", [scales[0], tape.op("Div", [query_scale, scale])])
    weights = [transposed_from(argument(node, 1)) for node in nodes]
    weight = transposed(tape, tape.op("Concat", weights, {"axis": 0}))
    bias = tape.op("Concat", biases, {"axis": 0}) if biases else None
    inputs = [x, weight, scale, tape.op("Concat", scales, {"axis": 0}), zero, None, bias]
    product = tape.op("MatMulIntegerToFloat", inputs, domain=CONTRIB)
    graph, widths = nodes[0].graph, [size(each, -1) for each in layers]
    assert isinstance(graph, ir.Graph)
    parts = tape.op_multi_out(
        "Split", [product, constant(graph, "widths", widths)], {"axis": 1}, num_outputs=3
    )
    graph.insert_before(next(node for node in graph if node in nodes), tape.nodes)
    for part, layer in zip(parts, layers, strict=True):
        layer.replace_all_uses_with(alike(part, layer))
    graph.remove([*nodes, *(_producer(argument(node, 1)) for node in nodes)], safe=True)
    return product


def _nodes_only_for(values: Sequence[ir.Value], graph: ir.Graph) -> list[ir.Node]:
    """Returns, in order, the nodes of a graph whose outputs serve only the given values."""
    found: set[ir.Node] = set()
    waiting = [_producer(value) for value in values]
    while waiting:
        node = waiting.pop()
        found.add(node)
        for origin in {each.producer() for each in node.inputs if each is not None} - found:
            if origin is not None and all(
                not each.is_graph_output() and found.issuperset(each.consumers())
                for each in origin.outputs
            ):
                waiting.append(origin)
    return [node for node in graph if node in found]


def _producer(value: ir.Value) -> ir.Node:
    """Returns the node that computes a value."""
    node = value.producer()
    if node is None:
        raise ParityError(
            f"attention of the exported graph: expected a node that makes {value}, found none; the "
            "exporter wrote it in another way"
        )
    return node


def _ungrouped(value: ir.Value) -> ir.Value:
    """Returns a value as it was before its heads were grouped, with four dimensions."""
    return value if rank(value) == 4 else _ungrouped(argument(_producer(value), 0))


def _split_into_heads(value: ir.Value) -> ir.Node | None:
    """Returns the Reshape that, with a Transpose, splits a value into heads, or None."""
    origin = transposed_from(value)
    reshape = origin.producer() if origin is not None else None
    return reshape if reshape is not None and reshape.op_type == "Reshape" else None
