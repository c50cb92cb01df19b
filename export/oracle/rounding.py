"""torch computing as a variant of integers should: the oracle for its graphs.

Simulated quantisation (Jacob et al. 2018, Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference, section 3): every weight, every input of a linear layer
and, in int8, every key and value of the cache is rounded to the integers of its scale; all else is
the reference model. A graph differs from it by rounding in float32 alone, and by its consequences
where a value moves across the border of two integers. Scales and the rounding of weights are the
export's own functions; the operators, their order and their constants are not.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from transferry.build_model.model.attention import KeyValues, MultiHeadAttention, Rotation
from transferry.build_model.model.transformer import Transformer
from transferry.export.arithmetic import (
    Arithmetic,
    Moved,
    Rounded,
    Shift,
    copied,
    moves,
    round_blocks,
    round_to,
    small,
)
from transferry.export.rewrite.calibration import Activation, Calibration
from transferry.export.rewrite.kv_scales import LARGEST, KVScales, fold_kv_scales
from transferry.export.rewrite.rounded_weights import BLOCK, block_weights, matrices, quantised
from transferry.export.torch_model import Floats, TorchDecoder, TorchState
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import Tolerance

# Half of the width, in steps, of the border between two integers: a value in it may be rounded to
# either side. The largest integer, 127 steps, with an error of 2^-20, twice what reports show.
BORDER = 2.0**-13
SideT = TypeVar("SideT")
ATTENTIONS = {"cross": "cross_attention", "past": "self_attention"}
LOWEST = -LARGEST - 1
# In float32; in float64; and in float64 with every value at the border of two integers rounded
# down, and up: their distance is the effect of rounding in float32, and a case in which
# they are equal has no such value.
SIDES = (
    (torch.float32, 0.0),
    (torch.float64, 0.0),
    (torch.float64, -BORDER),
    (torch.float64, BORDER),
)


class Borders:
    """Widths of the borders of a computation, and its values there rounded by chance.

    `BORDER` is the width where a value is as exact as the largest of its block. Where sums cancel,
    or a block is small beside its position, the error in steps is larger. The first pass, in
    float64, sets the integers. Passes in float32 follow them, so that only rounding in float32 is
    measured, by block; further ones in float64 move each value at random, by up to 8 times that.
    """

    def __init__(self) -> None:
        self._sites: list[tuple[Tensor, Tensor]] = []  # value in steps, width by block
        self._site, self._generator = 0, torch.Generator()

    def again(self, side: SideT, seed: int = 0) -> SideT:
        """Begins another pass on a side, which it returns."""
        self._site, self._generator = 0, torch.Generator().manual_seed(seed)
        return side

    def begin(self) -> None:
        """Goes on in the same pass."""

    def __call__(self, x: Tensor, scale: Any, least: int, most: int) -> Tensor:
        """Returns integers for the values of a site; see `arithmetic.Shift`."""
        steps, place = x / scale, self._site
        self._site += 1
        if first := place == len(self._sites):
            self._sites.append((steps, torch.full_like(steps[..., :1], BORDER)))
        exact, width = self._sites[place]
        if first:
            found: Tensor = steps.round()
        elif steps.dtype == exact.dtype:
            found = (steps + width * moves(steps, self._generator)).round_()
        else:
            error = (steps - exact).abs_().amax(dim=-1, keepdim=True)
            torch.maximum(width, Tolerance.factor * error, out=width)
            found = exact.round().to(steps.dtype)
        return found.clamp_(least, most)


def integer_sides(
    model: Transformer, precision: Precision, calibration: Calibration | None
) -> list[TorchDecoder]:
    """Returns torch rounding as a variant does, on each of `SIDES`; of a float variant none.

    Where only weights are rounded, on the first two of them.
    """
    if precision.block_bits:
        rounded = _blocks(model, precision.block_bits)
        return [TorchDecoder(*each) for each in _sides(model, rounded, SIDES)]
    if precision.weights_only:
        # No input is rounded, so none lies at a border.
        rounded = dict(_weights_alone(model))
        return [TorchDecoder(*each) for each in _sides(model, rounded, SIDES[:2])]
    if calibration is None:
        return []
    model = fold_kv_scales(model, calibration.kv_scales)
    for name in calibration.kv_scales:
        # The same weights, with keys and values as the cache holds them.
        attention = model.get_submodule(name)
        attention.__class__ = type("_", (_IntegerMemory, type(attention)), {})
    sides = _sides(model, _rows(model, calibration.activations), SIDES)
    return [_Int8Decoder(*each, calibration.kv_scales) for each in sides]


def _sides(
    model: Transformer, rounded: Mapping[str, Rounded], sides: Sequence[tuple[torch.dtype, float]]
) -> Iterator[tuple[Transformer, Moved]]:
    """Yields the model that each side computes, and how."""
    copies: dict[torch.dtype, Transformer] = {}
    for dtype, shift in sides:
        if not small(model):
            yield model, Arithmetic(model, dtype, rounded, shift)
            continue
        if dtype not in copies:
            copies[dtype] = copied(model, dtype, rounded)
        yield copies[dtype], Moved(shift)


def _blocks(model: Transformer, bits: int) -> dict[str, Rounded]:
    found = {}
    for name, weight in block_weights(model, bits):
        integers, scales = map(torch.from_numpy, (weight.integers, weight.scales))
        rounding = partial(round_blocks, block=BLOCK)
        offset = 1 << (weight.bits - 1)
        found[name] = Rounded(integers, scales[..., None], weight.inputs, rounding, offset=offset)
        model.release()
    return found


def _weights_alone(model: Transformer) -> Iterator[tuple[str, Rounded]]:
    """Yields the weights of a variant that rounds nothing else, by the parameters' names."""
    for name, weight in matrices(model):
        integers, scales = map(torch.from_numpy, quantised(weight, pairs=False))
        yield name, Rounded(integers, scales[:, None], weight.shape[1], _unrounded)
        model.release()


