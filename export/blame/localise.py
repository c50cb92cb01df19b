"""Localisation of a fault: bisection on the served graph, value by value against torch's program.

Each graph is checked alone, on the oracle's state rounded to the graph's types, so that a fault of
the encoder does not show again in the decoder. Cases without padding come first. On padded ones all
positions are compared: values at padding are meaningless, but equal on both sides of an honest
graph.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx import helper

from transferry.build_model.model.transformer import Transformer
from transferry.export.blame.traced_program import TracedProgram, trace, value_error
from transferry.export.torch_model import TorchDecoder, TorchEncoder, moved_heads
from transferry.export.trace.graph import Graph, flatten
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import GraphSpec, Variant
from transferry.runtime.decoding.decoder import Tensors
from transferry.runtime.ort.session import SessionOptions, open_session
from transferry.runtime.proof.compare import Case, Tolerance, Truth, compare, meaningful, truth
from transferry.runtime.proof.report import Origin

Arrays = dict[str, NDArray[Any]]
# Values shown by one session besides the graph's own outputs. onnxruntime fuses no operators across
# an output, so that with many of them it would not run the served graph any more.
MOST_SHOWN = 8


def localise(
    model: Transformer,
    bundle: Bundle,
    variant: Variant,
    session: SessionOptions,
    tolerance: Tolerance,
    cases: Sequence[Case],
) -> Origin | None:
    """Finds the first value of a bundle's graphs that is wrong though its inputs are right.

    The smallest case that shows the fault is used; nothing in the bundle's folder is changed.

    Returns:
        The origin; None if every graph agrees with torch in every case.
    """
    oracle = copy.deepcopy(model).double()
    ordered = sorted(
        cases, key=lambda case: (not case.mask.all(), case.source.size + case.target.size)
    )
    for name, spec in variant.steps.items():
        served = ServedGraph(bundle.graph(spec), spec, session)
        allowed = replace(tolerance, floor=0.0) if name == "select" else tolerance
        for case in ordered:
            for call in _calls(name, spec, case, TorchDecoder(model), TorchDecoder(oracle)):
                found = served.run(call.feeds, served.outputs)
                if faults := _faults(call, found, allowed, exact=name == "select"):
                    fresh = trace(model, name)
                    search = _Search(name, call, served, fresh, model, oracle, allowed)
                    return search.origin(faults)
    return None


@dataclass(frozen=True)
class _Call:
    """One run of one graph: its inputs, and its expected outputs, by name."""

    case: Case
    feeds: Arrays
    truth: Truth


def _calls(
    name: str, spec: GraphSpec, case: Case, reference: TorchDecoder, oracle: TorchDecoder
) -> Iterator[_Call]:
    outputs = [tensor.name for tensor in spec.outputs]
    if name == "encoder":
        sides: list[Tensors] = []
        for side in (oracle, reference):
            if side.model.config.decoder_layers:
                given = _flat(side.start(case.source, case.mask).cross)
            else:
                given = list(TorchEncoder(side.model).encode(case.source, case.mask).values())
            sides.append(dict(zip(outputs, given, strict=True)))
        least = 0.0
        if oracle.model.config.has_head:
            moved, least = moved_heads(oracle.encoder, case.mask, *sides)
            sides += moved
        yield _Call(case, _feeds(spec, case.source, case.mask), truth(case, *sides, least=least))
        return
    state = oracle.start(case.source, case.mask)
    if case.past:
        _, state = oracle.step(case.target[:, : case.past], state)
    if name == "select":
        if case.rows is not None:
            # The host selects rows of a recurrent state.
            past = [] if oracle.model.config.recurrent else state.past
            for caches in filter(None, (past, state.cross)):
                tensors = _flat(_rounded(caches, spec, oracle))
                chosen = dict(zip(outputs, (tensor[case.rows] for tensor in tensors), strict=True))
                feeds = _feeds(spec, case.rows, *tensors)
                yield _Call(case, feeds, Truth(chosen, {}))
        return
    if case.rows is not None:
        state = oracle.select(state, case.rows)
    target = case.target[case.kept, case.past :]
    sides = []
    for side in (oracle, reference):
        cross, past = (_rounded(each, spec, side) for each in (state.cross, state.past))
        rounded = replace(state, cross=cross, past=past)
        output, after = side.step(target, rounded)
        sides.append(dict(zip(outputs, (output.all_logits, *_flat(after.past)), strict=True)))
    feeds = _feeds(spec, target, state.mask.numpy(), *_flat(rounded.cross), *_flat(rounded.past))
    yield _Call(case, feeds, truth(case, *sides))


def _feeds(spec: GraphSpec, *arrays: NDArray[Any]) -> Arrays:
    return {
        tensor.name: np.ascontiguousarray(array, tensor.type)
        for tensor, array in zip(spec.inputs, arrays, strict=True)
    }


def _faults(call: _Call, found: Tensors, tolerance: Tolerance, *, exact: bool) -> set[str]:
    if exact:
        return {
            name for name, oracle in call.truth.oracle.items() if value_error(found[name], oracle)
        }
    comparisons = compare(call.case, call.truth, found, tolerance)
    return {item.tensor for item in comparisons if item.fault}


def _rounded(caches: Sequence[Any], spec: GraphSpec, side: TorchDecoder) -> list[Any]:
    """Rounds caches to the type of the graph's inputs; returns them in the type of a side."""
    kind: torch.dtype = getattr(torch, spec.inputs[-1].type)
    own = side.model.embedding.weight.dtype
    return [type(cache)(*(tensor.to(kind).to(own) for tensor in cache)) for cache in caches]


