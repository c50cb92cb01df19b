"""One graph beside a torch module of any kind, which a function of the user's returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from transferry.export.subject.foreign import GraphsSubject
from transferry.export.subject.layout import GraphFile, Layout
from transferry.export.subject.session import ForeignGraph
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.session import SessionOptions

Arrays = dict[str, NDArray[Any]]
Inputs = Mapping[str, Tensor]
# Tensors by the names of the graph's inputs, or in their order.
Given = Inputs | Sequence[Tensor]
EXPECTED = (
    "a torch module and its inputs: a dictionary or a list of tensors, or a list of either, one "
    "for each case"
)


class FunctionGraph(GraphsSubject):
    """A graph, and the inputs that the function returned.

    Attributes:
        module: The torch module in float32.
        inputs: Tensors by the names of the graph's inputs, once for each case.
    """

    def __init__(
        self, layout: Layout, session: SessionOptions, module: nn.Module, inputs: Sequence[Given]
    ) -> None:
        """Takes each tensor's own name as its meaning.

        Raises:
            InputError: The graph's inputs are not those of the function.
        """
        path = layout.decoder.path
        graph = ir.load(path).graph
        names, outputs = (
            {str(value.name): str(value.name) for value in side}
            for side in (graph.inputs, graph.outputs)
        )
        super().__init__(Layout("one file", GraphFile(path, names, outputs)), session)
        self.module, self.inputs = module, [self._named(given, [*names]) for given in inputs]

    def _named(self, given: Given, names: Sequence[str]) -> Inputs:
        """Returns tensors by the graph's names, in the order of its inputs."""
        if isinstance(given, Mapping):
            if given.keys() == {*names}:
                return {name: given[name] for name in names}
            found = ", ".join(given)
        elif len(given) == len(names):
            return dict(zip(names, given, strict=True))
        else:
            found = f"{len(given)} tensors"
        raise InputError(
            f"{self.layout.decoder.path} has the inputs {', '.join(names)}, the reference gives "
            f"{found}; return one tensor for each input, by its name or as a list in this order"
        )

    def open(self) -> ForeignGraph:
        """Opens the graph."""
        return ForeignGraph(self.layout.decoder, self.session)

    def reopened(self, folder: Path) -> FunctionGraph:
        """Returns the graph of a copy, with the same inputs."""
        return FunctionGraph(self.layout.moved(folder), self.session, self.module, self.inputs)

    def answers(self, inputs: Inputs) -> Arrays:
        """Returns the outputs of the graph; raises InputError if it fails."""
        return self.model.run({name: tensor.numpy() for name, tensor in inputs.items()}, {})[0]  # type: ignore[no-any-return]

    def tried(self) -> Sequence[NDArray[Any]]:
        """Returns the outputs on the first inputs."""
        return list(self.answers(self.inputs[0]).values())


def called(function: Callable[[], Any], name: str) -> tuple[nn.Module, list[Given]]:
    """Calls the user's function: a module, and the inputs of one case or a list of them.

    Raises:
        UsageError: It fails, or returns something else.
    """
    try:
        returned = function()
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"--reference {name} failed: {error}") from error
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(f"expected --reference {name} to return {EXPECTED}")
    module, inputs = returned
    if _is_case(inputs):
        inputs = [inputs]
    sound = isinstance(module, nn.Module) and isinstance(inputs, list | tuple) and inputs
    if not sound or not all(map(_is_case, inputs)):
        raise UsageError(f"expected --reference {name} to return {EXPECTED}")
    plain: list[Given] = [
        {key: _plain(one) for key, one in each.items()}
        if isinstance(each, Mapping)
        else [*map(_plain, each)]
        for each in inputs
    ]
    return module.eval().float().cpu(), plain


def _is_case(given: Any) -> bool:
    tensors = given.values() if isinstance(given, Mapping) else given
    listed = isinstance(given, Mapping | list | tuple) and len(given) > 0
    return listed and all(isinstance(one, Tensor) for one in tensors)


def _plain(tensor: Tensor) -> Tensor:
    """Takes away gradients and bfloat16, which numpy lacks."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@torch.inference_mode()
def run_module(
    module: nn.Module, inputs: Inputs, names: Sequence[str], dtype: torch.dtype
) -> Arrays:
    """Returns torch's values by the names of the graph's outputs.

    A module with other names of arguments than the graph takes them in the graph's order.

    Raises:
        UsageError: The module fails, or gives another number of outputs.
    """
    given = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }
    try:
        found = module(**given) if _takes(module, names=given) else module(*given.values())
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"the reference fails in {dtype}: {error}") from error
    if isinstance(found, Tensor):
        found = (found,)
    if isinstance(found, Mapping) and set(names) <= found.keys():
        values = [found[name] for name in names]
    else:
        values = list(found.values() if isinstance(found, Mapping) else found)
    if len(values) != len(names) or not all(isinstance(value, Tensor) for value in values):
        raise UsageError(
            f"the graph gives {', '.join(names)}, the reference {len(values)} values; return as "
            "many tensors, or a dictionary with these names"
        )
    return {name: value.numpy() for name, value in zip(names, values, strict=True)}


def _takes(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether the module has arguments of these names."""
    try:
        inspect.signature(module.forward).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):  # ValueError: a forward that is not of Python
        return False
    return True


def rows_alone(inputs: Inputs) -> list[dict[str, Tensor]]:
    """Returns each row of a batch alone, where all inputs have as many rows."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in inputs.values()}
    rows = sizes.pop() if len(sizes) == 1 else 0
    return [
        {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        for row in range(rows if rows > 1 else 0)
    ]
