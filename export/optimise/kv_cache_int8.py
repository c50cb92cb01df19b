"""The cache in 8 bits: keys and values of the source, and of earlier positions.

Every step reads all of it, mostly from memory far from the processor, so its size is what a step of
a single query waits for. Keys and values count in `units`, so rounding is all there is to do.

A step of one query a slot reads the integers, and writes its own, by GroupQueryAttention: each slot
the columns that it has. It knows neither beams that share a slot nor several tokens: for these the
integers become floats again, which costs about what reading a quarter of the memory saves. So both
stand in the graph, in the branches of an If, and the engine says which a step takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from transferry.export.graphs.fused import OPSET
from transferry.export.graphs.portable import Graph
from transferry.export.optimise.fusion import CONTRIB, constant, rank, register, shared
from transferry.export.optimise.kv_scales import Units
from transferry.runtime.bundle import GraphSpec, Role, TensorSpec
from transferry.runtime.errors import ParityError

IR_VERSION = 10  # as torch's exporter writes it
CACHE: tuple[Role, ...] = ("cross", "past", "present")
FRESH = 2  # the input of ScatterND that holds what it writes
FLOAT, INT8 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT8)


def round_cache(graphs: dict[str, Graph], units: Mapping[str, Units]) -> int:
    """Lets graphs hold the cache in 8 bits.

    Args:
        graphs: Encoder and decoder of `slot_graphs`, of `units.in_units`' model, in float32 and
            fused; the others hold the cache in 8 bits already. Changed in place.
        units: By the name of the attention.

    Returns:
        How many attentions of the decoder read integers now.
    """
    if "encoder" in graphs:
        graphs["encoder"] = _rounding(graphs["encoder"])
    graphs["decoder"], count = _reading(graphs["decoder"])
    graphs["unrounded"] = _meaning(graphs["decoder"].spec, units)
    return count


def _int8(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(replace(each, type="int8") if each.role in CACHE else each for each in specs)


def _rounding(encoder: Graph) -> Graph:
    """Rounds what the encoder gives, before it is split into heads: then that moves less."""
    graph = encoder.model.graph
    for value in graph.outputs:
        split, transpose = _splitting(value) or (None, None)
        if split is None or transpose is None or split.inputs[0] is None:
            raise ParityError(
                f"{encoder.spec.file}: expected {value.name} to be split into heads, found another "
                "end; the exporter wrote it in another way"
            )
        node = _rounded(graph, split.inputs[0])
        graph.insert_before(split, node)
        split.replace_input_with(0, node.outputs[0])
        split.outputs[0].type = transpose.outputs[0].type = INT8
    return replace(encoder, spec=replace(encoder.spec, outputs=_int8(encoder.spec.outputs)))


def _rounded(graph: ir.Graph, value: ir.Value) -> ir.Node:
    """Returns the node that rounds to the nearest of -128..127, of two to the even one."""
    one, zero = shared(graph, "unit", np.float32(1)), shared(graph, "unit.zero", np.int8(0))
    node = ir.node("QuantizeLinear", [value, one, zero])
    node.outputs[0].type, node.outputs[0].shape = INT8, value.shape
    return node


def _meaning(decoder: GraphSpec, units: Mapping[str, Units]) -> Graph:
    """Makes the graph that tells what integers stand for: state -> cross and past."""
    graph = ir.Graph([], [], nodes=[], name="unrounded", opset_imports={"": OPSET})
    specs = [each for each in decoder.inputs if each.role in CACHE]
    kinds = {"cross": "cross_attention", "past": "self_attention"}
    for spec in specs:
        _, layer, part = spec.name.split(".")
        unit = getattr(units[f"decoder.{layer}.{kinds[spec.role]}"], part)
        state = ir.Value(name=f"state.{spec.name}", type=INT8, shape=ir.Shape(spec.shape))
        factors = register(graph, f"unit.{spec.name}", unit[:, None].numpy())
        floats = ir.node("Cast", [state], {"to": int(ir.DataType.FLOAT)})
        product = ir.node("Mul", [floats.outputs[0], factors])
        graph.inputs.append(state)
        graph.extend([floats, product])
        (real,) = product.outputs
        real.name, real.type, real.shape = spec.name, FLOAT, state.shape
        graph.outputs.append(real)
    inputs = tuple(replace(each, name=f"state.{each.name}", role="state") for each in specs)
    outputs = tuple(replace(each, type="float32") for each in specs)
    file = decoder.file.replace("decoder.onnx", "unrounded.onnx")
    return Graph(ir.Model(graph, ir_version=IR_VERSION), GraphSpec(file, inputs, outputs))


def _reading(decoder: Graph) -> tuple[Graph, int]:
    """Lets the decoder read and write integers, and tells in how many places."""
    graph, spec = decoder.model.graph, decoder.spec
    attentions = [_Attention(node) for node in graph if node.op_type == "Softmax"]
    added = [TensorSpec("single", "single", "bool", ())]
    crosses = [each for each in spec.inputs if each.role == "cross"]
    if crosses:
        added.append(TensorSpec("source_length", "source_length", "int64", ("batch",)))
    for each in added:
        of = ir.TensorType(ir.DataType[each.type.upper()])
        graph.inputs.append(ir.Value(name=each.name, type=of, shape=ir.Shape(each.shape)))
    values = {value.name: value for value in graph.inputs}
    for each in spec.inputs:
        if each.role in CACHE:
            values[each.name].type = INT8
    first = graph[0]

    def add(kind: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        node = ir.node(kind, inputs, attributes)
        graph.insert_before(first, node)
        return node.outputs[0]

    # What GroupQueryAttention wants: how many columns a slot has with the new one, less one, how
    # many there is room for, and where it is to write nothing new ones of no length.
    int32 = int(ir.DataType.INT32)
    earliest = shared(graph, "earliest", np.int64(0))
    past = add("Cast", [add("Gather", [values["positions"], earliest], axis=1)], to=int32)
    cache = next(each for each in spec.inputs if each.role == "past")
    room = add("Shape", [values[cache.name]], start=2, end=3)
    columns = {"self": [past, add("Cast", [room], to=int32)]}
    nothing: list[ir.Value] = []
    if crosses:
        last = add("Sub", [values["source_length"], constant(graph, "one", [1])])
        room = add("Shape", [values[crosses[0].name]], start=2, end=3)
        columns["cross"] = [add("Cast", [each], to=int32) for each in (last, room)]
        narrow = attentions[0].kv_heads * attentions[0].d_head
        shape = [add("Shape", [past]), constant(graph, "nothing", [0, narrow])]
        nothing = [add("ConstantOfShape", [add("Concat", shape, axis=0)])] * 2
    for attention in attentions:
        kind = "self" if attention.writers else "cross"
        attention.choose(values["single"], columns[kind], nothing)
    kept = tuple(
        replace(each, name=f"kept.{each.name}", role="kept", type="int8") for each in crosses
    )
    inputs, outputs = (*_int8(spec.inputs), *added), (*_int8(spec.outputs), *kept)
    return replace(decoder, spec=replace(spec, inputs=inputs, outputs=outputs)), len(attentions)


class _Attention:
    """Attention around a softmax, as the exporter writes `build_model.attention.attend`.

    Attributes:
        query: [batch * target, heads * d_head], or what rotary positions make of it [batch, heads,
            target, d_head].
        memory: Keys and values [batch, kv_heads, columns, d_head], with the new ones in them.
        joined: What the heads found, side by side [batch * target, heads * d_head].
        readers: What reads keys, and what reads values.
        writers: What writes new keys and new values into the cache; none where nothing is written.
    """

    def __init__(self, softmax: ir.Node) -> None:
        scores = _producer(_producer(softmax.inputs[0]).inputs[0])
        product = softmax.outputs[0].consumers()[0]
        keys = _producer(scores.inputs[1]).inputs[0]  # before they are transposed
        query = _of_four(scores.inputs[0])
        self.memory = [_of_four(keys), _of_four(product.inputs[1])]
        self.heads, self.kv_heads = _size(query, 1), _size(self.memory[0], 1)
        self.d_head = _size(query, 3)
        self.query = _unsplit(query)
        self.joined = product.outputs[0]
        while rank(self.joined) != 2:
            self.joined = self.joined.consumers()[0].outputs[0]
        self.readers = [
            [use for use in value.uses() if use.node.op_type != "Shape"] for value in self.memory
        ]
        writers = [value.producer() for value in self.memory]
        self.writers = [writer for writer in writers if writer is not None]

    def choose(
        self, single: ir.Value, columns: Sequence[ir.Value], nothing: Sequence[ir.Value]
    ) -> None:
        """Puts a choice between two ways to read integers in its place.

        Args:
            single: Whether there is a single query a slot, bool [].
            columns: How many each slot has with the new one, less one int32 [batch], and how many
                there is room for int32 [1].
            nothing: Keys and values to write where none are [batch, 0, kv_heads * d_head].
        """
        before = self.joined.consumers()[0]
        graph = before.graph
        assert graph is not None
        then = self._one_query(graph, columns, nothing)
        states = self._as_floats(graph)
        olds = [self.joined, *states]
        nodes = _made_for(olds, graph)
        choice = ir.node("If", [single], num_outputs=3)
        for old, new in zip(olds, choice.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            for node, index in old.uses():
                if node not in nodes:
                    node.replace_input_with(index, new)
        news = dict(zip(olds, choice.outputs, strict=True))
        graph.outputs[:] = [news.get(value, value) for value in graph.outputs]
        if not self.writers:
            graph.outputs.extend(choice.outputs[1:])
        graph.remove(nodes)
        graph.insert_before(before, choice)
        otherwise = self._branch("several", nodes, olds)
        choice.attributes["then_branch"] = ir.AttrGraph("then_branch", then)
        choice.attributes["else_branch"] = ir.AttrGraph("else_branch", otherwise)

    def _one_query(
        self, graph: ir.Graph, columns: Sequence[ir.Value], nothing: Sequence[ir.Value]
    ) -> ir.Graph:
        """Returns the branch for a single query a slot."""
        wide, narrow = self.heads * self.d_head, self.kv_heads * self.d_head
        given = [(self.query, wide)]
        given += [(_fresh(writer), narrow) for writer in self.writers]
        rows = [
            ir.node("Reshape", [value, constant(graph, "row", [-1, 1, size])])
            for value, size in given
        ]
        states = [writer.inputs[0] for writer in self.writers] or self.memory
        unit = shared(graph, "units", np.ones(1, np.float32))
        new = [] if self.writers else nothing
        inputs = [*(row.outputs[0] for row in rows), *new, *states, *columns]
        attention = ir.node(
            "GroupQueryAttention",
            [*inputs, *[None] * 5, unit, unit],
            {
                "num_heads": self.heads,
                "kv_num_heads": self.kv_heads,
                "scale": 1.0,  # the query is scaled already
                "kv_cache_bit_width": 8,
                "k_quant_type": "PER_TENSOR",
                "v_quant_type": "PER_TENSOR",
            },
            domain=CONTRIB,
            num_outputs=3,
        )
        matrix = constant(graph, "matrix", [-1, wide])
        joined = ir.node("Reshape", [attention.outputs[0], matrix])
        outputs = [joined.outputs[0], *attention.outputs[1:]]
        return self._branch("single", [*rows, attention, joined], outputs)

    def _as_floats(self, graph: ir.Graph) -> list[ir.Value]:
        """Lets the products as they stand read integers, and returns what they leave these in."""
        for value, readers in zip(self.memory, self.readers, strict=True):
            cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)})
            graph.insert_before(readers[0].node, cast)
            for node, index in readers:
                node.replace_input_with(index, cast.outputs[0])
        for writer in self.writers:
            rounded = _rounded(graph, _fresh(writer))
            graph.insert_before(writer, rounded)
            writer.replace_input_with(FRESH, rounded.outputs[0])
            writer.outputs[0].type = INT8
        if self.writers:
            return self.memory
        # They stay where they are: onnxruntime copies nothing to where it lies.
        kept = [ir.node("Identity", [value]) for value in self.memory]
        for node, value in zip(kept, self.memory, strict=True):
            node.outputs[0].name = f"kept.{value.name}"
            node.outputs[0].type, node.outputs[0].shape = INT8, value.shape
        graph.insert_before(self.joined.consumers()[0], kept)
        return [node.outputs[0] for node in kept]

    def _branch(self, name: str, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> ir.Graph:
        # Names are unique in all of a graph, its branches included.
        for number, value in enumerate(value for node in nodes for value in node.outputs):
            value.name = f"{self.joined.name}.{name}.{number}"
        for value, kind in zip(outputs, (FLOAT, INT8, INT8), strict=True):
            value.type = kind
        return ir.Graph([], outputs, nodes=nodes, name=name)


def _made_for(values: Sequence[ir.Value], graph: ir.Graph) -> list[ir.Node]:
    """Returns the nodes of a graph whose outputs serve these values alone, in order."""
    made: set[ir.Node] = set()
    waiting = [_producer(value) for value in values]
    while waiting:
        node = waiting.pop()
        made.add(node)
        for origin in {each.producer() for each in node.inputs if each is not None} - made:
            if origin is not None and all(
                not each.is_graph_output() and made.issuperset(each.consumers())
                for each in origin.outputs
            ):
                waiting.append(origin)
    return [node for node in graph if node in made]


def _producer(value: ir.Value | None) -> ir.Node:
    """Returns the node that makes a value."""
    node = value.producer() if value is not None else None
    if node is None:
        raise ParityError(
            f"attention of the exported graph: expected a node that makes {value}, found none; the "
            "exporter wrote it in another way"
        )
    return node


def _fresh(writer: ir.Node) -> ir.Value:
    """Returns the new keys or values that a node writes [batch, target, kv_heads, d_head]."""
    value = writer.inputs[FRESH]
    assert value is not None
    return value


def _of_four(value: ir.Value | None) -> ir.Value:
    """Returns what a value of five dimensions was before heads were grouped."""
    assert value is not None
    return value if rank(value) == 4 else _of_four(_producer(value).inputs[0])


def _unsplit(value: ir.Value | None) -> ir.Value:
    """Returns [batch * target, heads * d_head] of [batch, heads, target, d_head], if that was it.

    With a single token both are the same numbers in the same order.
    """
    assert value is not None
    split = _splitting(value)
    return value if split is None or split[0].inputs[0] is None else split[0].inputs[0]


def _splitting(value: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """Returns the Reshape and the Transpose that split a value into heads, if they did."""
    transpose = value.producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    reshape = _producer(transpose.inputs[0])
    return (reshape, transpose) if reshape.op_type == "Reshape" else None


def _size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    assert isinstance(size, int), value.name
    return size
