"""The reference model behind the runtime's interfaces, so that one search drives both sides."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transferry.build_model.model.attention import KeyValues
from transferry.build_model.model.transformer import Transformer
from transferry.export.arithmetic import Arithmetic, Moved, Shaken, copied, small
from transferry.runtime.decoding.decoder import StepOutput, Tensors, longer

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.floating[Any]]
KEPT_STATE = 1 << 20  # entries of the keys of a source whose state is kept
MOVES = 8  # of hidden states, to learn how far rounding moves a head


@dataclass(frozen=True)
class TorchState:
    """Everything a step reads besides the tokens; shapes as in `Transformer.decode`.

    `rows` has the row of the source that each row came from, where there is an encoder.
    """

    mask: Tensor
    cross: list[KeyValues]
    past: list[Any]
    rows: Ids


class TorchDecoder:
    """`Decoder` in the model's own precision: float32 as trained, float64 as the oracle.

    Attributes:
        encoder: The same for a model without a decoder.
    """

    shares_cache = False

    def __init__(self, model: Transformer, arithmetic: Moved | None = None) -> None:
        """Takes the model, and the precision to compute it in; by default that of its weights."""
        self.model = model.eval()
        self.vocabulary_size = model.config.vocabulary_size
        self.has_encoder = bool(model.config.encoder_layers)
        self.encoder = TorchEncoder(model, arithmetic)
        self._arithmetic = arithmetic or _own_arithmetic(model)
        self._begun: tuple[Any, TorchState] | None = None  # the last source and its state

    @classmethod
    def oracle(cls, model: Transformer) -> Self:
        """Returns a decoder in float64: of a copy, or of the same weights where they are large."""
        if not small(model):
            return cls(model, Arithmetic(model, torch.float64))
        return cls(copied(model, torch.float64))

    @contextlib.contextmanager
    def rounding(self, by: Any) -> Iterator[None]:
        """While entered, rounds to integers as `by` says, see `arithmetic.round_to`."""
        assert isinstance(self._arithmetic, Moved)
        before, self._arithmetic.shift, self._begun = self._arithmetic.shift, by, None
        try:
            yield
        finally:
            self._arithmetic.shift, self._begun = before, None

    @contextlib.contextmanager
    def shaken(self, seed: int) -> Iterator[None]:
        """While entered, rounds as another order of its sums might."""
        self._begun = None
        try:
            with Shaken(seed):
                yield
        finally:
            self._begun = None

    @torch.inference_mode()
    def start(self, source: Ids, mask: Mask) -> TorchState:
        key = source.shape, source.tobytes(), mask.tobytes()
        if self._begun is not None and self._begun[0] == key:
            return self._begun[1]
        with self._arithmetic:
            state = self._start(source, mask)
        # One text is searched in several ways. The state of a large model would take memory.
        config = self.model.config
        size = source.size * config.kv_heads * config.d_head * config.decoder_layers
        kept = size <= KEPT_STATE and self.model.mapped is None
        self._begun = (key, state) if kept else None
        return state

    def _start(self, source: Ids, mask: Mask) -> TorchState:
        tokens, mask_tensor = _on_device(self.model, source, mask)
        past = self.model.empty_past(len(source))
        if self.has_encoder:
            # Split heads are views: each step's product would copy them.
            cross = _each(
                self.model.cross(self.model.encode(tokens, mask_tensor)), Tensor.contiguous
            )
            return TorchState(mask_tensor, cross, past, np.arange(len(source)))
        if source.shape[1]:
            _, past = self.model.decode(tokens, mask_tensor[:, :0], [], past)
        return TorchState(mask_tensor, [], past, np.arange(len(source)))

    @torch.inference_mode()
    def step(
        self, tokens: Ids, state: TorchState, *, top: int | None = None, normalise: bool = False
    ) -> tuple[StepOutput, TorchState]:
        (target,) = _on_device(self.model, np.ascontiguousarray(tokens))
        with self._arithmetic:
            logits, past = self.model.decode(target, state.mask, state.cross, state.past)
        mask = state.mask
        if not self.has_encoder:
            (mask,) = _on_device(self.model, longer(mask.cpu().numpy(), tokens))
        return StepOutput(logits.cpu().numpy()), replace(state, mask=mask, past=past)

    @torch.inference_mode()
    def select(self, state: TorchState, rows: Ids) -> TorchState:
        (index,) = _on_device(self.model, rows)
        past, moved = _each(state.past, lambda tensor: tensor[index]), state.rows[rows]
        if self.has_encoder and np.array_equal(moved, state.rows):
            return replace(state, past=past)  # beams of a sentence change places
        cross = _each(state.cross, lambda tensor: tensor[index])
        return TorchState(state.mask[index], cross, past, moved)

    def tensors(self, state: TorchState) -> dict[str, Floats]:
        """Copies cross and past of a state to numpy, named as in the exported graphs."""
        return {
            f"{role}.{number}.{kind}": tensor.cpu().numpy()
            for role, caches in (("cross", state.cross), ("past", state.past))
            for number, cache in enumerate(caches)
            for kind, tensor in cache._asdict().items()
        }


class TorchEncoder:
    """An encoder-only model in its own precision: float32 as trained, float64 as the oracle."""

    def __init__(self, model: Transformer, arithmetic: Moved | None = None) -> None:
        self.model = model.eval()
        self._arithmetic = arithmetic or _own_arithmetic(model)

    @torch.inference_mode()
    def encode(self, source: Ids, mask: Mask) -> dict[str, Floats]:
        """Returns tensors as `Transformer.answers`."""
        with self._arithmetic:
            outputs = self.model.answers(*_on_device(self.model, source, mask))
        return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}

    @torch.inference_mode()
    def head(self, hidden: Floats, mask: Mask) -> Floats:
        """Returns the head's output for hidden states `[rows, source, d_model]`."""
        states, places = _on_device(self.model, hidden, mask)
        assert self.model.head is not None
        with self._arithmetic:
            found: Floats = self.model.head(states, places).cpu().numpy()
        return found


