"""Named shapes with training settings that suit them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferry.build_model.model.shape import STACKS, TransformerConfig
from transferry.build_model.train.train_config import TrainConfig

if TYPE_CHECKING:  # which imports torch
    from transferry.build_model.model.config import ModelConfig


@dataclass(frozen=True)
class Preset:
    """Fields of TransformerConfig and TrainConfig, and the vocabulary to train from the corpus.

    With an encoding of tiktoken, that is cut down to the corpus instead.
    """

    vocabulary_size: int
    model: dict[str, Any]
    train: dict[str, Any]
    encoding: str | None = None

    @property
    def architecture(self) -> str:
        """Architecture of the shape."""
        return str(self.model.get("architecture", "encoder-decoder"))

    def shape(self, vocabulary_size: int, **changes: Any) -> TransformerConfig:
        """Returns the shape for a vocabulary, with some fields changed, without loading torch.

        With another architecture than the preset's, stacks that it lacks get 0 layers.
        """
        fields = {"vocabulary_size": vocabulary_size, **self.model}
        if stacks := STACKS.get(changes.get("architecture", "")):
            fields |= dict.fromkeys({"encoder_layers", "decoder_layers"} - set(stacks), 0)
        return TransformerConfig.from_dict(fields | changes)

    def model_config(self, vocabulary_size: int, **changes: Any) -> ModelConfig:
        """Returns the model's config of such a shape."""
        from transferry.build_model.model.config import ModelConfig

        return ModelConfig.from_dict(self.shape(vocabulary_size, **changes).to_dict())

    def train_config(self, **changes: Any) -> TrainConfig:
        """Returns the training settings, with some fields changed."""
        return TrainConfig.from_dict({**self.train, **changes})


# The encoder runs once per sentence, the decoder once per token: a deep encoder with a shallow
# decoder is faster than equal depths and nearly as good (Kasai et al. 2021). Pre-norm, because
# six post-norm layers did not learn to attend at this rate (docs/training.md).
FAST: dict[str, Any] = dict(
    d_model=256,
    heads=4,
    encoder_layers=6,
    decoder_layers=2,
    d_ff=1024,
    dropout=0.3,
    norm_order="pre",
)
FAST_RATES: dict[str, Any] = dict(
    warmup_steps=1000, peak_learning_rate=1.5e-3, schedule="linear", max_steps=6000
)
WRITES: dict[str, Any] = dict(
    architecture="decoder-only", heads=4, encoder_layers=0, norm_order="pre"
)
# Of models of plain text.
PLAIN: dict[str, Any] = dict(
    batch_tokens=4096, warmup_steps=100, schedule="linear", label_smoothing=0.0
)
PRESETS = {
    "tiny": Preset(
        600,
        dict(d_model=64, heads=4, encoder_layers=2, decoder_layers=2, d_ff=256, dropout=0.0),
        dict(warmup_steps=200, peak_learning_rate=4e-3, label_smoothing=0.0, max_steps=3000),
    ),
    "mini": Preset(
        5000,
        dict(d_model=128, heads=4, encoder_layers=4, decoder_layers=4, d_ff=256, dropout=0.2),
        dict(warmup_steps=1000, peak_learning_rate=3e-3, schedule="linear", max_steps=6000),
    ),
    "small": Preset(
        8000,
        dict(d_model=256, heads=4, encoder_layers=3, decoder_layers=3, d_ff=1024, dropout=0.3),
        dict(warmup_steps=1000, peak_learning_rate=1.5e-3, schedule="linear", max_steps=6000),
    ),
    "fast": Preset(8000, FAST, FAST_RATES),
    # The decoder of Kim et al. (2019), in mini's width: 2.8 million products per token, where small
    # has 7.5, so that greedy search takes less than half of small's time. Its feed-forward layers
    # are wide, since products are the cheapest part of a narrow model.
    "student": Preset(
        5000,
        FAST | dict(decoder_cell="ssru", d_model=128, d_ff=768, dropout=0.2),
        FAST_RATES | dict(peak_learning_rate=3e-3),
    ),
    # The smallest language model that learns something.
    "textbook": Preset(
        8000,
        WRITES | dict(d_model=64, decoder_layers=8, d_ff=256, dropout=0.1, max_positions=16),
        PLAIN | dict(batch_tokens=512, peak_learning_rate=3e-3, max_steps=2000),
        encoding="cl100k_base",
    ),
    # Llama's architecture (Touvron et al. 2023) at a useful size.
    "prose": Preset(
        4000,
        WRITES
        | dict(d_model=256, decoder_layers=4, d_ff=688, dropout=0.2, max_positions=256)
        | dict(norm="rms", positions="rotary", activation="swiglu")
        | dict(bias=False, scale_embedding=False),
        PLAIN | dict(peak_learning_rate=2e-3, weight_decay=0.1, max_steps=1000),
    ),
    # BERT (Devlin et al. 2019) at a useful size, with pre-norm and rotary positions as in
    # ModernBERT (Warner et al. 2024): with learned positions it had not learned after 1,500 steps
    # which tokens are neighbours (docs/encoder-only.md).
    "reader": Preset(
        4000,
        dict(architecture="encoder-only", d_model=256, heads=4, encoder_layers=4, decoder_layers=0)
        | dict(d_ff=1024, dropout=0.1, max_positions=128, norm_order="pre", positions="rotary")
        | dict(activation="gelu", scale_embedding=False, embedding_norm=True)
        | dict(output_transform=True, output_bias=True),
        PLAIN | dict(warmup_steps=200, peak_learning_rate=1e-3, max_steps=2000),
    ),
    # Table 3 of the paper, rows "base" and "big", with the training of section 5.
    "base": Preset(
        37000,
        dict(d_model=512, heads=8, encoder_layers=6, decoder_layers=6, d_ff=2048, dropout=0.1),
        dict(batch_tokens=25000, warmup_steps=4000, peak_learning_rate=7e-4, max_steps=100_000),
    ),
    "big": Preset(
        37000,
        dict(d_model=1024, heads=16, encoder_layers=6, decoder_layers=6, d_ff=4096, dropout=0.3),
        dict(batch_tokens=25000, warmup_steps=4000, peak_learning_rate=5e-4, max_steps=300_000),
    ),
}
