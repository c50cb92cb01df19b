"""The self-test of every proof: faults are planted in copies of a subject, and checks catch them.

Each copy goes through the checks of the proof, in order, up to the first that fails. A copy that
passes is compared with the honest subject on inputs that the checks do not use, to tell a fault
that was missed from one that changes no answer.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.export.checks.check import Check, first_failure
from transferry.export.checks.weights import WEIGHTS
from transferry.export.subject.subject import CopiedSubject
from transferry.runtime.errors import TransferryError
from transferry.runtime.proof.certificates.strength import GRAPHS
from transferry.runtime.proof.report import PlantedFault

Given = TypeVar("Given")
# Plants a fault in a copy; returns the change and its place, None where there is no place.
Plant = Callable[[Any], str | None]
Applies = Callable[[ModelConfig], bool]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kind: Its name in the report.
        plant: Plants it in a copy and describes the change; see `Plant`.
        applies: Whether a model of this shape can have it.
        everywhere: Whether any variant can have it; else it is planted in graphs as torch's
            exporter writes them.
    """

    kind: str
    plant: Plant
    applies: Applies = lambda config: True
    everywhere: bool = False


class Faults(list[Fault]):
    """Kinds of fault, in the order of the report."""

    def kind(
        self, kind: str, applies: Applies = lambda config: True, *, everywhere: bool = False
    ) -> Callable[[Plant], Plant]:
        """Decorates the function that plants a kind; see `Fault`."""

        def register(plant: Plant) -> Plant:
            self.append(Fault(kind, plant, applies, everywhere))
            return plant

        return register


def rare_tokens(config: ModelConfig) -> tuple[int, int]:
    """Returns the two tokens in whose rows of the embedding faults are planted."""
    return config.vocabulary_size // 3, 2 * config.vocabulary_size // 3


def given(new: Given) -> Callable[[Given], Given]:
    """Returns a change that replaces anything with this."""
    return lambda old: new


def decodes(config: ModelConfig) -> bool:
    """Whether there is a decoder."""
    return bool(config.decoder_layers)


def stack(config: ModelConfig) -> tuple[str, int]:
    """Returns the stack with the most layers, and how many it has."""
    if config.decoder_layers >= config.encoder_layers:
        return "decoder", config.decoder_layers
    return "encoder", config.encoder_layers


def first(config: ModelConfig) -> str:
    """Returns the first layer that a token meets."""
    return "encoder.0" if config.encoder_layers else "decoder.0"


def last(config: ModelConfig) -> str:
    """Returns the last layer that a token meets."""
    stack = "decoder" if config.decoder_layers else "encoder"
    return f"{stack}.{getattr(config, f'{stack}_layers') - 1}"


def tables(config: ModelConfig) -> list[str]:
    """Returns the names of the tables of positions."""
    return ["cosines", "sines"] if config.positions == "rotary" else ["positions"]


SubjectT = TypeVar("SubjectT", bound=CopiedSubject[Any])


@dataclass(frozen=True)
class Gate(Generic[SubjectT]):
    """Checks that each faulty copy must fail.

    Attributes:
        subject: The honest subject; it is copied, never changed.
        checks: Returns the checks of a copy.
        differs: Whether a copy answers otherwise on inputs that the checks do not use.
        faults: Whether a check that does not run is a fault; else the copy fails by "running".
        atol: The user's own tolerance, tried on each copy; None without one.
    """

    subject: SubjectT
    checks: Callable[[SubjectT], Iterable[Check]]
    differs: Callable[[SubjectT], bool]
    faults: bool = False
    atol: float | None = None

    def caught_by(self, copy: SubjectT) -> str:
        """Returns the first check that fails; empty if all pass."""
        return first_failure(self.checks(copy), faults=self.faults)

    def changes(self, copy: SubjectT) -> bool:
        """Whether a copy gives other answers than the honest subject, or no answers."""
        try:
            return self.differs(copy)
        except TransferryError:
            return True

    def plant(self, faults: Sequence[Fault], folder: Path) -> Iterator[PlantedFault | None]:
        """Plants faults one at a time in a copy in a folder.

        Yields:
            The result of each fault; None where the graphs have no place for it.
        """
        honest = self.subject.tried() if self.atol is not None else ()
        for fault in faults:
            edited = self.subject.copy(folder)
            if (where := fault.plant(edited)) is None:
                yield None
                continue
            edited.seal()
            copy = self.subject.reopened(folder)
            caught = self.caught_by(copy)
            # A stored weight or an attribute may differ by less than any answer shows.
            changes = caught not in ("", WEIGHTS, GRAPHS) or self.changes(copy)
            distance = tolerated = None
            if self.atol is not None:
                distance = _distance(honest, copy)
                tolerated = distance <= self.atol
            yield PlantedFault(fault.kind, where, changes, caught, distance, tolerated)
            edited.restore()


def _distance(honest: Sequence[NDArray[Any]], copy: CopiedSubject[Any]) -> float:
    """Returns the largest difference of outputs; infinity if the copy does not run."""
    found: Sequence[NDArray[Any]] = ()
    with contextlib.suppress(TransferryError):
        found = copy.tried()
    if [each.shape for each in honest] != [each.shape for each in found]:
        return float("inf")
    pairs = zip(honest, found, strict=True)
    return max(float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) for a, b in pairs)
