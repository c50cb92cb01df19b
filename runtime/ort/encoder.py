"""The graph of an encoder-only bundle: token ids in, hidden states, head and logits out."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import BatchOptions, blocks
from transferry.runtime.decoding.logits import Bools, Floats, Integers
from transferry.runtime.ort.graph_runner import Opened, describe, open_graphs, runtime_of
from transferry.runtime.ort.session import Device, SessionOptions

# Tokens of sources or prompts that are read at once: on the CPU few enough for their hidden states,
# four times as wide in a feed-forward layer, to stay in its cache.
PASS_TOKENS: dict[Device, int] = {"cpu": 512, "cuda": 1 << 13}

EncoderOutput = Literal["hidden", "head", "logits"]


class EncoderModel:
    """Runs a variant of an encoder-only bundle; several threads may use it at once."""

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        options: SessionOptions,
        opened: Opened | None = None,
    ) -> None:
        """Opens the graph, by default in the runtime of the options; raises as `open_model`."""
        self.variant, self.options = variant, options
        self.batches = BatchOptions(tokens=PASS_TOKENS[options.device])
        graph = variant.graphs["encoder"]
        self.outputs = tuple(
            name
            for name in get_args(EncoderOutput)
            if name in {spec.role for spec in graph.outputs}
        )
        given = bundle, {"encoder": graph}, options
        runners = open_graphs(*given, opened) if opened else runtime_of(options).open(*given)
        (self._runner,) = runners.values()

    def describe(self) -> dict[str, Any]:
        """Returns everything that determines the numbers; see `graph_runner.describe`."""
        return describe(self.variant, self.options, [self._runner])

    def encode(
        self, source: Integers, mask: Bools, outputs: Sequence[EncoderOutput] | None = None
    ) -> dict[str, Floats]:
        """Encodes token ids.

        Args:
            source: Padded token ids `[rows, source]`.
            mask: True at tokens, False at padding `[rows, source]`.
            outputs: Outputs to compute. Default: all of the graph's.

        Returns:
            "hidden" `[rows, source, d_model]`, "head" `[rows, width]` or `[rows, source, width]`,
            and "logits" `[rows, source, vocabulary]`, undefined at padding.
        """
        outputs = self.outputs if outputs is None else outputs
        runner, found = self._runner, dict[str, Floats]()
        for rows, columns in blocks(mask, PASS_TOKENS[self.options.device]):
            part = source[rows, :columns], mask[rows, :columns]
            inputs = {
                role: [runner.value(each)]
                for role, each in zip(("source", "source_mask"), part, strict=True)
            }
            for name, value in zip(outputs, runner.run(inputs, *outputs), strict=True):
                values = value.numpy()
                if len(values) == len(source):  # all rows at once
                    found[name] = values
                    continue
                by_token = values.ndim == 3
                if name not in found:
                    shape = source.shape if by_token else source.shape[:1]
                    found[name] = np.zeros((*shape, values.shape[-1]), values.dtype)
                found[name][(rows, slice(columns)) if by_token else rows] = values
        return found
