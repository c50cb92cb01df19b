"""Text in, text out, in the same order: tokenizer, batches, decoder and search together."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from transferry.runtime.bundle import MANIFEST, Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import search_stream
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    LongRows,
    Preprocessor,
    check_long_rows,
    sentences_version,
)
from transferry.runtime.engine.result import (
    NOT_FINITE,
    GenerationResult,
    RowError,
    TextHypothesis,
    joined,
)
from transferry.runtime.engine.worker_pool import (
    Done,
    Item,
    Task,
    Tasks,
    Worker,
    WorkItem,
    batch_worker,
    in_order,
    sparing,
)
from transferry.runtime.errors import UsageError
from transferry.runtime.files import sha256
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import Model, ServedDecoder, open_model
from transferry.runtime.ort.session import Optimisation, Provider, SessionOptions
from transferry.runtime.parity.certificate import fastest, require_standing, standing
from transferry.runtime.parity.recorded import verify_recorded

AnyModel = TypeVar("AnyModel", bound=Model)

# By how much the numbers of a row's pieces differ: more than there are rows.
PIECE = 1 << 40


class Engine:
    """Runs a bundle over any amount of text, in bounded memory."""

    def __init__(
        self,
        bundle: Bundle,
        *models: Model,
        replicas: int = 1,
        batches: BatchOptions | None = None,
        certificate: str = "not looked for",
        require_certificate: bool = False,
    ) -> None:
        """Puts an engine together; `load` is the usual way.

        Args:
            bundle: Gives the tokenizer and the model's limits.
            models: The same variant, opened on a device each. Each is called by `replicas` threads
                at once; all of them take from the same rows.
            replicas: Batches in progress at a time, on each device.
            batches: How much each computes at once; by default what suits the model.
            certificate: What is known of the bundle here, for whoever reads a result.
            require_certificate: Refuse to answer in ways that no certificate covers.
        """
        if replicas < 1:
            raise UsageError(f"replicas must be at least 1, not {replicas}")
        self.bundle = bundle
        self.models = models
        self.model = models[0]
        self.replicas = replicas
        self.batches = batches or self.model.batches
        self.certificate = certificate
        self.require_certificate = require_certificate
        self.max_positions = int(bundle.manifest.model["max_positions"])
        tokenizer = bundle.tokenizer
        self.reader = Preprocessor(
            tokenizer.encode_batch, tokenizer.special, self.max_positions, tokenizer.longest_token
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        provider: Provider = "cpu",
        variant: str | None = None,
        threads: int = 1,
        replicas: int | None = None,
        device_ids: Sequence[int] = (0,),
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
                the CPU, and one on each device of CUDA.
            device_ids: Which GPUs; all of them work on the same rows.
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
        if len(set(device_ids)) != len(device_ids) or not device_ids:
            raise UsageError(f"expected devices, each of them once, found {list(device_ids)}")
        if provider == "cpu" and len(device_ids) > 1:
            raise UsageError(
                f"provider cpu is one device, found {list(device_ids)}; choose provider cuda, or "
                "more replicas"
            )
        devices = [
            SessionOptions(provider, threads, device, optimisation, provider_options or {})
            for device in device_ids
        ]
        if replicas is None:
            replicas = max(1, usable_cores() // threads) if provider == "cpu" else 1
        chosen = bundle.variant(variant) if variant else fastest(bundle, devices[0])
        models: list[Model] = []
        certificates: dict[str, None] = {}
        for options in devices:  # which may be of several kinds
            found = standing(bundle, chosen, options)
            if require_certificate:
                require_standing(found, bundle)
            models.append(open_model(bundle, chosen, options))
            certificate = found.cite()
            if found.status == "elsewhere":
                verify_recorded(bundle, models[-1]).require()
                certificate += "; the recorded answers came out here too"
            certificates[certificate] = None
        certificate = "; ".join(certificates)
        return cls(
            bundle,
            *models,
            replicas=replicas,
            batches=batches,
            certificate=certificate,
            require_certificate=require_certificate,
        )

    @property
    def decoder(self) -> ServedDecoder:
        """What generates, on the first device.

        Raises:
            UsageError: The model is an encoder alone.
        """
        return self.decoders[0]

    @property
    def decoders(self) -> Sequence[ServedDecoder]:
        """What generates, on each device; see `decoder`."""
        decoders = [model for model in self.models if not isinstance(model, EncoderModel)]
        if not decoders:
            raise UsageError(
                f"{self.bundle.folder} holds an encoder-only model, which generates nothing; its "
                "tasks are embed and fill-mask"
            )
        return decoders

    @property
    def encoder(self) -> EncoderModel:
        """What embeds and fills in, on the first device.

        Raises:
            UsageError: The model is not an encoder alone.
        """
        return self.encoders[0]

    @property
    def encoders(self) -> Sequence[EncoderModel]:
        """What embeds and fills in, on each device; see `encoder`."""
        encoders = [model for model in self.models if isinstance(model, EncoderModel)]
        if not encoders:
            raise UsageError(
                f"{self.bundle.folder} holds a model of architecture "
                f"{self.bundle.manifest.architecture}, which neither embeds nor fills in; its task "
                "is generate"
            )
        return encoders

    def default_options(self) -> GenerationOptions:
        """Returns the options that the bundle's maker set."""
        return GenerationOptions(**self.bundle.manifest.generation)

    def describe(self) -> dict[str, Any]:
        """What explains the answers: versions, settings, and the manifest's hash."""
        return {
            "transferry": importlib.metadata.version("transferry"),
            "manifest_sha256": sha256(self.bundle.folder / MANIFEST),
            "certificate": self.certificate,
            "devices": len(self.models),
            "replicas": self.replicas,
            "sentencex": sentences_version(),
            **self.model.describe(),
        }

    def read(
        self,
        items: Sequence[str | RowError],
        options: GenerationOptions,
        long_rows: LongRows = "error",
    ) -> list[EncodedRow]:
        """Returns what the model reads of rows that it is to answer."""
        # A prompt that is cut short leaves positions for the prefix and one token of an answer.
        reserve = 0 if self.decoder.has_encoder else len(options.prefix)
        return self.reader.read(items, long_rows, reserve)

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
        long_rows: LongRows = "error",
    ) -> Iterator[GenerationResult]:
        """Answers each text, in order; reads ahead by at most two windows.

        An answer depends on its text and the options alone, for samples also on its place among
        the items; never on its neighbours or on how much is computed at once.

        Args:
            items: Any iterable, however long, of texts; an error is the result of its own row.
            options: How to search; the bundle's defaults if not given.
            first_row: The place of the first item, which seeds its samples.
            long_rows: What becomes of texts of more tokens than the model has positions: an
                "error"; or "truncate", which answers their beginning; or "split", which answers
                them piece by piece, sentences as far as they fit together, and joins the answers.
                Each piece's answer has the options' lengths and begins with their prefix.

        Raises:
            UsageError: The options ask for more positions than the model has, or exclude that rows
                are split.
        """
        options = options or self.default_options()
        if options.max_length > self.max_positions:
            raise UsageError(
                f"max_length is {options.max_length}, but the model has {self.max_positions} "
                "positions; lower max_length"
            )
        special = self.bundle.tokenizer.special
        conflict = "" if self.decoder.has_encoder else "a decoder-only bundle"
        check_long_rows(long_rows, f"n_best={options.n_best}" if options.n_best > 1 else conflict)
        cuts: deque[tuple[str, int]] = deque()

        def prepare(
            first: int, items: list[str | RowError]
        ) -> list[WorkItem[_Row] | GenerationResult]:
            rows: list[WorkItem[_Row] | GenerationResult] = []
            # What does not depend on the number of its row is the same for the same text.
            once: dict[str | RowError, list[WorkItem[_Row] | GenerationResult]] = {}
            readings = self.read(items, options, long_rows)
            for number, item in enumerate(items):
                if options.sample or item not in once:
                    row = first_row + first + number
                    once[item] = self._pieces(row, readings[number], options, long_rows)
                rows += once[item]
                if long_rows == "split":
                    cuts.append((readings[number].text, len(once[item])))
            return rows

        def work(
            decoder: ServedDecoder, rows: Tasks[_Row], slots: int
        ) -> Iterator[tuple[WorkItem[_Row], GenerationResult]]:
            def take(most: int) -> list[Request[WorkItem[_Row]]]:
                return [
                    Request(
                        todo, todo.task.source, todo.task.room, options.prefix, todo.task.number
                    )
                    for todo in rows.take(most)
                ]

            found = search_stream(decoder, take, options, special, slots=slots)
            for todo, hypotheses in found:
                yield todo, self._result(todo.task, hypotheses)

        slots = max(1, self.batches.rows // max(options.beam, options.n_best))
        workers = [sparing(partial(work, decoder), slots) for decoder in self.decoders]
        results = self._in_order(items, prepare, workers)
        return joined(results, cuts, options.length_penalty) if long_rows == "split" else results

    def map(
        self,
        items: Iterable[Item],
        prepare: Callable[[int, list[Item]], list[WorkItem[Task] | Done]],
        compute: Callable[[AnyModel, list[Task]], list[Done]],
        models: Sequence[AnyModel],
    ) -> Iterator[Done]:
        """Computes items in batches, as this engine is set up, and in order.

        Args:
            items: See `pipeline.in_order`.
            prepare: See there.
            compute: Computes a batch on one of the models.
            models: `decoders` or `encoders`.
        """
        workers = [batch_worker(partial(compute, model), self.batches.rows) for model in models]
        return self._in_order(items, prepare, workers)

    def _in_order(
        self,
        items: Iterable[Item],
        prepare: Callable[[int, list[Item]], list[WorkItem[Task] | Done]],
        workers: Sequence[Worker[Task, Done]],
    ) -> Iterator[Done]:
        return in_order(items, prepare, [*workers] * self.replicas, options=self.batches)

    def _pieces(
        self, number: int, reading: EncodedRow, options: GenerationOptions, long_rows: LongRows
    ) -> list[WorkItem[_Row] | GenerationResult]:
        """What is to be answered of a row, or why nothing is."""
        if long_rows != "split" or reading.error is None or reading.error.kind != "too-long":
            return [self._prepared(number, reading, options)]
        pieces = self.read(self.reader.pieces(reading.text), options)
        # Each piece has samples of its own, the first those of its row.
        return [
            self._prepared(number + place * PIECE, piece, options)
            for place, piece in enumerate(pieces)
        ]

    def _prepared(
        self, number: int, reading: EncodedRow, options: GenerationOptions
    ) -> WorkItem[_Row] | GenerationResult:
        text, source, error = reading.text, reading.ids, reading.error
        room = self._room(len(source), options)
        if error is None and len(options.prefix) > room:
            error = RowError(
                "too-long",
                f"{len(source)} tokens leave room for {room} in the model's {self.max_positions} "
                f"positions, but the prefix has {len(options.prefix)}; shorten either",
            )
        if error is not None:
            return GenerationResult(text, reading.tokens, (), error)
        return WorkItem(_Row(number, text, source, room, reading.truncated), len(source))

    def _room(self, tokens: int, options: GenerationOptions) -> int:
        """How long an answer may get; a prompt takes up positions, but for the last answer's."""
        if self.decoder.has_encoder:
            return options.max_length
        return max(1, min(options.max_length, self.max_positions - tokens + 1))

    def _result(self, row: _Row, hypotheses: Sequence[Hypothesis]) -> GenerationResult:
        usable = [item for item in hypotheses if item.finish_reason != "error"]
        outputs = tuple(
            TextHypothesis(
                self.bundle.tokenizer.decode(item.tokens),
                item.tokens,
                item.score,
                item.log_probability,
                item.finish_reason,
            )
            for item in usable
        )
        error = None if usable else NOT_FINITE
        return GenerationResult(row.text, len(row.source), outputs, error, row.truncated)


@dataclass(frozen=True)
class _Row:
    """A text to be answered.

    Attributes:
        number: Of the row.
        text: What came in.
        source: What the model reads of it.
        room: Most tokens of its answer.
        truncated: Whether the text goes on after that.
    """

    number: int
    text: str
    source: Sequence[int]
    room: int
    truncated: bool
