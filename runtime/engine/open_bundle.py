"""Texts in, answers out in the same order: a bundle, its models and the replicas that run them."""

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import (
    GenerationOptions,
    generation_options,
    suppressing,
)
from transferry.runtime.engine.opening import (
    check_replicas,
    covered,
    devices_of,
    open_again,
    open_certified,
    session_options,
    shares_of,
    weights_of,
)
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    LongRows,
    Preprocessor,
    Row,
    WorkItem,
)
from transferry.runtime.engine.processes import Parts, Processes
from transferry.runtime.engine.prompts import Encodable, encode_inputs
from transferry.runtime.engine.result import Results, with_bar
from transferry.runtime.engine.worker_pool import (
    Answer,
    Input,
    Repeats,
    Worker,
    batch_worker,
    in_order,
)
from transferry.runtime.errors import Option, UsageError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.installation import installed_version
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import ServedDecoder, ServedModel
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.certificates.certificate import Certificate
from transferry.runtime.proof.certificates.signature import Trust
from transferry.runtime.proof.certificates.standing import (
    fastest,
    require_search,
    require_task,
)
from transferry.runtime.proof.certificates.strength import FORMER, STRENGTHS, Strength
from transferry.runtime.proof.recorded import verify_recorded
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.settings import check_value, path_of, require_type
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

AnyModel = TypeVar("AnyModel", bound=ServedModel)


def _itself(value: Input) -> Input:
    return value


