"""Exported graphs: tracing of a torch module, and the description of its tensors."""

import ast
import contextlib
import functools
import inspect
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import onnx_ir as ir
import onnxscript.function_libs.torch_lib.ops  # fills the registry
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import initializer_deduplication as deduplication
from onnx_ir.tensor_adapters import TorchTensor
from onnxscript.function_libs.torch_lib import registration
from onnxscript.onnx_opset import opset20
from onnxscript.rewriter import _matcher, pattern
from torch import SymFloat, SymInt, Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.node import map_arg
from torch.fx.passes import shape_prop
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from transferry.build_model.allocator import rarely_collected
from transferry.build_model.model.attention import KeyValues
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.recurrence import CellState
from transferry.export.trace.canonical import Canonical
from transferry.runtime.bundle.specs import GraphSpec, Role, TensorSpec

# The exporter's own opset, so that nothing is converted afterwards: 23 and later have an Attention
# operator, whose kernel is slower than the separate products and which fewer runtimes know.
OPSET = 20
# Of the file format: the least with that opset, for onnxruntime 1.17. The exporter writes 10.
IR_VERSION = 9
# Example sizes while tracing. No two dimensions of a graph share one, or torch would merge them.
SIZES = {
    "batch": 2,
    "source": 7,
    "target": 3,
    "past": 5,
    "length": 5,
    "selected": 3,
    "capacity": 11,
    "new": 4,
    "rows": 6,
    "columns": 12,
}
_SCALARS = {bool: torch.bool, int: torch.int64, float: torch.float32}
_SCALARS |= {SymInt: torch.int64, SymFloat: torch.float32}
SCOPES = "pkg.torch.onnx.name_scopes"  # modules around a node and its name in torch's program
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # path of operators that the tracer added
CELL = ".cell"  # how the names of a recurrent decoder's states end
_decompose = _fx_passes.decompose_with_registry
_promote = _fx_passes.insert_type_promotion_nodes
_describe = shape_prop._extract_tensor_metadata
_from_torchlib = ONNXRegistry.from_torchlib
_TORCHLIB = dict(registration.default_registry.items())
_try_rewrite = pattern.RewriteRule.try_rewrite

Specs = tuple[TensorSpec, ...]
# A module with its inputs and outputs.
Module = tuple[nn.Module, Specs, Specs]


@dataclass(frozen=True)
class Graph:
    """An exported graph and its origin.

    Attributes:
        model: The graph.
        spec: Its entry in the manifest.
        program: torch's traced program. None where the graph was read from a file.
        names: Names of values in the program, by those in the graph.
    """

    model: ir.Model
    spec: GraphSpec
    program: ExportedProgram | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def canonical(self) -> Canonical:
        """The canonical form; the graph is not edited any more."""
        return Canonical(self.model)

    def at(self, file: str) -> Self:
        """Returns the graph with another file name."""
        return replace(self, spec=replace(self.spec, file=file))


def spec(role: Role, dtype: str, *shape: str | int) -> TensorSpec:
    """Returns the spec of a tensor named after its role."""
    return TensorSpec(role, role, dtype, shape)


def cache_specs(
    config: ModelConfig,
    role: Role,
    batch: str,
    length: str,
    dtype: str = "float32",
    prefix: str = "",
) -> Specs:
    """Returns the specs of a cache, `[batch, kv_heads, length, d_head]` for each layer."""
    shape = (batch, config.kv_heads, length, config.d_head)
    return tuple(
        TensorSpec(f"{prefix}{role}.{layer}.{kind}", role, dtype, shape)
        for layer in range(config.decoder_layers)
        for kind in ("keys", "values")
    )


def state_specs(
    config: ModelConfig, role: Role, *shape: str | int, dtype: str = "float32"
) -> Specs:
    """Returns the specs of a recurrent decoder's state, `[*shape, d_model]` for each layer."""
    return tuple(
        TensorSpec(f"{role}.{layer}{CELL}", role, dtype, (*shape, config.d_model))
        for layer in range(config.decoder_layers)
    )


