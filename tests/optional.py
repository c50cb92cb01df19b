"""Values of the marker `optional` names: packages and programs that `make setup` leaves out."""

import importlib.util
import shutil
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = CHECKOUT / "js" / "node_modules"
OLDEST = CHECKOUT / ".venv-oldest" / "bin" / "python"  # with onnxruntime 1.17.3
HEADERS = CHECKOUT / "build" / "headers" / "usr" / "include" / "onnxruntime"
NPM = (
    *("onnxruntime-node", "onnxruntime-web", "sentencex-wasm", "@huggingface/jinja"),
    *("esbuild", "typescript", "vite", "webpack"),
)
# Programs, with other names of the same one.
PROGRAMS = {
    "g++": ("g++",),
    "node": ("node",),
    "npm": ("npm",),
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
}


def program(name: str) -> str | None:
    """Returns the path of a program; None where it is absent."""
    return next(filter(None, map(shutil.which, PROGRAMS[name])), None)


def is_installed(name: str) -> bool:
    """Whether a Python package, an npm package or a program is here."""
    if name in PROGRAMS:
        return program(name) is not None
    if name == "headers of onnxruntime":
        return HEADERS.exists()
    if name == "oldest":
        return OLDEST.exists()
    if name in NPM:
        return (PACKAGES / name).exists()
    return importlib.util.find_spec(name) is not None
