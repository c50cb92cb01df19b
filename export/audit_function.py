"""A graph beside a torch module of any kind, which a function of the user's returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from transferry.export.audit import REPEATS, Done, Found, collected, settings, with_faults
from transferry.export.checks.independence import declared
from transferry.export.subject.layout import GraphFile, Layout
from transferry.export.subject.session import ForeignGraph
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Comparison, Tolerance, limited, relative_error
from transferry.runtime.proof.report import Claim, ParityReport

Arrays = dict[str, NDArray[Any]]


@dataclass
class FunctionAudit:
    """The checks of one graph beside a torch module.

    Attributes:
        module: In float32.
        inputs: Tensors by the names of the graph's inputs, once for each case.
        tolerance: What passes.
    """

    module: nn.Module
    inputs: Sequence[Mapping[str, Tensor]]
    tolerance: Tolerance

    @classmethod
    def of(cls, function: Callable[[], Any], name: str, tolerance: Tolerance) -> FunctionAudit:
        """Calls the function, which returns a module and inputs: one mapping or a list of them.

        Raises:
            UsageError: It fails, or returns something else.
        """
        try:
            returned = function()
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            raise UsageError(f"--reference {name} failed: {error}") from error
        expected = "a torch module and its inputs, a dictionary or a list of dictionaries"
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UsageError(f"expected --reference {name} to return {expected}")
        module, inputs = returned
        inputs = [inputs] if isinstance(inputs, Mapping) else inputs
        sound = isinstance(module, nn.Module) and isinstance(inputs, Sequence) and inputs
        if not sound or not all(
            isinstance(each, Mapping) and all(isinstance(one, Tensor) for one in each.values())
            for each in inputs
        ):
            raise UsageError(f"expected --reference {name} to return {expected}")
        # numpy has neither gradients nor bfloat16.
        plain = [
            {
                key: one.detach().cpu().float()
                if one.dtype == torch.bfloat16
                else one.detach().cpu()
                for key, one in each.items()
            }
            for each in inputs
        ]
        return cls(module.eval().float().cpu(), plain, tolerance)

    def layout(self, layout: Layout) -> Layout:
        """Returns the layout with each tensor's own name as its meaning.

        Raises:
            InputError: The graph's inputs are not those of the function.
        """
        graph = ir.load(layout.decoder.path).graph
        inputs = {str(value.name): str(value.name) for value in graph.inputs}
        for given in self.inputs:
            if given.keys() != inputs.keys():
                raise InputError(
                    f"{layout.decoder.path} has the inputs {', '.join(inputs)}, the reference "
                    f"gives {', '.join(given)}; return one tensor for each input, by its name"
                )
        outputs = {str(value.name): str(value.name) for value in graph.outputs}
        return Layout("one file", GraphFile(layout.decoder.path, inputs, outputs))

    def checks(self, layout: Layout, options: SessionOptions) -> Found:
        """Yields the result of one check after another."""
        graph = ForeignGraph(layout.decoder, options)
        exact = copy.deepcopy(self.module).double()
        for number, inputs in enumerate(self.inputs):
            cases = [(f"input {number}", inputs), *_rows(number, inputs)]
            whole: Arrays = {}
            for name, given in cases:
                budget = self.tolerance.budget(0.0)
                try:
                    found = self.answers(graph, given)
                except InputError as error:
                    nothing = (name, "output", "text", np.inf, 0.0, budget)
                    yield [Comparison(*nothing, fault=str(error))]
                    continue
                oracle = _call(exact, given, list(found), torch.float64)
                if not any(each.size for each in oracle.values()):
                    shapes = ", ".join(str(list(each.shape)) for each in oracle.values())
                    raise InputError(
                        f"{name}: expected outputs with numbers to compare, found shapes {shapes}; "
                        "return inputs of at least one row"
                    )
                own = _call(self.module, given, list(found), torch.float32)
                yield [
                    self._compare(name, each, found[each], oracle[each], own[each])
                    for each in found
                ]
                whole = whole or found
                if name != cases[0][0]:
                    row = int(name.rsplit(" ", 1)[1])
                    yield list(self._independence(name, row, found, whole, own, oracle))
        runs = [self.answers(graph, self.inputs[0]) for _ in range(REPEATS)]
        changed = [
            name
            for name in runs[0]
            if any(run[name].tobytes() != runs[0][name].tobytes() for run in runs)
        ]
        problem = f"{', '.join(changed)} differ between {REPEATS} runs on the same input"
        yield Claim("repeated runs", problem if changed else "")
        yield declared([graph])

    def report(
        self,
        folder: Path,
        layout: Layout,
        session: SessionOptions,
        precision: str,
        *,
        plant: bool = False,
        atol: float | None = None,
        done: Done = lambda phase, done, total: None,
    ) -> ParityReport:
        """Runs all checks; see `audit`."""
        claims, comparisons, _ = collected(self.checks(layout, session))
        described = settings(layout, session, precision) | {"inputs": len(self.inputs)}
        report = ParityReport(str(folder), described, self.tolerance, comparisons, claims=claims)
        if not plant:
            return report

        def answers(copied: Layout) -> list[NDArray[Any]]:
            graph = ForeignGraph(copied.decoder, session)
            return list(self.answers(graph, self.inputs[0]).values())

        def checks(copied: Layout) -> Found:
            return self.checks(copied, session)

        def changes(copied: Layout) -> bool:
            both = zip(answers(layout), answers(copied), strict=True)
            return not all(np.array_equal(one, other) for one, other in both)

        given = layout, checks, answers, changes, atol
        return with_faults(report, *given, partial(done, "planting"))

    def _compare(
        self,
        case: str,
        name: str,
        found: NDArray[Any],
        oracle: NDArray[Any],
        reference: NDArray[Any],
    ) -> Comparison:
        if found.shape != oracle.shape:
            fault = f"expected shape {list(oracle.shape)}, found {list(found.shape)}"
            return Comparison(case, name, "text", np.inf, 0.0, 0.0, fault)
        own, error = _error(reference, oracle), _error(found, oracle)
        return limited(case, name, "text", error, own, self.tolerance.budget(own))

    def _independence(
        self, case: str, row: int, alone: Arrays, whole: Arrays, own: Arrays, oracle: Arrays
    ) -> Iterator[Comparison]:
        for name, wanted in alone.items():
            if whole[name].shape[1:] == wanted.shape[1:] and len(whole[name]) > row:
                error = _error(whole[name][row : row + 1], wanted)
                rounding = _error(own[name], oracle[name])
                budget = Tolerance().budget(rounding)
                yield limited(
                    f"{case} alone and in its batch", name, "text", error, rounding, budget
                )

    def answers(self, graph: ForeignGraph, inputs: Mapping[str, Tensor]) -> Arrays:
        """Returns what the graph gives.

        Raises:
            InputError: It fails.
        """
        return graph.run({name: tensor.numpy() for name, tensor in inputs.items()}, {})[0]


def _error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Returns the relative error; of outputs that are no floats too."""
    numbers = found.astype(np.float64), wanted.astype(np.float64)
    return relative_error(*numbers, np.ones(wanted.shape, np.bool_))


def _rows(number: int, inputs: Mapping[str, Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
    """Returns each row of a batch alone, where all inputs have as many rows."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in inputs.values()}
    rows = sizes.pop() if len(sizes) == 1 else 0
    return [
        (
            f"input {number}, row {row}",
            {name: tensor[row : row + 1] for name, tensor in inputs.items()},
        )
        for row in range(rows if rows > 1 else 0)
    ]


@torch.inference_mode()
def _call(
    module: nn.Module, inputs: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype
) -> Arrays:
    """Returns what torch gives by the names of the graph's outputs.

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
