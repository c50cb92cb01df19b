"""The kinds of fault that a bundle can be made with, each as an edit of a copy of a bundle.

A fault is planted where it is hardest to see: in one layer, in one weight of middling size, in
rows that real text seldom reads. What finds nothing to edit raises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from transferry.build_model.config import ModelConfig
from transferry.build_model.transformer import Transformer
from transferry.export.bundle_copy import BundleCopy, add, constant, constants, replace, scalar
from transferry.runtime.special_tokens import SETTINGS_FILE, read_settings

RANKS_FILE = "ranks.tiktoken"

Plant = Callable[[BundleCopy], str]
Applies = Callable[[ModelConfig], bool]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kind: Its name in the report.
        plant: Plants it in a copy and says what was changed and where.
        applies: Whether a model of this shape can have it.
    """

    kind: str
    plant: Plant
    applies: Applies


FAULTS: list[Fault] = []


def faults_of(config: ModelConfig) -> list[Fault]:
    """Returns the kinds that a model of this shape can have."""
    return [fault for fault in FAULTS if fault.applies(config)]


def rare_tokens(config: ModelConfig) -> tuple[int, int]:
    """Returns the two tokens in whose rows of the embedding faults are planted."""
    return config.vocabulary_size // 3, 2 * config.vocabulary_size // 3


def _fault(kind: str, applies: Applies = lambda config: True) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS.append(Fault(kind, plant, applies))
        return plant

    return register


def _decodes(config: ModelConfig) -> bool:
    return bool(config.decoder_layers)


def _stack(config: ModelConfig) -> tuple[str, int]:
    """The stack with the most layers, and how many it has."""
    if config.decoder_layers >= config.encoder_layers:
        return "decoder", config.decoder_layers
    return "encoder", config.encoder_layers


def _first(config: ModelConfig) -> str:
    """The first layer that a token meets."""
    return "encoder.0" if config.encoder_layers else "decoder.0"


def _last(config: ModelConfig) -> str:
    stack = "decoder" if config.decoder_layers else "encoder"
    return f"{stack}.{getattr(config, f'{stack}_layers') - 1}"


def _is_weight(array: NDArray[Any]) -> bool:
    return array.ndim > 0 and array.dtype.kind in "fV"


# Weights.


