"""The machine and the packages of a measurement."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from transferry.runtime.hardware import cpu_name, instruction_sets, usable_cores


def processor() -> str:
    """Returns the processor and its instruction sets, for a line of results."""
    return " ".join([cpu_name(), *instruction_sets()])


def environment(*packages: str) -> dict[str, Any]:
    """Returns the processor, its instruction sets, the cores, and versions of packages."""
    from transferry.runtime.ort.graph_runner import RUNTIMES

    # Its distribution is onnxruntime-gpu on some systems.
    versions = {"onnxruntime": RUNTIMES["onnxruntime"].version()}
    for name in ("transferry", "numpy", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "instruction_sets": instruction_sets(),
        "versions": versions,
    }
