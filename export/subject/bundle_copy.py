"""An editable copy of a bundle, for planting faults."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.export.subject.subject import FolderCopy
from transferry.export.trace.store import SMALLEST, store
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import ONE_GRAPH, Variant
from transferry.runtime.errors import InputError
from transferry.runtime.io.sealed_folder import FileRecord

PLANTED = "planted.bin"  # the changed weights, beside the graphs; the others stay in their file
Change = Callable[[NDArray[Any]], NDArray[Any]]


class BundleCopy(FolderCopy):
    """A copy of a bundle; `seal` makes its manifest agree with the edits."""

    def __init__(
        self, bundle: Bundle, variant: Variant, folder: Path, *, whole: bool = False
    ) -> None:
        """Copies a bundle into a folder, for edits of one variant; see `FolderCopy`.

        With `whole`, the graph `generate` alone is edited, else all others.
        """
        super().__init__(bundle.folder, folder)
        self.manifest = bundle.manifest
        self.variant = variant
        self.specs = {ONE_GRAPH: variant.graphs[ONE_GRAPH]} if whole else variant.steps
        self.config = ModelConfig.from_dict(dict(bundle.manifest.model))
        self._written: set[str] = set()
        self._damaged = False

    @cached_property
    def graphs(self) -> dict[str, ir.Model]:
        """The graphs of the variant, by name."""
        return {name: ir.load(self.folder / spec.file) for name, spec in self.specs.items()}

    def write(self, name: str, content: bytes) -> None:
        """Writes a file of the copy, with its hash in the manifest."""
        (self.folder / name).write_bytes(content)
        self._written.add(name)
        self.touched.add(name)

    def truncate(self, name: str, *, vouched: bool) -> None:
        """Cuts a file in half; if vouched, with its new hash in the manifest."""
        path = self.folder / name
        self.touched.add(name)
        os.truncate(path, path.stat().st_size // 2)
        self._damaged = True
        if vouched:
            self._written.add(name)

    def seal(self) -> None:
        """Writes the edited graphs, and a manifest with the hashes of all files written."""
        if not self._damaged:
            self._write_graphs()
        records = {name: FileRecord.of(self.folder / name) for name in sorted(self._written)}
        manifest = dataclasses.replace(self.manifest, files={**self.manifest.files, **records})
        (self.folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        self.touched |= {MANIFEST, *self._written}

    def rewrite(self) -> None:
        """Rewrites a weight unchanged, so that a copy without a fault is rewritten too."""
        *_, (key, _) = self._outside()
        for value in self.named(key.removeprefix("model.")):
            value.const_value = ir.Tensor(_array(value), name=value.name)

    def _outside(self) -> list[tuple[str, Path]]:
        """Names and files of the weights outside of the graphs, by size."""
        found = sorted(
            (tensor.nbytes, key, Path(spec.file).parent / tensor.location)
            for spec, model in zip(self.specs.values(), self.graphs.values(), strict=True)
            for key, value in model.graph.initializers.items()
            for tensor in [value.const_value]
            if isinstance(tensor, ir.ExternalTensor)
        )
        if not found:
            raise self.absent("weights outside of the graphs")
        return [(key, path) for _, key, path in found]

    def _write_graphs(self) -> None:
        (folder,) = {Path(spec.file).parent for spec in self.specs.values()}
        name = (folder / PLANTED).as_posix()
        self.write(name, b"")
        places: dict[tuple[ir.DataType, bytes], tuple[int, int]] = {}
        meant: list[tuple[ir.Model, str, bytes]] = []
        with (self.folder / name).open("wb") as file:
            for model in self.graphs.values():
                for value in model.graph.initializers.values():
                    tensor = value.const_value
                    if isinstance(tensor, ir.Tensor) and tensor.nbytes >= SMALLEST:
                        value.const_value = store(tensor, file, places)
                        meant.append((model, str(value.name), tensor.tobytes()))
        for key, spec in self.specs.items():
            model = self.graphs[key]
            model.graph.sort()
            ir.save(model, self.folder / spec.file)
            self._written.add(spec.file)
            edited = [(weight, content) for owner, weight, content in meant if owner is model]
            if not edited:
                continue
            # Otherwise another fault than the reported one could be caught.
            found = ir.load(self.folder / spec.file).graph.initializers
            for weight, content in edited:
                tensor = found[weight].const_value
                if tensor is not None and tensor.tobytes() != content:
                    raise RuntimeError(f"{spec.file} does not hold {weight} as it was edited")

    def weights_file(self) -> str:
        """Returns the path inside the bundle of the file that holds the largest weight."""
        return self._outside()[-1][1].as_posix()

    def absent(self, what: str) -> InputError:
        """Returns the error for a graph that lacks the target of a fault."""
        return InputError(
            f"no fault can be planted in {what}: expected in the graphs of variant "
            f"{self.variant.name!r}, found none; the self-test knows the graphs that this version "
            "exports, so export the bundle again"
        )

    def named(self, name: str) -> list[ir.Value]:
        """Returns a weight in each graph that has it.

        The name comes from the torch model or from the export.
        """
        found = [
            model.graph.initializers[key]
            for model in self.graphs.values()
            for key in (f"model.{name}", name)
            if key in model.graph.initializers
        ]
        if not found:
            raise self.absent(f"the weight {name}")
        return found

    def names(self) -> list[str]:
        """Returns the names of all weights, as `named` takes them."""
        keys = [
            key.removeprefix("model.")
            for model in self.graphs.values()
            for key in model.graph.initializers
            if key.startswith("model.")
        ]
        return list(dict.fromkeys(keys))

    def array(self, name: str) -> NDArray[Any]:
        """Returns a copy of a weight."""
        return _array(self.named(name)[0])

    def edit(self, name: str, change: Change) -> None:
        """Changes a weight in each graph that has it; raises InputError if it stays the same."""
        for value in self.named(name):
            before = _array(value)
            # A scalar stays one.
            after = np.asarray(change(before.copy()), before.dtype, order="C")
            if before.tobytes() == after.tobytes():
                raise self.absent(f"{name}, which would stay the same")
            value.const_value = ir.Tensor(after, name=value.name)

    def nodes(self, *types: str, graph: str | None = None, wanted: str = "") -> list[ir.Node]:
        """Returns the nodes of some operators, of one graph or of all.

        Raises:
            InputError: No node was found for the purpose that `wanted` names.
        """
        models = [model for name, model in self.graphs.items() if graph in (None, name)]
        every = (node for model in models for node in model.graph.all_nodes())
        found = [node for node in every if node.op_type in types]
        if wanted and not found:
            raise self.absent(wanted)
        return found

    def tensor(self, graph: str, name: str) -> ir.Value:
        """Returns an input or output of a graph."""
        model = self.graphs[graph].graph
        return next(value for value in (*model.inputs, *model.outputs) if value.name == name)

    def linear(self, name: str) -> list[ir.Value]:
        """Returns the output of a Linear, its bias included, in each graph that has it."""
        found = []
        for weight in self.named(f"{name}.weight"):
            for product in self.users(weight, "Transpose", "MatMul"):
                value = product.outputs[0]
                adds = [node for node in value.consumers() if node.op_type == "Add"]
                biased = [node for node in adds if constants(node)]
                found.append(biased[0].outputs[0] if biased else value)
        return found

    def users(self, value: ir.Value, *types: str) -> list[ir.Node]:
        """Returns the nodes at the end of a chain of operators that begins at a value."""
        nodes: list[ir.Node] = []
        values = [value]
        for type_ in types:
            nodes = [user for one in values for user in one.consumers() if user.op_type == type_]
            values = [node.outputs[0] for node in nodes]
        if not nodes:
            raise self.absent(f"{' and '.join(types)} after {value.name}")
        return nodes


def _array(value: ir.Value) -> NDArray[Any]:
    assert value.const_value is not None
    return value.const_value.numpy().copy()


def constants(node: ir.Node) -> list[ir.Value]:
    """Returns the inputs of a node that are weights or constants."""
    return [value for value in node.inputs if value is not None and value.is_initializer()]


def scalar(node: ir.Node, wanted: float | None = None) -> ir.Value | None:
    """Returns a node's constant input of one entry, if it has the wanted value."""
    for value in constants(node):
        tensor = value.const_value
        if tensor is not None and tensor.size == 1:
            found = float(tensor.numpy().reshape(-1)[0].astype(np.float64))
            # float16 holds a square root to three digits.
            if wanted is None or math.isclose(found, wanted, rel_tol=1e-2):
                return value
    return None


