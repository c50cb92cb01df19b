"""A model under proof, of any kind: it opens, and copies itself for faults to be planted."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from numpy.typing import NDArray

from transferry.export.oracle.followed import ShownModel
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder

# Any model, whatever its state is.
Observable = ObservableDecoder[Any] | ObservableEncoder
ModelT = TypeVar("ModelT", covariant=True)


class Subject(ABC, Generic[ModelT]):
    """A model under proof."""

    # The model once more, with the integers that its graphs compute; None if it has none.
    shown: ShownModel | None = None

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


class FolderCopy(ABC):
    """An editable copy of a folder; the original is only read."""

    def __init__(self, original: Path, folder: Path, files: Iterable[str] | None = None) -> None:
        """Copies the folder, or some of its files, unless an earlier copy lies there.

        No links: onnx_ir and onnxruntime refuse weights outside of the folder, and onnx_ir those
        with several hard links too.
        """
        if files is not None and not folder.is_dir():
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(original / name, folder / name)
        elif not folder.is_dir():
            shutil.copytree(original, folder)
        self.original, self.folder = original, folder
        self.touched: set[str] = set()

    @abstractmethod
    def seal(self) -> None:
        """Writes the edits, so that the copy can be opened."""

    def restore(self) -> None:
        """Puts the touched files back, or removes those that the original lacks."""
        for name in self.touched:
            path = self.folder / name
            path.unlink(missing_ok=True)
            if (self.original / name).is_file():
                shutil.copy2(self.original / name, path)
        self.touched.clear()


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
