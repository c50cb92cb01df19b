"""Graphs of another tool in onnxruntime: one graph, fed by meaning and held to its declared shapes.

Graphs that generate are a decoder for the project's search, fed as their own libraries feed them:
the prompt is read whole, padded on the left or on the right, and later tokens one at a time. A
graph without a cache reads everything again at each step.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.export.subject.layout import GraphFile, Layout
from transferry.runtime.decoding.decoder import StepOutput, Tensors
from transferry.runtime.decoding.search import pad_sources
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
Padding = Literal["left", "right"]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
READS = ("tokens", "mask", "positions", "segments")


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


@dataclass(frozen=True)
class ForeignState:
    """Inputs of a step besides the tokens.

    Attributes:
        rows: The tokens of each row so far, without padding; of an encoder-decoder the target's.
        mask: True at a token of the cache, or of the source `[rows, columns]`.
        states: Hidden states of the source; None without an encoder.
        past: The cache by the names of its inputs; None before the first step.
    """

    rows: Sequence[tuple[int, ...]]
    mask: Mask
    states: NDArray[Any] | None = None
    past: Arrays | None = field(default=None)


def _longer(state: ForeignState, tokens: Ids) -> ForeignState:
    rows = [(*row, *new) for row, new in zip(state.rows, tokens.tolist(), strict=True)]
    return replace(state, rows=rows)


def padded(rows: Sequence[Sequence[int]], pad_id: int, padding: Padding) -> tuple[Ids, Mask]:
    """Pads rows on a side; returns token ids and mask `[rows, columns]`."""
    if padding == "right":
        return pad_sources(rows, pad_id)
    ids, mask = pad_sources([row[::-1] for row in rows], pad_id)
    return ids[:, ::-1], mask[:, ::-1]


class ForeignDecoder:
    """Runs foreign graphs that generate."""

    shares_cache = False
    gives = frozenset(["logits"])

    def __init__(
        self,
        layout: Layout,
        options: SessionOptions,
        config: ModelConfig,
        pad_id: int,
        padding: Padding = "right",
    ) -> None:
        """Opens the graphs; raises as `ForeignGraph` and `require` do."""
        self.vocabulary_size, self.padding, self._pad_id = config.vocabulary_size, padding, pad_id
        self._sizes = config.kv_heads or config.heads, config.d_head
        self._d_model = config.d_model
        self.has_encoder = layout.encoder is not None
        opened = [ForeignGraph(graph, options) for graph in layout.graphs]
        self.graphs = opened
        self._encoder = opened[0] if layout.encoder else None
        self._first = opened[1 if layout.encoder else 0]
        self._later = opened[-1] if layout.step else self._first
        if self._encoder is not None:
            self._encoder.require(("tokens", "mask"), ("hidden",))
            steps = ["tokens", "states", "states_mask", "use_cache"]
        else:
            steps = ["tokens", "mask", "positions", "use_cache"]
        for graph in dict.fromkeys([self._first, self._later]):
            graph.require(steps, ("logits",), cache=self._first.graph.past)

    def padded(self, padding: Padding) -> Self:
        """Returns the same decoder with padding on a side; the sessions are shared."""
        other = copy.copy(self)
        other.padding = padding
        return other

    def read(
        self, rows: Sequence[Sequence[int]], padding: Padding
    ) -> list[dict[str, NDArray[Any]]]:
        """Returns the logits after each text, and without an encoder those of a later step too."""
        decoder = self.padded(padding)
        if decoder.has_encoder:
            state = decoder.start(*pad_sources(rows, self._pad_id))
            output, _ = decoder.step(np.zeros((len(rows), 1), np.int64), state)
            return [{"logits": row} for row in output.all_logits]
        state = decoder.start(*pad_sources([row[:-1] for row in rows], self._pad_id))
        tokens = np.array([[row[-1]] for row in rows])
        output, state = decoder.step(tokens, state)
        later, _ = decoder.step(tokens, state)
        logits = np.concatenate([output.all_logits, later.all_logits], axis=1)
        return [{"logits": row} for row in logits]

    def start(self, source: Ids, mask: Mask) -> ForeignState:
        """Encodes the source; a prompt is read by the first step. See `Decoder.start`."""
        rows = [tuple(row[there].tolist()) for row, there in zip(source, mask, strict=True)]
        if self._encoder is None:
            return ForeignState(rows, mask[:, :0])
        ids, mask = padded(rows, self._pad_id, self.padding)
        found, _ = self._encoder.run({"tokens": ids, "mask": mask}, {})
        states = found["hidden"]
        require_shape("hidden", states, (*ids.shape, self._d_model))
        return ForeignState([()] * len(rows), mask, states)

    def step(
        self, tokens: Ids, state: ForeignState, *, top: int | None = None, normalise: bool = False
    ) -> tuple[StepOutput, ForeignState]:
        if state.past is None:
            logits, state = self._begin(tokens, state)
            return StepOutput(logits), state
        pieces = []
        for column in tokens.T[..., None]:
            logits, state = self._continue(column, state)
            pieces.append(logits)
        return StepOutput(np.concatenate(pieces, axis=1)), state

    def _begin(self, tokens: Ids, state: ForeignState) -> tuple[NDArray[Any], ForeignState]:
        """Reads all tokens so far, with an empty cache."""
        state = _longer(state, tokens)
        # A target has no mask: its padding, which a graph without a cache meets, is on the right.
        padding: Padding = "right" if self.has_encoder else self.padding
        ids, mask = padded(state.rows, self._pad_id, padding)
        nothing = self._first.empty(len(ids), *self._sizes)
        logits, past = self._run(self._first, ids, mask, state, nothing)
        ends = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)  # of each row, padding excluded
        places = ends[:, None] - tokens.shape[1] + np.arange(tokens.shape[1])
        logits = np.take_along_axis(logits, places[..., None], axis=1)
        mask = state.mask if self.has_encoder else mask
        return logits, replace(state, mask=mask, past=past or None)

    def _continue(self, tokens: Ids, state: ForeignState) -> tuple[NDArray[Any], ForeignState]:
        """Reads one token a row, after those of the cache."""
        assert state.past is not None
        mask = state.mask
        if not self.has_encoder:
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
        known = {*self._later.past, *self._later.graph.past}
        past = {name: value for name, value in state.past.items() if name in known}
        logits, grown = self._run(self._later, tokens, mask, state, past)
        return logits, replace(_longer(state, tokens), mask=mask, past={**state.past, **grown})

    def _run(
        self, graph: ForeignGraph, ids: Ids, mask: Mask, state: ForeignState, past: Arrays
    ) -> tuple[NDArray[Any], Arrays]:
        """Runs a graph on target tokens; returns the logits and the cache after them."""
        inputs = {"tokens": ids, "use_cache": np.array([state.past is not None])}
        if state.states is not None:
            inputs |= {"states": state.states, "states_mask": state.mask}
        else:
            positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
            inputs |= {"mask": mask, "positions": positions}
        found, grown = graph.run(inputs, past)
        if state.past is not None and self._first is self._later and self.has_encoder:
            # A merged decoder gives an empty or repeated cache of the source.
            grown = {
                name: state.past[name] if ".encoder." in name else value
                for name, value in grown.items()
            }
        require_shape("logits", found["logits"], (*ids.shape, self.vocabulary_size))
        for name, value in grown.items():
            if value.ndim != 4 or len(value) != len(ids):
                raise InputError(
                    f"expected what continues {name} of shape [{len(ids)}, heads, past, width], "
                    f"found {list(value.shape)}"
                )
        return found["logits"], grown

    def select(self, state: ForeignState, rows: Ids) -> ForeignState:
        past = state.past and {name: value[rows] for name, value in state.past.items()}
        states = None if state.states is None else state.states[rows]
        return ForeignState([state.rows[row] for row in rows], state.mask[rows], states, past)

    def tensors(self, state: ForeignState) -> Tensors:
        """Returns nothing: a cache is a graph's own affair, and shows in the logits after it."""
        return {}


