"""One foreign graph in onnxruntime: fed by meaning, and held to the shapes that it declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.subject.layout import GraphFile
from transferry.runtime.errors import InputError
from transferry.runtime.ort.session import ONNXRUNTIME_ERRORS, SessionOptions, open_session

Arrays = Mapping[str, NDArray[Any]]
TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({name})": name for name in ("int64", "int32", "int8", "uint8")},
}
FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)")


def require_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raises InputError for an output of another shape than the reference gives."""
    if array.shape != shape:
        raise InputError(f"expected {name} of shape {list(shape)}, found {list(array.shape)}")


class ForeignGraph:
    """A foreign graph, opened.

    Attributes:
        graph: Its file and the meaning of its tensors.
        lies: Mismatches of declared and observed outputs, by name.
    """

    def __init__(self, graph: GraphFile, options: SessionOptions) -> None:
        """Opens the graph.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: The graph cannot be opened, or has an input of an unknown type.
        """
        self.graph, self.options = graph, options
        self.session = open_session(graph.path, options)
        self._inputs = {value.name: value for value in self.session.get_inputs()}
        self._outputs = {value.name: value for value in self.session.get_outputs()}
        # Of the file: onnxruntime infers shapes anew, and drops what contradicts them.
        declared = ir.load(graph.path).graph
        self._shapes = {
            str(value.name): None
            if value.shape is None
            else [size if isinstance(size, int) else size.value for size in value.shape]
            for value in (*declared.inputs, *declared.outputs)
        }
        unknown = [value for value in self._inputs.values() if value.type not in TYPES]
        if unknown:
            raise InputError(
                f"{graph.path}: input {unknown[0].name} is of {unknown[0].type}, which the audit "
                f"cannot feed; it feeds {', '.join(TYPES.values())}"
            )
        self.lies: dict[str, str] = {}
        self.past = [name for name in graph.past if name in self._inputs]

    def require(
        self, reads: Collection[str], gives: Collection[str], cache: Collection[str] = ()
    ) -> None:
        """Checks that a graph fits the reference, before it is run.

        Args:
            reads: Meanings of the inputs that there is something for.
            gives: Meanings of outputs; it must have one of them.
            cache: Inputs of a cache that there is something for.

        Raises:
            InputError: It reads something else, lacks all of them, or gives integers.
        """
        path = self.graph.path
        if "tokens" not in self.graph.inputs:
            raise InputError(f"{path}: expected an input of tokens; name it with --names")
        known = {name for role, name in self.graph.inputs.items() if role in reads} | {*cache}
        if unknown := [name for name in self._inputs if name not in known]:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise InputError(
                f"{path} reads {unknown[0]}{more}, for which the reference has nothing; name the "
                "reference that the graphs were made from, or export all of them anew"
            )
        if not {*gives} & {*self.graph.outputs}:
            raise InputError(
                f"{path}: expected an output {' or '.join(gives)}, found "
                f"{', '.join(self.graph.outputs) or 'none'}; name it with --names"
            )
        for name in self.graph.outputs.values():
            if (kind := self._outputs[name].type) not in FLOATS:
                raise InputError(f"{path}: expected floats in output {name}, found {kind}")

    def empty(self, rows: int, kv_heads: int, d_head: int) -> dict[str, NDArray[Any]]:
        """Returns a cache without positions, of the sizes given where the graph declares none.

        Raises:
            InputError: The cache is not of shape `[batch, kv_heads, past, d_head]`.
        """
        found = {}
        for name in self.past:
            value = self._inputs[name]
            if len(value.shape) != 4:
                raise InputError(
                    f"{self.graph.path}: expected {name} of shape [batch, heads, past, width], "
                    f"found {value.shape}; export it with keys and values apart"
                )
            pairs = (value.shape[1], kv_heads), (value.shape[-1], d_head)
            heads, width = (size if isinstance(size, int) else other for size, other in pairs)
            found[name] = np.zeros((rows, heads, 0, width), TYPES[value.type])
        return found

    def run(self, inputs: Arrays, past: Arrays) -> tuple[dict[str, NDArray[Any]], Arrays]:
        """Runs the graph.

        Args:
            inputs: Arrays by meaning; those that the graph does not read are left out.
            past: The cache by the names of its inputs.

        Returns:
            The outputs by meaning, and the cache by the names of its inputs: grown where the graph
            gives it, as it was where not.

        Raises:
            InputError: The graph fails.
        """
        named = {name: inputs[role] for role, name in self.graph.inputs.items() if role in inputs}
        named |= {name: past[name] for name in self.past}
        fed = {
            name: array.astype(TYPES[self._inputs[name].type], copy=False)
            for name, array in named.items()
        }
        try:
            values = self.session.run(None, fed)
        except ONNXRUNTIME_ERRORS as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in fed.items())
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"does not run on {shapes}: {reason}") from error
        found = dict(zip(self._outputs, values, strict=True))
        self._hold(fed, found)
        grown = {
            name: found[present] if present in found and found[present].size else past[name]
            for name, present in self.graph.past.items()
            if present in found or name in past
        }
        meant = {role: found[name] for role, name in self.graph.outputs.items()}
        return meant, grown

    def _hold(self, fed: Arrays, found: Arrays) -> None:
        """Remembers what declares another type, size or relation of sizes than it has."""
        bound: dict[str, int] = {}
        for name, array in (*fed.items(), *found.items()):
            if not isinstance(array, np.ndarray) or not array.size:
                continue  # a merged decoder gives a cache of the source that nobody reads
            shape, value = self._shapes.get(name), self._outputs.get(name)
            wrong = shape is not None and len(shape) != array.ndim
            for size, given in zip(shape or (), array.shape, strict=False):
                meant = bound.setdefault(size, given) if isinstance(size, str) else size
                wrong |= isinstance(meant, int) and meant != given
            if value is None:  # an input
                continue
            if wrong:
                self.lies.setdefault(name, f"declares shape {shape}, gives {list(array.shape)}")
            if array.dtype != TYPES.get(value.type, array.dtype):
                self.lies.setdefault(name, f"declares {value.type}, gives {array.dtype}")
