"""Runs a bundle with onnxruntime; needs numpy, onnxruntime, tiktoken and small libraries.

The public names load their modules on first use: `import transferry.runtime` alone is cheap.
"""

from importlib import import_module

# Not typing's, whose import takes milliseconds in which signals are not handled yet.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.decoding.batching import BatchOptions
    from transferry.runtime.decoding.generation_options import GenerationOptions
    from transferry.runtime.engine.engine import Engine, verify
    from transferry.runtime.engine.preprocess import InLanguages
    from transferry.runtime.engine.result import Results, RowError
    from transferry.runtime.engine.tasks.answer import AnsweredResult
    from transferry.runtime.engine.tasks.classify import ClassifiedResult
    from transferry.runtime.engine.tasks.embed import EmbeddingResult
    from transferry.runtime.engine.tasks.fill_mask import FilledMaskResult
    from transferry.runtime.engine.tasks.generate import GenerationResult
    from transferry.runtime.engine.tasks.rank import RankedResult
    from transferry.runtime.engine.tasks.score import ScoreResult
    from transferry.runtime.engine.tasks.tag import TaggedResult
    from transferry.runtime.errors import (
        BadRowsError,
        InputError,
        ParityError,
        ProviderError,
        TransferryError,
        UsageError,
    )
    from transferry.runtime.jobs.job import Job
    from transferry.runtime.jobs.job_options import JobOptions
    from transferry.runtime.ort.session import SessionOptions
    from transferry.runtime.proof.report import ParityReport
    from transferry.runtime.tokenizer.byte_pair import Tokenizer
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return __all__


__all__ = ["AnsweredResult", "BadRowsError", "BatchOptions", "Bundle", "ClassifiedResult"]
__all__ += ["EmbeddingResult", "Engine", "FilledMaskResult", "GenerationOptions"]
__all__ += ["GenerationResult", "InLanguages", "InputError", "Job", "JobOptions", "ParityError"]
__all__ += ["ParityReport", "ProviderError", "RankedResult", "Results", "RowError", "ScoreResult"]
__all__ += ["SessionOptions", "TaggedResult", "Tokenizer", "TransferryError", "UsageError"]
__all__ += ["verify"]


_NAMES = {
    "errors": (
        *("BadRowsError", "InputError", "ParityError", "ProviderError"),
        *("TransferryError", "UsageError"),
    ),
    "decoding.batching": ("BatchOptions",),
    "bundle.bundle": ("Bundle",),
    "engine.tasks.answer": ("AnsweredResult",),
    "engine.tasks.classify": ("ClassifiedResult",),
    "engine.tasks.embed": ("EmbeddingResult",),
    "engine.engine": ("Engine", "verify"),
    "engine.tasks.fill_mask": ("FilledMaskResult",),
    "decoding.generation_options": ("GenerationOptions",),
    "engine.result": ("Results", "RowError"),
    "engine.preprocess": ("InLanguages",),
    "jobs.job": ("Job",),
    "jobs.job_options": ("JobOptions",),
    "engine.tasks.generate": ("GenerationResult",),
    "engine.tasks.rank": ("RankedResult",),
    "engine.tasks.score": ("ScoreResult",),
    "engine.tasks.tag": ("TaggedResult",),
    "proof.report": ("ParityReport",),
    "ort.session": ("SessionOptions",),
    "tokenizer.byte_pair": ("Tokenizer",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
