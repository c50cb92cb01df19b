"""Shape of any model: the papers' fields, and those of each part; checked on construction."""

from dataclasses import dataclass

from transferry.build_model.model.parts.disentangled import DisentangledConfig
from transferry.build_model.model.parts.distances import DistancesConfig, RereadingConfig
from transferry.build_model.model.parts.embeddings import (
    InputsConfig,
    NarrowConfig,
    ProjectedSumConfig,
    SourceConfig,
)
from transferry.build_model.model.parts.heads import HeadConfig
from transferry.build_model.model.parts.shapes import (
    DivisorConfig,
    MultipliersConfig,
    OutputsConfig,
    ParallelConfig,
    QueryKeyNormConfig,
    ShapesConfig,
    SoftcapConfig,
)
from transferry.build_model.model.parts.windows import (
    CausalConfig,
    RotaryConfig,
    WindowsConfig,
)


@dataclass(frozen=True)
class ModelConfig(
    # The last is the innermost: its fields come first in JSON, its code runs first.
    MultipliersConfig,
    DisentangledConfig,
    CausalConfig,
    RereadingConfig,
    InputsConfig,
    HeadConfig,
    OutputsConfig,
    ProjectedSumConfig,
    DistancesConfig,
    SourceConfig,
    NarrowConfig,
    RotaryConfig,
    WindowsConfig,
    SoftcapConfig,
    DivisorConfig,
    ParallelConfig,
    QueryKeyNormConfig,
    ShapesConfig,
):
    """Shape of a model, with the parts of imported models."""
