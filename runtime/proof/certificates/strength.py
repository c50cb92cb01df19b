"""Strength of a verification. Imports nothing heavy: `--help` lists the strengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

# The weakest first.
Strength = Literal["recorded", "run without fresh graphs", "run"]
STRENGTHS: tuple[Strength, ...] = ("recorded", "run without fresh graphs", "run")
GRAPHS = "graphs"  # the claim that the graphs are those that export makes now


def strength_of(against: str, claims: Mapping[str, str]) -> Strength:
    """Returns the strength of a verification.

    Args:
        against: "the run" or "the recorded answers".
        claims: What was not compared, by claim; empty where everything was.
    """
    if against != "the run":
        return "recorded"
    # A report without this claim is no stronger than one that could not make it.
    return "run without fresh graphs" if claims.get(GRAPHS, "absent") else "run"
