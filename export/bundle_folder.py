"""The folder of a bundle: whether `export` may write it. Needs no torch."""

import re
from pathlib import Path
from typing import Any

from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.outputs import foreign_member
from transferry.runtime.proof.certificates.envelope import FOLDER


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
