"""Carries a trained Transformer from PyTorch to ONNX Runtime and runs it there."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # On demand: importlib.metadata would slow every `transferry --help` down.
        if name == "__version__":
            from importlib.metadata import version

            return version("transferry")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