class ForeignEncoder:
    """Runs a foreign encoder-only graph."""

    def __init__(
        self, layout: Layout, options: SessionOptions, config: ModelConfig, pad_id: int
    ) -> None:
        """Opens the graph; raises as `ForeignGraph` and `require` do."""
        self._config, self._pad_id = config, pad_id
        self._graph = ForeignGraph(layout.decoder, options)
        self.graphs = [self._graph]
        # The logits of a classifier are those of its head.
        self._names = {"logits": "head"} if config.has_head else {}
        self.gives = frozenset(self._names.get(name, name) for name in layout.decoder.outputs)
        self._graph.require(READS, ("logits", "hidden", "head"))

    def encode(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        inputs = {
            "tokens": source,
            "mask": mask,
            "positions": np.broadcast_to(np.arange(source.shape[1]), source.shape),
            "segments": np.zeros_like(source),
        }
        if self._config.segments:
            ends = np.cumsum(source == self._config.segment_end, axis=1)
            before = np.pad(ends, ((0, 0), (1, 0)))[:, :-1]
            inputs["segments"] = np.minimum(before, self._config.segments - 1)
        found, _ = self._graph.run(inputs, {})
        named = {self._names.get(name, name): value for name, value in found.items()}
        for name, value in named.items():
            require_shape(name, value, self._shape(name, source))
        return named

    def read(
        self, rows: Sequence[Sequence[int]], padding: Padding
    ) -> list[dict[str, NDArray[Any]]]:
        """Returns the outputs for a batch of texts, without padding, a row each."""
        ids, mask = padded(rows, self._pad_id, padding)
        found = self.encode(ids, mask)
        return [
            {
                name: value[row][mask[row]] if value.ndim > 2 else value[row]
                for name, value in found.items()
            }
            for row in range(len(rows))
        ]

    def _shape(self, name: str, source: NDArray[np.int64]) -> tuple[int, ...]:
        config = self._config
        if name == "head":
            of_text = source.shape[:1] if config.pooling else source.shape
            return (*of_text, config.d_head_output)
        return (*source.shape, config.vocabulary_size if name == "logits" else config.d_model)
