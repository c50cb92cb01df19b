"""Text in, text out, in the same order: tokenizer, batches, decoder and search together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from transferry.runtime.batching import BatchOptions
from transferry.runtime.bundle import MANIFEST, Bundle
from transferry.runtime.certificate import fastest, require_standing, standing
from transferry.runtime.errors import UsageError
from transferry.runtime.files import sha256
from transferry.runtime.hypothesis import FinishReason, Hypothesis
from transferry.runtime.model import Model, ServedDecoder, open_model
from transferry.runtime.onnx_encoder import OnnxEncoder
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Request
from transferry.runtime.pipeline import (
    Done,
    Item,
    Supply,
    Task,
    Todo,
    Worker,
    batch_worker,
    in_order,
)
from transferry.runtime.processor import usable_cores
from transferry.runtime.reading import Reader, Reading
from transferry.runtime.reference import verify_recorded
from transferry.runtime.rows import NOT_FINITE, RowError
from transferry.runtime.search import search_stream
from transferry.runtime.session import Optimisation, Provider, SessionOptions


@dataclass(frozen=True)
class Output:
    """One answer to a row.

    Attributes:
        text: The tokens as text.
        tokens: Ids, without the start and end tokens.
        score: What answers are ranked by: log-probability over length ** length_penalty; NaN where
            the options want no scores.
        log_probability: Of all tokens, the end token included, in nats; NaN likewise.
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
        source: The text that came in; nothing where an error came in.
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

    @property
    def target_tokens(self) -> int:
        """Length of the best answer, without the end token."""
        return len(self.outputs[0].tokens) if self.outputs else 0