def moved_heads(
    exact: TorchEncoder,
    mask: Mask,
    *sides: Tensors,
    held: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[list[Tensors], float]:
    """Returns outputs of the head for hidden states with torch's error, and their unit.

    A head outputs few numbers, and torch may by chance round no number: its error on one text
    says little about rounding. Sums may cancel, too: the unit is the largest output for random
    hidden states of the same size.

    Args:
        exact: The oracle.
        mask: True at a token `[rows, source]`.
        sides: Tensors of the oracle, and of torch in float32.
        held: Entered for each moved state; may hold the integers that its values are rounded to.
    """
    oracle, reference = (side["hidden"].astype(np.float64) for side in sides[:2])
    there = mask[..., None]
    error = np.abs(reference - oracle).max(initial=0.0, where=there)
    error = max(error, 2.0**-24 * np.abs(oracle).max(initial=0.0, where=there))
    size = np.sqrt(np.square(oracle).mean(where=np.broadcast_to(there, oracle.shape)))
    generator = np.random.default_rng(0)
    moved: list[Tensors] = []
    unit = 0.0
    for _ in range(MOVES):
        signs = generator.choice([-1.0, 1.0], oracle.shape)
        with held():
            moved.append({**sides[1], "head": exact.head(oracle + error * signs, mask)})
        drawn = exact.head(size * signs, mask)
        unit = max(unit, float(np.abs(drawn[mask] if drawn.ndim > 2 else drawn).max(initial=0.0)))
    return moved, unit


def _each(caches: Sequence[Any], made: Callable[[Tensor], Tensor]) -> list[Any]:
    return [type(cache)(*map(made, cache)) for cache in caches]


def _own_arithmetic(model: Transformer) -> AbstractContextManager[Any]:
    """Returns the precision of the weights; where they are mapped, it releases what was read."""
    if model.mapped is None or model.embedding.weight.dtype != torch.float32:
        return contextlib.nullcontext()
    return Arithmetic(model, torch.float32)


def _on_device(model: Transformer, *arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(array).to(model.embedding.weight.device) for array in arrays]
