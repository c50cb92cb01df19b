"""Shape and training settings of a model: two frozen dataclasses, checked on construction."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from transferry.runtime.errors import UsageError, require


def _check_whole(config: _JsonConfig, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        holds = isinstance(value, int) and value >= least
        require(holds, name, f"a whole number of at least {least}", repr(value))


def _check_positive(config: _JsonConfig, *names: str) -> None:
    for name in names:
        require(getattr(config, name) > 0, name, "above 0", getattr(config, name))


def _check_probability(config: _JsonConfig, name: str) -> None:
    value = getattr(config, name)
    require(0 <= value < 1, name, "at least 0 and below 1", value)


def _check_choices(config: _JsonConfig) -> None:
    """Raises for values outside of a field's literals."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            choices, value = get_args(hint), getattr(config, name)
            require(value in choices, name, f"one of {', '.join(choices)}", repr(value))


class _JsonConfig:
    """Round trip through a dictionary; unknown fields are errors."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Makes the config from the result of `to_dict`.

        Raises:
            UsageError: A field is unknown, missing or outside its range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(values.keys() - fields.keys()):
            raise UsageError(
                f"{cls.__name__} has no {', '.join(unknown)}; it knows {', '.join(fields)}"
            )
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if missing := sorted(required - values.keys()):
            raise UsageError(f"{cls.__name__} needs {', '.join(missing)}, which is not given")
        return cls(**values)


Architecture = Literal["encoder-decoder", "decoder-only", "encoder-only"]
# Stacks of layers by architecture.
STACKS: dict[Architecture, tuple[str, ...]] = {
    "encoder-decoder": ("encoder_layers", "decoder_layers"),
    "decoder-only": ("decoder_layers",),
    "encoder-only": ("encoder_layers",),
}


@dataclass(frozen=True)
class ModelConfig(_JsonConfig):
    """Shape of a Transformer, in the terms of Vaswani et al. (2017).

    The defaults are that paper's model; the alternatives cover GPT-2, BERT, Llama and mixtures.

    Attributes:
        vocabulary_size: Rows of the embedding shared by source, target and output.
        d_model: Width of the hidden states.
        heads: Attention heads; each has the width d_model / heads.
        encoder_layers: Encoder layers; 0 for decoder-only.
        decoder_layers: Decoder layers; 0 for encoder-only.
        d_ff: Inner width of the feed-forward sublayer.
        dropout: Dropout probability of sublayer outputs and embedding sums.
        max_positions: Longest source or target, in tokens.
        norm_epsilon: Epsilon of the norm.
        architecture: "encoder-decoder" maps a source to a target, "decoder-only" continues a text,
            "encoder-only" reads one.
        norm: "layer" is LayerNorm (Ba et al. 2016), "rms" is RMSNorm (Zhang and Sennrich 2019).
        norm_order: "post" is Norm(x + Sublayer(x)) as in the paper; "pre" is x + Sublayer(Norm(x))
            with a final norm after each stack (Xiong et al. 2020).
        positions: "sinusoidal" (section 3.5 of the paper) and "learned" are added to the
            embedding; "rotary" rotates queries and keys (Su et al. 2021).
        rotary_base: Base of the rotary angles, theta in Llama.
        activation: Feed-forward activation; "gelu" is exact, "gelu-tanh" is GPT-2's approximation,
            "swiglu" adds a third matrix (Shazeer 2020).
        key_value_heads: Heads of keys and values, each shared by an equal group of query heads
            (Ainslie et al. 2023); 1 is multi-query attention, 0 means as many as heads.
        tied: Use the embedding as the output projection.
        bias: Add a bias to linear layers and LayerNorm.
        scale_embedding: Multiply the embedding by sqrt(d_model).
        embedding_norm: Normalise the sum of embedding and position, as in BERT.
        output_transform: Put a linear layer, the activation and a norm before the output
            projection, as in BERT.
        output_bias: Add a bias to the output projection, as in BERT and MarianMT.
    """

    vocabulary_size: int
    d_model: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    d_ff: int
    dropout: float = 0.1
    max_positions: int = 512
    norm_epsilon: float = 1e-5
    architecture: Architecture = "encoder-decoder"
    norm: Literal["layer", "rms"] = "layer"
    norm_order: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    rotary_base: float = 10000.0
    activation: Literal["relu", "gelu", "gelu-tanh", "swish", "swiglu"] = "relu"
    key_value_heads: int = 0
    tied: bool = True
    bias: bool = True
    scale_embedding: bool = True
    embedding_norm: bool = False
    output_transform: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        stacks = STACKS[self.architecture]
        sizes = ("vocabulary_size", "d_model", "heads", *stacks, "d_ff", "max_positions")
        _check_whole(self, 1, *sizes)
        _check_whole(self, 0, "key_value_heads")
        for name in {"encoder_layers", "decoder_layers"} - set(stacks):
            layers = getattr(self, name)
            require(layers == 0, name, f"0 for architecture {self.architecture}", repr(layers))
        require(
            self.d_model % self.heads == 0,
            "d_model",
            f"a multiple of heads ({self.heads})",
            self.d_model,
        )
        require(
            self.heads % self.kv_heads == 0,
            "heads",
            f"a multiple of key_value_heads ({self.kv_heads})",
            self.heads,
        )
        if self.positions == "sinusoidal":
            expected = "even for sinusoidal positions, which are pairs of sine and cosine"
            require(self.d_model % 2 == 0, "d_model", expected, self.d_model)
        if self.positions == "rotary":
            expected = "even for rotary positions, which turn pairs of features"
            require(self.d_head % 2 == 0, "d_model / heads", expected, self.d_head)
        _check_probability(self, "dropout")
        _check_positive(self, "norm_epsilon", "rotary_base")

    @property
    def d_head(self) -> int:
        """Width of one attention head, d_k in the paper."""
        return self.d_model // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.key_value_heads or self.heads


@dataclass(frozen=True)
class Preset:
    """A named shape with training settings that suit it.

    Attributes:
        vocabulary_size: Size of the vocabulary to train from the corpus.
        model: Fields of ModelConfig.
        train: Fields of TrainConfig that differ from the defaults.
        encoding: A tiktoken encoding to cut down to the corpus instead of training a vocabulary.
    """

    vocabulary_size: int
    model: dict[str, Any]
    train: dict[str, Any]
    encoding: str | None = None

    def model_config(self, vocabulary_size: int, **changes: Any) -> ModelConfig:
        """Returns the shape for a vocabulary, with some fields changed.

        With another architecture than the preset's, stacks that it lacks get 0 layers.
        """
        fields = {"vocabulary_size": vocabulary_size, **self.model}
        if stacks := STACKS.get(changes.get("architecture", "")):
            fields |= dict.fromkeys({"encoder_layers", "decoder_layers"} - set(stacks), 0)
        return ModelConfig.from_dict(fields | changes)

    def train_config(self, **changes: Any) -> TrainConfig:
        """Returns the training settings, with some fields changed."""
        return TrainConfig.from_dict({**self.train, **changes})


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
    # The encoder runs once per sentence, the decoder once per token: a deep encoder with a shallow
    # decoder is faster than equal depths and nearly as good (Kasai et al. 2021). Pre-norm, because
    # six post-norm layers did not learn to attend at this rate (docs/training.md).
    "fast": Preset(
        8000,
        dict(
            d_model=256,
            heads=4,
            encoder_layers=6,
            decoder_layers=2,
            d_ff=1024,
            dropout=0.3,
            norm_order="pre",
        ),
        dict(warmup_steps=1000, peak_learning_rate=1.5e-3, schedule="linear", max_steps=6000),
    ),
    # The smallest language model that learns something.
    "textbook": Preset(
        8000,
        dict(
            architecture="decoder-only",
            d_model=64,
            heads=4,
            encoder_layers=0,
            decoder_layers=8,
            d_ff=256,
            dropout=0.1,
            max_positions=16,
            norm_order="pre",
        ),
        dict(
            batch_tokens=512,
            warmup_steps=100,
            peak_learning_rate=3e-3,
            schedule="linear",
            label_smoothing=0.0,
            max_steps=2000,
        ),
        encoding="cl100k_base",
    ),
    # Llama's architecture (Touvron et al. 2023) at a useful size.
    "prose": Preset(
        4000,
        dict(
            architecture="decoder-only",
            d_model=256,
            heads=4,
            encoder_layers=0,
            decoder_layers=4,
            d_ff=688,
            dropout=0.2,
            max_positions=256,
            norm="rms",
            norm_order="pre",
            positions="rotary",
            activation="swiglu",
            bias=False,
            scale_embedding=False,
        ),
        dict(
            batch_tokens=4096,
            warmup_steps=100,
            peak_learning_rate=2e-3,
            schedule="linear",
            label_smoothing=0.0,
            weight_decay=0.1,
            max_steps=1000,
        ),
    ),
    # BERT (Devlin et al. 2019) at a useful size, with pre-norm and rotary positions as in
    # ModernBERT (Warner et al. 2024): with learned positions it had not learned after 1,500 steps
    # which tokens are neighbours (docs/encoder-only.md).
    "reader": Preset(
        4000,
        dict(
            architecture="encoder-only",
            d_model=256,
            heads=4,
            encoder_layers=4,
            decoder_layers=0,
            d_ff=1024,
            dropout=0.1,
            max_positions=128,
            norm_order="pre",
            positions="rotary",
            activation="gelu",
            scale_embedding=False,
            embedding_norm=True,
            output_transform=True,
            output_bias=True,
        ),
        dict(
            batch_tokens=4096,
            warmup_steps=200,
            peak_learning_rate=1e-3,
            schedule="linear",
            label_smoothing=0.0,
            max_steps=2000,
        ),
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


@dataclass(frozen=True)
class TrainConfig(_JsonConfig):
    """Training settings.

    Attributes:
        seed: Seed of the weights, dropout and the order of batches.
        batch_tokens: Largest batch, as rows times the longest side, padding included.
        accumulation: Batches whose gradients are added up for one step.
        peak_learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps over which the learning rate grows linearly from zero.
        schedule: Learning rate after the warm-up: "inverse-sqrt" decays as step ** -0.5 (eq. 3 of
            the paper), "linear" decays to zero at max_steps.
        precision: Precision of matrix products in the forward pass; "auto" is bfloat16 autocast on
            CUDA and float32 on the CPU, where bfloat16 pays off only with AMX.
        label_smoothing: Probability mass spread evenly over the vocabulary (section 5.4 of the
            paper).
        weight_decay: Weight decay of AdamW, on matrices only.
        clip_norm: Largest norm of a step's gradient.
        max_steps: Steps after which training ends; 0 means no limit, so max_minutes must be set.
        max_minutes: Minutes after which training ends; 0 means no limit, so max_steps must be set.
        validate_every: Steps between validations, each of which saves a checkpoint; 0 means once
            per epoch.
        patience: Validations without improvement before training stops; 0 never stops early.
        average: Most checkpoints averaged into the final weights.
        save_every: Steps between saves of the state that --resume continues from, besides those at
            each validation.
        valid_sentences: Most validation sentences translated for BLEU.
    """

    seed: int = 0
    batch_tokens: int = 2000
    accumulation: int = 1
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 600
    schedule: Literal["inverse-sqrt", "linear"] = "inverse-sqrt"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    max_steps: int = 0
    max_minutes: float = 0.0
    validate_every: int = 0
    patience: int = 0
    average: int = 5
    save_every: int = 500
    valid_sentences: int = 1000

    def __post_init__(self) -> None:
        at_least_1 = ("batch_tokens", "accumulation", "warmup_steps")
        _check_whole(self, 1, *at_least_1, "average", "save_every", "valid_sentences")
        _check_whole(self, 0, "seed", "max_steps", "validate_every", "patience")
        for name in ("max_minutes", "weight_decay"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _check_positive(self, "peak_learning_rate", "clip_norm")
        _check_probability(self, "label_smoothing")
        _check_choices(self)
        if self.schedule == "linear" and not self.max_steps:
            raise UsageError("schedule linear ends at max_steps, which is not set; set it")
        if not self.max_steps and not self.max_minutes:
            raise UsageError("training needs an end: set max_steps, max_minutes or both")

    def learning_rate(self, step: int) -> float:
        """Learning rate of step 1, 2, ... (Vaswani et al. 2017, eq. 3, scaled to the peak)."""
        warm = step / self.warmup_steps
        if self.schedule == "linear":
            falling = max(1, self.max_steps - self.warmup_steps)
            return self.peak_learning_rate * max(0.0, min(warm, (self.max_steps - step) / falling))
        return self.peak_learning_rate * min(warm, 1.0 / math.sqrt(warm))
