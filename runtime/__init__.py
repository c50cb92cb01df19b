"""Runs a bundle with onnxruntime; needs numpy, onnxruntime, tiktoken and small libraries.

The public names load their modules on first use: `import transferry.runtime` alone is cheap.
"""

from importlib import import_module

# As typing has it, whose import would take milliseconds in which a signal is not handled yet.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from transferry.runtime.bundle import Bundle
    from transferry.runtime.decoding.options import GenerationOptions
    from transferry.runtime.engine.engine import Engine
    from transferry.runtime.engine.preprocess import InLanguages
    from transferry.runtime.jobs.job import Job
    from transferry.runtime.jobs.options import JobOptions
    from transferry.runtime.ort.session import SessionOptions
    from transferry.runtime.parity.recorded import verify
    from transferry.runtime.tokenizer.byte_pair import Tokenizer
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "Bundle",
    "Engine",
    "GenerationOptions",
    "InLanguages",
    "Job",
    "JobOptions",
    "SessionOptions",
    "Tokenizer",
    "verify",
]

_MODULES = {
    "Bundle": "bundle",
    "Engine": "engine.engine",
    "GenerationOptions": "decoding.options",
    "InLanguages": "engine.preprocess",
    "Job": "jobs.job",
    "JobOptions": "jobs.options",
    "SessionOptions": "ort.session",
    "Tokenizer": "tokenizer.byte_pair",
    "verify": "parity.recorded",
}
