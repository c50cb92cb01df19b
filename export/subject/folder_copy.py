"""A folder copied once, whose edited files are put back after each fault."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path


class FolderCopy(ABC):
    """An editable copy of a folder; the original is only read."""

    def __init__(self, original: Path, folder: Path) -> None:
        """Copies the folder, unless an earlier copy lies there.

        No links: onnx_ir and onnxruntime refuse weights outside of the folder, and onnx_ir those
        with several hard links too.
        """
        if not folder.is_dir():
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
