"""Proof that one graph computes what a torch module of any kind does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from transferry.export.audit import UNLIMITED, Done, tolerance_of, with_faults
from transferry.export.checks.check import INDEPENDENCE, Check, Findings, claim, failed, prove
from transferry.export.checks.foreign_weights import foreign_weights
from transferry.export.checks.numbers import batched, declared, repeats
from transferry.export.checks.unrounded import told, tolerance_of_floats, without_rounding
from transferry.export.faults.gate import Gate
from transferry.export.subject.foreign import GraphsSubject
from transferry.export.subject.foreign_model import ForeignGraph
from transferry.export.subject.layout import GraphFile, Layout
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Comparison, Tolerance, limited
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.proof.units import Units

Arrays = dict[str, NDArray[Any]]
Inputs = Mapping[str, Tensor]
# Tensors by the names of the graph's inputs, or in their order.
Given = Inputs | Sequence[Tensor]
EXPECTED = (
    "a torch module and its inputs: a dictionary or a list of tensors, or a list of either, one "
    "for each case"
)


def audit_function(
    folder: Path,
    subject: FunctionGraph,
    precision: str,
    *,
    plant: bool = False,
    atol: float | None = None,
    done: Done = lambda phase, done, total: None,
) -> ParityReport:
    """Compares a graph with a torch module; see `audit`.

    Raises:
        UsageError: The module fails, or gives another number of outputs.
        InputError: There are no numbers to compare.
    """
    tolerance = tolerance_of(precision)
    work = FunctionAudit(subject.module, copy.deepcopy(subject.module).double(), tolerance)
    found = prove(work.checks(subject))
    settings = {**subject.describe(precision), "inputs": len(subject.inputs)}
    given = str(folder), settings, tolerance, found.comparisons
    report = ParityReport(*given, claims=found.claims, times=[*found.times.values()])

    def changed(copied: FunctionGraph) -> bool:
        return not all(map(np.array_equal, subject.tried(), copied.tried()))

    gate = Gate(subject, work.checks, changed, atol=atol)
    return with_faults(report, gate, done) if plant else report


@dataclass(frozen=True)
class FunctionAudit:
    """The checks of one graph beside a torch module in float32, and in float64."""

    module: nn.Module
    exact: nn.Module
    tolerance: Tolerance

    def checks(self, subject: FunctionGraph) -> Iterator[Check]:
        """Yields the checks of a graph, in order."""
        exact, left = without_rounding(subject, self.module)
        yield from left
        rounded = self
        if exact is not None:
            tolerance = tolerance_of_floats(subject.layout)
            yield from map(told, replace(self, tolerance=tolerance)._inputs(exact))
            rounded = replace(self, tolerance=UNLIMITED)
        yield from rounded._inputs(subject)
        yield repeats(lambda: subject.answers(subject.inputs[0]))
        yield claim("declared", lambda: [declared([subject.model])])
        yield claim("weights", lambda: [foreign_weights(self.module, subject.layout)])

    def _inputs(self, subject: FunctionGraph) -> Iterator[Check]:
        for number, inputs in enumerate(subject.inputs):
            yield Check(f"input {number}", partial(self._input, subject, f"input {number}", inputs))

    def _input(
        self, subject: FunctionGraph, name: str, inputs: Inputs, so_far: Findings
    ) -> Iterator[Findings]:
        """Compares a batch, and each of its rows alone."""
        cases: list[tuple[str, Inputs]] = [(name, inputs)]
        cases += [(f"{name}, row {row}", each) for row, each in enumerate(rows_alone(inputs))]
        whole: Arrays = {}
        errors: dict[str, float] = {}  # the largest of each output
        for row, (case, given) in enumerate(cases, start=-1):
            try:
                found = subject.answers(given)
            except InputError as error:
                yield Findings(comparisons=[failed(case, "text", error)])
                continue
            oracle = run_module(self.exact, given, list(found), torch.float64)
            if not any(each.size for each in oracle.values()):
                shapes = ", ".join(str(list(each.shape)) for each in oracle.values())
                raise InputError(
                    f"{case}: expected outputs with numbers to compare, found shapes {shapes}; "
                    "return inputs of at least one row"
                )
            reference = run_module(self.module, given, list(found), torch.float32)
            rounding = {each: _error(reference[each], oracle[each]) for each in found}
            whole, together = whole or found, list[Comparison]()
            for each, own in rounding.items():
                item = self._compare(case, each, found[each], oracle[each], own)
                errors[each] = max(item.error, errors.get(each, 0.0))
                yield Findings(comparisons=[item])
                # The row alone, and in its batch; see `batched`.
                alone, batch = found[each], whole[each]
                if row >= 0 and batch.shape[1:] == alone.shape[1:] and len(batch) > row:
                    apart = _error(batch[row : row + 1], alone)
                    budget = batched(self.tolerance, own, errors[each])
                    shown = f"{case}{INDEPENDENCE}its batch", each, "text"
                    together.append(limited(*shown, apart, own, budget))
            yield Findings(comparisons=together)

    def _compare(
        self, case: str, name: str, found: NDArray[Any], oracle: NDArray[Any], own: float
    ) -> Comparison:
        if found.shape != oracle.shape:
            fault = f"expected shape {list(oracle.shape)}, found {list(found.shape)}"
            return Comparison(case, name, "text", np.inf, 0.0, 0.0, fault)
        error = _error(found, oracle)
        return limited(case, name, "text", error, own, self.tolerance.budget(own))


def _error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Returns the largest error in units; of outputs that are no floats too."""
    exact, other = (np.atleast_1d(each).astype(np.float64) for each in (wanted, found))
    return Units.of(exact).largest_error(other)


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
    module: Any
    inputs: Any
    pair = isinstance(returned, tuple) and len(returned) == 2
    module, inputs = returned if pair else (None, ())
    inputs = [inputs] if _is_case(inputs) else inputs
    listed = isinstance(inputs, list | tuple) and inputs and all(map(_is_case, inputs))
    if not isinstance(module, nn.Module) or not listed:
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