def _one_entry(copy: BundleCopy, name: str, change: Callable[[Any], Any], row: int = -1) -> str:
    """Changes the entry of middling size of a weight, or of a row of it."""
    array = copy.array(name)
    part = array if row < 0 else array[row]
    sizes = np.abs(part.astype(np.float64)).ravel()
    place = int(np.argsort(sizes)[len(sizes) // 2])
    place += 0 if row < 0 else row * part.size
    before = array.ravel()[place]
    after = array.dtype.type(change(before))

    def put(array: NDArray[Any]) -> NDArray[Any]:
        array.ravel()[place] = after
        return array

    copy.edit(name, put)
    where = [int(index) for index in np.unravel_index(place, array.shape)]
    return f"{name}{where}: {float(before):.9g} became {float(after):.9g}"


@_fault("one weight off by 1 %")
def _one_percent(copy: BundleCopy) -> str:
    name = f"{_last(copy.config)}.feed_forward.outer.weight"
    return _one_entry(copy, name, lambda weight: weight * weight.dtype.type(1.01))


@_fault("one weight off by one ULP")
def _one_ulp(copy: BundleCopy) -> str:
    name = f"{_last(copy.config)}.feed_forward.outer.weight"
    return _one_entry(copy, name, lambda weight: np.nextafter(weight, weight.dtype.type(9)))


@_fault("a rare token's embedding off by 1 %")
def _rare_embedding(copy: BundleCopy) -> str:
    row, _ = rare_tokens(copy.config)
    change = lambda weight: weight * weight.dtype.type(1.01)  # noqa: E731
    return _one_entry(copy, "embedding.weight", change, row)


@_fault("NaN in a weight")
def _not_a_number(copy: BundleCopy) -> str:
    name = f"{_first(copy.config)}.self_attention.value.weight"
    return _one_entry(copy, name, lambda weight: np.nan)


@_fault("two rows of the vocabulary swapped")
def _vocabulary_rows(copy: BundleCopy) -> str:
    pair = list(rare_tokens(copy.config))

    def swap(array: NDArray[Any]) -> NDArray[Any]:
        array[pair] = array[pair[::-1]]
        return array

    copy.edit("embedding.weight", swap)
    return f"embedding.weight, rows {pair[0]} and {pair[1]}"


@_fault("two layers swapped", lambda config: _stack(config)[1] > 1)
def _layers_swapped(copy: BundleCopy) -> str:
    stack, layers = _stack(copy.config)
    one, other = f"{stack}.0.", f"{stack}.{layers - 1}."
    for name in [name for name in copy.names() if name.startswith(one)]:
        twin = other + name.removeprefix(one)
        left, right = copy.array(name), copy.array(twin)
        if left.tobytes() != right.tobytes():
            copy.edit(name, lambda _, new=right: new)  # type: ignore[misc]
            copy.edit(twin, lambda _, new=left: new)  # type: ignore[misc]
    return f"{stack}, layers 0 and {layers - 1}"


def _drop(copy: BundleCopy, suffix: str) -> str:
    """Zeroes the first bias of a name that is not zero already."""
    for name in copy.names():
        if name.endswith(suffix) and copy.array(name).any():
            copy.edit(name, np.zeros_like)
            return f"{name} is zero"
    raise copy.absent(f"biases named {suffix}")


@_fault("a bias dropped", lambda config: config.bias)
def _bias_dropped(copy: BundleCopy) -> str:
    return _drop(copy, "feed_forward.inner.bias")


@_fault("the bias of the keys dropped", lambda config: config.bias)
def _key_bias_dropped(copy: BundleCopy) -> str:
    # softmax(q (k + b)) = softmax(q k + q b) adds the same to every score: without rotation an
    # answer does not depend on this bias, but a decoder's cache holds it.
    return _drop(copy, "self_attention.key.bias")


@_fault("the bias of the output dropped", lambda config: config.output_bias)
def _output_bias_dropped(copy: BundleCopy) -> str:
    return _drop(copy, "output_bias")


@_fault("a square weight transposed", lambda config: config.d_model > 1)
def _transposed(copy: BundleCopy) -> str:
    name = f"{_last(copy.config)}.self_attention.output.weight"
    copy.edit(name, np.transpose)
    return name


@_fault("the heads of the query permuted", lambda config: config.heads > 1)
def _heads_permuted(copy: BundleCopy) -> str:
    name = f"{_last(copy.config)}.self_attention.query.weight"
    copy.edit(name, lambda array: np.roll(array, copy.config.d_head, axis=0))
    return f"{name}, by one head"


@_fault("all weights rounded to float16")
def _rounded(copy: BundleCopy) -> str:
    changed = 0
    for name in copy.names():
        array = copy.array(name)
        rounded = array.astype(np.float16).astype(array.dtype)
        if _is_weight(array) and rounded.tobytes() != array.tobytes():
            copy.edit(name, lambda _, new=rounded: new)  # type: ignore[misc]
            changed += 1
    if not changed:
        raise copy.absent("weights that float16 does not hold")
    return f"{changed} tensors"


@_fault("weights of an untrained model")
def _untrained(copy: BundleCopy) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        fresh = Transformer(copy.config).state_dict()
    for name in copy.names():
        if name.endswith(".weight") and ".norm." not in name and name in fresh:
            new = fresh[name].float().numpy()
            if new.ndim == 2:
                copy.edit(name, lambda _, new=new: new)  # type: ignore[misc]
    return "all matrices"


@_fault("the output projection taken for the embedding", lambda config: not config.tied)
def _tied(copy: BundleCopy) -> str:
    embedding = copy.array("embedding.weight")
    copy.edit("output.weight", lambda _: embedding)
    return "output.weight"


@_fault(
    "cross keys and values swapped",
    lambda config: bool(config.encoder_layers and config.decoder_layers),
)
def _cross_swapped(copy: BundleCopy) -> str:
    module = f"decoder.{copy.config.decoder_layers - 1}.cross_attention"
    for part in ["weight", "bias"] if copy.config.bias else ["weight"]:
        keys, values = (copy.array(f"{module}.{name}.{part}") for name in ("key", "value"))
        if keys.tobytes() != values.tobytes():
            copy.edit(f"{module}.key.{part}", lambda _, new=values: new)  # type: ignore[misc]
            copy.edit(f"{module}.value.{part}", lambda _, new=keys: new)  # type: ignore[misc]
    return module


# Positions.


def _tables(config: ModelConfig) -> list[str]:
    return ["cosines", "sines"] if config.positions == "rotary" else ["positions"]


@_fault("positions shifted by one", lambda config: config.max_positions > 1)
def _shifted(copy: BundleCopy) -> str:
    tables = _tables(copy.config)
    for name in tables:
        copy.edit(name, lambda table: np.concatenate([table[1:], table[-1:]]))
    return f"{', '.join(tables)}: each position has the next one's row"


@_fault("the last position wrong", lambda config: config.max_positions > 1)
def _last_position(copy: BundleCopy) -> str:
    tables = _tables(copy.config)
    for name in tables:
        copy.edit(name, lambda table: np.concatenate([table[:-1], table[-2:-1]]))
    return f"{', '.join(tables)}: the last row is the one before it"


@_fault("positions turned the wrong way", lambda config: config.positions == "rotary")
def _reversed(copy: BundleCopy) -> str:
    copy.edit("sines", np.negative)
    return "sines are negative"


@_fault("positions begin anew at each step", _decodes)
def _restarted(copy: BundleCopy) -> str:
    table = copy.graphs["decoder"].graph.initializers[f"model.{_tables(copy.config)[0]}"]
    for gather in copy.users(table, "Gather"):
        index = gather.inputs[1]
        sum_ = index.producer() if index is not None else None
        if sum_ is None or sum_.op_type != "Add":
            raise copy.absent("the sum of past and new positions")
        for place, value in enumerate(sum_.inputs):
            if value is not None and not _made_by(value, "Range"):
                sum_.replace_input_with(place, add(value, "Mul", value, constant(value, 0)))
    return "decoder: the length of the past is not added"


@_fault(
    "padding counted as positions",
    lambda config: bool(config.decoder_layers and not config.encoder_layers),
)
def _padding_counted(copy: BundleCopy) -> str:
    mask = _input(copy, "decoder", "past_mask")
    for cast in copy.users(mask, "Cast"):
        every = add(mask, "Or", mask, add(mask, "Not", mask))
        cast.replace_input_with(0, every)
    return "decoder: positions of a row go on behind its padding"


def _made_by(value: ir.Value, operator: str) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == operator


# Masks.


def _input(copy: BundleCopy, graph: str, role: Any) -> ir.Value:
    (name,) = copy.variant.graphs[graph].names(role)
    return next(value for value in copy.graphs[graph].graph.inputs if value.name == name)


def _masks(copy: BundleCopy) -> list[ir.Value]:
    return [
        _input(copy, name, role)
        for name, spec in copy.variant.graphs.items()
        for role in ("source_mask", "past_mask")
        if spec.names(role)  # type: ignore[arg-type]
    ]


@_fault("padding mask off by one")
def _mask_shifted(copy: BundleCopy) -> str:
    for mask in _masks(copy):
        for node in copy.users(mask, "Not"):
            ends = [constant(mask, [number]) for number in (0, 1, -1)]
            head = add(mask, "Slice", mask, ends[0], ends[1], ends[1])
            tail = add(mask, "Slice", mask, ends[0], ends[2], ends[1])
            node.replace_input_with(0, add(mask, "Concat", head, tail, axis=1))
    return "each row sees one position of its padding"


@_fault("padding mask dropped")
def _mask_dropped(copy: BundleCopy) -> str:
    for mask in _masks(copy):
        for where in copy.users(mask, "Not", "Where"):
            nothing = where.inputs[2]
            assert nothing is not None
            replace(where.outputs[0], lambda _, new=nothing: new)  # type: ignore[misc]
    return "padding is seen"


@_fault("causal mask off by one", _decodes)
def _causal_shifted(copy: BundleCopy) -> str:
    found = list(copy.nodes("Greater", graph="decoder"))
    if not found:
        raise copy.absent("the causal mask")
    for node in found:
        limit = node.inputs[1]
        assert limit is not None
        node.replace_input_with(1, add(limit, "Add", limit, constant(limit, 1)))
    return "decoder: each position sees the next one"


# What lies between the weights.


@_fault("norm epsilon changed")
def _epsilon(copy: BundleCopy) -> str:
    # Ten times, or where it is smaller than torch's default, that.
    wrong = max(10 * copy.config.norm_epsilon, 1e-5)
    changed = 0
    for node in copy.nodes("LayerNormalization"):
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", wrong)
        changed += 1
    for mean in copy.nodes("ReduceMean") if copy.config.norm == "rms" else ():
        for sum_ in copy.users(mean.outputs[0], "Add"):
            epsilon = scalar(sum_)
            if epsilon is None or epsilon.const_value is None:
                raise copy.absent("the epsilon of RMSNorm")
            new = constant(sum_.outputs[0], np.asarray(wrong, epsilon.const_value.numpy().dtype))
            sum_.replace_input_with(list(sum_.inputs).index(epsilon), new)
            changed += 1
    if not changed:
        raise copy.absent("norms")
    return f"{copy.config.norm_epsilon:g} became {wrong:g} in {changed} norms"


@_fault("a norm skipped")
def _norm_skipped(copy: BundleCopy) -> str:
    name = f"{_last(copy.config)}.self_residual.norm.weight"
    for weight in copy.named(name):
        for node in weight.consumers():
            inner = next(value for value in node.inputs if value is not None and value != weight)
            if node.op_type == "Mul":
                # RMSNorm: (x * 1 / sqrt(...)) * weight.
                product = inner.producer()
                assert product is not None
                inner = next(
                    value
                    for value in product.inputs
                    if value is not None and not _made_by(value, "Reciprocal")
                )
            replace(node.outputs[0], lambda _, new=inner: new)  # type: ignore[misc]
    return name.removesuffix(".weight")


@_fault("query scale missing", lambda config: config.d_head > 1)
def _scale_missing(copy: BundleCopy) -> str:
    wanted = math.sqrt(copy.config.d_head)
    for node in reversed(list(copy.nodes("Div"))):
        query = node.inputs[0]
        if scalar(node, wanted) is not None and query is not None:
            replace(node.outputs[0], lambda _: query)
            return f"the last attention: not divided by {wanted:.4g}"
    raise copy.absent("the scale of a query")


@_fault("embedding scale missing", lambda config: config.scale_embedding and config.d_model > 1)
def _embedding_scale_missing(copy: BundleCopy) -> str:
    for weight in copy.named("embedding.weight"):
        for node in copy.users(weight, "Gather", "Mul"):
            value = next(value for value in node.inputs if value not in constants(node))
            assert value is not None
            replace(node.outputs[0], lambda _, new=value: new)  # type: ignore[misc]
    return f"not multiplied by {math.sqrt(copy.config.d_model):.4g}"


@_fault("another activation")
def _activation(copy: BundleCopy) -> str:
    kinds = {"relu": "Relu", "gelu": "Gelu", "gelu-tanh": "Gelu"}
    wanted = kinds.get(copy.config.activation, "Sigmoid")
    node = next(copy.nodes(wanted), None)
    if node is None or node.inputs[0] is None:
        raise copy.absent(f"the activation {wanted}")
    value, other = node.inputs[0], "Relu" if wanted == "Gelu" else "Gelu"
    if wanted == "Sigmoid":
        # swish is x * sigmoid(x).
        (node,) = copy.users(node.outputs[0], "Mul")
    replace(node.outputs[0], lambda _: add(value, other, value))
    return f"the first {copy.config.activation} is {other}"


@_fault("GELU's other form", lambda config: config.activation in ("gelu", "gelu-tanh"))
def _other_gelu(copy: BundleCopy) -> str:
    found = list(copy.nodes("Gelu"))
    if not found:
        raise copy.absent("GELU")
    form = "tanh" if copy.config.activation == "gelu" else "none"
    found[-1].attributes["approximate"] = ir.AttrString("approximate", form)
    return f"approximate={form!r} in the last"


@_fault("residual dropped")
def _residual_dropped(copy: BundleCopy) -> str:
    name = f"{_last(copy.config)}.feed_forward.outer"
    for value in copy.linear(name):
        for node in copy.users(value, "Add"):
            replace(node.outputs[0], lambda _, new=value: new)  # type: ignore[misc]
    return f"only {name} goes on"


@_fault("a dimension frozen while tracing")
def _frozen(copy: BundleCopy) -> str:
    found = 0
    for name in ("encoder", "decoder"):
        for node in copy.nodes("Shape", graph=name):
            start, end = (node.attributes.get(key) for key in ("start", "end"))
            if start and end and (start.value, end.value) == (0, 1):
                replace(node.outputs[0], lambda value: constant(value, [2]))
                found += 1
    if not found:
        raise copy.absent("the size of the batch")
    return "the batch is 2"


# The cache.


@_fault("stale cache positions", _decodes)
def _stale_positions(copy: BundleCopy) -> str:
    name = copy.variant.graphs["decoder"].names("present")[-1]
    (present,) = [o for o in copy.graphs["decoder"].graph.outputs if o.name == name]
    join = present.producer()
    if join is None or join.op_type != "Concat" or None in join.inputs:
        raise copy.absent(f"the concatenation that gives {name}")
    past, new = join.inputs

    def stale(value: ir.Value) -> ir.Value:
        return add(value, "Concat", past, add(value, "Sub", new, new), axis=2)

    replace(present, stale, outside=True)
    return f"{name}: what a step adds is not written"


def _select(copy: BundleCopy, make: Callable[[ir.Value, ir.Value], ir.Value], which: int) -> str:
    """Gives one tensor of the selection other rows, made from the rows and the batch [1]."""
    node = list(copy.nodes("Gather", graph="select"))[which]
    state, rows = node.inputs
    assert state is not None
    assert rows is not None
    batch = add(rows, "Shape", state, start=0, end=1)
    node.replace_input_with(1, make(rows, batch))
    return str(node.outputs[0].name)


@_fault("stale cache rows", _decodes)
def _stale_rows(copy: BundleCopy) -> str:
    def unselected(rows: ir.Value, batch: ir.Value) -> ir.Value:
        axes = constant(rows, [0])
        count = add(rows, "Squeeze", add(rows, "Shape", rows), axes)
        every = add(rows, "Range", constant(rows, 0), count, constant(rows, 1))
        return add(rows, "Mod", every, batch)

    return f"{_select(copy, unselected, -1)} is as before the selection"


@_fault("swapped cache rows", _decodes)
def _swapped_rows(copy: BundleCopy) -> str:
    def backwards(rows: ir.Value, batch: ir.Value) -> ir.Value:
        last, least = constant(rows, [-1]), constant(rows, [np.iinfo(np.int64).min])
        return add(rows, "Slice", rows, last, least, constant(rows, [0]), last)

    return f"{_select(copy, backwards, 0)} has the rows from last to first"


@_fault("wrong beam index", _decodes)
def _wrong_rows(copy: BundleCopy) -> str:
    def next_one(rows: ir.Value, batch: ir.Value) -> ir.Value:
        return add(rows, "Mod", add(rows, "Add", rows, constant(rows, 1)), batch)

    return f"{_select(copy, next_one, 1)} has the row after the chosen one"


@_fault("one beam for all", _decodes)
def _one_row(copy: BundleCopy) -> str:
    def first(rows: ir.Value, batch: ir.Value) -> ir.Value:
        return add(rows, "Mul", rows, constant(rows, 0))

    return f"{_select(copy, first, -1)} repeats row 0"


# Files.


@_fault("truncated external data")
def _truncated(copy: BundleCopy) -> str:
    name = copy.weights_file()
    copy.truncate(name, vouched=False)
    return f"{name} ends in the middle; the manifest is as it was"


@_fault("truncated external data, hashes agreeing")
def _truncated_before_hashing(copy: BundleCopy) -> str:
    name = copy.weights_file()
    copy.truncate(name, vouched=True)
    return f"{name} ends in the middle, and the manifest says so"


@_fault("another tokenizer")
def _tokenizer(copy: BundleCopy) -> str:
    if (copy.folder / RANKS_FILE).is_file():
        lines = (copy.folder / RANKS_FILE).read_bytes().splitlines(keepends=True)
        one, other = (line.split() for line in lines[-2:])
        lines[-2:] = [other[0] + b" %s\n" % one[1], one[0] + b" %s\n" % other[1]]
        copy.write(RANKS_FILE, b"".join(lines))
        return f"{RANKS_FILE}: ranks {int(one[1])} and {int(other[1])} changed places"
    # The files of other kinds are their libraries' own; all kinds name the end token alike.
    settings = read_settings(copy.folder)
    settings["special"]["eos_id"] += 1
    copy.write(SETTINGS_FILE, json.dumps(settings).encode())
    return f"{SETTINGS_FILE}: another end token"