class Engine:
    """Runs a bundle over any amount of text, in bounded memory."""

    def __init__(
        self,
        bundle: Bundle,
        model: Model,
        *,
        replicas: int = 1,
        batches: BatchOptions | None = None,
        certificate: str = "not looked for",
    ) -> None:
        """Puts an engine together; `load` is the usual way.

        Args:
            bundle: Gives the tokenizer and the model's limits.
            model: Computes; it is called by `replicas` threads at once.
            replicas: Batches in progress at a time.
            batches: How much each computes at once; by default what suits the model.
            certificate: What is known of the bundle here, for whoever reads a result.
        """
        if replicas < 1:
            raise UsageError(f"replicas must be at least 1, not {replicas}")
        self.bundle = bundle
        self.model = model
        self.replicas = replicas
        self.batches = batches or model.batches
        self.certificate = certificate
        self.max_positions = int(bundle.manifest.model["max_positions"])
        tokenizer = bundle.tokenizer
        self.reader = Reader(tokenizer.encode_batch, tokenizer.special, self.max_positions)

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
        require_certificate: bool = False,
    ) -> Self:
        """Opens a bundle on a provider.

        Where the bundle was verified on another processor, or with another version of onnxruntime,
        its recorded answers are computed again before anything else.

        Args:
            folder: The bundle.
            provider: "cpu" or "cuda"; never another than the one asked for.
            variant: Which variant; by default the one that `certificate.fastest` chooses.
            threads: Threads that share one operator. Two replicas of one thread are faster than
                one of two (docs/performance.md).
            replicas: Batches in progress at a time; by default one a usable core over threads on
                the CPU, and one on CUDA.
            device_id: Which GPU.
            optimisation: How far onnxruntime may rewrite the graphs.
            provider_options: Passed to the provider as they are.
            batches: How much is computed at once; by default what suits the variant.
            require_certificate: Refuse what was not verified, or has changed since.

        Raises:
            InputError: The bundle is damaged or not one.
            ParityError: A certificate is required, and none holds for this way of computing; or
                it was made elsewhere, and the recorded answers do not come out here.
            ProviderError: The provider cannot run here.
            UsageError: An option is out of range, or there is no such variant.
        """
        bundle = Bundle.load(Path(folder))
        options = SessionOptions(provider, threads, device_id, optimisation, provider_options or {})
        if replicas is None:
            replicas = max(1, usable_cores() // threads) if provider == "cpu" else 1
        chosen = bundle.variant(variant) if variant else fastest(bundle, options)
        found = standing(bundle, chosen, options)
        if require_certificate:
            require_standing(found, bundle)
        model = open_model(bundle, chosen, options)
        certificate = found.cite()
        if found.status == "elsewhere":
            verify_recorded(bundle, model).require()
            certificate += "; the recorded answers came out here too"
        return cls(bundle, model, replicas=replicas, batches=batches, certificate=certificate)

    @property
    def decoder(self) -> ServedDecoder:
        """What generates.

        Raises:
            UsageError: The model is an encoder alone.
        """
        if isinstance(self.model, OnnxEncoder):
            raise UsageError(
                f"{self.bundle.folder} holds an encoder-only model, which generates nothing; its "
                "tasks are embed and fill-mask"
            )
        return self.model

    @property
    def encoder(self) -> OnnxEncoder:
        """What embeds and fills in.

        Raises:
            UsageError: The model is not an encoder alone.
        """
        if not isinstance(self.model, OnnxEncoder):
            raise UsageError(
                f"{self.bundle.folder} holds a model of architecture "
                f"{self.bundle.manifest.architecture}, which neither embeds nor fills in; its task "
                "is generate"
            )
        return self.model

    def default_options(self) -> GenerationOptions:
        """Returns the options that the bundle's maker set."""
        return GenerationOptions(**self.bundle.manifest.generation)

    def describe(self) -> dict[str, Any]:
        """What explains the answers: versions, settings, and the manifest's hash."""
        return {
            "transferry": importlib.metadata.version("transferry"),
            "manifest_sha256": sha256(self.bundle.folder / MANIFEST),
            "certificate": self.certificate,
            "replicas": self.replicas,
            **self.model.describe(),
        }

    def source_of(self, text: str) -> list[int]:
        """Returns what the model reads of a text."""
        tokenizer = self.bundle.tokenizer
        return tokenizer.special.wrap(tokenizer.encode(text))

    def fitted(self, options: GenerationOptions, tokens: int) -> GenerationOptions:
        """Returns the options for a source of so many tokens: an answer needs positions too."""
        room = self._room(tokens, options)
        return replace(options, max_length=room, min_length=min(options.min_length, room))

    def generate(
        self,
        items: Iterable[str | RowError],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
    ) -> Iterator[Result]:
        """Answers each text, in order; reads ahead by at most two windows.

        An answer depends on its text and the options alone, for samples also on its place among
        the items; never on its neighbours or on how much is computed at once.

        Args:
            items: Any iterable, however long, of texts; an error is the result of its own row.
            options: How to search; the bundle's defaults if not given.
            first_row: The place of the first item, which seeds its samples.

        Raises:
            UsageError: The options ask for more positions than the model has.
        """
        options = options or self.default_options()
        if options.max_length > self.max_positions:
            raise UsageError(
                f"max_length is {options.max_length}, but the model has {self.max_positions} "
                "positions; lower max_length"
            )
        decoder, special = self.decoder, self.bundle.tokenizer.special

        def prepare(first: int, items: list[str | RowError]) -> list[Todo[_Row] | Result]:
            rows = [
                self._prepared(number, reading, options)
                for number, reading in enumerate(self.reader.read(items), start=first_row + first)
            ]
            if options.sample:
                return rows
            # What does not depend on the number of its row is the same for the same text.
            once: dict[str | RowError, Todo[_Row] | Result] = {}
            return [once.setdefault(item, row) for item, row in zip(items, rows, strict=True)]

        def work(supply: Supply[_Row, Result]) -> Iterator[tuple[Todo[_Row], Result]]:
            slots = max(1, self.batches.rows // max(options.beam, options.n_best))
            requests = _Requests(supply, options.prefix)
            found = search_stream(decoder, requests, options, special, slots=slots)
            for todo, hypotheses in found:
                yield todo, self._result(todo.task, hypotheses)

        return self._in_order(items, prepare, work)

    def map(
        self,
        items: Iterable[Item],
        prepare: Callable[[int, list[Item]], list[Todo[Task] | Done]],
        compute: Callable[[list[Task]], list[Done]],
    ) -> Iterator[Done]:
        """Computes items in batches, as this engine is set up, and in order.

        Args:
            items: See `pipeline.in_order`.
            prepare: See there.
            compute: Computes a batch.
        """
        return self._in_order(items, prepare, batch_worker(compute, self.batches.rows))

    def _in_order(
        self,
        items: Iterable[Item],
        prepare: Callable[[int, list[Item]], list[Todo[Task] | Done]],
        worker: Worker[Task, Done],
    ) -> Iterator[Done]:
        return in_order(items, prepare, worker, options=self.batches, replicas=self.replicas)

    def _prepared(
        self, number: int, reading: Reading, options: GenerationOptions
    ) -> Todo[_Row] | Result:
        text, source, error = reading.text, reading.ids, reading.error
        room = self._room(len(source), options)
        if error is None and len(options.prefix) > room:
            error = RowError(
                "too-long",
                f"{len(source)} tokens leave room for {room} in the model's {self.max_positions} "
                f"positions, but the prefix has {len(options.prefix)}; shorten either",
            )
        if error is not None:
            return Result(text, len(source), (), error)
        return Todo(_Row(number, text, source, room), len(source))

    def _room(self, tokens: int, options: GenerationOptions) -> int:
        """How long an answer may get; a prompt takes up positions, but for the last answer's."""
        if self.decoder.has_encoder:
            return options.max_length
        return max(1, min(options.max_length, self.max_positions - tokens + 1))

    def _result(self, row: _Row, hypotheses: Sequence[Hypothesis]) -> Result:
        usable = [item for item in hypotheses if item.finish_reason != "error"]
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
        error = None if usable else NOT_FINITE
        return Result(row.text, len(row.source), outputs, error)


@dataclass(frozen=True)
class _Row:
    """A text to be answered.

    Attributes:
        number: Of the row.
        text: What came in.
        source: What the model reads of it.
        room: Most tokens of its answer.
    """

    number: int
    text: str
    source: Sequence[int]
    room: int


@dataclass(frozen=True)
class _Requests:
    """The supply of a search out of that of the pipeline."""

    rows: Supply[_Row, Result]
    prefix: tuple[int, ...]

    def take(self, most: int, *, wait: bool) -> list[Request[Todo[_Row]]]:
        return [
            Request(todo, todo.task.source, todo.task.room, self.prefix, todo.task.number)
            for todo in self.rows.take(most, wait=wait)
        ]

    def ready(self, most: int) -> int:
        return self.rows.ready(most)
