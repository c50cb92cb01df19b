"""Lists the files of a folder as a manifest does."""

from pathlib import Path

from transferry.runtime.io.sealed_folder import FileRecord
from transferry.runtime.io.whole import sha256


def records(folder: Path) -> dict[str, FileRecord]:
    """Hash and size of each file of a folder but its manifest."""
    return {
        path.relative_to(folder).as_posix(): FileRecord(sha256(path), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
