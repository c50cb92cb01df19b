"""The graphs of a bundle as a `Decoder`: onnxruntime through IOBinding, the cache on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.bundle import Bundle, GraphSpec, Variant
from transferry.runtime.processor import instruction_sets
from transferry.runtime.session import SessionOptions, assigned_nodes, open_session


@dataclass(frozen=True)
class OnnxState:
    """What a step reads besides the tokens; all of it lies on the device.

    Attributes:
        mask: [rows, source] bool, True at a token.
        cross: Keys and values of the source, two a layer, [rows, heads, source, d_head] each.
        past: Keys and values of earlier positions, two a layer, [rows, heads, past, d_head] each.
        host_mask: The mask once more, in numpy.
        sentences: [rows] int64, which row of `start` each row stems from. The rows of a beam share
            their sentence's cross, which thus stays where it is when only they change places.
        scratch: The logits of the last step, [rows, target, vocabulary], written over by the next.
    """

    mask: OrtValue
    cross: Sequence[OrtValue]
    past: Sequence[OrtValue]
    host_mask: NDArray[np.bool_]
    sentences: NDArray[np.int64]
    scratch: NDArray[np.floating[Any]]


class OnnxDecoder:
    """Runs a variant of a bundle; may be used by several threads at once."""

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graphs.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: A graph cannot be opened.
        """
        self._variant, self._options = variant, options
        graphs = variant.graphs
        self._encoder = _Runner(bundle, graphs["encoder"], options)
        self._decoder = _Runner(bundle, graphs["decoder"], options)
        self._select = _Runner(bundle, graphs["select"], options)
        logits = graphs["decoder"].tensor("logits")
        self.vocabulary_size = int(logits.shape[-1])
        self._logits_type = np.dtype(logits.type)
        past = graphs["decoder"].tensor("past")
        self._past_type = np.dtype(past.type)
        self._past_shape = past.shape

    def describe(self) -> dict[str, Any]:
        """What decides the numbers: the settings, and where the nodes of the graphs really ran."""
        nodes: Counter[str] = Counter()
        for runner in (self._encoder, self._decoder, self._select):
            nodes.update(assigned_nodes(runner.session))
        return {
            "variant": self._variant.name,
            "provider": self._options.provider,
            "threads": self._options.threads,
            "optimisation": self._options.optimisation,
            "instruction_sets": list(instruction_sets()),
            "onnxruntime": onnxruntime.__version__,
            "nodes": [f"{name} {count}" for name, count in sorted(nodes.items())],
        }

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> OnnxState:
        """Encodes the source; see `Decoder.start`."""
        device_mask = self._encoder.value(mask)
        cross = self._encoder.run(
            {"source": [self._encoder.value(source)], "source_mask": [device_mask]}, "cross"
        )
        rows = len(source)
        _, heads, _, d_head = self._past_shape
        shape = (rows, int(heads), 0, int(d_head))
        empty = self._decoder.value(np.zeros(shape, self._past_type))
        return OnnxState(
            device_mask,
            cross,
            [empty] * len(cross),
            mask,
            np.arange(rows),
            np.empty((0, 0, 0), self._logits_type),
        )

    def step(
        self, tokens: NDArray[np.int64], state: OnnxState
    ) -> tuple[NDArray[np.floating[Any]], OnnxState]:
        """Reads target tokens; see `Decoder.step`."""
        shape = (*tokens.shape, self.vocabulary_size)
        logits = state.scratch
        if logits.shape != shape:
            logits = np.empty(shape, self._logits_type)
        present = self._decoder.run(
            {
                "target": [self._decoder.value(tokens)],
                "source_mask": [state.mask],
                "cross": state.cross,
                "past": state.past,
            },
            "present",
            {"logits": logits},
        )
        return logits, OnnxState(
            state.mask, state.cross, present, state.host_mask, state.sentences, logits
        )

    def select(self, state: OnnxState, rows: NDArray[np.int64]) -> OnnxState:
        """Takes rows of the state; see `Decoder.select`."""
        chosen = self._select.value(rows)
        past = state.past
        sentences = state.sentences[rows]
        if past[0].shape()[2] or len(rows) != len(state.sentences):
            past = self._select.run({"rows": [chosen], "state": past}, "selected")
        if np.array_equal(sentences, state.sentences):
            return OnnxState(
                state.mask, state.cross, past, state.host_mask, sentences, state.scratch
            )
        cross = self._select.run({"rows": [chosen], "state": state.cross}, "selected")
        mask = state.host_mask[rows]
        return OnnxState(self._decoder.value(mask), cross, past, mask, sentences, state.scratch)

    def tensors(self, state: OnnxState) -> dict[str, NDArray[np.floating[Any]]]:
        """Copies the cross and past of a state to the host, by their names in the graph."""
        graph = self._decoder.graph
        names = [*graph.names("cross"), *graph.names("past")]
        values = [*state.cross, *state.past]
        # On the CPU `numpy()` is a view of what the next step reads.
        return {name: value.numpy().copy() for name, value in zip(names, values, strict=True)}


class _Runner:
    """One graph, run through IOBinding with tensors given and taken by role."""

    def __init__(self, bundle: Bundle, graph: GraphSpec, options: SessionOptions) -> None:
        self.graph = graph
        self.session = open_session(bundle.graph(graph), options)
        self._device = options.provider
        self._device_id = options.device_id if options.provider != "cpu" else 0

    def value(self, array: NDArray[Any]) -> OrtValue:
        """Puts an array on the device."""
        contiguous = np.ascontiguousarray(array)
        return OrtValue.ortvalue_from_numpy(contiguous, self._device, self._device_id)

    def run(
        self,
        inputs: Mapping[Any, Sequence[OrtValue]],
        output: Any,
        host: Mapping[Any, NDArray[Any]] | None = None,
    ) -> list[OrtValue]:
        """Runs the graph.

        Args:
            inputs: All inputs, by role, in the manifest's order.
            output: The role of the outputs that stay on the device and are returned.
            host: Where to write the other outputs, by role.
        """
        binding = self.session.io_binding()
        for role, values in inputs.items():
            for name, value in zip(self.graph.names(role), values, strict=True):
                binding.bind_ortvalue_input(name, value)
        for role, array in (host or {}).items():
            (name,) = self.graph.names(role)
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in self.graph.names(output):
            binding.bind_output(name, self._device, self._device_id)
        self.session.run_with_iobinding(binding)
        bound = len(host or {})
        outputs: list[OrtValue] = list(binding.get_outputs())
        return outputs[bound:]
