"""Special tokens, and the interface and files that all kinds of tokenizer share."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import msgspec

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import parse_document
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.settings import Whole, shown
from transferry.runtime.tokenizer.chat import (
    TEMPLATE_FILE,
    ChatTemplate,
    Message,
    Pieces,
    require_jinja,
)

FORMAT_VERSION = 1
PANIC = "PanicException"  # of a library in Rust; no Exception
SETTINGS_FILE = "tokenizer.json"
# Fields of special tokens in the first tokenizer.json; others were added since.
NEEDED = frozenset({"pad_id", "bos_id", "eos_id", "mask_id", "before", "after"})


Item = TypeVar("Item")


class TextError(InputError):
    """A text that a tokenizer cannot encode."""


@contextmanager
def text_errors() -> Iterator[None]:
    """Turns the errors of a library over one text, panics of Rust included, into a TextError."""
    try:
        yield
    except (MemoryError, TextError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise TextError(f"the tokenizer cannot encode the text: {reason}") from error


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns a panic of a Rust library, which is no Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise ValueError(f"the library fails on it: {error}") from error


class Place(NamedTuple):
    """Place of a token in a text.

    Attributes:
        start: Its first character, from 0.
        end: The character after its last one.
        continues: Whether it continues the word of the token before.
        word: Number of its word in the text as the tokenizer splits it before it looks for tokens;
            None for tokens outside of words.
    """

    start: int
    end: int
    continues: bool
    word: int | None = None


@dataclass(frozen=True)
class SpecialTokens:
    """Ids without text, and those that a tokenizer puts around a model's input.

    Attributes:
        pad_id: Pads rows to equal length.
        bos_id: Precedes every output of an encoder-decoder.
        eos_id: Ends an output.
        mask_id: Hides a token in masked language modelling; None without a mask.
        before: Ids before every input text.
        after: Ids after every input text.
        more_ends: Further ids that end an output; a model may know them as text.
        between: Ids between the two texts of a pair.
        joins: Whether pairs are joined though nothing is between.
        languages: Id of each language by name, such as "eng_Latn"; `before` or `after` has the id
            of the source's default language.
        begins_with_language: Whether the language of an output is its `bos_id`, as in mBART, and
            not its first token.
        longest: Tokens that a truncated text keeps, special tokens included (`model_max_length`);
            0 for as many as the model has positions.
        keeps_end: Whether a truncated text keeps its end (`truncation_side` "left").
        texts: Ids by the texts that transformers reads as special tokens, such as "</s>", where
            the tokenizer's files do not tell them.
    """

    pad_id: Whole = 0
    bos_id: Whole = 1
    eos_id: Whole = 2
    mask_id: Whole | None = None
    before: tuple[Whole, ...] = ()
    after: tuple[Whole, ...] = (2,)
    more_ends: tuple[Whole, ...] = ()
    between: tuple[Whole, ...] = ()
    languages: Mapping[str, Whole] = field(default_factory=dict)
    begins_with_language: bool = False
    longest: Whole = 0
    keeps_end: bool = False
    texts: Mapping[str, Whole] = field(default_factory=dict)
    joins: bool = False

    def __post_init__(self) -> None:
        for token_id in (*self.ids(), *self.ends):
            if type(token_id) is not int or token_id < 0:
                raise InputError(f"expected special ids of at least 0, found {token_id!r}")

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids that end an output, `eos_id` first."""
        return self.eos_id, *self.more_ends

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """Adds the ids before and after a text."""
        return [*self.before, *ids, *self.after]

    @property
    def joins_pairs(self) -> bool:
        """Whether two texts can be joined to one input."""
        return self.joins or bool(self.between)

    def cut(self, ids: Sequence[Item], room: int) -> Sequence[Item]:
        """Returns the tokens that a truncated text keeps, at most `room`."""
        return ids[max(0, len(ids) - room) :] if self.keeps_end else ids[:room]

    def language(self, name: str) -> int:
        """Returns the id of a language; raises UsageError for an unknown one."""
        self.require_languages(f"language {shown(name)}")
        if not isinstance(name, str) or name not in self.languages:
            raise UsageError(
                f"there is no language {shown(name)}; the bundle's tokenizer has "
                f"{', '.join(self.languages)}"
            )
        return self.languages[name]

    def require_languages(self, reason: str) -> None:
        """Raises UsageError if there are no languages to choose from."""
        if not self.languages:
            raise UsageError(
                f"the bundle's tokenizer has no languages, so {reason} has no effect; leave it out"
            )

    def of_source(self, language: int) -> Self:
        """Returns these tokens with another language around a source."""
        own = set(self.languages.values())
        before, after = (
            tuple(language if token in own else token for token in ids)
            for ids in (self.before, self.after)
        )
        return replace(self, before=before, after=after)

    def ids(self) -> set[int]:
        """All special ids; those of `more_ends` may have text."""
        around = (*self.before, *self.between, *self.after)
        named = {self.pad_id, self.bos_id, self.eos_id, *around, *self.languages.values()}
        return named if self.mask_id is None else named | {self.mask_id}

    @property
    def largest(self) -> int:
        """The largest id, of those with text too."""
        return max(*self.ids(), *self.ends, *self.texts.values())


