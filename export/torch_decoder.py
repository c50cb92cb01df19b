"""The reference model as a `Decoder`, so that torch and onnxruntime are driven by one search."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transferry.build_model.attention import KeyValues
from transferry.build_model.transformer import Transformer
from transferry.export.graphs.portable import flatten
from transferry.runtime.decoding.decoder import StepOutput, longer


@dataclass(frozen=True)
class TorchState:
    """What a step reads besides the tokens; shapes as in `Transformer.decode`."""

    mask: Tensor
    cross: list[KeyValues]
    past: list[KeyValues]


class TorchDecoder:
    """Runs the model in its own precision: float32 as trained, float64 as the oracle."""

    shares_cache = False

    def __init__(self, model: Transformer) -> None:
        self.model = model.eval()
        self.vocabulary_size = model.config.vocabulary_size
        self.has_encoder = bool(model.config.encoder_layers)

    @classmethod
    def oracle(cls, model: Transformer) -> TorchDecoder:
        """Returns a decoder that runs a float64 copy of the model: the truth, as far as known."""
        return cls(copy.deepcopy(model).double())

    @torch.inference_mode()
    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> TorchState:
        """Encodes the source; see `Decoder.start`."""
        device = self.model.embedding.weight.device
        tokens, mask_tensor = torch.from_numpy(source).to(device), torch.from_numpy(mask).to(device)
        past = self.model.empty_past(len(source))
        if self.has_encoder:
            cross = self.model.cross(self.model.encode(tokens, mask_tensor))
            return TorchState(mask_tensor, cross, past)
        if source.shape[1]:
            _, past = self.model.decode(tokens, mask_tensor[:, :0], [], past)
        return TorchState(mask_tensor, [], past)

    @torch.inference_mode()
    def step(
        self,
        tokens: NDArray[np.int64],
        state: TorchState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, TorchState]:
        """Reads target tokens and returns all logits; see `Decoder.step`."""
        target = torch.from_numpy(np.ascontiguousarray(tokens)).to(state.mask.device)
        logits, past = self.model.decode(target, state.mask, state.cross, state.past)
        mask = state.mask
        if not self.has_encoder:
            mask = torch.from_numpy(longer(mask.cpu().numpy(), tokens)).to(target.device)
        return StepOutput(logits.cpu().numpy()), TorchState(mask, state.cross, past)

    @torch.inference_mode()
    def select(self, state: TorchState, rows: NDArray[np.int64]) -> TorchState:
        """Takes rows of the state; see `Decoder.select`."""
        index = torch.from_numpy(rows).to(state.mask.device)

        def take(caches: list[KeyValues]) -> list[KeyValues]:
            return [KeyValues(cache.keys[index], cache.values[index]) for cache in caches]

        return TorchState(state.mask[index], take(state.cross), take(state.past))

    def tensors(self, state: TorchState) -> dict[str, NDArray[np.floating[Any]]]:
        """Copies the cross and past of a state to numpy, named as in the exported graphs."""
        return {
            f"{role}.{number // 2}.{('keys', 'values')[number % 2]}": tensor.cpu().numpy()
            for role, caches in (("cross", state.cross), ("past", state.past))
            for number, tensor in enumerate(flatten(caches))
        }