def _flat(caches: Sequence[Any]) -> list[NDArray[Any]]:
    return [tensor.numpy() for tensor in flatten(caches)]


@dataclass(frozen=True)
class _Verdict:
    error: float
    budget: float
    fault: str

    @property
    def right(self) -> bool:
        return self.error <= self.budget


class _Search:
    """The search for the first wrong value of one run of one graph."""

    def __init__(
        self,
        name: str,
        call: _Call,
        served: ServedGraph,
        fresh: Graph,
        model: Transformer,
        oracle: Transformer,
        tolerance: Tolerance,
    ) -> None:
        assert fresh.program is not None
        self.name, self.call, self.served, self.tolerance = name, call, served, tolerance
        self.program = TracedProgram(fresh.program, model, oracle)
        self.torch_names = align(served, fresh, self.program)
        self.inputs = list(call.feeds.values())
        # Values shown while the fault was there, and those that hide it when shown.
        self.known: dict[str, _Verdict] = {}
        self.hiding: set[str] = set()

    def origin(self, faults: set[str]) -> Origin:
        if (untrue := self._traced_fault(faults)) is not None:
            return untrue
        wrong = self._first_wrong(min(faults, key=self.served.position))
        right = self._nearest(wrong)
        nodes, _ = self.served.between(wrong, right)
        verdict = self.known.get(wrong) or self._verdicts([wrong])[wrong]
        operators = ", ".join(dict.fromkeys(node.op_type for node in nodes))
        return self._at(wrong, operators, self._message(wrong, right, verdict))

    def _traced_fault(self, faults: set[str]) -> Origin | None:
        """Returns an origin if torch's program itself differs from the model."""
        outputs = sorted(faults, key=self.served.position)
        for name, (exact, _) in zip(outputs, self._kept(outputs)[0], strict=True):
            verdict = self._output(name, exact)
            if not verdict.right:
                message = f"the program that torch traced: {verdict.fault}"
                return self._at(name, "torch.export", message)
        return None

    def _output(self, name: str, found: NDArray[Any]) -> _Verdict:
        """Judges an output of the graph as the comparison of tensors does."""
        call = self.call
        if name not in call.truth.errors:  # rows that are selected
            error = value_error(found, call.truth.oracle[name])
            return _Verdict(error, 0.0, "other rows than those selected")
        (item,) = compare(call.case, call.truth, {name: found}, self.tolerance, [name])
        return _Verdict(item.error, item.budget, item.fault)

    def _at(self, value: str, operator: str, message: str) -> Origin:
        place = self.program.place(self.torch_names[value])
        case, found = self.call.case.name, (place.module, place.source, operator, message)
        return Origin(self.name, case, value, *found, code=place.code)

    def _first_wrong(self, wrong: str) -> str:
        """Goes back from a wrong value to one whose nearest comparable values are right."""
        while True:
            probe, most = self._candidates(wrong), MOST_SHOWN - 1
            if len(probe) > most:  # evenly spread
                probe = [probe[(number + 1) * len(probe) // (most + 1)] for number in range(most)]
            if not probe:
                return wrong
            verdicts = self._verdicts([*probe, wrong])
            if verdicts[wrong].right:
                # Showing the probe changed the graph: find the value that hides the fault.
                verdicts = {}
                for name in probe:
                    alone = self._verdicts([name, wrong])
                    if alone[wrong].right:
                        self.hiding.add(name)
                    else:
                        verdicts |= alone
            self.known |= verdicts
            found = [name for name, verdict in verdicts.items() if not verdict.right]
            wrong = min(found, key=self.served.position, default=wrong)

    def _candidates(self, wrong: str) -> list[str]:
        """Comparable values upstream of a wrong one that are not known yet, in order."""
        comparable = self._comparable(self.served.upstream([wrong]))
        told = {*self.known, *self.hiding, wrong}
        right = [name for name, verdict in self.known.items() if verdict.right]
        beyond = self._comparable(self.served.upstream(right))
        open_ones = [name for name in comparable if name not in told and name not in beyond]
        # A value before a right one may still be wrong, and reach the wrong one by another path.
        return open_ones or [name for name in self._nearest(wrong) if name not in told]

    def _comparable(self, places: set[int]) -> list[str]:
        names = (name for place in sorted(places) for name in self.served.nodes[place].output)
        return [name for name in names if name in self.torch_names]

    def _nearest(self, value: str) -> list[str]:
        """The nearest comparable values that a value is computed from."""
        stop = self.torch_names.keys() - self.hiding - {value}
        _, read = self.served.between(value, stop)
        return [name for name in read if name in stop]

    def _verdicts(
        self, names: Sequence[str], served: ServedGraph | None = None
    ) -> dict[str, _Verdict]:
        """Shows values in one session and compares them."""
        found = (served or self.served).run(self.call.feeds, names)
        kept, errors = self._kept(names)
        verdicts = {}
        for name, (exact, _) in zip(names, kept, strict=True):
            if name in self.call.truth.errors:
                verdicts[name] = self._output(name, found[name])
                continue
            whole = self.name == "select" or name not in self.call.truth.oracle
            mask = None if whole else meaningful(self.call.case, name, exact)
            error = value_error(found[name], exact, mask)
            # On one small value torch may round almost nothing, see `Units.own`: take the largest
            # error on the path to it.
            path = self._comparable(self.served.upstream([name]))
            own = max(errors[self.torch_names[other]] for other in path)
            budget = self.tolerance.budget(own) if exact.dtype.kind == "f" else 0.0
            verdicts[name] = _Verdict(error, budget, _fault(found[name], exact, error, budget))
        return verdicts

    def _kept(
        self, names: Sequence[str]
    ) -> tuple[list[tuple[NDArray[Any], NDArray[Any]]], Mapping[str, float]]:
        wanted = [self.torch_names[name] for name in names]
        kept, errors = self.program.run(self.inputs, wanted)
        return [kept[name] for name in wanted], errors

    def _message(self, wrong: str, right: Sequence[str], verdict: _Verdict) -> str:
        text = verdict.fault
        served, options = self.served, self.served.options
        if options.optimisation == "disable":
            return text
        plain = ServedGraph(served.path, served.spec, replace(options, optimisation="disable"))
        if self._verdicts([wrong], plain)[wrong].right:
            text += (
                "; it is right with optimisation disable, so onnxruntime's optimiser is at fault "
                f"between {', '.join(right) or 'the inputs'} and {wrong}"
            )
        if self.hiding:
            shown = ", ".join(sorted(self.hiding, key=served.position))
            text += f"; it is right where {shown} is an output too, across which nothing is fused"
        return text


def _fault(found: NDArray[Any], oracle: NDArray[Any], error: float, budget: float) -> str:
    if found.shape != oracle.shape:
        return f"expected shape {list(oracle.shape)}, found {list(found.shape)}"
    if oracle.dtype.kind != "f":
        return f"{(found != oracle).sum()} of {oracle.size} entries are not torch's"
    if np.isinf(error):
        places = (np.isfinite(found) != np.isfinite(oracle)).sum()
        return f"{places} of {oracle.size} entries are infinite or NaN on one side only"
    return f"error {error:.2e} of the largest entry exceeds the budget {budget:.2e}"


class ServedGraph:
    """One graph of a bundle; nothing is written into the bundle's folder."""

    def __init__(self, path: Path, spec: GraphSpec, options: SessionOptions) -> None:
        self.path, self.spec, self.options = path, spec, options
        self.model = onnx.load(str(self.path), load_external_data=False)
        self.nodes = list(self.model.graph.node)
        self._plain = open_session(self.path, options)
        self._producers = {name: n for n, node in enumerate(self.nodes) for name in node.output}

    @property
    def outputs(self) -> list[str]:
        """The names of the graph's own outputs."""
        return [tensor.name for tensor in self.spec.outputs]

    def run(self, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, Any]:
        """Runs the graph with further values as outputs, at most `MOST_SHOWN`."""
        added = [name for name in names if name not in self.outputs]
        assert len(added) <= MOST_SHOWN
        session = self._plain
        if added:
            model = onnx.ModelProto()
            model.CopyFrom(self.model)
            model.graph.output.extend(map(helper.make_empty_tensor_value_info, added))
            session = open_session(self.path, self.options, model.SerializeToString())
        found = session.run(list(names), dict(feeds))
        return {name: np.asarray(value) for name, value in zip(names, found, strict=True)}

    def position(self, value: str) -> int:
        """Returns the place in the graph of the node that computes a value."""
        return self._producers[value]

    def upstream(self, values: Iterable[str], stop: Collection[str] = ()) -> set[int]:
        """Returns the nodes that compute values, back to the values of `stop`."""
        reached: set[int] = set()
        left = list(values)
        while left:
            place = self._producers.get(left.pop())
            if place is not None and place not in reached:
                reached.add(place)
                left += [name for name in self.nodes[place].input if name not in stop]
        return reached

    def between(self, value: str, known: Collection[str]) -> tuple[list[onnx.NodeProto], list[str]]:
        """Returns the nodes from the nearest of `known` values to `value`, and their inputs.

        The inputs are values of `known` and inputs of the graph, in the order of the nodes.
        """
        places = sorted(self.upstream([value], {*known} - {value}))
        nodes = [self.nodes[place] for place in places]
        own = {name for node in nodes for name in node.output}
        weights = {tensor.name for tensor in self.model.graph.initializer}
        read = (name for node in nodes for name in node.input)
        return nodes, [name for name in dict.fromkeys(read) if name and name not in own | weights]


def align(served: ServedGraph, fresh: Graph, program: TracedProgram) -> dict[str, str]:
    """Maps values of a served graph to torch's names in the traced program.

    The names of the two differ if the served graph was changed: values of one module are numbered,
    so that one operator less renames those after it. Nodes are therefore matched like lines of two
    texts, by operator and by the weights they read, with those of a fresh export of the program.
    """
    weights = program.parameters
    ours = [_key(node.op_type, node.input, weights) for node in served.nodes]
    fresh_nodes = list(fresh.model.graph)
    theirs = [_key(node.op_type, _inputs(node), weights) for node in fresh_nodes]
    named = {name: traced for name, traced in fresh.names.items() if traced in program.values}
    named |= dict(zip([spec.name for spec in fresh.spec.outputs], program.outputs, strict=True))
    found = {}
    for tag, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and b - a == d - c):
            for node, other in zip(served.nodes[a:b], fresh_nodes[c:d], strict=True):
                for name, value in zip(node.output, other.outputs, strict=False):
                    if value.name in named:
                        found[name] = named[value.name]
    for spec, other_spec in zip(served.spec.outputs, fresh.spec.outputs, strict=True):
        found[spec.name] = named[other_spec.name]
    return found


def _key(operator: str, inputs: Iterable[str], weights: Collection[str]) -> tuple[str, ...]:
    return (operator, *(name for name in inputs if name in weights))


def _inputs(node: ir.Node) -> Iterator[str]:
    return (value.name or "" for value in node.inputs if value is not None)
