"""Carries a trained Transformer from PyTorch to ONNX Runtime and runs it there.

The public names are those of `transferry.runtime`, loaded on first use:
`from transferry import Engine`.
"""

# Not typing's, whose import takes milliseconds in which signals are not handled yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from transferry.runtime import *  # noqa: F403

    __version__: str
else:

    def __getattr__(name: str) -> object:
        # On demand: importlib.metadata would slow every `transferry --help` down.
        if name == "__version__":
            from importlib.metadata import version

            return version("transferry")
        from importlib import import_module

        runtime = import_module("transferry.runtime")
        if name not in ("__all__", *runtime.__all__):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(runtime, name)

    def __dir__() -> list[str]:
        from transferry.runtime import __all__

        return [*__all__, "__version__"]
