"""Runs a bundle with onnxruntime; needs numpy, onnxruntime, tiktoken and small libraries.

The public names load their modules on first use: `import transferry.runtime` alone is cheap.
"""

from importlib import import_module

# As typing has it, whose import would take milliseconds in which a signal is not handled yet.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.decoding.batching import BatchOptions
    from transferry.runtime.decoding.generation_options import GenerationOptions
    from transferry.runtime.engine.engine import Engine
    from transferry.runtime.engine.open_bundle import verify
    from transferry.runtime.engine.preprocess import InLanguages
    from transferry.runtime.engine.result import GenerationResult, Results, RowError
    from transferry.runtime.engine.tasks.classify import (
        ClassifiedResult,
        RankedResult,
        TaggedResult,
    )
    from transferry.runtime.engine.tasks.embed import EmbeddingResult
    from transferry.runtime.engine.tasks.fill_mask import FilledMaskResult
    from transferry.runtime.engine.tasks.score import ScoreResult
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
    from transferry.runtime.tokenizer.byte_pair import Tokenizer
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "BadRowsError",
    "BatchOptions",
    "Bundle",
    "ClassifiedResult",
    "EmbeddingResult",
    "Engine",
    "FilledMaskResult",
    "GenerationOptions",
    "GenerationResult",
    "InLanguages",
    "InputError",
    "Job",
    "JobOptions",
    "ParityError",
    "ProviderError",
    "RankedResult",
    "Results",
    "RowError",
    "ScoreResult",
    "SessionOptions",
    "TaggedResult",
    "Tokenizer",
    "TransferryError",
    "UsageError",
    "verify",
]

_MODULES = {
    "BadRowsError": "errors",
    "BatchOptions": "decoding.batching",
    "Bundle": "bundle.bundle",
    "ClassifiedResult": "engine.tasks.classify",
    "EmbeddingResult": "engine.tasks.embed",
    "Engine": "engine.engine",
    "FilledMaskResult": "engine.tasks.fill_mask",
    "GenerationOptions": "decoding.generation_options",
    "GenerationResult": "engine.result",
    "InLanguages": "engine.preprocess",
    "InputError": "errors",
    "Job": "jobs.job",
    "JobOptions": "jobs.job_options",
    "ParityError": "errors",
    "ProviderError": "errors",
    "RankedResult": "engine.tasks.classify",
    "Results": "engine.result",
    "RowError": "engine.result",
    "ScoreResult": "engine.tasks.score",
    "SessionOptions": "ort.session",
    "TaggedResult": "engine.tasks.classify",
    "Tokenizer": "tokenizer.byte_pair",
    "TransferryError": "errors",
    "UsageError": "errors",
    "verify": "engine.open_bundle",
}
