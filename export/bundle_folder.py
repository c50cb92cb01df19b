"""The folder of a bundle: whether `export` may write it. Needs no torch."""

import re
from pathlib import Path
from typing import Any

from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.outputs import foreign_member, require_own
from transferry.runtime.proof.certificates.envelope import FOLDER


def require_replaceable(out: Path, *, force: bool) -> None:
    """Raises UsageError for a folder that exists, with `force` for one that is no bundle."""
    if out.exists() and not force:
        raise UsageError(f"{out} exists already; add --force to replace it, or name another folder")
    require_own(out, foreign_bundle)


def foreign_bundle(folder: Path) -> str:
    """Returns what is wrong with a folder that should be a bundle; "" if nothing is."""
    try:
        record = read_document(folder / MANIFEST, dict[str, Any], "")
    except InputError:
        record = {}
    # Of any format: an older bundle is replaced too.
    kinds = {"format": int, "model": dict, "variants": dict, "files": dict}
    if not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        return "exists and is no bundle"
    own = {MANIFEST, *record["files"]}
    return foreign_member(
        folder, lambda name: name in own or re.fullmatch(rf"{FOLDER}/[^/]+\.json", name) is not None
    )
