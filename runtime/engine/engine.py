"""Texts in, answers out in the same order: a bundle, its models and the replicas that run them."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from transferry.runtime.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits_processors import beginning
from transferry.runtime.decoding.options import (
    GenerationOptions,
    generation_options,
    suppressing,
)
from transferry.runtime.decoding.search import search_stream
from transferry.runtime.decoding.stop_strings import StopStrings
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.engine.certified import covered, open_certified
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    InLanguages,
    LongRows,
    Preprocessor,
    check_long_rows,
    in_languages,
    sentences_version,
)
from transferry.runtime.engine.prompts import (
    Encodable,
    Prompt,
    Source,
    checked_prompts,
    encode_prompt,
)
from transferry.runtime.engine.result import (
    NOT_FINITE,
    GenerationResult,
    RowError,
    TextHypothesis,
    joined,
)
from transferry.runtime.engine.worker_pool import (
    Answer,
    Input,
    Row,
    Take,
    WorkItem,
    batch_worker,
    in_order,
)
from transferry.runtime.errors import UsageError, require
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import Model, ServedDecoder
from transferry.runtime.ort.session import Few, SessionOptions
from transferry.runtime.parity.certificate import (
    Certificate,
    Strength,
    fastest,
    require_search,
)
from transferry.runtime.parity.recorded import verify_recorded
from transferry.runtime.parity.report import ParityReport
from transferry.runtime.parity.signature import load_public_key
from transferry.runtime.settings import Whole64, check_value, shown
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

AnyModel = TypeVar("AnyModel", bound=Model)

# Difference of the row ids of neighbouring pieces of a row: larger than any number of rows.
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
        required: Sequence[Certificate] = (),
    ) -> None:
        """Combines a bundle with opened models; `load` is the usual way.

        Args:
            bundle: The bundle.
            models: One variant of it, opened once per device. All devices share the rows.
            replicas: Concurrent batches per device.
            batches: Limits on what is computed at once. Default: depends on the variant.
            certificate: Citation of the certificate, for reports.
            required: Certificates that must cover every search.
        """
        check_value("replicas", replicas, Few)
        require(replicas >= 1, "replicas", "at least 1", replicas)
        self.bundle = bundle
        self.models = models
        self.model = models[0]
        self.replicas = replicas
        self.batches = batches or self.model.batches
        self.certificate = certificate
        self.required = required
        self.max_positions = int(bundle.manifest.model["max_positions"])
        tokenizer = bundle.tokenizer
        self.preprocessor = Preprocessor(
            tokenizer.encode_batch, tokenizer.special, self.max_positions, tokenizer.longest_token
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        options: SessionOptions | None = None,
        *,
        variant: str | None = None,
        device_ids: Sequence[int] | None = None,
        replicas: int | None = None,
        batches: BatchOptions | None = None,
        require_certificate: Strength | bool = False,
        trusted_key: Path | str | None = None,
        prove: Callable[[Bundle, Model], ParityReport] = verify_recorded,
        **session: Any,
    ) -> Self:
        """Opens a bundle.

        If the bundle was verified with another CPU, GPU or version of onnxruntime, `prove` runs
        first: by default it computes the recorded answers again.

        Args:
            folder: The bundle.
            options: Provider, threads per replica, and how onnxruntime runs the graphs.
            variant: Name of the variant. Default: chosen by `certificate.fastest`.
            device_ids: GPUs; all of them share the rows. Default: that of `options`.
            replicas: Concurrent batches per device. Default: on the CPU the cores divided by
                threads, on CUDA one. Two replicas of one thread are faster than one of two
                (docs/performance.md).
            batches: Limits on what is computed at once. Default: depends on the variant.
            require_certificate: Refuse a bundle that was not verified for this way of computing:
                "run" (or True) against the run, "recorded" against the recorded answers at least.
                Larger batches than were verified are not computed, other searches refused.
            trusted_key: PEM file of the public key that must have signed the required certificate.
            prove: Verifies, on this machine, a bundle that was verified on another.
            **session: Fields of SessionOptions that override `options`, such as `provider="cuda"`.

        Raises:
            InputError: The folder is not a bundle, or is damaged.
            ParityError: A required certificate is missing or not signed by the trusted key, or the
                recorded answers differ here.
            ProviderError: The provider cannot run here.
            UsageError: An option is out of range, or there is no such variant.
        """
        if trusted_key is not None and not require_certificate:
            raise UsageError("--trusted-key needs --require-certificate, which it is the key of")
        trusted = load_public_key(Path(trusted_key)) if trusted_key is not None else None
        bundle = Bundle.load(Path(folder))
        options = replace(options or SessionOptions(), **session)
        ids = [options.device_id] if device_ids is None else list(device_ids)
        if len(set(ids)) != len(ids) or not ids:
            raise UsageError(f"expected devices, each of them once, found {ids}")
        if options.provider == "cpu" and len(ids) > 1:
            raise UsageError(
                f"provider cpu is one device, found {ids}; choose provider cuda, or more replicas"
            )
        if replicas is None:
            cpu = options.provider == "cpu"
            replicas = max(1, usable_cores() // options.threads) if cpu else 1
        devices = [replace(options, device_id=number) for number in ids]
        chosen = bundle.variant(variant) if variant else fastest(bundle, devices[0], trusted)
        strength: Strength | None = (
            "run" if require_certificate is True else require_certificate or None
        )
        opened = [
            open_certified(bundle, chosen, each, strength, trusted, prove) for each in devices
        ]
        models = [model for model, _, _ in opened]
        required = [one for _, _, one in opened if one is not None]
        if required:
            batches = covered(batches, models[0].batches, required)
        # Devices of one kind have the same certificate.
        certificate = "; ".join(dict.fromkeys(citation for _, citation, _ in opened))
        settings: dict[str, Any] = {"certificate": certificate, "required": required}
        return cls(bundle, *models, replicas=replicas, batches=batches, **settings)

    @property
    def decoder(self) -> ServedDecoder:
        """The decoder on the first device; see `decoders`."""
        return self.decoders[0]

    @property
    def decoders(self) -> Sequence[ServedDecoder]:
        """The decoder on each device.

        Raises:
            UsageError: The bundle is encoder-only.
        """
        decoders = [model for model in self.models if not isinstance(model, EncoderModel)]
        if not decoders:
            raise UsageError(
                f"{self.bundle.folder} holds an encoder-only model, which generates nothing; its "
                f"tasks are {' and '.join(self.bundle.tasks)}"
            )
        return decoders

    @property
    def encoder(self) -> EncoderModel:
        """The encoder-only model on the first device; see `encoders`."""
        return self.encoders[0]

    @property
    def encoders(self) -> Sequence[EncoderModel]:
        """The encoder-only model on each device.

        Raises:
            UsageError: The bundle is not encoder-only.
        """
        encoders = [model for model in self.models if isinstance(model, EncoderModel)]
        if not encoders:
            raise UsageError(
                f"{self.bundle.folder} holds a model of architecture "
                f"{self.bundle.manifest.architecture}, which neither embeds nor fills in; its task "
                "is generate"
            )
        return encoders

    def default_options(self) -> GenerationOptions:
        """Returns the bundle's own generation options."""
        return GenerationOptions(**self.bundle.manifest.generation)

    def options(self, options: GenerationOptions | None = None, **named: Any) -> GenerationOptions:
        """Returns generation options with named fields changed.

        `suppress` adds to what is suppressed, and may hold text beside token ids. A text is
        forbidden by its own tokens, both as it stands and after a blank: a single token everywhere,
        several as a sequence. Other tokens may still spell it.

        Args:
            options: The other fields; see `generation_options`. Default: those of the bundle.
            **named: Fields of GenerationOptions.

        Raises:
            UsageError: A field is unknown or has another type, or the fields conflict.
        """
        default = self.default_options() if options is None else options
        if not isinstance(default, GenerationOptions):
            raise UsageError(f"options must be GenerationOptions, found {shown(default)}")
        encode = self.bundle.tokenizer.encode_target
        return generation_options(suppressing(named, default, encode), default)

    def require_covered(self, options: GenerationOptions) -> None:
        """Raises ParityError if a certificate is required, and none covers such a search."""
        for certificate in self.required:
            require_search(certificate, options)

    def describe(self) -> dict[str, Any]:
        """Returns what determines the answers: versions, settings, and the manifest's hash."""
        return {
            "transferry": importlib.metadata.version("transferry"),
            "manifest_sha256": self.bundle.sha256,
            "certificate": self.certificate,
            "devices": len(self.models),
            "replicas": self.replicas,
            "sentencex": sentences_version(),
            **self.model.describe(),
        }

    def encode(
        self,
        texts: Sequence[Encodable],
        options: GenerationOptions,
        long_rows: LongRows = "error",
    ) -> list[EncodedRow]:
        """Encodes the sources or prompts to generate from."""
        # A truncated prompt leaves positions for the prefix and one more token.
        forced = len(options.prefix) + (options.forced_begin is not None)
        reserve = 0 if self.decoder.has_encoder else forced
        plain = [text for text in texts if not isinstance(text, Prompt)]
        rows = iter(self.preprocessor.encode(plain, long_rows, reserve))
        around = (self.bundle.tokenizer, self.max_positions, long_rows, reserve)
        return [
            encode_prompt(text, *around) if isinstance(text, Prompt) else next(rows)
            for text in texts
        ]

    def fitted(self, options: GenerationOptions, tokens: int) -> GenerationOptions:
        """Returns the options for a source of this length: a prompt takes up positions."""
        room = self.room(options, tokens)
        least = min(options.min_length, room)
        return replace(options, max_length=room, max_total_length=0, min_length=least)

    def settings_of(
        self, row: EncodedRow, options: GenerationOptions
    ) -> tuple[GenerationOptions, SpecialTokens]:
        """Returns the options and special tokens of a row, which may name a language."""
        special = self.bundle.tokenizer.special
        if row.target is None:
            return options, special
        if special.begins_with_language:
            return options, replace(special, bos_id=row.target)
        return replace(options, forced_begin=row.target), special

    def room(self, options: GenerationOptions, tokens: int) -> int:
        """Returns the maximal length of an answer to a source of this length."""
        if self.decoder.has_encoder:
            return options.room(0)
        # The last token of an answer is never read, so it takes up no position.
        return max(1, min(options.room(tokens), self.max_positions - tokens + 1))

    def generate(
        self,
        texts: Iterable[Source],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
        long_rows: LongRows = "error",
        source_language: str | None = None,
        target_language: str | None = None,
        **named: Any,
    ) -> Iterator[GenerationResult]:
        """Generates an answer to each text, in order; reads ahead by two windows at most.

        An answer depends on its text and the options, and with sampling on the row's number; never
        on other rows or on batches.

        Args:
            texts: Any number of texts; an error becomes the result of its row. Instead of a text, a
                list of messages with role and content each, which the bundle's chat template
                renders, or a list of token ids, which the model reads as they are; or
                `InLanguages`, a text with languages of its own.
            options: Generation options. Default: those of the bundle.
            first_row: Number of the first row; a row's number seeds its samples.
            long_rows: Treatment of texts longer than the model's positions: "error"; "truncate" to
                answer their beginning; or "split" to answer them in pieces, as many sentences each
                as fit, and join the answers. The options apply to each piece.
            source_language: Language of the texts, by its name in the bundle's tokenizer. Default:
                the bundle's own.
            target_language: Language of the answers, likewise.
            **named: Fields of GenerationOptions to change, such as `beam=4`; see `options`.

        Raises:
            UsageError: A field is unknown or out of range, `max_length` exceeds the model's
                positions, rows cannot be split here, there is no such language, or there are
                messages and no chat template or no jinja2.
            ParityError: A certificate is required, and none covers such a search.
        """
        options = self.options(options, **named)
        languages = source_language, target_language, self.bundle.tokenizer.special
        prompts = in_languages(checked_prompts(texts), *languages)
        check_value("first_row", first_row, Whole64)
        self.require_covered(options)
        if options.max_length > self.max_positions:
            raise UsageError(
                f"max_length is {options.max_length}, but the model has {self.max_positions} "
                "positions; lower max_length"
            )
        conflict = "" if self.decoder.has_encoder else "a decoder-only bundle"
        check_long_rows(long_rows, f"n_best={options.n_best}" if options.n_best > 1 else conflict)
        task = _Generate(self, options, long_rows)
        workers = [partial(task.work, decoder) for decoder in self.decoders] * self.replicas
        slots = max(1, self.batches.rows // max(options.beam, options.n_best))
        results = self._watched(
            in_order(enumerate(prompts, first_row), task.prepare, workers, slots, self.batches)
        )
        if long_rows != "split":
            return results
        return joined(results, task.rows, options.length_penalty)

    def map(
        self,
        inputs: Iterable[Input],
        prepare: Callable[[list[Input]], list[WorkItem[Row] | Answer]],
        compute: Callable[[AnyModel, list[Row]], list[Answer]],
        models: Sequence[AnyModel],
    ) -> Iterator[Answer]:
        """Computes inputs in batches, in order.

        Args:
            inputs: Of any number.
            prepare: See `worker_pool.in_order`.
            compute: Computes a batch on one of the models.
            models: `decoders` or `encoders`.
        """
        workers = [batch_worker(partial(compute, model)) for model in models] * self.replicas
        return self._watched(in_order(inputs, prepare, workers, self.batches.rows, self.batches))

    def _watched(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        """Passes answers on while the weights are still those that were hashed."""
        for answer in answers:
            self.bundle.files.require_unchanged()
            yield answer


class _Generate:
    """A call of `Engine.generate`.

    Attributes:
        rows: Where rows are split: text and number of pieces of each row, see `joined`.
    """

    def __init__(self, engine: Engine, options: GenerationOptions, long_rows: LongRows) -> None:
        self.engine, self.options, self.long_rows = engine, options, long_rows
        self.rows: deque[tuple[str, int]] = deque()

    def prepare(
        self, texts: list[tuple[int, Encodable]]
    ) -> list[WorkItem[EncodedRow] | GenerationResult]:
        prepared: list[WorkItem[EncodedRow] | GenerationResult] = []
        # Without sampling, equal texts have equal answers.
        known: dict[Encodable, list[WorkItem[EncodedRow] | GenerationResult]] = {}
        rows = self.engine.encode([text for _, text in texts], self.options, self.long_rows)
        for (number, text), row in zip(texts, rows, strict=True):
            if self.options.sample or text not in known:
                known[text] = [self._item(piece) for piece in self._pieces(number, text, row)]
            prepared += known[text]
            if self.long_rows == "split":
                self.rows.append((row.text, len(known[text])))
        return prepared

    def _pieces(self, number: int, text: Encodable, row: EncodedRow) -> list[EncodedRow]:
        """Returns a row with its row id, or its pieces with one each, so that samples differ."""
        pieces = [row]
        too_long = row.error is not None and row.error.kind == "too-long"
        if self.long_rows == "split" and too_long and isinstance(text, str | InLanguages):
            texts = self.engine.preprocessor.pieces(row.text)
            whole = text if isinstance(text, InLanguages) else InLanguages(text)
            pieces = self.engine.encode([replace(whole, text=each) for each in texts], self.options)
        return [replace(piece, row_id=number + i * PIECE) for i, piece in enumerate(pieces)]

    def _item(self, row: EncodedRow) -> WorkItem[EncodedRow] | GenerationResult:
        options, error, tokens = self.options, row.error, len(row.ids)
        request = self._request(row)
        prefix, room = len(beginning(options, request)), request.max_length
        longest = options.max_total_length
        if error is None and longest and not self.engine.decoder.has_encoder and tokens >= longest:
            error = RowError(
                "too-long",
                f"{tokens} tokens are not less than max_total_length={longest}; raise it, or "
                "shorten the text",
            )
        if error is None and prefix > room:
            error = RowError(
                "too-long",
                f"{tokens} tokens leave room for {room} in the model's "
                f"{self.engine.max_positions} positions, but the prefix has {prefix}; shorten "
                "either",
            )
        if error is not None:
            return GenerationResult(row.text, row.tokens, error=error)
        self.engine.require_covered(self.engine.settings_of(row, options)[0])
        return WorkItem(row, tokens)

    def _request(self, row: EncodedRow, key: Any = None) -> Request[Any]:
        """Returns the request for a row, with its language where that is the first token."""
        options = self.options
        room, first = self.engine.room(options, len(row.ids)), row.target
        begins = self.engine.bundle.tokenizer.special.begins_with_language
        given = (None, first) if not begins else (first, None)
        return Request(key, row.ids, room, options.prefix, row.row_id, *given)

    def work(
        self, decoder: ServedDecoder, take: Take[EncodedRow], slots: int
    ) -> Iterator[tuple[WorkItem[EncodedRow], GenerationResult]]:
        options, special = self.options, self.engine.bundle.tokenizer.special

        def requests(most: int) -> list[Request[WorkItem[EncodedRow]]]:
            return [self._request(item.row, item) for item in take(most)]

        decode = self.engine.bundle.tokenizer.decode
        stream = search_stream(decoder, requests, options, special, slots=slots, decode=decode)
        for item, found in stream:
            yield item, self._result(item.row, found)

    def _result(self, row: EncodedRow, found: Sequence[Hypothesis]) -> GenerationResult:
        decode = self.engine.bundle.tokenizer.decode
        stops = StopStrings(self.options.stop, decode)
        hypotheses = tuple(
            TextHypothesis(**vars(one), text=stops.cut(decode(one.tokens)))
            for one in found
            if one.finish_reason != "error"
        )
        error = None if hypotheses else NOT_FINITE
        return GenerationResult(
            row.text, len(row.ids), hypotheses, error=error, truncated=row.truncated
        )
