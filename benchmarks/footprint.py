"""Costs of a side besides speed: seconds to open, peak memory, bytes on disk.

`footprint` runs this file as a script, which is the measured process. It loads only what the side
itself needs: no torch, no converter.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sentences import search_options
from sides import Side
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import Variant

STATUS = Path("/proc/self/status")


def footprint(
    side: Side,
    texts: Sequence[str],
    search: Mapping[str, int],
    batch_rows: int,
    *,
    openings: int = 3,
) -> dict[str, Any]:
    """Measures a side in processes of its own.

    Args:
        side: The side.
        texts: Texts that it answers once.
        search: Arguments of `search_options`.
        batch_rows: Rows per batch.
        openings: Number of processes; only the first one answers.

    Returns:
        Medians import_seconds and open_seconds; opened_bytes and peak_bytes of memory, None if the
        system does not report them.
    """
    work = {"side": asdict(side), "search": dict(search), "batch_rows": batch_rows}
    found = [_child(work | {"texts": [] if number else list(texts)}) for number in range(openings)]
    return found[0] | {
        name: round(statistics.median(one[name] for one in found), 3)
        for name in ("import_seconds", "open_seconds")
    }


def _child(work: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        path.write_text(json.dumps(work), encoding="utf-8")
        result = subprocess.run(
            [sys.executable, __file__, str(path)], capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise RuntimeError(f"the measured process failed:\n{result.stderr}")
    return dict(json.loads(result.stdout.splitlines()[-1]))


def bundle_bytes(bundle: Bundle, variant: Variant) -> int:
    """Size of a bundle with this variant alone."""
    import onnx

    # Files beside the variants' folders serve all variants: tokenizer, recorded answers.
    files = {bundle.folder / name for name in bundle.manifest.files if "/" not in name}
    files.add(bundle.folder / MANIFEST)
    for graph in variant.graphs.values():
        path = bundle.graph(graph)
        files.add(path)
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            places = (entry.value for entry in tensor.external_data if entry.key == "location")
            files.update(path.parent / place for place in places)
    return sum(path.stat().st_size for path in files)


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _memory(field: str) -> int | None:
    """VmRSS or VmHWM of this process in bytes; `ru_maxrss` would include the parent's peak."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Opens a side, answers its texts and prints the costs."""
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    side = Side(**work["side"])
    started = time.perf_counter()
    side.load_library()
    imported = time.perf_counter()
    answer = side.open()
    opened = time.perf_counter()
    opened_bytes = _memory("VmRSS")
    if work["texts"]:
        answer(work["texts"], search_options(**work["search"]), work["batch_rows"])
    print(
        json.dumps(
            {
                "import_seconds": imported - started,
                "open_seconds": opened - imported,
                "opened_bytes": opened_bytes,
                "peak_bytes": _memory("VmHWM"),
            }
        )
    )


if __name__ == "__main__":
    main()