def add(near: ir.Value, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
    """Adds a node to the graph of a value and returns its output."""
    graph = near.graph
    assert isinstance(graph, ir.Graph)
    node = ir.node(operator, list(inputs), attributes)
    node.outputs[0].name = f"planted.{graph.name}.{len(graph)}"
    graph.append(node)
    return node.outputs[0]


def constant(near: ir.Value, array: Any) -> ir.Value:
    """Adds a constant to the graph of a value; whole numbers are int64."""
    return add(near, "Constant", value=ir.tensor(np.asarray(array)))


def always(value: ir.Value) -> ir.Value:
    """Returns True wherever a value is True or False."""
    return add(value, "Or", value, add(value, "Not", value))


def never(value: ir.Value) -> ir.Value:
    """Returns False wherever a value is True or False."""
    return add(value, "And", value, add(value, "Not", value))


def backwards(value: ir.Value) -> ir.Value:
    """Returns the rows of a value from last to first."""
    last, beyond, axis = (constant(value, [each]) for each in (-1, np.iinfo(np.int64).min, 0))
    return add(value, "Slice", value, last, beyond, axis, last)


def row_numbers(near: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the number of rows of a value `[]`, and their numbers `[rows]`, both int64."""
    count = add(near, "Squeeze", add(near, "Shape", rows, start=0, end=1))
    return count, add(near, "Range", constant(near, 0), count, constant(near, 1))


def rows_from(first: int, near: ir.Value, rows: ir.Value) -> ir.Value:
    """Returns whether each row of a value is at or after the first `[rows]`."""
    return add(near, "GreaterOrEqual", row_numbers(near, rows)[1], constant(near, first))


def scaled_rows(value: ir.Value, chosen: ir.Value, factor: float) -> ir.Value:
    """Returns a value, of whose chosen rows `[rows]` every number is multiplied by a factor."""
    more = add(value, "CastLike", constant(value, np.float32(factor - 1)), value)
    rows = add(value, "Mul", add(value, "CastLike", chosen, value), more)
    ones = [1] * (len(value.shape or (1, 1, 1)) - 1)
    column = add(value, "Reshape", rows, constant(value, [-1, *ones]))
    return add(value, "Add", value, add(value, "Mul", value, column))


def replace(
    value: ir.Value, make: Callable[[ir.Value], ir.Value], *, outside: bool = False
) -> None:
    """Replaces a value, which the replacement may read, wherever it is read.

    With `outside` it is replaced as an output of the graph only.
    """
    uses = [] if outside else list(value.uses())
    new = make(value)
    for node, index in uses:
        node.replace_input_with(index, new)
    graph = new.graph
    assert isinstance(graph, ir.Graph)
    with contextlib.suppress(ValueError):
        place = [item.name for item in graph.outputs].index(value.name)
        output = add(new, "Identity", new)
        output.name, value.name = value.name, output.name
        output.type, output.shape = value.type, value.shape
        graph.outputs[place] = output