def flatten(caches: Sequence[KeyValues | CellState]) -> tuple[Tensor, ...]:
    """Returns keys and values of each layer in turn, or the state of each."""
    return tuple(tensor for cache in caches for tensor in cache)


def pair(tensors: Sequence[Tensor]) -> list[KeyValues]:
    """Undoes `flatten`."""
    return [KeyValues(*both) for both in zip(tensors[::2], tensors[1::2], strict=True)]


class Traces:
    """Traced graphs without weights, shared by every model and variant with the same modules."""

    def __init__(self, trace: Callable[[nn.Module, GraphSpec, int], Graph] | None = None) -> None:
        """Takes the function that traces a module. Default: `export_graph`."""
        self._trace = trace or export_graph
        self._traced: dict[tuple[Any, ...], _Trace] = {}

    def graph(self, module: nn.Module, spec: GraphSpec, opset: int) -> Graph:
        """Returns the graph of `export_graph`, filled with the module's weights.

        Traces the module only if no equal one was traced before.
        """
        weights = weights_of(module)
        key = trace_key(module, spec, opset)
        graph, trace = None, self._traced.get(key)
        with rarely_collected():
            if trace is None:
                graph = self._trace(module, spec, opset)
                trace = self._traced[key] = _Trace(graph, weights.keys())
            # Cloned the first time too: a clone numbers the names of added nodes from zero.
            filled = trace.filled(weights)
            return replace(graph, model=filled) if graph else Graph(filled, spec)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by each of their names, with buffers that no file stores."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def trace_key(module: nn.Module, spec: GraphSpec, opset: int) -> tuple[Any, ...]:
    """Returns everything that decides a traced graph."""
    config = getattr(getattr(module, "model", None), "config", None)
    types = tuple((name, str(weight.dtype)) for name, weight in weights_of(module).items())
    kind = type(module)
    # repr: a layer's sizes and constants, such as the epsilon of a norm.
    of_module = kind.__module__, kind.__qualname__, repr(module), repr(config), types
    return *of_module, spec.inputs, spec.outputs, opset


class _Trace:
    """A traced graph without its weights."""

    def __init__(self, graph: Graph, weights: Set[str]) -> None:
        """Copies a graph; `weights` are their names."""
        self._model = graph.model.clone()
        self._named = self._model.graph.initializers.keys() & weights
        for name in self._named:  # a copy of the model would live as long
            self._model.graph.initializers[name].const_value = None

    def filled(self, weights: Mapping[str, Tensor]) -> ir.Model:
        """Returns the graph with weights."""
        model = self._model.clone()
        for name in self._named:
            model.graph.initializers[name].const_value = TorchTensor(weights[name], name=name)
        return model


def export_modules(
    modules: Mapping[str, Module], opset: int = OPSET, traces: Traces | None = None
) -> dict[str, Graph]:
    """Exports each module to a graph with the file name `NAME.onnx`."""
    traces = traces or Traces()
    return {
        name: traces.graph(module, GraphSpec(f"{name}.onnx", inputs, outputs), opset)
        for name, (module, inputs, outputs) in modules.items()
    }


