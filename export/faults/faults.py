"""All kinds of fault that verification is tried with."""

from __future__ import annotations

from transferry.build_model.config import ModelConfig
from transferry.export.faults import graph_faults, weight_faults
from transferry.export.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (*weight_faults.FAULTS, *graph_faults.FAULTS)


def faults_of(config: ModelConfig) -> list[Fault]:
    """Returns the kinds that a model of this shape can have."""
    return [fault for fault in FAULTS if fault.applies(config)]
