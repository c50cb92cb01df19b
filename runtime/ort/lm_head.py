"""The LM head of a fused variant: logits, top k and log-sum-exp of the decoder's hidden states."""

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.decoder import StepOutput, TopK
from transferry.runtime.decoding.logits import SEGMENT, Doubles, Floats, SegmentMaxima, log_sum_exp
from transferry.runtime.ort.graph_runner import Bindable, BoundCall, BufferView, GraphRunner
from transferry.runtime.ort.screened_argmax import ScreenedArgmax

# Sums of exponentials that float32 holds in full precision, their largest terms included.
SMALLEST_SUM, LARGEST_SUM = 1e-30, 1e38


class _Workspace(threading.local):
    """Buffers of a thread, kept over all its batches: fresh memory is expensive page by page.

    Attributes:
        hidden: Hidden states of the last step, on the device `[rows, d_model]`.
        views: The first rows of it, by their number.
        logits: `[rows, vocabulary]`, exact or approximate.
        calls: Graphs bound to these buffers, by name, rows and k.
    """

    def __init__(self) -> None:
        self.hidden: OrtValue | None = None
        self.views: dict[int, BufferView] = {}
        self.logits = np.empty((0, 0), np.float32)
        self.calls: dict[tuple[str, int, int], BoundCall] = {}


class LMHead:
    """Scores hidden states; several threads may use it at once."""

    def __init__(
        self, bundle: Bundle, variant: Variant, runners: Mapping[str, GraphRunner]
    ) -> None:
        """Reads the weights of the screened argmax, if the variant has it."""
        self._runners = runners
        self._own = _Workspace()
        self._on_device = runners["exp_sums"].on_device
        self._top_k = variant.top_k
        self.vocabulary_size = int(variant.graphs["lm_head"].tensor("logits").shape[-1])
        self.screened: ScreenedArgmax | None = None
        if variant.screen:
            weights = {name: tensor.read(bundle.files) for name, tensor in variant.screen.items()}
            self.screened = ScreenedArgmax(**weights)

    def hidden(self, rows: int) -> BufferView:
        """Buffer for the hidden states of this thread's next step over `rows` rows."""
        own, decoder = self._own, self._runners["decoder"]
        if rows in own.views:
            return own.views[rows]
        if own.hidden is None or rows > own.hidden.shape()[0]:
            width = int(decoder.graph.tensor("hidden").shape[-1])
            own.calls.clear()
            own.views.clear()
            own.hidden = decoder.zeros("hidden", (rows, width))
        view = own.views[rows] = BufferView(own.hidden, 0, rows)
        return view

    def scores(
        self, shape: tuple[int, ...], *, top: int | None = None, normalise: bool = False
    ) -> StepOutput:
        """Scores the hidden states of the last step, over tokens of a shape `[rows, target]`.

        See `Decoder.step`.
        """
        rows = math.prod(shape)
        # On a CPU the largest logit alone is found faster among all of them.
        alone = top == 1 and not normalise and not self._on_device
        if top is not None and self._top_k and not alone:
            return StepOutput(top_k=self._ranked(rows, top))
        if top == 1 and not normalise and self.screened is not None:
            tokens = self.screened.argmax(*self.approximate(rows))
            return StepOutput(top_k=TopK(tokens[:, None]))
        logits = self._run("lm_head", rows)["logits"]
        by_token = logits.reshape(*shape, -1)
        if not normalise or self._on_device:
            return StepOutput(by_token)
        found = self._run("exp_sums", rows)
        maxima = SegmentMaxima(found["segment_maxima"], SEGMENT)
        return StepOutput(by_token, None, self._log_of_sums(found["exp_sums"]), maxima)

    def approximate(self, rows: int) -> tuple[Floats, Floats, SegmentMaxima]:
        """Arguments of `ScreenedArgmax.argmax`, in a variant with a screen."""
        approximate = self._run("approximate_logits", rows)["approximate_logits"]
        maxima = SegmentMaxima(self._run("segment_maxima", rows)["segment_maxima"], SEGMENT)
        return self.hidden(rows).numpy(), approximate, maxima

    def _ranked(self, rows: int, k: int) -> TopK:
        """The k likeliest tokens of each row, ranked in a graph."""
        found = self._run("top_k", rows, k)
        logits, tokens = found["top_logits"], found["top_tokens"]
        if "exp_sums" in found:
            normaliser = self._log_of_sums(found["exp_sums"])
        else:
            with np.errstate(all="ignore"):  # a sum below 1 is of a broken device
                normaliser = logits[:, 0] + np.log(found["relative_sums"], dtype=np.float64)
        if self._on_device:  # which may be broken
            normaliser[tokens.view(np.uint64).max(1) >= self.vocabulary_size] = np.nan
        return TopK(tokens, logits, normaliser)

    def _run(self, name: str, rows: int, k: int = 0) -> Mapping[str, NDArray[Any]]:
        """Runs a graph on this thread's buffers, and returns its outputs by role.

        The next run of the graph overwrites them; exact and approximate logits share a buffer.
        """
        own = self._own
        if (name, rows, k) in own.calls:
            return own.calls[name, rows, k].run()
        hidden = self.hidden(rows)
        if name != "top_k" and rows > len(own.logits):
            own.calls.clear()
            own.logits = np.empty((hidden.buffer.shape()[0], self.vocabulary_size), np.float32)
        runner, logits = self._runners[name], own.logits[:rows]
        read: dict[str, Bindable] = {"hidden": hidden}
        if name in ("exp_sums", "segment_maxima"):
            read["logits"] = runner.value(logits)  # on the CPU: a view
        if name == "top_k":
            read["count"] = OrtValue.ortvalue_from_numpy(np.array([k]))  # read on the host
        written = {"logits": logits, "approximate_logits": logits}
        for spec in runner.graph.outputs:
            size = spec.shape[-1] if isinstance(spec.shape[-1], int) else k
            shape = (rows, size) if len(spec.shape) > 1 else (rows,)
            written.setdefault(spec.role, np.empty(shape, spec.type))
        call = own.calls[name, rows, k] = runner.bind(
            fixed={spec.role: [read[spec.role]] for spec in runner.graph.inputs},
            host={spec.role: written[spec.role] for spec in runner.graph.outputs},
        )
        return call.run()

    def _log_of_sums(self, sums: Floats) -> Doubles:
        """Log-sum-exp of each row `[rows]`, from the sums of the exponentials of the logits.

        The graph does not subtract the largest logit first. A row whose sum float32 cannot hold is
        computed again the slow, safe way.
        """
        if sums.min() > SMALLEST_SUM and sums.max() < LARGEST_SUM:
            return np.log(sums, dtype=np.float64)
        extreme = ~((sums > SMALLEST_SUM) & (sums < LARGEST_SUM))
        result = np.empty(len(sums))
        result[extreme] = log_sum_exp(self._run("lm_head", len(sums))["logits"][extreme])
        result[~extreme] = np.log(sums[~extreme], dtype=np.float64)
        return result
