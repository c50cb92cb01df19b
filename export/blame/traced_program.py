"""torch's traced program: its values in float32 and float64, and their lines of code."""

import contextlib
import linecache
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import Node, map_aggregate

from transferry.build_model.model import attention, layers, transformer
from transferry.build_model.model.transformer import Transformer
from transferry.export.trace.graph import NO_MODULE, Graph
from transferry.export.trace.portable import export_graphs

PACKAGE = Path(transformer.__file__).parents[2]
TRACED = ("build_model", "export")  # packages with traced code
_CODE = (attention, layers, transformer)


@dataclass(frozen=True)
class Place:
    """The code that computes a value.

    Attributes:
        module: Path of the innermost module, such as "decoder.0.self_attention.query", or the class
            of the model.
        source: File, relative to the package, and line of the innermost code of the package.
    """

    module: str
    source: str
    code: str


def relative_error(found: NDArray[Any], oracle: NDArray[Any], mask: NDArray[np.bool_]) -> float:
    """Returns the largest |found - oracle| over the largest |oracle|, both where mask is True."""
    distance, largest = (
        float(np.abs(each).max(initial=0.0, where=mask)) for each in (found - oracle, oracle)
    )
    return distance / largest if largest else distance


def value_error(
    found: NDArray[Any], oracle: NDArray[Any], mask: NDArray[np.bool_] | None = None
) -> float:
    """Returns the error of a value inside a graph: `relative_error` where both are finite.

    Equal infinities, as in masks, count as equal, and so do two NaN. Another shape, or infinity on
    one side only, is an infinite error, and so is any difference of integers or booleans.
    """
    if found.shape != oracle.shape:
        return np.inf
    mask = np.ones(oracle.shape, np.bool_) if mask is None else mask
    if oracle.dtype.kind != "f":
        return 0.0 if (found == oracle).all(where=mask) else np.inf
    finite = np.isfinite(found) & np.isfinite(oracle)
    same = (found == oracle) | (np.isnan(found) & np.isnan(oracle))
    if not (finite | same).all(where=mask):
        return np.inf
    zero = np.zeros((), np.float64)
    return relative_error(
        np.where(finite, found, zero), np.where(finite, oracle, zero), finite & mask
    )


class TracedProgram:
    """torch's program of one graph, in float32 and in float64.

    The float64 side is the same program with the weights of the oracle and float64 in place of
    float32, so that both sides have the same values under the same names.
    """

    def __init__(self, program: ExportedProgram, model: Transformer, oracle: Transformer) -> None:
        self._program = program
        self._model = model
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._fixed = {
            entry.arg.name: tuple(
                _tensor(program, entry.kind, str(entry.target), side) for side in (oracle, model)
            )
            for entry in program.graph_signature.input_specs
            if entry.kind is not InputKind.USER_INPUT
        }
        self._frees: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(program.graph.nodes):
            for used in node.all_input_nodes:
                if used not in seen:
                    seen.add(used)
                    self._frees.setdefault(node, []).append(used)

    @property
    def outputs(self) -> list[str]:
        """The names of the values that the program returns, in order."""
        return [str(name) for name in self._program.graph_signature.user_outputs]

    @property
    def parameters(self) -> set[str]:
        """The names of the weights in the graph."""
        return {str(entry.target) for entry in self._program.graph_signature.input_specs}

    @property
    def values(self) -> set[str]:
        """The names of the computed tensors."""
        return {
            name
            for name, node in self._nodes.items()
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
        }

    def place(self, value: str) -> Place:
        """Returns the code that computes a value."""
        node = self._nodes[value]
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        path = next((path for path, _ in reversed(list(stack.values())) if path != NO_MODULE), "")
        module = re.sub(r"@\d+", "", path).removeprefix("model").lstrip(".")
        frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
        source = code = ""
        for file, line in frames:
            # An environment, too, may lie in the folder of the package.
            if any(Path(file).is_relative_to(PACKAGE / part) for part in TRACED):
                source = f"{Path(file).relative_to(PACKAGE).as_posix()}:{line}"
                code = linecache.getline(file, int(line)).strip()
        return Place(module or type(self._model).__name__, source, code)

    @torch.inference_mode()
    def run(
        self, inputs: Sequence[NDArray[Any]], wanted: Collection[str]
    ) -> tuple[dict[str, tuple[NDArray[Any], NDArray[Any]]], dict[str, float]]:
        """Runs the program on the graph's inputs, in float64 and in float32, side by side.

        Returns:
            The wanted values in float64 and float32, and the error of float32 in every value. All
            other values are dropped after their last use.
        """
        given = iter(inputs)
        sides: dict[Node, tuple[Any, Any]] = {}
        kept: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        errors: dict[str, float] = {}
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                if node.name in self._fixed:
                    exact, single = self._fixed[node.name]
                else:
                    single = _widened(torch.from_numpy(next(given)), torch.float32)
                    exact = _widened(single, torch.float64)
            elif node.op == "call_function":
                exact, single = (self._call(node, sides, side) for side in (0, 1))
            else:
                continue
            sides[node] = exact, single
            if isinstance(exact, torch.Tensor):
                arrays = exact.numpy(), single.numpy()
                errors[node.name] = value_error(arrays[1], arrays[0])
                if node.name in wanted:
                    kept[node.name] = arrays[0].copy(), arrays[1].copy()
            for used in self._frees.get(node, ()):
                del sides[used]
        return kept, errors

    def _call(self, node: Node, sides: Mapping[Node, tuple[Any, Any]], side: int) -> Any:
        def filled(argument: Any) -> Any:
            if isinstance(argument, Node):
                return sides[argument][side]
            return torch.float64 if argument is torch.float32 and side == 0 else argument

        arguments: Any = map_aggregate(node.args, filled)
        settings: Any = map_aggregate(node.kwargs, filled)
        assert callable(node.target)
        return node.target(*arguments, **settings)


def trace(model: Transformer, name: str) -> Graph:
    """Exports a graph once more, with a program that knows the code of every value."""
    with _functions_recorded():
        return export_graphs(model, [name])[name]


def _tensor(
    program: ExportedProgram, kind: InputKind, target: str, model: Transformer
) -> torch.Tensor:
    name = target.removeprefix("model.")
    if kind is InputKind.PARAMETER:
        return model.get_parameter(name).detach()
    if kind is InputKind.BUFFER:
        return model.get_buffer(name)
    constant = program.constants[target]
    assert isinstance(constant, torch.Tensor)
    return _widened(constant, model.embedding.weight.dtype)


def _widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _functions_recorded() -> Iterator[None]:
    """Lets the tracer record the functions of the model, not only `forward` of its modules.

    The set is internal to the tracer; in a version of torch without it, lines are those of the
    `forward` that calls the function.
    """
    anchors: set[tuple[str, str]] = getattr(torch.fx.proxy, "_STACK_TRACE_ANCHORS", set())
    added = {
        (code.co_filename, code.co_name)
        for module in _CODE
        if module.__spec__ is not None and module.__spec__.loader is not None
        for code in _functions(module.__spec__.loader.get_code(module.__name__))  # type: ignore[attr-defined]
    } - anchors
    anchors |= added
    try:
        yield
    finally:
        anchors -= added


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _functions(constant)