class OpenBundle:
    """A bundle with its models, open on every device: what the tasks compute on.

    It is a context manager; on leaving, the models are closed.

    Attributes:
        certificate: Citation of the certificate, for reports.
        required: Certificates that must cover every search.
        progress: Whether each call shows a progress bar.
    """

    certificate = "not looked for"
    required: Sequence[Certificate] = ()
    progress = False
    _processes: Processes | None = None  # others, with some of the replicas

    def __init__(
        self,
        folder: Path | str,
        options: SessionOptions | None = None,
        *,
        variant: str | None = None,
        device_ids: Sequence[int] | None = None,
        replicas: int | None = None,
        processes: int | None = 1,
        batches: BatchOptions | None = None,
        require_certificate: Strength | bool = False,
        trusted_key: Path | str | Sequence[Path | str] | None = None,
        require_signatures: int = 1,
        prove: Callable[[Bundle, ServedModel], ParityReport] = verify_recorded,
        special_tokens: Literal["as-text", "as-tokens"] = "as-text",
        progress: bool = False,
        **session: Any,
    ) -> None:
        """Opens a bundle.

        If the bundle was verified with another CPU, GPU or version of onnxruntime, transferry or
        numpy, `prove` runs first: by default it computes the recorded answers again.

        Args:
            folder: The bundle.
            options: Provider, threads per replica, and how onnxruntime runs the graphs.
            variant: Name of the variant. Default: see `standing.fastest`.
            device_ids: GPUs, which share the rows. Default: that of `options`.
            replicas: Concurrent batches per device. Default: on the CPU the cores divided by
                threads, on CUDA one (docs/performance.md).
            processes: Processes that share the replicas of the CPU; None for one of each four
                replicas, with copies of the weights of 1 GiB in all. Replicas of one process wait
                for each other's Python: with many, or with batches of few rows, several processes
                are faster. Each opens the bundle for itself.
            batches: Limits on a batch. Default: depends on the variant.
            require_certificate: Least strength of a certificate for this way of computing:
                "checkpoint" (or True), "checkpoint without fresh graphs", that is its answers and
                weights alone, or "recorded", the recorded answers. Larger batches than were
                verified are not computed, other searches refused.
            trusted_key: PEM file of the public key that must have signed the required certificate,
                or files of several.
            require_signatures: Number of the trusted keys that must have signed it.
            prove: Verifies, on this machine, a bundle that was verified on another.
            special_tokens: Meaning of text that looks like a special token, such as "</s>": text,
                or as in transformers that token. Chats and token ids are read alike in both.
            progress: Show a progress bar of the rows for each call, on stderr or in a notebook.
            **session: Fields of SessionOptions that override `options`, such as `provider="cuda"`;
                `device="cuda:1"` names provider and GPU as torch does.

        Raises:
            InputError: The folder is not a bundle, or is damaged.
            ParityError: A required certificate is missing, or the recorded answers differ here.
            ProviderError: The provider cannot run here.
            UsageError: An option is out of range, or there is no such variant.
        """
        require_type("require_certificate", require_certificate, str | bool | None)
        require_type("special_tokens", special_tokens, str)
        if trusted_key is not None and not require_certificate:
            told = Option("trusted_key"), " has no effect without ", Option("require_certificate")
            raise UsageError(*told)
        least = "checkpoint" if require_certificate is True else require_certificate
        require_type("options", options, SessionOptions | None)
        require_type("variant", variant, str | None)
        check_value("require_signatures", require_signatures, int)
        named = FORMER.get(str(least), least)
        strength = None if named in (None, False) else cast("Strength", named)
        if strength not in (None, *STRENGTHS):
            expected = ", ".join(STRENGTHS)
            raise UsageError(Option("require_certificate"), f" must be one of {expected}")
        several = isinstance(trusted_key, Iterable) and not isinstance(trusted_key, str | bytes)
        paths = cast("Iterable[object]", trusted_key if several else [trusted_key])
        keys = [] if trusted_key is None else [path_of("trusted_key", each) for each in paths]
        if trusted_key is not None and not keys:
            raise UsageError(Option("trusted_key"), " is empty; name a public key, or leave it out")
        trusted = Trust.load(keys, require_signatures)
        bundle = Bundle.load(folder)
        options = session_options(options, session)
        devices = devices_of(options, device_ids)
        if replicas is None:
            cpu = options.provider == "cpu"
            replicas = max(1, usable_cores() // options.threads) if cpu else 1
        by_default = partial(fastest, bundle, devices[0], trusted)
        chosen = by_default() if variant is None else bundle.variant(variant)
        shares = shares_of(replicas, processes, options, weights_of(bundle, chosen))
        others = None
        if len(shares) > 1:
            reads_special = special_tokens == "as-tokens"
            around = (bundle.folder, bundle.sha256, chosen.name, devices[0], reads_special)
            others = Processes(partial(open_again, OpenBundle.of, *around), shares[1:])
        models, citations, required = zip(
            *(open_certified(bundle, chosen, each, strength, trusted, prove) for each in devices),
            strict=True,
        )
        if special_tokens == "as-tokens":
            bundle.tokenizer.read_special_tokens()
        elif special_tokens != "as-text":
            found = f"found {special_tokens!r}"
            raise UsageError(Option("special_tokens"), f" must be as-text or as-tokens, {found}")
        if strength:
            batches = covered(batches, models[0].batches, required)
        # Devices of one kind have the same certificate.
        self.certificate = "; ".join(dict.fromkeys(citations))
        self.required = required if strength else ()
        self.progress = progress
        self._processes = others
        if others:
            others.wait()
        self._combine(bundle, models, replicas, batches)

    @classmethod
    def load(
        cls, folder: Path | str, options: SessionOptions | None = None, **settings: Any
    ) -> Self:
        """Opens a bundle, as the class itself does."""
        return cls(folder, options, **settings)

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        *models: ServedModel,
        replicas: int = 1,
        batches: BatchOptions | None = None,
    ) -> Self:
        """Combines a bundle with opened models, without a certificate.

        Args:
            bundle: The bundle.
            models: One variant of it, opened once per device. All devices share the rows.
            replicas: Concurrent batches per device.
            batches: Limits on a batch. Default: depends on the variant.
        """
        engine = cls.__new__(cls)
        engine._combine(bundle, models, replicas, batches)
        return engine

    def _combine(
        self,
        bundle: Bundle,
        models: Sequence[ServedModel],
        replicas: int,
        batches: BatchOptions | None,
    ) -> None:
        check_replicas(replicas)
        require_type("batches", batches, BatchOptions | None)
        self.bundle = bundle
        self.models = models
        self.replicas = replicas
        self.batches = batches or models[0].batches
        self._waiting: Callable[[int], None] = _nothing
        tokenizer, model, head = bundle.tokenizer, bundle.manifest.model, bundle.manifest.head
        separator = model["segment_end"] if model.get("segments") else None
        # Classifiers of decoders read the last token before padding.
        last = model.get("pooling") == ["last"] and not tokenizer.special.after
        at_end = last and head is not None and head.task == "classify" and not head.template
        if at_end or model.get("rereading_layers"):
            separator = tokenizer.special.pad_id
        self.max_positions = int(model["max_positions"])
        self.preprocessor = Preprocessor(
            *(tokenizer.encode_batch, tokenizer.special, self.max_positions),
            *(tokenizer.longest_token, separator, at_end),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the models; their memory is free once no results are being read."""
        self.models, self._processes = (), None

    def __reduce__(self) -> Any:
        raise UsageError(
            "an engine cannot be copied or pickled: open one in each process, or give it a "
            "transferry.batches.Mapper"
        )

    def __repr__(self) -> str:
        name, folder = type(self).__name__, str(self.bundle.folder)
        if not self.models:
            return f"{name}({folder!r}, closed)"
        described = {**self.model.describe(), "devices": len(self.models)}
        described |= {"replicas": self.replicas, "certificate": self.certificate}
        names = ("variant", "provider", "threads", "devices", "replicas", "certificate")
        return f"{name}({folder!r}, {', '.join(f'{key}={described[key]!r}' for key in names)})"

    @property
    def model(self) -> ServedModel:
        """The model on the first device; raises UsageError if the engine is closed."""
        if not self.models:
            raise UsageError(f"{self!r} has no models any more; load the bundle again")
        return self.models[0]

    def parts(self) -> Parts:
        """Returns the objects to which workers of tasks refer."""
        bundle, tokenizer = self.bundle, self.bundle.tokenizer
        parts = {"engine": self, "bundle": bundle, "tokenizer": tokenizer, "model": self.model}
        return {**parts, "preprocessor": self.preprocessor}

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the tasks that the bundle can do."""
        return self.bundle.tasks

    @property
    def decoder(self) -> ServedDecoder:
        """The decoder on the first device; see `decoders`."""
        return self.decoders[0]

    @property
    def decoders(self) -> Sequence[ServedDecoder]:
        """The decoder on each device; raises UsageError if the bundle is encoder-only."""
        _ = self.model
        decoders = [model for model in self.models if not isinstance(model, EncoderModel)]
        if not decoders:
            raise UsageError(
                f"{self.bundle.folder} holds an encoder-only model, which generates nothing; its "
                f"tasks: {', '.join(self.tasks)}"
            )
        return decoders

    @property
    def encoder(self) -> EncoderModel:
        """The encoder-only model on the first device; see `encoders`."""
        return self.encoders[0]

    @property
    def encoders(self) -> Sequence[EncoderModel]:
        """The encoder-only model on each device; raises UsageError for other bundles."""
        _ = self.model
        encoders = [model for model in self.models if isinstance(model, EncoderModel)]
        if not encoders:
            raise UsageError(
                f"{self.bundle.folder} holds a model of architecture "
                f"{self.bundle.manifest.architecture}, whose task is generate; all other tasks "
                "need an encoder-only one"
            )
        return encoders

    def default_options(self) -> GenerationOptions:
        """Returns the bundle's own generation options."""
        return GenerationOptions(**self.bundle.manifest.generation)

    def options(self, options: GenerationOptions | None = None, **named: Any) -> GenerationOptions:
        """Returns generation options with named fields changed; by default of the bundle's own.

        `suppress` adds to the suppressed tokens, and may hold text beside token ids. A text is
        forbidden by its own tokens, both without and with a blank before it: a single token
        everywhere, several as a sequence. Other tokens may still spell it.

        Raises:
            UsageError: A field is unknown or has another type, or the fields conflict.
        """
        require_type("options", options, GenerationOptions | None)
        default = self.default_options() if options is None else options
        if "progress" in named:
            raise UsageError("generation has no progress; write Engine(..., progress=True)")
        encode = self.bundle.tokenizer.encode_target
        return generation_options(suppressing(named, default, encode), default)

    def splits_lines(self, options: GenerationOptions) -> bool:
        """Whether texts are answered line by line; raises UsageError for a decoder-only model."""
        if options.split_lines and not self.decoder.has_encoder:
            raise UsageError(
                *("a prompt may hold line breaks, so ", Option("split_lines"), " needs an "),
                *("encoder-decoder; leave ", Option("split_lines"), " out"),
            )
        return self.decoder.has_encoder if options.split_lines is None else options.split_lines

    def require_positions(self, options: GenerationOptions) -> None:
        """Raises UsageError for answers longer than the model's positions."""
        if options.max_length > self.max_positions:
            raise UsageError(
                *(Option("max_length"), f" is {options.max_length}, but the model has "),
                *(f"{self.max_positions} positions; lower ", Option("max_length")),
            )

    def require_task(self, task: str) -> None:
        """Raises ParityError unless every required certificate covers the task."""
        for certificate in self.required:
            require_task(certificate, task)

    def require_covered(self, options: GenerationOptions) -> None:
        """Raises ParityError unless every required certificate covers such a search."""
        for certificate in self.required:
            require_search(certificate, options)

    def describe(self) -> dict[str, Any]:
        """Returns versions, settings and the manifest's hash, which determine the answers."""
        return {
            "transferry": importlib.metadata.version("transferry"),
            "manifest_sha256": self.bundle.sha256,
            "certificate": self.certificate,
            "devices": len(self.models),
            "replicas": self.replicas,
            "processes": 1 + (self._processes.count if self._processes else 0),
            "sentencex": installed_version("sentencex") or "none",  # where texts are split
            **({"special_tokens": "as-tokens"} if self.bundle.tokenizer.reads_special else {}),
            **self.model.describe(),
        }

    def encoded(
        self, texts: Sequence[Encodable], options: GenerationOptions, long_rows: LongRows = "error"
    ) -> list[EncodedRow]:
        """Encodes the sources or prompts to generate from."""
        # A truncated prompt leaves positions for the prefix and one more token.
        forced = len(options.prefix) + (options.forced_begin is not None)
        reserve = 0 if self.decoder.has_encoder else forced
        tokenizer = self.bundle.tokenizer
        return encode_inputs(texts, tokenizer, self.preprocessor, long_rows, reserve)

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

    def map(
        self,
        inputs: Iterable[Input],
        prepare: Callable[[list[Input]], list[WorkItem[Row] | Answer]],
        compute: Callable[[AnyModel, list[Row]], list[Answer]],
        models: Sequence[AnyModel],
        key: Callable[[Input], Any] = _itself,
    ) -> Results[Answer]:
        """Computes inputs in batches on models (`decoders` or `encoders`), in order.

        `prepare` is as in `worker_pool.in_order`; `compute` computes a batch on one of the models;
        for `key` see `answers`.
        """
        workers = [batch_worker(partial(compute, model)) for model in models]
        answers = self.answers(inputs, prepare, workers, self.batches.rows, key)
        return self.results(answers, inputs)

    def results(self, answers: Iterator[Answer], inputs: Iterable[Any]) -> Results[Answer]:
        """Returns answers as results, with a bar if the engine shows progress."""
        total = length_hint(inputs) or None
        return Results(with_bar(answers, total) if self.progress else answers)

    @contextmanager
    def watched(self, waiting: Callable[[int], None]) -> Iterator[None]:
        """Calls `waiting` while a task waits for an answer; see `worker_pool.in_order`."""
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = _nothing

    def answers(
        self,
        inputs: Iterable[Input],
        prepare: Callable[[list[Input]], list[WorkItem[Row] | Answer]],
        workers: Sequence[Worker[Row, Answer]],
        slots: int,
        key: Callable[[Input], Any] | None = None,
    ) -> Iterator[Answer]:
        """Yields answers while the weights are still those that were hashed.

        `workers` are one for each model. Equal inputs share an answer where `key` gives the part of
        an input that decides it; the other arguments are those of `worker_pool.in_order`.
        """
        others = self._processes.workers(workers[0], self.parts()) if self._processes else []
        workers = [*others, *[*workers] * (self.replicas - len(others))]
        if key is None:
            found = in_order(inputs, prepare, workers, slots, self.batches, self._waiting)
        else:
            repeats: Repeats[Input, Any] = Repeats(prepare, key)
            found = repeats.watch(
                in_order(inputs, repeats.prepare, workers, slots, self.batches, self._waiting)
            )
        for answer in found:
            self.bundle.files.require_unchanged()
            yield answer


def _nothing(ahead: int) -> None:
    """Tells nobody."""
