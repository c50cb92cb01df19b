"""Carries a trained Transformer from PyTorch to ONNX Runtime and runs it there."""

# As typing has it, whose import would take milliseconds in which a signal is not handled yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # On demand: importlib.metadata would slow every `transferry --help` down.
        if name == "__version__":
            from importlib.metadata import version

            return version("transferry")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
