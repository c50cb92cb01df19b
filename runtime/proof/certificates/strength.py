"""Strength of a verification. Imports nothing heavy: `--help` lists the strengths."""

from collections.abc import Mapping
from typing import Literal

# The weakest first.
Strength = Literal["recorded", "checkpoint without fresh graphs", "checkpoint"]
STRENGTHS: tuple[Strength, ...] = ("recorded", "checkpoint without fresh graphs", "checkpoint")
# Former names, in settings files and in recorded certificates and reports.
FORMER = {"run": "checkpoint", "run without fresh graphs": "checkpoint without fresh graphs"}
CHECKPOINT = "the checkpoint"  # the other side of a comparison
GRAPHS = "graphs"  # the claim that the graphs are those that export makes now


def is_checkpoint(against: object) -> bool:
    """Whether the recorded other side of a comparison is the checkpoint."""
    return against in (CHECKPOINT, "the run")


def strength_of(against: str, claims: Mapping[str, str]) -> Strength:
    """Returns the strength of a verification against "the checkpoint" or "the recorded answers".

    `claims` names what was not compared, by claim; empty where everything was.
    """
    if not is_checkpoint(against):
        return "recorded"
    # A report without this claim is no stronger than one that could not make it.
    return "checkpoint without fresh graphs" if claims.get(GRAPHS, "absent") else "checkpoint"
