"""Tokenizers that tiktoken cannot hold, such as WordPiece and SentencePiece.

Their files are kept unchanged and read by the library that wrote them. The libraries are extras,
imported when a tokenizer is opened.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

import msgspec

from transferry.runtime.errors import InputError, Option, UsageError, from_extra
from transferry.runtime.io.documents import decode
from transferry.runtime.settings import shown
from transferry.runtime.tokenizer.chat import PRIVATE_USE, Pieces
from transferry.runtime.tokenizer.special_tokens import (
    AnyTokenizer,
    Place,
    SpecialTokens,
    panics_as_errors,
    text_errors,
)

UNKNOWN = "<unk>"
# SentencePiece's character for a blank.
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
# A pair of surrogates, or one character.
_CHARACTER = re.compile("[\ud800-\udbff][\udc00-\udfff]|.", re.DOTALL)
# Replacements of transformers' `clean_up_tokenization`, in order.
CLEANED = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"[]")
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    continuing_subword_prefix: str | None = None
    unk_token: str | None = None
    unk_id: int | None = None


class _File(msgspec.Struct):
    model: _Model


class ThirdPartyTokenizer(AnyTokenizer):
    """A tokenizer kept as its original files.

    Attributes:
        kind: Its name in tokenizer.json.
        library: Python package that reads the files; the extra has the same name.
    """

    kind: ClassVar[str]
    library: ClassVar[str]
    # White space may be dropped, and a word of any length may be one unknown token.
    longest_token = None

    def __init__(
        self, files: Mapping[str, bytes], special: SpecialTokens, vocabulary_size: int
    ) -> None:
        """Opens the files, by name; some ids of `vocabulary_size` may have no text.

        Raises:
            UsageError: The library is not installed.
            InputError: The library cannot read the files, or they have ids that the model lacks.
        """
        self.files = {name: files[name] for name in self.names}
        self.special = special
        self.vocabulary_size = vocabulary_size
        needs = from_extra(self.library, f"the tokenizer needs {self.library}")
        try:
            with needs, panics_as_errors():
                largest = max(self._open(), special.largest)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise InputError(
                f"expected a tokenizer that {self.library} reads in {' and '.join(self.names)}, "
                f"found something else: {error}"
            ) from error
        if type(vocabulary_size) is not int or largest >= vocabulary_size:
            raise InputError(
                f"expected ids below {vocabulary_size}, the size of the model's vocabulary, found "
                f"{largest}"
            )

    @abstractmethod
    def _open(self) -> int:
        """Opens the files with the library; returns the largest id."""

    def _identity(self) -> tuple[object, ...]:
        return self.kind, self.files, self.special, self.vocabulary_size, self.chat

    def _text_ids(self, ids: Iterable[int]) -> list[int]:
        special = self.special.ids()
        return [token for token in ids if token not in special]

    def _settings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "special": asdict(self.special),
            "vocabulary_size": self.vocabulary_size,
        }

    def _contents(self) -> Mapping[str, bytes]:
        return self.files

    @classmethod
    def _restore(
        cls, settings: Mapping[str, Any], special: SpecialTokens, contents: Mapping[str, bytes]
    ) -> Self:
        return cls(contents, special, settings["vocabulary_size"])


class HuggingFaceTokenizer(ThirdPartyTokenizer):
    """Any tokenizer of Hugging Face's `tokenizers`.

    One exception to "text is text": the library always finds tokens that the file adds without
    declaring them special.
    """

    kind = "tokenizers"
    names = ("huggingface.json",)
    library = "tokenizers"

    def _open(self) -> int:
        import tokenizers

        (content,) = self.files.values()
        if (largest := largest_id(content)) >= self.vocabulary_size:
            return largest  # before the library makes a list of this length
        self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        self._chat_tokenizers: dict[str, tuple[Any, dict[int, int]]] = {}
        self._tokenizer.encode_special_tokens = True
        # The file may hold these settings from training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._require_distinct()
        return max(map(int, self._tokenizer.get_vocab().values()), default=0)

    def _require_distinct(self) -> None:
        """Raises ValueError for added tokens of one normalised text: the library finds any."""
        known: dict[str, str] = {}
        normalizer = self._tokenizer.normalizer
        for token in self._added.values() if normalizer else ():
            text = normalizer.normalize_str(token.content) if token.normalized else ""
            if text and (other := known.setdefault(text, token.content)) != token.content:
                raise ValueError(
                    f"added tokens {shown(other)} and {shown(token.content)}, which have one text "
                    f"once normalised, {shown(text)}; remove one of them"
                )

    @property
    def _added(self) -> Any:
        """The tokens that the file adds to the model's, by id."""
        return self._tokenizer.get_added_tokens_decoder()

    def special_texts(self) -> Mapping[str, int]:
        return {each.content: token for token, each in self._added.items() if each.special}

    def read_special_tokens(self) -> None:
        super().read_special_tokens()
        self._tokenizer.encode_special_tokens = False

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    @text_errors()
    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(well_formed(text), add_special_tokens=False).ids
        return ids

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._tokenizer.get_vocab())

    @text_errors()
    def places(self, text: str) -> list[Place]:
        """See `AnyTokenizer.places`.

        As `gather_pre_entities` of transformers: a word continues at a marked piece of WordPiece or
        a piece of another length than its characters; in other models it begins at a blank.
        """
        given, text, model = text, well_formed(text), self._word_model
        found = self._tokenizer.encode(text, add_special_tokens=False)
        named = model.unk_token
        unknown = model.unk_id if named is None else self._tokenizer.token_to_id(named)
        places = []
        pieces = zip(found.ids, found.tokens, found.offsets, found.word_ids, strict=True)
        for token, piece, (start, end), word in pieces:
            if model.continuing_subword_prefix:
                continues = len(piece) != end - start
            else:
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            places.append(Place(start, end, continues and token != unknown, word))
        if len(text) < len(given):  # halves of a surrogate pair became one character
            at = [*(found.start() for found in _CHARACTER.finditer(given)), len(given)]
            places = [each._replace(start=at[each.start], end=at[each.end]) for each in places]
        return places

    @cached_property
    def _word_model(self) -> _Model:
        (content,) = self.files.values()
        return msgspec.json.decode(content, type=_File).model

    @text_errors()
    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text; the library uses all cores."""
        encodings = self._tokenizer.encode_batch(
            list(map(well_formed, texts)), add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def encode_masked(self, pieces: Sequence[str]) -> list[int]:
        """See AnyTokenizer; the flags of the mask decide which blanks belong to it."""
        mask = self.special.mask_id
        assert mask is not None
        if self.reads_special:
            return self.encode(self._tokenizer.id_to_token(mask).join(pieces))
        between: list[str | int] = [mask] * (2 * len(pieces) - 1)
        between[::2] = pieces
        return self.encode_pieces(between)

    @text_errors()
    def encode_pieces(self, pieces: Pieces) -> list[int]:
        """Token ids of texts with the ids of special tokens in between.

        The library encodes all at once: ids beside a special token may depend on it, for example
        because it takes in blanks.
        """
        texts = "".join(piece for piece in pieces if isinstance(piece, str))
        mark = next((mark for mark in map(chr, PRIVATE_USE) if mark not in texts), "")
        while not mark or mark in texts:  # a run that is longer than every one in the texts
            mark += chr(PRIVATE_USE[0])
        if mark not in self._chat_tokenizers:
            self._chat_tokenizers = {mark: self._chat_tokenizer(mark)}
        tokenizer, ids = self._chat_tokenizers[mark]
        added = self._added
        text = "".join(
            piece if isinstance(piece, str) else mark + added[piece].content for piece in pieces
        )
        found = tokenizer.encode(well_formed(text), add_special_tokens=False).ids
        return [ids.get(token, token) for token in found]

    def _chat_tokenizer(self, mark: str) -> tuple[Any, dict[int, int]]:
        """Tokenizer that knows special tokens by a mark in front, and their ids by its own."""
        import tokenizers

        made: Any = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        made.encode_special_tokens = True
        ids, added = {}, self._added
        # A normalizer that drops the mark would find the same text without one.
        keeps = made.normalizer is None or mark in made.normalizer.normalize_str(mark)
        control = set(self.chat.control.values()) if self.chat else set()
        for token in sorted(control | ({self.special.mask_id} & added.keys())):
            sides = ("single_word", "lstrip", "rstrip", "normalized")
            flags = {side: getattr(added[token], side) for side in sides}
            flags["normalized"] &= keeps
            content = added[token].content
            made.add_special_tokens([tokenizers.AddedToken(content, special=True)])
            made.add_tokens([tokenizers.AddedToken(mark + content, special=False, **flags)])
            ids[made.token_to_id(mark + content)] = token
        return made, ids

    def check_chat(self) -> None:
        added = self._added
        for text, token in self.chat.control.items() if self.chat else ():
            if token not in added or added[token].content != text:
                raise InputError(f"expected {text!r} as an added token of id {token}, found none")

    def decode(self, ids: Iterable[int]) -> str:
        known = self._text_ids(ids)
        try:
            with panics_as_errors():
                return str(self._tokenizer.decode(known, skip_special_tokens=True))
        except ValueError as error:
            # A decoder that cuts the ends of a text panics over an empty one.
            if any(map(self._tokenizer.id_to_token, {*known} - {*self.special_texts().values()})):
                raise InputError(f"the tokenizer cannot make a text of {known}: {error}") from error
            return ""


class SentencePieceTokenizer(ThirdPartyTokenizer):
    """A SentencePiece model (Kudo and Richardson 2018) with its own ids.

    One exception to "text is text": the library always finds the model's user-defined symbols.

    Attributes:
        pieces: Number of ids of the model.
    """

    kind = "sentencepiece"
    names = ("sentencepiece.model",)
    library = "sentencepiece"

    def _open(self) -> int:
        (content,) = self.files.values()
        self._model = _sentencepiece(content)
        self.pieces = int(self._model.get_piece_size())
        return self.pieces - 1

    def special_texts(self) -> Mapping[str, int]:
        model, ids = self._model, range(self.pieces)
        named = (token for token in ids if model.is_control(token) or model.is_unknown(token))
        return {model.id_to_piece(token): token for token in named}

    def read_special_tokens(self) -> None:
        """Raises UsageError: the library begins each text between tokens with a blank."""
        raise UsageError(
            *(Option("special_tokens"), "=as-tokens needs a tokenizer.json, found "),
            f"{self.names[0]} alone; write one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), and import and export "
            "the folder again",
        )

    @text_errors()
    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(well_formed(text))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special and unknown ones are skipped."""
        model, size = self._model, self.pieces
        known = [
            token
            for token in self._text_ids(ids)
            if 0 <= token < size and not model.is_control(token) and not model.is_unknown(token)
        ]
        text: str = model.decode(known)
        return text


