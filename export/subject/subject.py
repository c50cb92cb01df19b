"""A model under proof, of any kind: it opens, and copies itself for faults to be planted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from numpy.typing import NDArray

from transferry.export.subject.folder_copy import FolderCopy
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder

# Any model, whatever its state is.
Observable = ObservableDecoder[Any] | ObservableEncoder
ModelT = TypeVar("ModelT", covariant=True)


class Subject(ABC, Generic[ModelT]):
    """A model under proof."""

    @abstractmethod
    def open(self) -> ModelT:
        """Opens the model; raises one of the project's errors if that fails."""

    @cached_property
    def model(self) -> ModelT:
        """The model, opened once."""
        return self.open()

    @property
    def tensors(self) -> frozenset[str] | None:
        """Names of the tensors to compare; None for all."""
        return None


class OpenedModel(Subject[ModelT]):
    """A model that is open already."""

    def __init__(self, model: ModelT) -> None:
        self._opened = model

    def open(self) -> ModelT:
        """Returns the model."""
        return self._opened


class CopiedSubject(Subject[ModelT]):
    """A model under proof in files, which can be copied and edited."""

    @abstractmethod
    def copy(self, folder: Path) -> FolderCopy:
        """Returns an editable copy in a folder; one that is there already is used again."""

    @abstractmethod
    def reopened(self, folder: Path) -> Self:
        """Returns the same kind of subject with the files of a copy."""

    def tried(self) -> Sequence[NDArray[Any]]:
        """Returns the answers to an input on which exporters commonly try a tolerance."""
        return ()
