"""A search as one graph of standard ONNX operators: encoder, and a Loop over the decoder step.

Any runtime answers with it in one call. A value that depends on weights, source and cross alone is
computed once, before the Loop. It shares the weights of the portable graphs, in their file.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_all_uses_with

from transferry.export.trace.editing import END, Tape, cast, described, drop_unused
from transferry.export.trace.graph import Graph, Specs, spec
from transferry.export.trace.search_rules import History, Rules
from transferry.runtime.bundle.specs import ANSWERS, ONE_GRAPH, SCORES, GraphSpec, TensorSpec
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

# Rules of a search that the graph does not have. Options that choose another search, such as
# `beam`, do not concern it; `forced_begin` and `prefix` are part of its input.
REFUSED = ("min_total_length", "max_total_length", "stop")
OF_HISTORY = (
    *("repetition_penalty", "no_repeat_ngram", "suppress_sequences", "suppress_begin"),
    "forced_end",
)
MOST_BEAMS = 64


def require_one_graph(architecture: str, generation: Mapping[str, Any], beam: int = 1) -> None:
    """Checks that one graph can keep a bundle's generation defaults.

    Raises:
        UsageError: The model is encoder-only, a default is a rule that the graph lacks, or the
            number of beams lies outside its range.
    """
    if not 1 <= beam <= MOST_BEAMS:
        raise UsageError(
            f"the beams of one graph must be between 1 and {MOST_BEAMS}, but are {beam}"
        )
    if architecture == "encoder-only":
        raise UsageError(
            "--one-graph needs a model that generates, found an encoder-only one, one graph "
            "already; leave --one-graph out"
        )
    options, plain = generation_options(generation), GenerationOptions()
    rules = (*REFUSED, "renormalise") if beam > 1 else REFUSED
    refused = [name for name in rules if getattr(options, name) != getattr(plain, name)]
    if architecture == "decoder-only":  # there the caller writes prompts, not beginnings
        refused += [
            name for name in ("forced_begin", "prefix") if getattr(options, name) not in (None, ())
        ]
    if refused:
        raise UsageError(
            f"--one-graph cannot keep {', '.join(refused)} of the model's generation defaults; "
            "leave --one-graph out, or remove the default from the checkpoint's generation settings"
        )


class SearchGraph(ABC):
    """Composes the portable graphs of a model that generates into a search.

    The graphs stay as they are; the rules of the generation defaults are kept.
    """

    # Element type and number of axes of each value that the Loop carries, besides the cache.
    carried: ClassVar[Mapping[str, tuple[str, int]]]

    def __init__(
        self,
        graphs: Mapping[str, Graph],
        special: SpecialTokens,
        generation: Mapping[str, Any],
        max_positions: int,
    ) -> None:
        self.graphs, self.special = graphs, special
        self.options = generation_options(generation)
        self.max_positions = max_positions
        self.has_encoder = "encoder" in graphs
        self.decoder = graphs["decoder"]
        self.weights: dict[str, ir.Value] = {}
        # Prompt and limit of each row, and the number of forced tokens, for rules that read them.
        self._history: tuple[ir.Value, ir.Value, ir.Value] | None = None
        self.main, self.step = Tape(), Tape()
        self.inputs = {item.name: described(ir.Value(), item) for item in self._inputs()}

    def _inputs(self) -> Specs:
        begun = (spec("target", "int64", "batch", "begun"),) if self.has_encoder else ()
        return (
            spec("source", "int64", "batch", "source"),
            spec("source_mask", "bool", "batch", "source"),
            *begun,
            spec("max_length", "int64", 1),
        )

    def graph(self) -> Graph:
        """Returns the graph."""
        each = self._each_answer()
        outputs: Specs = (
            spec("tokens", "int64", *each, "length"),
            spec("lengths", "int64", *each),
            spec("log_probabilities", "float32", *each),
        )
        results = self._search()
        if len(results) > len(outputs):
            outputs += (spec(SCORES, "float32", *each),)
        found = [self.main.op("Identity", [value]) for value in results]
        nodes = list(self.main.nodes)
        _name([node for node in nodes if not node.name], "search")
        for value, item in zip(found, outputs, strict=True):
            described(value, item)
        graph = ir.Graph(
            list(self.inputs.values()),
            found,
            nodes=nodes,
            initializers=list(self.weights.values()),
            opset_imports=dict(self.decoder.model.opset_imports),
            name=ONE_GRAPH,
        )
        drop_unused(graph)
        model = ir.Model(graph, ir_version=self.decoder.model.ir_version)
        folder = self.decoder.spec.file.rpartition("/")[0]
        file = f"{folder}/{ONE_GRAPH}.onnx" if folder else f"{ONE_GRAPH}.onnx"
        return Graph(model, GraphSpec(file, self._inputs(), outputs))

    @abstractmethod
    def _each_answer(self) -> tuple[str | int, ...]:
        """Returns the axes along which the answers lie."""

    def _search(self) -> list[ir.Value]:
        main = self.main
        source, mask = self._padded_right()
        count = main.op("ReduceSum", [main.integers(mask), main.of(1)], {"keepdims": 1})
        batch, past_spec = main.size(source, 0), self.decoder.spec.tensor("past")
        _, heads, length, d_head = past_spec.shape
        # Not a constant: OpenVINO 2026.4 rewrites what has a fixed size of 0 into other shapes.
        limit = self.inputs["max_length"]
        self._zero = main.op("Sub", [limit, limit])
        # A recurrent decoder's state has a length of its own.
        first = main.of(length) if isinstance(length, int) else self._zero
        sizes = main.of(int(heads)), first, main.of(int(d_head))
        empty = main.filled(np.float32(0), batch, *sizes)
        past = [empty] * len(self.decoder.spec.names("past"))
        feeds: dict[str, ir.Value] = {}
        if self.has_encoder:
            encoder = {"source": source, "source_mask": mask}
            nodes, cross = self._part(self.graphs["encoder"], "source", encoder)
            main._nodes += nodes
            feeds = dict(zip(self.decoder.spec.names("cross"), cross, strict=True))
            feeds["source_mask"] = mask
            target = self.inputs["target"]
            limit = main.op("Min", [limit, main.of(self.max_positions)])
        else:
            whole = mask
            past, mask, target = self._read_prompt(source, mask, count, past)
            room = main.op("Sub", [main.of(self.max_positions + 1), count])
            limit = main.op("Min", [limit, main.op("Squeeze", [room, main.of(1)])])
        limit = main.op("Expand", [limit, batch])
        begun = main.op("Sub", [main.size(target, 1), main.of(1)])
        if self._rules_read_history():
            prompt = main.columns(target, 0, 1) if self.has_encoder else self._prompt(source, whole)
            prompt, most = (self._row_of_each_beam(value, batch) for value in (prompt, limit))
            self._history = prompt, most, begun
        feeds = {name: self._row_of_each_beam(value, batch) for name, value in feeds.items()}
        target, *past = [self._row_of_each_beam(value, batch) for value in (target, *past)]
        carried = {
            "target": target,
            "ended": main.filled(np.bool_(False), batch),
            **self._begun(target, begun, batch),
            **({} if self.has_encoder else {"past_mask": self._row_of_each_beam(mask, batch)}),
            **dict(zip(self.decoder.spec.names("past"), past, strict=True)),
        }
        first = main.op("Less", [begun, self.inputs["max_length"]])
        first = main.op("Squeeze", [first, main.of(0)])
        trips = main.op("Squeeze", [self.inputs["max_length"], main.of(0)])
        body = self._body(carried, feeds, limit)
        results = main.op_multi_out(
            "Loop", [trips, first, *carried.values()], {"body": body}, num_outputs=len(carried)
        )
        return self._answers(dict(zip(carried, results, strict=True)), batch)

    def _rules_read_history(self) -> bool:
        plain = GenerationOptions()
        return any(getattr(self.options, name) != getattr(plain, name) for name in OF_HISTORY)

    def _prompt(self, source: ir.Value, mask: ir.Value) -> ir.Value:
        """Moves the tokens of each row to the right, after padding of -1."""
        main, columns = self.main, self.main.size(source, 1)
        places = main.range(columns)
        padding = main.integers(main.op("Not", [mask]))
        keys = main.op("Sub", [main.op("Mul", [padding, columns]), places])
        _, order = main.op_multi_out("TopK", [keys, columns], {"axis": 1}, num_outputs=2)
        kept = main.op("Where", [mask, source, main.of(-1)])
        return main.picked(kept, order)

    def _allowed(self, values: ir.Value, tokens: ir.Value) -> ir.Value:
        """Applies the rules of the search to logits or log-probabilities of the next token."""
        size = int(self.decoder.spec.tensor("logits").shape[-1])
        prompt, limit, begun = self._history or (tokens, tokens, tokens)
        rules = Rules(self.step, self.options, self.special.ends, size)
        return rules.applied(values, History(tokens, prompt, begun, limit))

    def _row_of_each_beam(self, value: ir.Value, batch: ir.Value) -> ir.Value:
        """Returns the rows of a tensor `[batch, ...]` as the Loop has them: one per sentence."""
        return value

    @abstractmethod
    def _begun(self, target: ir.Value, begun: ir.Value, batch: ir.Value) -> dict[str, ir.Value]:
        """Returns the values that the Loop carries, besides target, past and `ended`."""

    @abstractmethod
    def _answers(self, results: Mapping[str, ir.Value], batch: ir.Value) -> list[ir.Value]:
        """Returns tokens, lengths and log-probabilities, given the last carried values."""

    def _padded_right(self) -> tuple[ir.Value, ir.Value]:
        """Moves the tokens of each row to the left, in order: callers may pad on either side."""
        main, source, mask = self.main, self.inputs["source"], self.inputs["source_mask"]
        columns = main.size(source, 1)
        places = main.range(columns)
        # Larger for tokens than for padding, and falling from left to right.
        tokens_first = main.op("Mul", [main.integers(mask), columns])
        keys = main.op("Sub", [tokens_first, places])
        _, order = main.op_multi_out("TopK", [keys, columns], {"axis": 1}, num_outputs=2)
        source = main.picked(source, order)
        moved = main.op("GatherElements", [main.integers(mask), order], {"axis": 1})
        return source, cast(main, moved, ir.DataType.BOOL)

    def _read_prompt(
        self, source: ir.Value, mask: ir.Value, count: ir.Value, past: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        """Reads whole prompts; the first step reads their last tokens again.

        Returns:
            Past, its mask without these last tokens, and these tokens `[batch, 1]`.
        """
        main = self.main
        nothing = main.op("Slice", [mask, main.of(0), self._zero, main.of(1)])
        names = self.decoder.spec.names("past")
        feeds = {"target": source, "past_mask": nothing, **dict(zip(names, past, strict=True))}
        nodes, (_, *present) = self._part(self.decoder, "prompt", feeds)
        main._nodes += nodes
        last = main.op("Sub", [count, main.of(1)])
        places = main.range(main.size(source, 1))
        mask = main.op("And", [mask, main.op("Less", [places, last])])
        return present, mask, main.picked(source, last)

    def _part(
        self, graph: Graph, prefix: str, feeds: Mapping[str, ir.Value]
    ) -> tuple[list[ir.Node], list[ir.Value]]:
        """Copies the nodes of a graph, which read these inputs and the shared weights.

        Returns:
            The nodes, in no graph, and the graph's outputs.
        """
        part = graph.model.graph.clone()
        for value in part.inputs:
            replace_all_uses_with(value, feeds[str(value.name)])
        for name, value in part.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            known = self.weights.get(name)
            stored = known.const_value if known is not None else None
            if stored is not None and stored.tobytes() != tensor.tobytes():
                name, known = f"{prefix}.{name}", None
            if known is None:
                known = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
                self.weights[name] = known
            replace_all_uses_with(value, known)
        nodes, outputs = list(part), list(part.outputs)
        part.outputs.clear()
        part.remove(nodes)
        # ONNX shares names between a graph and the body of its Loop.
        for node in nodes:
            node.name = f"{prefix}.{node.name}"
            for value in node.outputs:
                value.name = f"{prefix}.{value.name}"
        return nodes, outputs

    def _body(
        self, names: Collection[str], feeds: Mapping[str, ir.Value], limit: ir.Value
    ) -> ir.Graph:
        """Returns one step of the search: reads `target`, lengthens every answer by one token."""
        step = self.step
        given = {}
        for name in names:
            kind, axes = self.carried.get(name, ("float32", 4))
            shape: list[str | int] = [f"{name}.{axis}" for axis in range(axes)]
            if axes == 4:
                whole = self.decoder.spec.tensor("past").shape
                length = whole[2] if isinstance(whole[2], int) else f"{name}.length"
                shape = [f"{name}.0", whole[1], length, whole[3]]
            given[name] = described(ir.Value(), _spec(f"before.{name}", kind, shape))
        past = self.decoder.spec.names("past")
        all_feeds = {**feeds, **{name: given[name] for name in (*past, "target")}}
        if not self.has_encoder:
            all_feeds["past_mask"] = given["past_mask"]
        nodes, (logits, *present) = self._part(self.decoder, "step", all_feeds)
        step._nodes += self._hoisted(nodes, feeds)
        after, kept = self._choose(given, logits, limit, present)
        after |= dict(zip(past, kept, strict=True))
        going = step.any(step.op("Not", [after["ended"]]), 0)
        outputs = [going]
        for name in names:
            value = step.op("Identity", [after[name]])
            value.type, value.shape = given[name].type, None
            outputs.append(value)
        going.type = ir.TensorType(ir.DataType.BOOL)
        going.shape = ir.Shape(())
        number = described(ir.Value(), _spec("iteration", "int64", ()))
        before = described(ir.Value(), _spec("going", "bool", ()))
        body = list(step.nodes)
        _name([node for node in body if not node.name], "choice")
        return ir.Graph([number, before, *given.values()], outputs, nodes=body, name="step")

    def _hoisted(self, nodes: list[ir.Node], feeds: Mapping[str, ir.Value]) -> list[ir.Node]:
        """Moves nodes without an input from the step before the Loop; returns the other nodes."""
        fixed = {id(value) for value in (*self.weights.values(), *feeds.values())}
        left = []
        for node in nodes:
            if all(value is None or id(value) in fixed for value in node.inputs):
                fixed |= {id(value) for value in node.outputs}
                self.main._nodes.append(node)
            else:
                left.append(node)
        return left

    @abstractmethod
    def _choose(
        self,
        given: Mapping[str, ir.Value],
        logits: ir.Value,
        limit: ir.Value,
        present: Sequence[ir.Value],
    ) -> tuple[dict[str, ir.Value], Sequence[ir.Value]]:
        """Chooses the next tokens; returns the carried values, and the cache."""

    def _longer_mask(self, given: Mapping[str, ir.Value], ended: ir.Value) -> ir.Value:
        """Adds the column that a step read to the mask of each row."""
        step = self.step
        shape = step.op("Shape", [given["target"]])
        true = step.op("ConstantOfShape", [shape], {"value": ir.tensor(np.array([True]))})
        # An ended row attends to nothing before it and stays at the first position: it may have no
        # position left while others go on.
        live = step.op("Not", [step.unsqueezed(ended, 1)])
        return step.op("And", [step.joined(given["past_mask"], true), live])


def _spec(name: str, kind: str, shape: Sequence[int | str]) -> TensorSpec:
    return TensorSpec(name, "state", kind, tuple(shape))


def _name(nodes: Sequence[ir.Node], prefix: str) -> None:
    """Names the nodes of a search and their values by operator, as no other part does."""
    for number, node in enumerate(nodes):
        node.name = f"{prefix}.{number}.{node.op_type}"
        for place, value in enumerate(node.outputs):
            value.name = f"{node.name}.{place}" if place else node.name


class GreedyGraph(SearchGraph):
    """Composes the graph with greedy search; the rows of the Loop are the sentences."""

    carried: ClassVar[Mapping[str, tuple[str, int]]] = {
        "target": ("int64", 2),
        "ended": ("bool", 1),
        "past_mask": ("bool", 2),
        "tokens": ("int64", 2),
        "lengths": ("int64", 1),
        "log_probabilities": ("float32", 1),
    }

    def _each_answer(self) -> tuple[str | int, ...]:
        return ("batch",)

    def _begun(self, target: ir.Value, begun: ir.Value, batch: ir.Value) -> dict[str, ir.Value]:
        main = self.main
        return {
            "tokens": main.columns(target, 1, END),
            "lengths": main.op("Expand", [begun, batch]),
            "log_probabilities": main.filled(np.float32(0), batch),
        }

    def _answers(self, results: Mapping[str, ir.Value], batch: ir.Value) -> list[ir.Value]:
        return [results[role] for role in ANSWERS]

    def _choose(
        self,
        given: Mapping[str, ir.Value],
        logits: ir.Value,
        limit: ir.Value,
        present: Sequence[ir.Value],
    ) -> tuple[dict[str, ir.Value], Sequence[ir.Value]]:
        """Takes the likeliest token of each row, the lowest of equally likely ones."""
        step, ended = self.step, given["ended"]
        last = step.op("Gather", [logits, step.of(-1, flat=False)], {"axis": 1})
        last = self._allowed(last, given["tokens"])
        # Not ArgMax, which OpenVINO does not run in a Loop.
        _, likeliest = step.op_multi_out("TopK", [last, step.of(1)], {"axis": 1}, num_outputs=2)
        column = step.unsqueezed(ended, 1)
        chosen = step.op("Where", [column, step.of(self.special.pad_id), likeliest])
        begun = step.columns(given["target"], 1, END)
        scored = step.unsqueezed(step.joined(begun, chosen), 2)
        every = step.op("LogSoftmax", [logits], {"axis": -1})
        each = step.op("GatherElements", [every, scored], {"axis": 2})
        gain = step.op("ReduceSum", [each, step.of(1, 2)], {"keepdims": 0})
        zero = step.constant(np.float32(0))
        gain = step.op("Where", [ended, zero, gain])
        longer = step.op("Sub", [step.of(1), step.integers(ended)])
        lengths = step.op("Add", [given["lengths"], longer])
        ends = step.any(step.op("Equal", [chosen, step.of(*self.special.ends)]), 1)
        full = step.op("GreaterOrEqual", [lengths, limit])
        over = step.op("Or", [ended, step.op("Or", [ends, full])])
        after = {
            "target": chosen,
            "ended": over,
            "tokens": step.joined(given["tokens"], chosen),
            "lengths": lengths,
            "log_probabilities": step.op("Add", [given["log_probabilities"], gain]),
        }
        if not self.has_encoder:
            after["past_mask"] = self._longer_mask(given, over)
        return after, present
