"""A torch module of the user's own behind the interface of the reference.

Protocol of the module, shapes as in `Transformer`:

    max_positions: int              the longest source or target, in tokens

    an encoder-decoder, and with `decode` alone a decoder-only model
    cache: (layers, heads, width)   of the keys and values in cross and past
    encode(source, source_mask) -> encoded [batch, source, d_model]
    cross(encoded) -> (keys, values) of each layer, [batch, heads, source, width]
    decode(target, mask, cross, past) -> logits [batch, target, vocabulary], present (past included)

    an encoder
    forward(source, source_mask) -> hidden [batch, source, d_model]
    head(hidden, source_mask) -> [batch, n], or [batch, source, n] of each token; optional
    labels: n names, where the head classifies or tags; optional
    logits(hidden) -> [batch, source, vocabulary], for fill-mask; optional

    special_tokens: dict            see `tokenizer.read_tokenizer`; optional
    generation: dict                defaults of GenerationOptions; optional
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from transferry.build_model.model.attention import KeyValues
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import UsageError

_made = count()


class OwnModel(Transformer):
    """The module as a Transformer: its methods are called, its weights keep their names.

    Attributes:
        module: The module.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Takes no part of the config: the module is the model."""
        made: Self = nn.Module.__new__(cls)
        return made

    def __init__(self, module: nn.Module, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.module: Any = module
        self.encoder: Any = (None,) * config.encoder_layers
        self.decoder: Any = (None,) * config.decoder_layers
        self.output = None
        # Two modules may look alike and compute something else, so that no trace is shared.
        self._number = next(_made)

    def extra_repr(self) -> str:
        """See nn.Module; part of the key of a trace."""
        return f"number {self._number}"

    @property
    def embedding(self) -> Any:  # type: ignore[override]
        """Holds a weight, whose type and device are the model's."""
        return SimpleNamespace(weight=next(self.module.parameters()))

    @property
    def head(self) -> Any:  # type: ignore[override]
        """The module's head; None without one."""
        return getattr(self.module, "head", None) if self.config.has_head else None

    def tables(self) -> dict[str, Tensor]:
        """None: buffers of the module are widened."""
        return {}

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        encode = self.module.encode if self.config.decoder_layers else self.module
        encoded: Tensor = encode(source, source_mask)
        return encoded

    def cross(self, encoded: Tensor) -> list[KeyValues]:
        return [KeyValues(*both) for both in self.module.cross(encoded)]

    def empty_past(self, batch: int) -> list[KeyValues]:
        shape = batch, self.config.kv_heads, 0, self.config.d_head
        nothing = self.embedding.weight.new_zeros(shape)
        return [KeyValues(nothing, nothing) for _ in self.decoder]

    def decode(
        self, target: Tensor, mask: Tensor, cross: Sequence[Any], past: Sequence[Any]
    ) -> tuple[Tensor, list[Any]]:
        logits, present = self.module.decode(target, mask, cross, past)
        return logits, [KeyValues(*both) for both in present]

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.module.logits(x)
        return found


def shape_of(module: Any, vocabulary_size: int, width: int, outputs: Sequence[int]) -> ModelConfig:
    """Returns the fields of ModelConfig that the manifest and the graphs need.

    `width` is the width of hidden states, 0 without an encoder; `outputs` is the shape of the
    head's output, empty without one.
    """
    fields: dict[str, Any] = {"architecture": "encoder-only", "encoder_layers": 1}
    layers, heads, d_head = getattr(module, "cache", (0, 1, 0))
    if layers:
        alone = not hasattr(module, "encode")
        fields = {"architecture": "decoder-only" if alone else "encoder-decoder"}
        fields |= {"encoder_layers": 0 if alone else 1, "head_width": d_head}
    else:
        fields["lm_head"] = hasattr(module, "logits")
    if outputs:
        fields |= {"head_widths": (outputs[-1],), "head_activations": ("none",)}
        fields |= {"head_biases": (False,), "pooling": ("first",) if len(outputs) == 2 else ()}
    return ModelConfig(
        **{"encoder_layers": 0, **fields},
        vocabulary_size=vocabulary_size,
        d_model=width or heads * d_head,
        heads=heads,
        decoder_layers=layers,
        d_ff=1,
        dropout=0.0,
        max_positions=module.max_positions,
        positions="none",
    )


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of weights by name."""
    found = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        plain = weight.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {list(plain.shape)}\n".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def refused_trace(error: BaseException) -> UsageError:
    """Returns the error for a module that torch's exporter refuses: the innermost reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip(" -") for line in str(error).strip().splitlines()] or [""]
    reason = lines[lines[0].endswith(":") and len(lines) > 1][:200]
    return UsageError(
        f"torch's exporter refuses the module: {type(error).__name__}: {reason}; use no branch or "
        "size that depends on the content of a tensor, and no int() of a size"
    )
