"""Settings of a job: frozen descriptions, checked on construction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from transferry.runtime.bundle.head import Aggregation
from transferry.runtime.decoding.generation_options import check_generation
from transferry.runtime.engine.preprocess import LongRows
from transferry.runtime.errors import UsageError, require
from transferry.runtime.settings import MOST, check_fields, shown

TaskName = Literal["generate", "embed", "fill-mask", "classify", "rank", "tag", "score"]
InputFormat = Literal["text", "tsv", "csv", "jsonl", "parquet", "arrow", "openai"]
OutputFormat = Literal["text", "jsonl", "tsv", "csv", "parquet", "npy", "openai"]


@dataclass(frozen=True)
class JobOptions:
    """Settings of a job. A job is resumed only with the settings that decide its output.

    Attributes:
        task: what to do with each row; all but generate and score need an encoder-only bundle.
        generation: fields of GenerationOptions that replace the bundle's defaults.
        prefix: text that every output begins with.
        chat: for generate: each row is a turn of a user, which the bundle's chat template renders.
        system: system message before each turn of --chat.
        messages: for generate: JSONL column with a list of messages with role and content each,
            which the bundle's chat template renders.
        prompt_ids: for generate: JSONL column with a list of token ids, read as they are.
        source_language: language of the rows, by its name in the bundle's tokenizer, such as
            eng_Latn. Default: the bundle's own.
        target_language: language of the outputs, likewise.
        source_language_column: column with the language of each row; where it is empty,
            --source-language counts.
        target_language_column: column with the language of each output, likewise.
        suppress: text that no output holds, at the beginning of a word or within one; a number is a
            token id, unless it is quoted. Only the text's own tokens are forbidden.
        pooling: for embed: mean over all tokens, or the first one. Default: as the bundle does,
            else mean.
        normalise: for embed: scale vectors to length 1.
        prompt: for embed: name of a text of the bundle to put before each row. Default: the
            bundle's, if it has one.
        pair: for classify and rank: column with the second text of each pair.
        aggregation: for tag: join neighbouring tokens of one entity, as they are (simple) or after
            giving all tokens of a word one label (first, average, max).
        mask: for fill-mask: the text that stands for a masked token.
        top: for fill-mask: candidates per mask.
        target: for score: file with the other side of the pairs, in the format of the input.
        column: field that holds the text; others are passed through. Default: text or source, or
            the only one.
        format_in: format of the input; openai are requests of the OpenAI Batch API in JSONL.
            Default: from its name, else text.
        format: format of the output; openai are responses to such requests. Default: as such an
            input is, or from its name, else text, or JSONL for scores.
        long_rows: what to do with a row longer than the model's positions: report an error,
            truncate it, or split it into sentences and join their outputs. Default: error, or
            truncate where an encoder-only bundle has a longest row.
        limit: read at most so many rows of the input.
        partition: I/N: only the I-th of N parts of the input, to use N machines.
        chunk_rows: rows saved together, and lost together by an interruption.
        max_errors: stop when more rows than this have errors.
        canary: 1/N: compute one row in N again on the reference, and compare.
        force: replace an existing output, and an interrupted job with other settings.
    """

    task: TaskName = "generate"
    generation: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    chat: bool = False
    system: str | None = None
    messages: str | None = None
    prompt_ids: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    source_language_column: str | None = None
    target_language_column: str | None = None
    suppress: tuple[str, ...] = ()
    pooling: Literal["mean", "first"] | None = None
    normalise: bool = False
    prompt: str | None = None
    pair: str | None = None
    aggregation: Aggregation = "none"
    mask: str = "[MASK]"
    top: Annotated[int, msgspec.Meta(le=MOST)] = 5
    target: Path | None = None
    column: str | None = None
    format_in: InputFormat | None = None
    format: OutputFormat | None = None
    long_rows: LongRows | None = None
    limit: Annotated[int, msgspec.Meta(le=MOST)] | None = None
    partition: str | None = None
    chunk_rows: Annotated[int, msgspec.Meta(le=MOST)] = 16384
    max_errors: Annotated[int, msgspec.Meta(le=MOST)] | None = None
    canary: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_generation(self.generation)  # a conflict with the bundle's defaults is found later
        if self.task != "generate" and (self.generation or self.suppress):
            name = next(iter(self.generation), "suppress")
            raise UsageError(
                f"task {self.task} generates nothing, so {name} has no effect; leave it out"
            )
        if self.prompt is not None and self.task != "embed":
            raise UsageError(
                f"prompt names a text to put before a text to embed, so it has no effect on task "
                f"{self.task}; leave it out"
            )
        if self.task == "rank" and self.pair is None:
            raise UsageError(
                "task rank scores pairs of texts; name the column of the second with --pair"
            )
        if self.pair is not None and self.task not in ("classify", "rank"):
            raise UsageError(
                f"pair names the second text of a pair to classify or rank, so it has no effect on "
                f"task {self.task}; leave it out"
            )
        if self.aggregation != "none" and self.task != "tag":
            raise UsageError(
                f"aggregation joins the tokens that task tag labels, so it has no effect on task "
                f"{self.task}; leave it out"
            )
        if self.task == "score" and self.canary is not None:
            raise UsageError("task score has no canary; leave it out")
        self._check_prompts()
        self._check_languages()
        require(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)
        require(self.chunk_rows >= 1, "chunk_rows", "at least 1", self.chunk_rows)
        require((self.max_errors or 0) >= 0, "max_errors", "at least 0", self.max_errors)
        if self.partition is not None:
            number, count = fraction(self.partition)
            expected = "I/N, such as 1/4 up to 4/4"
            require(number <= count, "partition", expected, shown(self.partition))
        if self.canary is not None:
            one, every = fraction(self.canary)
            require(one == 1 <= every, "canary", "1/N, such as 1/1000", shown(self.canary))

    @property
    def prompt_kind(self) -> Literal["turn", "messages", "ids"] | None:
        """Kind of the rows; None if they are plain texts."""
        if self.chat:
            return "turn"
        if self.messages is not None:
            return "messages"
        return None if self.prompt_ids is None else "ids"

    def _check_prompts(self) -> None:
        """Raises UsageError for options of prompts that exclude each other or have no effect."""
        columns = ("column", "messages", "prompt_ids")
        named = [name for name in columns if getattr(self, name) is not None]
        named += ["chat"] * self.chat
        names = [name.replace("_", "-") for name in named if name != "column"]
        if self.task != "generate" and names:
            raise UsageError(
                f"task {self.task} generates nothing, so {names[0]} has no effect; leave it out"
            )
        if len(names) > 1 or (names and "column" in named and not self.chat):
            raise UsageError(
                f"{' and '.join(name.replace('_', '-') for name in named)} exclude each other, "
                "since each says what the rows are; choose one"
            )
        if self.system is not None and not self.chat:
            raise UsageError("system has no effect without chat; add --chat")
        if self.prompt_kind in ("turn", "messages") and self.long_rows not in (None, "error"):
            raise UsageError(
                f"long_rows={self.long_rows} and {names[0]} exclude each other, since a chat ends "
                "with the turn to be answered; choose long_rows=error"
            )

    def _check_languages(self) -> None:
        """Raises UsageError for languages of rows that have none."""
        kinds = ("source_language", "target_language")
        names = [*kinds, *(f"{kind}_column" for kind in kinds)]
        for name in names:
            if getattr(self, name) is None:
                continue
            option = name.replace("_", "-")
            if self.task not in ("generate", "score"):
                raise UsageError(f"{option} has no effect on task {self.task}; leave it out")
            if self.prompt_kind is not None:
                raise UsageError(
                    f"{option} has no effect on chats and token ids, only on plain texts; leave it "
                    "out"
                )


def token_or_text(value: str) -> int | str:
    """Returns the token id that a number is; of other text what is inside of its quotes, if any."""
    if value.isdecimal() and value.isascii():
        return int(value[:12])  # more digits are no id either
    quoted = len(value) > 2 and value[0] == value[-1] == '"'
    return value[1:-1] if quoted else value


def fraction(text: str) -> tuple[int, int]:
    """Reads "I/N" of nine digits at most; returns 1 and 0 for other text."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", text.strip())
    return (int(found[1]), int(found[2])) if found else (1, 0)


@dataclass(frozen=True)
class RayOptions:
    """Where the chunks of a job are computed.

    Attributes:
        engine: plain is this process, ray are workers of Ray; these write their chunks into the
            folder --out.
        ray_address: address of a Ray cluster. Default: RAY_ADDRESS, else Ray on this machine.
        workers: Ray workers, each of which opens the bundle. Default: depends on the cores or GPUs.
    """

    engine: Literal["plain", "ray"] = "plain"
    ray_address: str | None = None
    workers: Annotated[int, msgspec.Meta(le=10_000)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.engine == "plain":
            for name in ("ray_address", "workers"):
                if getattr(self, name) is not None:
                    option = name.replace("_", "-")
                    raise UsageError(f"{option} has no effect without Ray; add --engine ray")
        require(self.workers is None or self.workers >= 1, "workers", "at least 1", self.workers)