def export_graph(module: nn.Module, spec: GraphSpec, opset: int = OPSET) -> Graph:
    """Traces a module with every symbolic dimension of its inputs dynamic."""
    dynamic = [
        {axis: size for axis, size in enumerate(tensor.shape) if isinstance(size, str)}
        for tensor in spec.inputs
    ]
    # forward(a, b, *cache) takes the shapes of *cache as one tuple; forward(a, b) has none.
    forward = inspect.getfullargspec(module.forward)
    fixed = len(forward.args) - 1
    shapes = (*dynamic[:fixed], tuple(dynamic[fixed:])) if forward.varargs else tuple(dynamic)
    weights = weights_of(module)
    # With symbolic sizes a look into the cache costs more than computing anew: the same graphs take
    # a quarter to a third longer with it.
    with (
        _silenced(),
        patch.object(ONNXRegistry, "from_torchlib", staticmethod(_translations)),
        patch.object(proxy_tensor, "_extract_tensor_metadata", _described),
        patch.object(_fx_passes, "decompose_with_registry", _decomposed),
        patch.object(_fx_passes, "insert_type_promotion_nodes", _promoted),
        patch.object(pattern.RewriteRule, "try_rewrite", _rewritten),
        # Else it takes an epsilon of 1e-12 for 0 and a factor of 0.999999 for 1, and drops them.
        patch.object(_matcher, "math", SimpleNamespace(isclose=_equal)),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        _use_lazy_graph_module(True),  # else each pass writes the program as Python
    ):
        program = torch.onnx.export(
            module.eval(),
            tuple(_example(tensor) for tensor in spec.inputs),
            dynamic_shapes=shapes,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
            opset_version=opset,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert program is not None
        with _hidden(program.model.graph, weights):
            onnxscript.optimizer.optimize_ir(program.model)
    program.model.ir_version = IR_VERSION
    names = _rename(program.model, weights.keys())
    _strip(program.model)
    return Graph(program.model, spec, program.exported_program, names)


class _Translations(ONNXRegistry):
    """The exporter's translations of operators, and one more, each parsed when it is read.

    For each graph it would parse all 500 again, a fifth of the time of a trace.
    """

    def __init__(self, opset_version: int) -> None:
        self._opset_version = opset_version

    @functools.cached_property
    def functions(self) -> Any:  # type: ignore[override]
        """All translations."""
        return _read(self.opset_version).functions

    def get_decomps(self, target: Any) -> list[Any]:
        """Returns the translations of an operator; a few have other names than it has."""
        overload = isinstance(target, torch._ops.OpOverload)
        name = target.name() if overload else f"{target.__module__}::{target.__name__}"
        found = _read(self.opset_version, name).get_decomps(target)
        return found or super().get_decomps(target)


_translations = functools.cache(_Translations)


@functools.cache
def _read(opset_version: int, name: str | None = None) -> ONNXRegistry:
    """Reads the translations of one name, or all; those of torch itself are always among them."""
    names = _TORCHLIB.keys() if name is None else _TORCHLIB.keys() & {name}
    read = {each: _TORCHLIB[each] for each in names}
    with patch.object(registration, "default_registry", read):
        registry = _from_torchlib(opset_version)
    registry.register_op(torch.ops.aten.to.dtype, _cast)
    return registry


def _cast(
    tensor: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: int = 0
) -> Any:
    return opset20.Cast(tensor, to=dtype)


def _decomposed(program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
    """Takes a program apart only where an operator has no translation.

    For this the exporter traces a program once more, which is half of the time, and finds nothing
    to take apart in most of ours: build_model avoids `flatten`, whose translation has more nodes,
    and operators without one. No operator that writes in place has one.
    """
    _fx_passes.remove_assertion_nodes(program.graph_module)  # as the exporter does afterwards
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    if all(map(registry.is_registered, targets)):
        return program
    return _decompose(program, registry)


def _described(tensor: Tensor) -> Any:
    """Describes a traced value without the memory formats that it fits, which nobody reads."""
    return _describe(tensor, include_contiguity=False)


def _promoted(module: GraphModule) -> None:
    """Inserts casts only where an operand has another type than torch computes in.

    For this the exporter computes every node once more, a third of the time of a trace.
    """
    table = type_promotion.TypePromotionTable()
    parts = [each for each in module.modules() if isinstance(each, GraphModule)]
    if any(_mixed(node, table) for part in parts for node in part.graph.nodes):
        _promote(module)


def _mixed(node: Node, table: type_promotion.TypePromotionTable) -> bool:
    """Whether the exporter would cast an operand of a node."""
    if (rule := type_promotion.get_type_promotion_rule(node, table)) is None:
        return False
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    wanted = rule.preview_type_promotion(args, kwargs)
    types: dict[Any, torch.dtype] = {**wanted.args_dtypes, **wanted.kwargs_dtypes}
    for place, operand in (*enumerate(args), *kwargs.items()):
        operands = operand if isinstance(operand, list | tuple) else [operand]
        found = {getattr(each, "dtype", _SCALARS.get(type(each))) for each in operands}
        if types.get(place) is not None and found != {types[place]}:
            return True
    return False


def _equal(one: float, other: float, **tolerances: float) -> bool:
    """Takes the place of `math.isclose`."""
    return one == other


def _rewritten(
    rule: pattern.RewriteRule, model: ir.Model, graph: Any, node: ir.Node, **options: Any
) -> Any:
    """Tries a rule only on nodes of the operator that its pattern ends with.

    For a pattern of several outputs the optimiser lists all nodes of the graph first, at each of
    them: half of its time on two layers, and more on many.
    """
    if not rule._target_pattern.output_nodes[0].op.matches(node.op_type):
        return None
    return _try_rewrite(rule, model, graph, node, **options)


@contextlib.contextmanager
def _hidden(graph: ir.Graph, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Meanwhile weights have no values, so that these do not decide the graph.

    The optimiser would merge layers with equal weights, remove a bias of zeros, and store a
    transposed weight a second time; onnxruntime folds those when it opens the graph. Tables of
    integers, which the configuration decides, stay visible but for a module of the user's own.
    """
    kept = {
        name: graph.initializers[name].const_value
        for name, weight in weights.items()
        if name in graph.initializers
        and (weight.is_floating_point() or name.startswith("model.module."))
    }
    for name in kept:
        graph.initializers[name].const_value = None
    yield
    for name in graph.initializers.keys() & kept:
        graph.initializers[name].const_value = kept[name]


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hides the warnings of the exporter and its optimiser about their own internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", deduplication.__name__)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _example(tensor: TensorSpec) -> Tensor:
    shape = [size if isinstance(size, int) else SIZES[size] for size in tensor.shape]
    dtype: torch.dtype = getattr(torch, tensor.type)
    make = torch.zeros if dtype.is_floating_point else torch.ones
    return make(shape, dtype=dtype)


def _rename(model: ir.Model, kept: Collection[str]) -> dict[str, str]:
    """Names nodes and values after their modules: `decoder.0.self_attention.query.linear`.

    A size, which belongs to no module, is named after the tensor, and a constant after the first
    node that reads it. Inputs, outputs and the weights `kept` keep their names.

    Returns:
        Names of computed values in torch's program, by their new names.
    """
    graph, former, taken = model.graph, {}, {*kept}
    ends = {value.name for value in (*graph.inputs, *graph.outputs)}
    taken |= {str(name) for name in ends}

    def free(name: str) -> str:
        numbered = (f"{name}.{number}" for number in itertools.count(1))
        found = next(each for each in itertools.chain([name], numbered) if each not in taken)
        taken.add(found)
        return found

    for node in graph.all_nodes():
        # Nodes that the exporter adds itself have no scope.
        scopes = ["", "", *ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))]
        module, traced = scopes[-2:]
        own = any(value.name == traced or value.is_graph_output() for value in node.outputs)
        kind = re.sub(r"_\d+$", "", traced) if own else node.op_type.lower()
        if module == NO_MODULE and (tensor := node.inputs[0]) is not None:
            module, kind = str(tensor.name), node.op_type.lower()
        node.name = free(f"{module.removeprefix('model.')}.{kind}".lstrip("."))
        for value in node.inputs:
            if value is not None and value.is_initializer() and value.name not in taken:
                value.name = free(f"{node.name}.constant")
        for place, value in enumerate(node.outputs):
            if value.name and value.name not in ends:
                name = free(f"{node.name}.{place}") if place else node.name
                former[name], value.name = value.name, name
    return former


def _strip(model: ir.Model) -> None:
    """Drops traces of the exporting machine: stack traces, paths, names of modules."""
    stripped: list[Any] = [model, *model.graph.inputs, *model.graph.initializers.values()]
    for graph in (model.graph, *model.functions.values()):
        stripped.append(graph)
        for node in graph:
            stripped += [node, *node.outputs]
    for each in stripped:
        each.doc_string = None
        each.metadata_props.clear()