# Of trained tokenizers: sources of an encoder-decoder end with the end token, prompts of a decoder
# lack it, and inputs of an encoder-only model are marked at both ends.
SOURCES = SpecialTokens()
PROMPTS = SpecialTokens(after=())
PASSAGES = SpecialTokens(mask_id=3, before=(1,))


class AnyTokenizer(ABC):
    """Text to token ids and back; two are equal if every text has the same ids in both.

    Text that looks like a special token is text, unless `read_special_tokens` was called.

    Attributes:
        names: Its files beside tokenizer.json.
        special: The special ids.
        vocabulary_size: Number of ids, special ids included.
        longest_token: Most characters of one id; None if unlimited.
        chat: Template that turns messages into a prompt; None for a model without chats.
        reads_special: Whether text that looks like a special token is that token.
    """

    names: ClassVar[tuple[str, ...]]
    special: SpecialTokens
    vocabulary_size: int
    longest_token: int | None
    chat: ChatTemplate | None = None
    reads_special = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AnyTokenizer):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self.vocabulary_size))

    @abstractmethod
    def _identity(self) -> tuple[object, ...]:
        """Everything that decides the ids of a text."""

    @property
    def source_size(self) -> int:
        """Number of ids that the model reads, where a table of their own gives others."""
        return self.vocabulary_size

    def special_texts(self) -> Mapping[str, int]:
        """Returns the texts that look like special tokens, with their ids."""
        return self.special.texts

    def read_special_tokens(self) -> None:
        """From now on, reads text that looks like a special token as that token.

        Raises:
            UsageError: No text does.
        """
        if not self.special_texts():
            raise UsageError(
                *(Option("special_tokens"), "=as-tokens has no effect: the bundle's tokenizer "),
                "names no texts of special tokens, as ByT5's does. Leave it out; a model of "
                "an earlier version can be imported and exported again",
            )
        self.reads_special = True
        if self.longest_token is not None:
            self.longest_token = max(self.longest_token, *map(len, self.special_texts()))

    @cached_property
    def _special_text(self) -> re.Pattern[str] | None:
        """Finds the longest text of a special token at each place."""
        texts = sorted(self.special_texts(), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def looks_special(self, text: str) -> bool:
        """Whether a text holds one that looks like a special token."""
        return self._special_text is not None and self._special_text.search(text) is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a source, without those around it; raises TextError if it has none."""
        return self._encode_each(text, self._encode)

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Token ids of a source in which no text is a special token."""

    def _encode_each(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encodes the text between special tokens."""
        if not self.reads_special or self._special_text is None:
            return encode(text)
        texts, ids = self.special_texts(), []
        for number, piece in enumerate(self._special_text.split(text)):
            ids += [texts[piece]] if number % 2 else encode(piece) if piece else []
        return ids

    def encode_masked(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of texts with a mask between each two, to which one blank before belongs."""
        assert self.special.mask_id is not None
        *before, last = pieces
        ids: list[int] = []
        for piece in before:
            ids += [*self.encode(piece.removesuffix(" ")), self.special.mask_id]
        return ids + self.encode(last)

    def places(self, text: str) -> list[Place]:
        """Place of each token of `encode` in a text; raises UsageError if the kind has none."""
        raise UsageError(
            "the bundle's tokenizer does not tell the places of its tokens in a text, which tasks "
            "tag and answer need"
        )

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; ids without text are skipped."""

    def vocabulary(self) -> Mapping[Any, int]:
        """Returns the id of each token; empty if encoding the text of a token gives it."""
        return {}

    def check_chat(self) -> None:
        """Raises InputError for a token of the chat template that the tokenizer lacks."""
        size = self.vocabulary_size
        for text, token in self.chat.control.items() if self.chat else ():
            if token >= size:
                raise InputError(f"expected ids below {size}, found {token} for {text!r}")

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Content of tokenizer.json, without the format version."""

    @abstractmethod
    def _contents(self) -> Mapping[str, bytes]:
        """Content of each file in `names`."""

    @classmethod
    @abstractmethod
    def _restore(
        cls, settings: Mapping[str, Any], special: SpecialTokens, contents: Mapping[str, bytes]
    ) -> Self:
        """Makes the tokenizer from the results of `_settings` and `_contents`."""

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a target, which may be split by rules of its own."""
        return self.encode(text)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each source."""
        return [self.encode(text) for text in texts]

    def encode_pieces(self, pieces: Pieces) -> list[int]:
        """Token ids of texts with the ids of special tokens in between."""
        return [
            token
            for piece in pieces
            for token in (self.encode(piece) if isinstance(piece, str) else [piece])
        ]

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of messages and of the beginning of an answer, special tokens included.

        `variables` are further ones of the template.

        Raises:
            ChatError: A message lacks its role or content, or the template refuses the messages.
            TextError: The tokenizer cannot encode the text.
            UsageError: There is no chat template, or jinja2 is not installed.
        """
        return self.encode_pieces(self.require_chat().render(messages, variables))

    def require_chat(self) -> ChatTemplate:
        """Returns the chat template; raises UsageError without it or without jinja2."""
        if self.chat is None:
            raise UsageError(
                *("the bundle has no chat template; leave out ", Option("chat"), " and "),
                *(Option("messages"), ", or import a folder with a chat_template.jinja and a "),
                "tokenizer.json, and export it",
            )
        require_jinja()
        return self.chat

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, the files in `names`, and the chat template; reproducible bytes.

        Raises:
            InputError: The folder cannot be written to.
        """
        settings = {"format_version": FORMAT_VERSION, **self._settings()}
        contents = dict(self._contents())
        if self.chat is not None:
            settings["chat"] = self.chat.settings()
            contents[TEMPLATE_FILE] = self.chat.source.encode()
        record = json.dumps(settings, ensure_ascii=False).encode() + b"\n"
        for name, content in [*contents.items(), (SETTINGS_FILE, record)]:
            with atomic_file(folder / name) as file:
                file.write(content)

    @classmethod
    def load(cls, folder: Path, read: Callable[[str], bytes] | None = None) -> Self:
        """Reads the files that `save` wrote, as `load_tokenizer`.

        Raises:
            InputError: A file is missing or malformed, or does not fit the others.
            UsageError: The library that the kind needs is not installed.
        """
        read = read or partial(_read, folder)
        settings = read_settings(folder, read)
        contents = {name: read(name) for name in cls.names}
        try:
            tokenizer = cls._restore(settings, _special_of(settings), contents)
            if (chat := settings.get("chat")) is not None:
                source = read(TEMPLATE_FILE).decode()
                tokenizer.chat = msgspec.convert({**chat, "source": source}, ChatTemplate)
                tokenizer.check_chat()
            return tokenizer
        except KeyError as error:
            raise InputError(f"{folder / SETTINGS_FILE}: expected the key {error}.") from error
        except (InputError, TypeError, ValueError, AttributeError, OverflowError) as error:
            files = " and ".join((SETTINGS_FILE, *cls.names))
            raise InputError(
                f"{folder}: the tokenizer is inconsistent: {error}. Take {files} from one export."
            ) from error


def _read(folder: Path, name: str) -> bytes:
    return read_bytes(folder / name)


def read_settings(folder: Path, read: Callable[[str], bytes] | None = None) -> dict[str, Any]:
    """Reads the tokenizer.json of any kind of tokenizer; `read` as in `AnyTokenizer.load`.

    Raises:
        InputError: The file is missing, malformed or of another format version.
    """
    path = folder / SETTINGS_FILE
    content = (read or partial(_read, folder))(SETTINGS_FILE)
    settings = parse_document(content, dict[str, Any], str(path), "restore the file")
    found = settings.get("format_version")
    if found is True or found != FORMAT_VERSION:
        raise InputError(
            f"{path}: expected format version {FORMAT_VERSION}, found {found}. "
            "Export again with this version of transferry."
        )
    return settings


def _special_of(settings: Mapping[str, Any]) -> SpecialTokens:
    special = settings["special"]
    if lacking := NEEDED - special.keys():
        raise InputError(f"expected the special tokens' {min(lacking)}, found none")
    if unknown := special.keys() - SpecialTokens.__dataclass_fields__.keys():
        raise InputError(f"expected special tokens, found {min(unknown)}")
    return msgspec.convert(special, SpecialTokens)
