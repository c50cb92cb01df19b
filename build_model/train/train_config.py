"""Settings of a training, checked on construction."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from transferry.build_model.model.shape import JsonConfig, Rate, TransformerConfig
from transferry.runtime.errors import Option, UsageError, require
from transferry.runtime.settings import Count, Probability, Whole, Whole64

_Cap = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


@dataclass(frozen=True)
class TrainConfig(JsonConfig):
    """Training settings.

    Attributes:
        seed: Seed of the weights, dropout and the order of batches.
        batch_tokens: Largest batch, as rows times the longest side, padding included.
        accumulation: Batches whose gradients are added up for one step.
        peak_learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps of linear growth of the learning rate from zero.
        schedule: Learning rate after the warm-up: step ** -0.5 (eq. 3 of the paper), or linear to
            zero at max_steps.
        precision: Precision of matrix products in the forward pass; auto is bfloat16 on CUDA,
            float32 on the CPU, where bfloat16 pays off only with AMX.
        label_smoothing: Probability mass spread evenly over the vocabulary.
        r_drop: Weight of R-Drop's divergence between two readings of each batch (Wu et al. 2021); 0
            disables it.
        bpe_dropout: Probability of leaving out a merge, drawn anew in each step (Provilkov et al.
            2020); 0 disables it.
        weight_decay: Weight decay of AdamW, on matrices only.
        clip_norm: Largest norm of a step's gradient.
        max_steps: Limit on the steps; 0 is no limit and needs max_minutes.
        max_minutes: Limit on the minutes; 0 is no limit and needs max_steps.
        validate_every: Steps between validations, each with a checkpoint; 0 is once per epoch.
        patience: Validations without improvement before an early stop; 0 disables it.
        average: Limit on the checkpoints averaged into the final weights.
        save_every: Steps between saves for --resume, besides those at validations.
        valid_sentences: Limit on the validation sentences translated for BLEU.
    """

    seed: Whole64 = 0
    batch_tokens: Count = 2000
    accumulation: Count = 1
    peak_learning_rate: Rate = 2e-3
    warmup_steps: Count = 600
    schedule: Literal["inverse-sqrt", "linear"] = "inverse-sqrt"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    label_smoothing: Probability = 0.1
    r_drop: _Cap = 0.0
    bpe_dropout: Probability = 0.0
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.01
    clip_norm: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    max_steps: Whole = 0
    max_minutes: Annotated[float, msgspec.Meta(ge=0, le=1e7)] = 0.0
    validate_every: Whole = 0
    patience: Whole = 0
    average: Count = 5
    save_every: Count = 500
    valid_sentences: Count = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "linear" and not self.max_steps:
            raise UsageError("schedule linear ends at ", Option("max_steps"), "; set it")
        if not self.max_steps and not self.max_minutes:
            limits = Option("max_steps"), ", ", Option("max_minutes")
            raise UsageError("training needs an end: set ", *limits, " or both")

    def learning_rate(self, step: int) -> float:
        """Learning rate of step 1, 2, ... (Vaswani et al. 2017, eq. 3, scaled to the peak)."""
        warm = step / self.warmup_steps
        if self.schedule == "linear":
            falling = max(1, self.max_steps - self.warmup_steps)
            return self.peak_learning_rate * max(0.0, min(warm, (self.max_steps - step) / falling))
        return self.peak_learning_rate * min(warm, 1.0 / math.sqrt(warm))


def require_fitting(model: TransformerConfig, config: TrainConfig) -> None:
    """Raises UsageError for settings that have no effect on a model of this shape."""
    pairs = model.architecture == "encoder-decoder"
    expected = "0 unless the model is an encoder-decoder, which is trained on whole texts"
    require(pairs or not config.bpe_dropout, "bpe_dropout", expected, config.bpe_dropout)
    expected = "0 where dropout is 0, with which both readings of a batch are the same"
    require(model.dropout > 0 or not config.r_drop, "r_drop", expected, config.r_drop)