class _Side:
    """The SentencePiece model of a language, and its table of ids."""

    def __init__(self, model: bytes, table: Mapping[str, int], named: Collection[str]) -> None:
        self.model, self.table, self.unknown = _sentencepiece(model), table, table[UNKNOWN]
        # SentencePiece passes unknown text through: "</s>" may become one piece.
        self.textual = {
            piece: token
            for piece, token in table.items()
            if piece not in named and not (piece.startswith(">>") and piece.endswith("<<"))
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; pieces missing from the table become the unknown token."""
        pieces = self.model.encode(well_formed(text), out_type=str)
        return [self.textual.get(piece, self.unknown) for piece in pieces]


class SentencePiecePair(ThirdPartyTokenizer):
    """MarianMT's tokenizer: one SentencePiece model per language and a shared table of ids.

    A source may begin with a target language of the table, such as ">>fra<<".

    Attributes:
        cleans: Whether blanks before punctuation are removed from texts.
    """

    cleans = False

    kind = "sentencepiece-pair"
    names: ClassVar[tuple[str, ...]] = ("source.spm", "target.spm", "vocab.json")
    library = "sentencepiece"

    def _open(self) -> int:
        source, target, *contents = self.files.values()
        tables = [msgspec.convert(decode(content), dict[str, int]) for content in contents]
        for name, table in zip(self.names[2:], tables, strict=True):
            if UNKNOWN not in table:
                raise ValueError(f"{name} has no {UNKNOWN}")
        self._pieces = {token: piece for piece, token in tables[-1].items()}
        named = {self._pieces[token] for token in self._special() if token in self._pieces}
        around = {*self.special.before, *self.special.after}
        added = {piece for piece, token in tables[0].items() if token in around}
        self._source = _Side(source, tables[0], named | added)
        self._target = _Side(target, tables[-1], named)
        return max(map(int, tables[-1].values()))

    def _special(self) -> set[int]:
        """Special ids of a target."""
        return self.special.ids()

    @text_errors()
    def _encode(self, text: str) -> list[int]:
        end = text.find("<<") + 2
        if text.startswith(">>") and (language := self._source.table.get(text[:end])) is not None:
            return [language, *self._source.encode(text[end:])]
        return self._source.encode(text)

    @text_errors()
    def encode_target(self, text: str) -> list[int]:
        """Token ids of a target, split by the model of the target language."""
        return self._encode_each(text, self._target.encode)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a target's token ids; special and unknown ids are skipped."""
        skipped = {*self._special(), self._target.unknown}
        pieces = [
            self._pieces[token] for token in ids if token in self._pieces and token not in skipped
        ]
        text: str = self._target.model.decode_pieces(pieces)
        text = text.replace(BLANK, " ").strip()
        for found, content in CLEANED if self.cleans else ():
            text = text.replace(found, content)
        return text

    def _identity(self) -> tuple[object, ...]:
        return *super()._identity(), self.cleans

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | ({"clean_up_spaces": True} if self.cleans else {})

    @classmethod
    def _restore(
        cls, settings: Mapping[str, Any], special: SpecialTokens, contents: Mapping[str, bytes]
    ) -> Self:
        made = super()._restore(settings, special, contents)
        made.cleans = settings.get("clean_up_spaces") is True
        return made


class SentencePieceTables(SentencePiecePair):
    """MarianMT's tokenizer with a table of ids for each side (`separate_vocabs`).

    The tokens around a source are in its table, all other special tokens in the target's.
    """

    kind = "sentencepiece-tables"
    names = ("source.spm", "target.spm", "vocab.json", "target_vocab.json")

    def _special(self) -> set[int]:
        special = self.special
        return {special.pad_id, special.bos_id, *special.ends}

    @text_errors()
    def encode_target(self, text: str) -> list[int]:
        """See SentencePiecePair; the texts of special tokens are those of sources."""
        return self._target.encode(text)

    @property
    def source_size(self) -> int:
        """Number of ids of sources."""
        return 1 + max(map(int, self._source.table.values()))


def largest_id(content: bytes) -> int:
    """Largest id in the table of a Hugging Face tokenizer.json; 0 without a table.

    Raises:
        ValueError: The file has another form, or one at which the library ends the process.
    """
    model = msgspec.json.decode(content, type=_File).model
    _require_prefixes(model)
    if not bytes(model.vocab).startswith(b"{"):
        return 0  # a list, in the order of the ids
    return max(msgspec.json.decode(model.vocab, type=dict[str, int]).values(), default=0)


def _require_prefixes(model: _Model) -> None:
    """Refuses merges without the prefix, which the library cuts off, or else ends the process."""
    prefix = model.continuing_subword_prefix or ""
    kind = list[str | tuple[str, str]]
    for merge in msgspec.json.decode(model.merges, type=kind) if prefix else ():
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"a merge with {second!r}, which does not begin with {prefix}")


def _sentencepiece(content: bytes) -> Any:
    import sentencepiece

    if not content:  # the library would take it for a model that is not loaded yet
        raise ValueError("an empty file")
    return sentencepiece.SentencePieceProcessor(model_proto=content)


KINDS: Mapping[str, type[ThirdPartyTokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (
        *(HuggingFaceTokenizer, SentencePieceTokenizer),
        *(SentencePiecePair, SentencePieceTables),
    )
}


def well_formed(text: str) -> str:
    """Replaces halves of surrogate pairs by U+FFFD, as tiktoken does; the libraries refuse them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
