"""Text in, text out, in the same order: tokenizer, batches, decoder and search together."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from transferry.runtime.batching import BatchOptions, length_batches, windows
from transferry.runtime.bundle import MANIFEST, Bundle
from transferry.runtime.errors import UsageError
from transferry.runtime.files import sha256
from transferry.runtime.hypothesis import FinishReason, Hypothesis
from transferry.runtime.onnx_decoder import OnnxDecoder
from transferry.runtime.options import GenerationOptions
from transferry.runtime.processor import usable_cores
from transferry.runtime.search import search
from transferry.runtime.session import Optimisation, Provider, SessionOptions

RowErrorKind = Literal["empty", "too-long", "not-finite"]


@dataclass(frozen=True)
class RowError:
    """Why a row has no answer.

    Attributes:
        kind: A word for programs.
        message: A sentence for people.
    """

    kind: RowErrorKind
    message: str


@dataclass(frozen=True)
class Output:
    """One answer to a row.

    Attributes:
        text: The tokens as text.
        tokens: Ids, without the start and end tokens.
        score: What answers are ranked by: log-probability over length ** length_penalty.
        log_probability: Of all tokens, the end token included, in nats.
        finish_reason: "end", or "length" where max_length cut it off.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    log_probability: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Result:
    """What became of one row: answers, best first, or an error.

    Attributes:
        source: The text that came in.
        source_tokens: Its length, the end token included.
        outputs: `n_best` answers, or fewer where the search found fewer; none on an error.
        error: None where there is an answer.
    """

    source: str
    source_tokens: int
    outputs: tuple[Output, ...]
    error: RowError | None = None

    @property
    def text(self) -> str:
        """The best answer, or nothing on an error."""
        return self.outputs[0].text if self.outputs else ""


