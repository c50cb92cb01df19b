"""Shape of any model: the papers' fields, and those of each part; checked on construction."""

from dataclasses import dataclass

from transferry.build_model.model.parts.disentangled import DisentangledConfig
from transferry.build_model.model.parts.distances import DistancesConfig
from transferry.build_model.model.parts.embeddings import (
    NarrowConfig,
    ProjectedSumConfig,
    SourceConfig,
)
from transferry.build_model.model.parts.heads import HeadConfig
from transferry.build_model.model.parts.inputs import InputsConfig
from transferry.build_model.model.parts.multipliers import MultipliersConfig
from transferry.build_model.model.parts.rereading import RereadingConfig
from transferry.build_model.model.parts.rotary import RotaryConfig
from transferry.build_model.model.parts.scores import QueryKeyNormConfig, SoftcapConfig
from transferry.build_model.model.parts.shapes import (
    DivisorConfig,
    OutputsConfig,
    ParallelConfig,
    ShapesConfig,
)
from transferry.build_model.model.parts.windows import CausalConfig, WindowsConfig


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
