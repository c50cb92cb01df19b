"""The card of a model: name, licence and origin, which no computation needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from transferry.runtime.errors import require

MOST = 1000  # characters of a text, and texts of a list
Words = Annotated[str, Meta(max_length=MOST)]
Several = Annotated[tuple[Words, ...], Meta(max_length=MOST)]
SHOWN = 8  # names of a list


@dataclass(frozen=True)
class ModelCard:
    """Facts as the publisher states them; an empty one is unknown.

    The source is a repository and revision, or the model that this one was made from; `trained_on`
    lists data sets.
    """

    name: Words = ""
    source: Words = ""
    licence: Words = ""
    languages: Several = ()
    trained_on: Several = ()

    def stating(self, **stated: str | None) -> ModelCard:
        """Returns the card with other facts; None keeps one. Raises UsageError for a long text."""
        given = {name: value for name, value in stated.items() if value is not None}
        for name, value in given.items():
            require(len(value) <= MOST, name, f"at most {MOST:,} characters", f"{len(value):,}")
            # A command line may hold bytes that are no text.
            given[name] = " ".join(value.encode(errors="replace").decode().split())
        return ModelCard(**{**asdict(self), **given})

    def to_dict(self) -> dict[str, Any]:
        """Returns the known fields."""
        return {name: value for name, value in asdict(self).items() if value}

    def facts(self) -> dict[str, str]:
        """Returns the known facts as text, with long lists cut short."""
        known = self.to_dict().items()
        return {name: value if isinstance(value, str) else joined(value) for name, value in known}

    def cited(self) -> dict[str, str]:
        """Returns name, source and licence, for a report and a certificate."""
        cited = {"model": self.name, "source": self.source, "licence": self.licence}
        return {name: value for name, value in cited.items() if value}


UNKNOWN = ModelCard()


def joined(names: Sequence[str]) -> str:
    """Returns the first names of a list, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
