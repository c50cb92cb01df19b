"""One graph beside a torch module of any kind, which a function of the user's returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
EXPECTED = "a torch module and its inputs, a dictionary or a list of dictionaries"


class FunctionGraph(GraphsSubject):
    """A graph, and the inputs that the function returned.

    Attributes:
        module: The torch module in float32.
        inputs: Tensors by the names of the graph's inputs, once for each case.
    """

    def __init__(
        self, layout: Layout, session: SessionOptions, module: nn.Module, inputs: Sequence[Inputs]
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
        for given in inputs:
            if given.keys() != names.keys():
                raise InputError(
                    f"{path} has the inputs {', '.join(names)}, the reference gives "
                    f"{', '.join(given)}; return one tensor for each input, by its name"
                )
        super().__init__(Layout("one file", GraphFile(path, names, outputs)), session)
        self.module, self.inputs = module, inputs

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


def called(function: Callable[[], Any], name: str) -> tuple[nn.Module, list[Inputs]]:
    """Calls the user's function: a module, and inputs, one mapping or a list of them.

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
    inputs = [inputs] if isinstance(inputs, Mapping) else inputs
    sound = isinstance(module, nn.Module) and isinstance(inputs, Sequence) and inputs
    if not sound or not all(
        isinstance(each, Mapping) and all(isinstance(one, Tensor) for one in each.values())
        for each in inputs
    ):
        raise UsageError(f"expected --reference {name} to return {EXPECTED}")
    # numpy has neither gradients nor bfloat16.
    plain: list[Inputs] = [{key: _plain(one) for key, one in each.items()} for each in inputs]
    return module.eval().float().cpu(), plain


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@torch.inference_mode()
def run_module(
    module: nn.Module, inputs: Inputs, names: Sequence[str], dtype: torch.dtype
) -> Arrays:
    """Returns torch's values by the names of the graph's outputs.

    Raises:
        UsageError: The module fails, or gives another number of outputs.
    """
    given = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }
    try:
        found = module(**given)
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


def rows_alone(inputs: Inputs) -> list[dict[str, Tensor]]:
    """Returns each row of a batch alone, where all inputs have as many rows."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in inputs.values()}
    rows = sizes.pop() if len(sizes) == 1 else 0
    return [
        {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        for row in range(rows if rows > 1 else 0)
    ]


def same(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> bool:
    """Whether outputs are equal."""
    return all(np.array_equal(*both) for both in zip(one, other, strict=True))