def _rows(model: Transformer, activations: Mapping[str, Activation]) -> dict[str, Rounded]:
    found = {}
    for name, parameter in model.named_parameters():
        if (activation := activations.get(name)) is None and name != "embedding.weight":
            continue
        # An embedding that is not tied is only looked up.
        rounding: Any = _unrounded
        if activation is not None:
            rounding = partial(_round_input, activation=activation)
        weight, wide = parameter.detach().cpu(), () if activation is None else activation.wide
        integers, scales = map(torch.from_numpy, quantised(weight.numpy(), wide=wide))
        exact = weight[:, list(wide)] if wide else None
        given = integers, scales[:, None], parameter.shape[1], rounding
        found[name] = Rounded(*given, exact, wide)
        model.release()
    return found


def _unrounded(x: Tensor, shift: Shift) -> Tensor:
    return x


def _round_input(x: Tensor, shift: Shift, activation: Activation) -> Tensor:
    zero, wide = activation.zero_point, list(activation.wide)
    rounded = round_to(x, activation.scale, shift, -zero, 255 - zero)
    if wide:
        rounded[..., wide] = x[..., wide]
    return rounded


class _IntegerMemory(MultiHeadAttention):
    """Attention whose keys and values are rounded to the integers of an int8 cache."""

    def project(self, x: Tensor, rotation: Rotation | None = None) -> KeyValues:
        exact, shift = super().project(x, rotation), Moved.current
        with torch._C.DisableTorchFunction():  # nothing is left to convert
            return KeyValues(*(round_to(each, 1.0, shift, LOWEST, LARGEST) for each in exact))


class _Int8Decoder(TorchDecoder):
    """A model with integers in its cache, as `Decoder`."""

    def __init__(
        self, model: Transformer, arithmetic: Moved, scales: Mapping[str, KVScales]
    ) -> None:
        super().__init__(model, arithmetic)
        self._scales = scales

    def tensors(self, state: TorchState) -> dict[str, Floats]:
        """Copies cross and past to numpy, times the scales of the cache."""
        tensors = super().tensors(state)
        return {name: each * self.scale(name) for name, each in tensors.items()}

    def scale(self, name: str) -> Floats:
        """Returns the scales of a tensor of the cache, that broadcast; 1 for a recurrent state."""
        role, layer, kind = name.split(".")
        found = self._scales.get(f"decoder.{layer}.{ATTENTIONS[role]}")
        return (
            np.ones(1, np.float32) if found is None else getattr(found, kind)[:, None].cpu().numpy()
        )