class Engine:
    """Runs a bundle over any amount of text, in bounded memory."""

    def __init__(
        self,
        bundle: Bundle,
        decoder: OnnxDecoder,
        *,
        replicas: int = 1,
        batches: BatchOptions | None = None,
    ) -> None:
        """Puts an engine together; `load` is the usual way.

        Args:
            bundle: Gives the tokenizer and the model's limits.
            decoder: Computes; it is called by `replicas` threads at once.
            replicas: Batches in progress at a time.
            batches: How much each computes at once.
        """
        if replicas < 1:
            raise UsageError(f"replicas must be at least 1, not {replicas}")
        self.bundle = bundle
        self.decoder = decoder
        self.replicas = replicas
        self.batches = batches or BatchOptions()
        self.max_positions = int(bundle.manifest.model["max_positions"])

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        provider: Provider = "cpu",
        variant: str | None = None,
        threads: int = 1,
        replicas: int | None = None,
        device_id: int = 0,
        optimisation: Optimisation = "all",
        provider_options: Mapping[str, str] | None = None,
        batches: BatchOptions | None = None,
    ) -> Self:
        """Opens a bundle on a provider.

        Args:
            folder: The bundle.
            provider: "cpu" or "cuda"; never another than the one asked for.
            variant: Which variant; the first of the manifest by default.
            threads: Threads that share one operator. Two replicas of one thread are faster than
                one of two (docs/speed.md).
            replicas: Batches in progress at a time; by default one a usable core over threads on
                the CPU, and one on CUDA.
            device_id: Which GPU.
            optimisation: How far onnxruntime may rewrite the graphs.
            provider_options: Passed to the provider as they are.
            batches: How much is computed at once.

        Raises:
            InputError: The bundle is damaged or not one.
            ProviderError: The provider cannot run here.
            UsageError: An option is out of range, or there is no such variant.
        """
        bundle = Bundle.load(Path(folder))
        options = SessionOptions(provider, threads, device_id, optimisation, provider_options or {})
        if replicas is None:
            replicas = max(1, usable_cores() // threads) if provider == "cpu" else 1
        decoder = OnnxDecoder(bundle, bundle.variant(variant), options)
        return cls(bundle, decoder, replicas=replicas, batches=batches)

    def default_options(self) -> GenerationOptions:
        """Returns the options that the bundle's maker set."""
        return GenerationOptions(**self.bundle.manifest.generation)

    def describe(self) -> dict[str, Any]:
        """What explains the answers: versions, settings, and the manifest's hash."""
        return {
            "transferry": importlib.metadata.version("transferry"),
            "manifest_sha256": sha256(self.bundle.folder / MANIFEST),
            "replicas": self.replicas,
            **self.decoder.describe(),
        }

    def generate(
        self, texts: Iterable[str], options: GenerationOptions | None = None
    ) -> Iterator[Result]:
        """Answers each text, in order; reads ahead by at most two windows.

        An answer depends on its text and the options alone, for samples also on its place in
        `texts`; never on its neighbours or on how much is computed at once.

        Args:
            texts: Any iterable, however long.
            options: How to search; the bundle's defaults if not given.

        Raises:
            UsageError: The options ask for more positions than the model has.
        """
        options = options or self.default_options()
        if options.max_length > self.max_positions:
            raise UsageError(
                f"max_length is {options.max_length}, but the model has {self.max_positions} "
                "positions; lower max_length"
            )
        return self._stream(texts, options)

    def _stream(self, texts: Iterable[str], options: GenerationOptions) -> Iterator[Result]:
        pool = ThreadPoolExecutor(self.replicas, thread_name_prefix="replica")
        try:
            first = 0
            pending: deque[_Window] = deque()
            for window in windows(texts, self.batches.window):
                pending.append(self._submit(pool, window, first, options))
                first += len(window)
                # One window is computed while the next is read, so that no replica waits.
                if len(pending) > 1:
                    yield from self._collect(pending.popleft())
            while pending:
                yield from self._collect(pending.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, texts: list[str], first: int, options: GenerationOptions
    ) -> _Window:
        tokenizer = self.bundle.tokenizer
        sources = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]
        results = [
            Result(text, len(source), (), self._refusal(text, source))
            for text, source in zip(texts, sources, strict=True)
        ]
        good = [index for index, result in enumerate(results) if result.error is None]
        batches = length_batches(
            [len(sources[index]) for index in good],
            max(1, self.batches.rows // max(options.beam, options.n_best)),
            self.batches.tokens,
        )
        jobs = []
        for batch in batches:
            rows = [good[index] for index in batch]
            future = pool.submit(
                search,
                self.decoder,
                [sources[row] for row in rows],
                options,
                pad_id=tokenizer.pad_id,
                bos_id=tokenizer.bos_id,
                eos_id=tokenizer.eos_id,
                row_ids=[first + row for row in rows],
            )
            jobs.append((rows, future))
        return _Window(results, jobs)

    def _refusal(self, text: str, source: Sequence[int]) -> RowError | None:
        if not text.strip():
            return RowError("empty", "there is no text to work on")
        if len(source) > self.max_positions:
            return RowError(
                "too-long",
                f"{len(source)} tokens, but the model has {self.max_positions} positions; "
                "split the text",
            )
        return None

    def _collect(self, window: _Window) -> Iterator[Result]:
        results = window.results
        for rows, future in window.jobs:
            for row, hypotheses in zip(rows, future.result(), strict=True):
                results[row] = self._result(results[row], hypotheses)
        yield from results

    def _result(self, result: Result, hypotheses: Sequence[Hypothesis]) -> Result:
        usable = [item for item in hypotheses if item.finish_reason != "error"]
        if not usable:
            message = "the model gave NaN or infinity; verify the bundle on this provider"
            return replace(result, error=RowError("not-finite", message))
        outputs = tuple(
            Output(
                self.bundle.tokenizer.decode(item.tokens),
                item.tokens,
                item.score,
                item.log_probability,
                item.finish_reason,
            )
            for item in usable
        )
        return replace(result, outputs=outputs)


@dataclass(frozen=True)
class _Window:
    """Rows being worked on: their results so far, and the batches that will complete them."""

    results: list[Result]
    jobs: list[tuple[list[int], Future[list[list[Hypothesis]]]]]
