"""What ranges the inputs of the linear products have, and so how to round them to 8 bits."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transferry.build_model.transformer import Transformer
from transferry.export.optimise.kv_scales import Ranges, Units, in_units
from transferry.export.torch_decoder import TorchDecoder
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

BINS = 2048
CLIPS = 100  # how many ranges are tried: this many equal steps up to the largest value
ROWS = 32  # sentences that are searched together
# Rows and tokens of each in which the vocabulary is run through.
SWEPT_ROWS, SWEPT_LENGTH = 128, 64


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


@dataclass(frozen=True)
class Calibration:
    """What an int8 variant is made with.

    Attributes:
        activations: How to round the inputs of linear layers, by the name of the weight, in a model
            whose keys and values count in `units`.
        units: By the name of the attention; none where there is no decoder.
    """

    activations: Mapping[str, Activation]
    units: Mapping[str, Units]


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


class Linears(TorchFunctionMode):
    """Sees every product with a parameter of the model, wherever it is computed."""

    def __init__(self, model: Transformer, see: Callable[[str, Tensor, Tensor], None]) -> None:
        """Takes what is told of each: the parameter's name, what came in and what came out."""
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.see = see

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Computes what was asked for, and tells of it where it is F.linear."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is F.linear:
            given: dict[str, Tensor] = dict(zip(("input", "weight"), args, strict=False))
            given.update(kwargs)
            name = self.names.get(id(given["weight"]))
            if name is not None:
                self.see(name, given["input"], found)
        return found


@torch.inference_mode()
def calibrate(
    model: Transformer,
    special: SpecialTokens,
    sentences: Sequence[Sequence[int]],
    max_length: int,
) -> Calibration:
    """Runs the model over sentences and its own greedy answers to them, a row at a time.

    Alone, a row has no padding, of which nothing shall be counted.

    Args:
        model: The model in float32; it is put into eval mode.
        special: The ids that pad, begin and end.
        sentences: Token ids as the model reads them, at least one token each: of an encoder the
            sources, of a decoder alone what its texts begin with.
        max_length: Most tokens of an answer.

    Returns:
        Units, and with them how to round the input of every linear product; of the output
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
    ranges = Ranges(model)
    texts: list[tuple[Tensor, Tensor]] = []
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
            texts.append((_row(source, model), _row(target, model)))
    # All sizes of keys and values count, not only frequent ones; answers hold few of the tokens.
    swept = [*texts, *vocabulary_texts(model)]
    _run(model, swept, lambda name, _, found: ranges.see(name, found))
    units = ranges.units()
    # In other units the heads find other numbers, which the output layers round.
    inputs = collections.defaultdict[str, Histogram](Histogram)
    _run(
        in_units(model, units),
        texts,
        lambda name, given, _: inputs[name].add(given.detach().cpu().numpy()),
    )
    return Calibration({name: found.activation() for name, found in inputs.items()}, units)


def vocabulary_texts(model: Transformer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields sources and targets of tokens in random order, each of a small vocabulary once."""
    length = min(SWEPT_LENGTH, model.config.max_positions)
    tokens = np.random.default_rng(0).permutation(model.config.vocabulary_size)
    for row in range(min(SWEPT_ROWS, -(-len(tokens) // length))):
        ids = tokens[row * length : (row + 1) * length].tolist()
        yield _row(ids if model.encoder else [], model), _row(ids, model)


def _row(ids: Sequence[int], model: Transformer) -> Tensor:
    return torch.tensor([ids], dtype=torch.int64, device=model.embedding.weight.device)


def _run(
    model: Transformer,
    texts: Iterable[tuple[Tensor, Tensor]],
    see: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Runs a model over sources and targets, a row at a time."""
    with Linears(model, see):
        for source, target in texts:
            model(source, torch.ones_like(source, dtype=torch.bool), target)
