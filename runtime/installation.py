"""The installed onnxruntime: its distributions, faults, and commands that fix them.

`onnxruntime` and `onnxruntime-gpu` install the same files: the last one installed wins, and
removing either leaves the other without its modules.
"""

import importlib.metadata
import re
from collections.abc import Mapping

CPU, GPU = "onnxruntime", "onnxruntime-gpu"
# Versions with the kernels and file checks that the graphs were tested with.
LEAST, BELOW = (1, 31), (1, 32)


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, from its metadata."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions(*distributions: str) -> dict[str, str]:
    """Version of each distribution that is installed."""
    found = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in found.items() if version}


def onnxruntime_fault(installed: Mapping[str, str], failure: str = "") -> tuple[str, str] | None:
    """Returns a fault of the installed distributions and the command that fixes it, or None.

    `installed` has the version of each distribution, `failure` the message of an import that
    failed.
    """
    told = ", ".join(f"{name} {version}" for name, version in installed.items())
    if len(installed) > 1:
        # Fetched first: without an index the command ends before anything is removed.
        kept = f"{GPU}=={installed[GPU]}"
        fetch = f"pip download --no-deps -d wheels {kept}"
        install = f"pip install --no-index --find-links wheels --no-deps --force-reinstall {kept}"
        found = f"{told}: both install the same files, and the last one wins"
        return found, f"{fetch} && pip uninstall --yes {CPU} && {install}"
    if not installed:
        if not failure:  # a build of another name, such as onnxruntime-directml
            return None
        wanted = f'"{CPU}>={_dotted(LEAST)},<{_dotted(BELOW)}"'
        remedy = f"pip install --no-deps {wanted}, or {GPU} of that version for CUDA"
        return f"not installed: {failure}", remedy
    ((name, version),) = installed.items()
    if failure:
        remedy = f"pip install --force-reinstall --no-deps {name}=={version}"
        return f"{told} is installed and cannot be imported: {failure}", remedy
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not LEAST <= numbers < BELOW:
        wanted = f"{_dotted(LEAST)} or a later version below {_dotted(BELOW)}"
        remedy = f'pip install --no-deps "{name}>={_dotted(LEAST)},<{_dotted(BELOW)}"'
        return f"{told}, expected {wanted}", remedy
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
