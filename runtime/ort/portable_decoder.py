"""A decoder over the portable graphs, whose KV cache grows with every step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import LANES, UNIT, BatchOptions, widened
from transferry.runtime.decoding.decoder import StepOutput, longer
from transferry.runtime.decoding.logits import Bools, Floats, Integers
from transferry.runtime.decoding.shared_prompts import shared_prompts
from transferry.runtime.ort.graph_runner import describe, runtime_of
from transferry.runtime.ort.session import SessionOptions


@dataclass(frozen=True)
class PortableState:
    """Inputs of a step besides the tokens, on the device.

    The source is padded to a multiple of `batching.UNIT` columns, a prompt to one of `LANES`.

    Attributes:
        mask: True at a token `[rows, source]` bool; without an encoder of the past `[rows, past]`.
        cross: Keys and values of the source, two a layer `[rows, kv_heads, source, d_head]`; empty
            without an encoder.
        past: Keys and values of earlier positions, two a layer `[rows, kv_heads, past, d_head]`,
            or the state of an SSRU, one a layer `[rows, 1, 1, d_model]`.
        host_mask: The mask in numpy.
        sentences: The row of `start` that each row descends from `[rows]` int64. Cross stays in
            place while only beams of a sentence change places.
        columns: Columns of the source without that padding.
        scratch: Logits of the last step, overwritten by the next `[rows, target, vocabulary]`.
    """

    mask: Any
    cross: Sequence[Any]
    past: Sequence[Any]
    host_mask: Bools
    sentences: Integers
    columns: int
    scratch: Floats


class PortableDecoder:
    """Runs the portable graphs of a bundle; several threads may use it at once."""

    shares_cache = False

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graphs; raises as `open_model`."""
        self.variant, self.options = variant, options
        self.batches = BatchOptions()
        graphs = variant.steps
        self._runners = runtime_of(options).open(bundle, graphs, options)
        self._decoder, self._select = self._runners["decoder"], self._runners["select"]
        self.has_encoder = "encoder" in graphs
        self._mask_role = "source_mask" if self.has_encoder else "past_mask"
        logits = graphs["decoder"].tensor("logits")
        self.vocabulary_size = int(logits.shape[-1])
        self._logits_type = np.dtype(logits.type)
        past = graphs["decoder"].tensor("past")
        self._past_type = np.dtype(past.type)
        self._past_shape = past.shape
        self._recurrent = variant.recurrent
        self._layers = len(graphs["decoder"].names("past"))
        self._unit = UNIT if self.has_encoder else LANES
        self._max_positions = int(bundle.manifest.model["max_positions"])
        independent = options.rows_are_independent and not self._recurrent
        self.shares_prompts = not self.has_encoder and independent

    def describe(self) -> dict[str, Any]:
        """Returns everything that determines the numbers; see `graph_runner.describe`."""
        return describe(self.variant, self.options, self._runners.values())

    def start(self, source: Integers, mask: Bools) -> PortableState:
        """Encodes the sources or reads the prompts; see `Decoder.start`."""
        rows, columns = source.shape
        source = widened(source, self._unit, self._max_positions)
        mask = widened(mask, self._unit, self._max_positions)
        shape = [0 if isinstance(size, str) else size for size in self._past_shape[1:]]
        empty = self._decoder.value(np.zeros((rows, *shape), self._past_type))
        past: Sequence[Any] = [empty] * self._layers
        cross: Sequence[Any] = []
        if self.has_encoder:
            encoder = self._runners["encoder"]
            inputs = {"source": [encoder.value(source)], "source_mask": [encoder.value(mask)]}
            cross = encoder.run(inputs, "cross")
        elif columns:
            past = self._read_prompts(source, mask, past)
            mask = widened(mask, self._unit)
            if extra := mask.shape[1] - source.shape[1]:  # beyond the positions of the model
                around = ((0, 0), (0, 0), (0, extra), (0, 0))
                past = [self._decoder.value(np.pad(value.numpy(), around)) for value in past]
        scratch = np.empty((0, 0, 0), self._logits_type)
        sentences = np.arange(rows)
        return PortableState(
            self._decoder.value(mask), cross, past, mask, sentences, columns, scratch
        )

    def _read_prompts(self, source: Integers, mask: Bools, empty: Sequence[Any]) -> Sequence[Any]:
        """Returns a past that holds the prompts."""
        shared = shared_prompts(source, mask) if self.shares_prompts else None
        if shared is None:
            return self._read(source, empty)
        begin, first = shared.length, shared.first
        nothing = [self._decoder.value(value.numpy()[first]) for value in empty]
        past = self._read(source[first, :begin], nothing)
        rows = self._select.value(shared.of_row)
        past = self._select.run({"rows": [rows], "state": past}, "selected")
        return self._read(source[:, begin:], past, begin) if begin < source.shape[1] else past

    def _read(self, source: Integers, past: Sequence[Any], begin: int = 0) -> Sequence[Any]:
        """Returns the past after further tokens of prompts, padding included."""
        # Padding comes after all tokens of its row, so no token attends to it. With a mask that
        # shows all of it, its own keys and values equal those of prompts that are read at once.
        before = np.ones((len(source), begin), np.bool_)
        inputs = {
            "target": [self._decoder.value(source)],
            "past_mask": [self._decoder.value(before)],
            "past": past,
        }
        return self._decoder.run(inputs, "present")

    def step(
        self,
        tokens: Integers,
        state: PortableState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, PortableState]:
        """Reads target tokens and returns all logits; see `Decoder.step`."""
        shape = (*tokens.shape, self.vocabulary_size)
        logits = state.scratch
        if logits.shape != shape:
            logits = np.empty(shape, self._logits_type)
        present = self._decoder.run(
            {
                "target": [self._decoder.value(tokens)],
                self._mask_role: [state.mask],
                "cross": state.cross,
                "past": state.past,
            },
            "present",
            host={"logits": logits},
        )
        mask, device_mask = state.host_mask, state.mask
        if not self.has_encoder:
            mask = longer(mask, tokens)
            device_mask = self._decoder.value(mask)
        state = replace(state, mask=device_mask, past=present, host_mask=mask, scratch=logits)
        return StepOutput(logits), state

    def select(self, state: PortableState, rows: Integers) -> PortableState:
        """Takes rows of the state; see `Decoder.select`."""
        chosen = self._select.value(rows)
        past = state.past
        sentences = state.sentences[rows]
        if past[0].shape()[2] or len(rows) != len(state.sentences):
            if self._recurrent:  # a few numbers a row, unlike the graph's shapes
                past = [self._decoder.value(value.numpy()[rows]) for value in past]
            else:
                past = self._select.run({"rows": [chosen], "state": past}, "selected")
        if np.array_equal(sentences, state.sentences):
            return replace(state, past=past)
        cross = state.cross
        if self.has_encoder:
            cross = self._select.run({"rows": [chosen], "state": cross}, "selected")
        mask = state.host_mask[rows]
        return replace(
            state,
            mask=self._decoder.value(mask),
            cross=cross,
            past=past,
            host_mask=mask,
            sentences=sentences,
        )

    def tensors(self, state: PortableState) -> dict[str, Floats]:
        """Copies the cross and past of a state to the host, by their names in the graph.

        The source has its original length.
        """
        graph = self._decoder.graph
        names = [*graph.names("cross"), *graph.names("past")]
        # On the CPU `numpy()` is a view of the next step's input; `delete` copies.
        cross = [value.numpy()[:, :, : state.columns].copy() for value in state.cross]
        padded = state.columns if self.has_encoder else state.columns + -state.columns % self._unit
        padding = np.arange(state.columns, padded)
        past = [np.delete(value.numpy(), padding, axis=2) for value in state.past]
        return dict(zip(names, (*cross, *past), strict=True))
