"""torch computing as an int8 variant should: the oracle for its graphs.

Simulated quantisation (Jacob et al. 2018, Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference, section 3): every weight, every input of a linear layer
and every key and value of the cache is rounded to the integers of its scale; all else is the
reference model. An int8 graph differs from it by rounding in float32 alone, and by what follows
where that moves a value across the border of two integers. Scales and the rounding of weights are
the export's own functions; the operators, their order and their constants are not.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transferry.build_model.attention import KeyValues, MultiHeadAttention, Rotation
from transferry.build_model.transformer import Transformer
from transferry.export.optimise.calibration import Calibration
from transferry.export.optimise.kv_scales import LARGEST, fold_kv_scales
from transferry.export.optimise.weight_int8 import quantised
from transferry.export.torch_model import Floats, Ids, Mask, TorchDecoder, TorchEncoder, TorchState
from transferry.runtime.decoding.decoder import StepOutput

# Half of the width, in steps, of the border between two integers: a value in it may be rounded to
# either side. The largest integer, 127 steps, with an error of 2^-20, twice what reports show.
BORDER = 2.0**-13
ATTENTIONS = {"cross": "cross_attention", "past": "self_attention"}
LOWEST = -LARGEST - 1


def simulate_int8(model: Transformer, calibration: Calibration) -> Transformer:
    """Returns a copy of a model with the weights of an int8 variant, and integers in its cache.

    The inputs of linear layers are rounded where the copy runs: `Int8TorchDecoder`,
    `Int8TorchEncoder`.
    """
    model = fold_kv_scales(model, calibration.kv_scales)
    for name in calibration.kv_scales:
        # The same weights, with keys and values as the cache holds them.
        model.get_submodule(name).__class__ = _IntegerMemory
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in calibration.activations or name == "embedding.weight":
                integers, scales = map(torch.from_numpy, quantised(parameter.cpu().numpy()))
                parameter.copy_(integers.float() * scales[:, None])
    return model


def int8_sides(model: Transformer, calibration: Calibration) -> list[TorchDecoder]:
    """Returns torch rounding as an int8 variant does.

    In float32; in float64; and in float64 with every value at the border of two integers rounded
    down, and up: the distance between them is what rounding in float32 may do, and a case in which
    they are equal has no such value.
    """
    single = simulate_int8(model, calibration)
    doubles = [copy.deepcopy(single).double() for _ in range(3)]
    return [
        Int8TorchDecoder(side, calibration, shift)
        for side, shift in zip((single, *doubles), (0.0, 0.0, -BORDER, BORDER), strict=True)
    ]


class _IntegerMemory(MultiHeadAttention):
    """Attention whose keys and values are rounded to the integers of an int8 cache."""

    shift = 0.0

    def project(self, x: Tensor, rotation: Rotation | None = None) -> KeyValues:
        """See `MultiHeadAttention.project`."""
        exact = super().project(x, rotation)
        return KeyValues(*((each + self.shift).round().clamp(LOWEST, LARGEST) for each in exact))


class _RoundedInputs(TorchFunctionMode):
    """Rounds the input of every product with a parameter, wherever it is computed."""

    def __init__(self, model: Transformer, calibration: Calibration, shift: float) -> None:
        super().__init__()
        self._shift = shift
        self._activations = {
            id(parameter): calibration.activations[name]
            for name, parameter in model.named_parameters()
            if name in calibration.activations
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes a function of torch, F.linear with a rounded input."""
        if func is F.linear and (found := self._activations.get(id(args[1]))) is not None:
            zero = found.zero_point
            integers = (args[0] / found.scale + self._shift).round().clamp(-zero, 255 - zero)
            args = (integers * found.scale, *args[1:])
        return func(*args, **(kwargs or {}))


class Int8TorchDecoder(TorchDecoder):
    """A model of `simulate_int8`, in float32 or float64, as `Decoder`."""

    def __init__(self, model: Transformer, calibration: Calibration, shift: float = 0.0) -> None:
        """Takes a model of its own.

        Args:
            model: Of `simulate_int8`.
            calibration: Of the int8 variant.
            shift: Added to every value before it is rounded to an integer, in steps: what comes
                out otherwise lies closer to a border than that.
        """
        super().__init__(model)
        self.encoder = Int8TorchEncoder(model, calibration, shift)
        self._rounding = self.encoder.rounding
        self._scales = calibration.kv_scales
        for module in model.modules():
            if isinstance(module, _IntegerMemory):
                module.shift = shift

    def start(self, source: Ids, mask: Mask) -> TorchState:
        """See `TorchDecoder.start`."""
        with self._rounding:
            return super().start(source, mask)

    def step(
        self, tokens: Ids, state: TorchState, *, top: int | None = None, normalise: bool = False
    ) -> tuple[StepOutput, TorchState]:
        """See `TorchDecoder.step`."""
        with self._rounding:
            return super().step(tokens, state, top=top, normalise=normalise)

    def tensors(self, state: TorchState) -> dict[str, Floats]:
        """Copies cross and past to numpy, times the scales of the cache."""
        tensors = super().tensors(state)
        for name, integers in tensors.items():
            role, layer, kind = name.split(".")
            scale = getattr(self._scales[f"decoder.{layer}.{ATTENTIONS[role]}"], kind)
            tensors[name] = integers * scale[:, None].cpu().numpy()
        return tensors


class Int8TorchEncoder(TorchEncoder):
    """A model of `simulate_int8` without a decoder, in float32 or float64."""

    def __init__(self, model: Transformer, calibration: Calibration, shift: float = 0.0) -> None:
        """See `Int8TorchDecoder`."""
        super().__init__(model)
        self.rounding = _RoundedInputs(model, calibration, shift)

    def encode(self, source: Ids, mask: Mask) -> dict[str, Floats]:
        """See `TorchEncoder.encode`."""
        with self.rounding:
            return super().encode(source, mask)

    def head(self, hidden: Floats, mask: Mask) -> Floats:
        """See `TorchEncoder.head`."""
        with self.rounding:
            return super().head(hidden, mask)
