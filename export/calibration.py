"""What ranges the inputs of the linear products have, and so how to round them to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transferry.build_model.transformer import Transformer
from transferry.export.torch_decoder import TorchDecoder
from transferry.runtime.errors import InputError
from transferry.runtime.options import GenerationOptions
from transferry.runtime.search import search
from transferry.runtime.special_tokens import SpecialTokens

BINS = 2048
CLIPS = 100  # how many ranges are tried: this many equal steps up to the largest value
ROWS = 32  # sentences that are searched together


@dataclass(frozen=True)
class Activation:
    """How the input of a product is rounded to uint8: round(x / scale) + zero_point.

    Attributes:
        scale: The step, a float32.
        zero_point: 0 where no input was negative, as after ReLU, else 128.
        largest: The largest absolute value seen.
        clipped: Share of values that lie more than half a step beyond the range, to a bin's width.
        values: How many were seen.
    """

    scale: float
    zero_point: int
    largest: float
    clipped: float
    values: int


class Histogram:
    """Counts absolute values in bins whose number is fixed and whose width is a power of two.

    Where a value lies beyond the last bin, bins are joined, 2 or 4 or 8 to one. The counts are
    then those of wide bins from the start: they do not depend on the order of what is added.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.top = 0.0  # where the last bin ends: a power of two, 0 before any value but 0
        self.largest = 0.0
        self.negative = False

    def add(self, values: NDArray[np.float32]) -> None:
        """Takes in values of any shape.

        Raises:
            InputError: One is not finite.
        """
        sizes = np.abs(values).ravel()
        largest = float(sizes.max(initial=0))
        if not math.isfinite(largest):
            raise InputError(
                "expected finite inputs of the linear products, found NaN or infinity: "
                "the model cannot be calibrated; does it pass verify?"
            )
        self.largest = max(self.largest, largest)
        self.negative = self.negative or bool((values < 0).any())
        top = math.ldexp(1.0, math.frexp(largest)[1]) if largest else 0.0
        if top > self.top:
            joined = min(int(top / self.top), BINS) if self.top else BINS
            counts = self.counts.reshape(-1, joined).sum(axis=1)
            self.counts = np.zeros(BINS, np.int64)
            self.counts[: len(counts)] = counts
            self.top = top
        places = sizes.astype(np.float64) * (BINS / self.top if self.top else 0)
        self.counts += np.bincount(places.astype(np.int64), minlength=BINS)

    def activation(self) -> Activation:
        """Chooses the range of the least squared error of rounding and clipping.

        See Nagel et al. 2021, A White Paper on Neural Network Quantization, section 3.1, and for
        calibration by histograms Wu et al. 2020, Integer Quantization for Deep Learning Inference.
        """
        values = int(self.counts.sum())
        levels, zero_point = (127, 128) if self.negative else (255, 0)
        if not self.largest:
            return Activation(1.0, zero_point, 0.0, 0.0, values)
        centres = (np.arange(BINS) + 0.5) * (self.top / BINS)
        # The widest first: of equal errors it is the one that clips least.
        clips = self.largest * np.arange(CLIPS, 0, -1) / CLIPS
        errors = []
        for clip in clips:
            step = clip / levels
            rounded = np.minimum(np.rint(centres / step), levels) * step
            errors.append(float((self.counts * (rounded - centres) ** 2).sum()))
        clip = float(clips[np.argmin(errors)])
        return Activation(
            scale=float(np.float32(clip / levels)),
            zero_point=zero_point,
            largest=self.largest,
            clipped=int(self.counts[centres > clip * (1 + 0.5 / levels)].sum()) / values,
            values=values,
        )


class LinearInputs(TorchFunctionMode):
    """Sees the input of every product with a parameter of the model, wherever it is computed."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.histograms: dict[str, Histogram] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Counts the input of F.linear, then computes what was asked for."""
        kwargs = kwargs or {}
        if func is F.linear:
            given: dict[str, Tensor] = dict(zip(("input", "weight"), args, strict=False))
            given.update(kwargs)
            name = self.names.get(id(given["weight"]))
            if name is not None:
                values = given["input"].detach().cpu().numpy()
                self.histograms.setdefault(name, Histogram()).add(values)
        return func(*args, **kwargs)


@torch.inference_mode()
def calibrate(
    model: Transformer,
    special: SpecialTokens,
    sentences: Sequence[Sequence[int]],
    max_length: int,
) -> dict[str, Activation]:
    """Runs the model over sentences and its own greedy answers to them, a row at a time.

    Alone, a row has no padding, of which nothing shall be counted.

    Args:
        model: The model in float32; it is put into eval mode.
        special: The ids that pad, begin and end.
        sentences: Token ids as the model reads them, at least one token each: of an encoder the
            sources, of a decoder alone what its texts begin with.
        max_length: Most tokens of an answer.

    Returns:
        By the name of its weight, how to round the input of every linear product; of the output
        projection where it is tied, by the name of the embedding.

    Raises:
        InputError: There is no sentence, one has no tokens, or an activation is not finite.
    """
    if not sentences or not all(sentences):
        raise InputError(
            f"expected at least one sentence to calibrate with and tokens in each, found "
            f"{len(sentences)} sentences, {sum(not sentence for sentence in sentences)} of them "
            "empty: give sentences like those that will be run"
        )
    decoder = TorchDecoder(model)
    device = model.embedding.weight.device
    inputs = LinearInputs(model)
    for first in range(0, len(sentences), ROWS):
        part = sentences[first : first + ROWS]
        answers: list[Sequence[int]] = [()] * len(part)
        if model.decoder:
            options = GenerationOptions(max_length=max_length)
            found = search(decoder, part, options, special)
            answers = [hypotheses[0].tokens for hypotheses in found]
        for sentence, answer in zip(part, answers, strict=True):
            source = list(sentence) if model.encoder else []
            begin = [special.bos_id] if model.encoder else list(sentence)
            # What the search feeds: of an answer that it cut off all but the last token.
            target = [*begin, *answer[: max_length - 1]]
            ids, texts = (
                torch.tensor([row], dtype=torch.int64, device=device) for row in (source, target)
            )
            with inputs:
                model(ids, torch.ones_like(ids, dtype=torch.bool), texts)
    return {name: histogram.activation() for name, histogram in inputs.histograms.items()}
