"""Tokenizers kept as the files they came in, read by the library that wrote them.

tiktoken holds byte-level BPE only. What is none, WordPiece and SentencePiece above all, is carried
along unchanged; the libraries are extras, and imported when a tokenizer is made.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import atomic_file
from transferry.runtime.tokenizer.special_tokens import (
    FORMAT_VERSION,
    SETTINGS_FILE,
    SpecialTokens,
    read_bytes,
    read_settings,
    special_of,
)

# What SentencePiece writes for a blank.
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


class ThirdPartyTokenizer(ABC):
    """What the kinds share: their files as bytes, and tokenizer.json, which names the kind.

    Special ids never come out of `encode`: text that looks like a special token is text.

    Attributes:
        kind: What tokenizer.json calls it.
        names: Its files.
        library: What reads them; the extra has the same name.
        longest_token: Unknown: white space may be dropped, and a word or more be one unknown token.
    """

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    library: ClassVar[str]
    longest_token: ClassVar[None] = None

    def __init__(
        self, files: Mapping[str, bytes], special: SpecialTokens, vocabulary_size: int
    ) -> None:
        """Open the files.

        Args:
            files: the content of each file in `names`.
            special: the special ids.
            vocabulary_size: how many ids the model has; some of them may have no text.

        Raises:
            UsageError: the library is not installed.
            InputError: the files are not what the library reads, or the model lacks some of the
                ids.
        """
        self.files = {name: files[name] for name in self.names}
        self.special = special
        self.vocabulary_size = vocabulary_size
        try:
            largest = max(self._open(), *special.ids())
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the tokenizer needs {self.library}, which is not installed; "
                f'pip install "transferry[{self.library}]"'
            ) from error
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
        """Let the library read the files; the largest id comes back."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text that the model reads, without those around it."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; ids that stand for no text are left out."""

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a text that the model could have written."""
        return self.encode(text)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text that the model reads."""
        return [self.encode(text) for text in texts]

    def __eq__(self, other: object) -> bool:
        """Whether both are of the same files and special ids."""
        if not isinstance(other, ThirdPartyTokenizer):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.kind, self.vocabulary_size))

    def _identity(self) -> tuple[object, ...]:
        return self.kind, self.files, self.special, self.vocabulary_size

    def _text_ids(self, ids: Iterable[int]) -> list[int]:
        special = self.special.ids()
        return [token for token in ids if token not in special]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and the files; the same tokenizer gives the same bytes.

        Raises:
            InputError: the folder cannot be written to.
        """
        settings = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "special": asdict(self.special),
            "vocabulary_size": self.vocabulary_size,
        }
        for name, content in self.files.items():
            with atomic_file(folder / name) as file:
                file.write(content)
        with atomic_file(folder / SETTINGS_FILE) as file:
            file.write(json.dumps(settings).encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            InputError: a file is missing or malformed.
            UsageError: the library is not installed.
        """
        settings = read_settings(folder)
        files = {name: read_bytes(folder / name) for name in cls.names}
        try:
            return cls(files, special_of(settings), settings["vocabulary_size"])
        except (InputError, TypeError, AttributeError) as error:
            raise InputError(f"{folder}: the tokenizer is inconsistent: {error}.") from error
        except KeyError as error:
            raise InputError(f"{folder / SETTINGS_FILE}: expected the key {error}.") from error


class HuggingFaceTokenizer(ThirdPartyTokenizer):
    """A tokenizer of Hugging Face's `tokenizers`, whatever it is made of.

    Text that looks like a special token is text, but not what the file declares as an added token
    without calling it special: the library always finds those.
    """

    kind = "tokenizers"
    names = ("huggingface.json",)
    library = "tokenizers"

    def _open(self) -> int:
        import tokenizers

        (content,) = self.files.values()
        self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.encode_special_tokens = True
        # Settings of a training that the file may have kept.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        return max(map(int, self._tokenizer.get_vocab().values()), default=0)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text; the library uses as many threads as there are cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special ids, and ids without a text, are left out."""
        text: str = self._tokenizer.decode(self._text_ids(ids), skip_special_tokens=True)
        return text


class SentencePieceTokenizer(ThirdPartyTokenizer):
    """One model of SentencePiece (Kudo and Richardson 2018), whose ids are the model's.

    Text that looks like a special token is text, but not what was declared as a user-defined
    symbol when the model was trained: the library always finds those.
    """

    kind = "sentencepiece"
    names = ("sentencepiece.model",)
    library = "sentencepiece"

    def _open(self) -> int:
        (content,) = self.files.values()
        self._model = _sentencepiece(content)
        return int(self._model.get_piece_size()) - 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special and unknown ones are left out."""
        model, size = self._model, self._model.get_piece_size()
        known = [
            token
            for token in self._text_ids(ids)
            if 0 <= token < size and not model.is_control(token) and not model.is_unknown(token)
        ]
        text: str = model.decode(known)
        return text


class SentencePiecePair(ThirdPartyTokenizer):
    """MarianMT's: a model of SentencePiece for either language, and one table of ids for both.

    A source may begin with the language to translate into, such as ">>fra<<", if the table has it.
    """

    kind = "sentencepiece-pair"
    names = ("source.spm", "target.spm", "vocab.json")
    library = "sentencepiece"
    unknown = "<unk>"

    def _open(self) -> int:
        source, target, vocabulary = self.files.values()
        self._source, self._target = _sentencepiece(source), _sentencepiece(target)
        self._ids: dict[str, int] = json.loads(vocabulary)
        self._pieces = {token: piece for piece, token in self._ids.items()}
        # SentencePiece gives what it does not know as it is: "</s>" may come out as one piece.
        special = self.special.ids()
        self._textual = {
            piece: token
            for piece, token in self._ids.items()
            if token not in special and not (piece.startswith(">>") and piece.endswith("<<"))
        }
        if self.unknown not in self._ids:
            raise ValueError(f"vocab.json has no {self.unknown}")
        return max(map(int, self._ids.values()))

    def encode(self, text: str) -> list[int]:
        """Token ids of a source; pieces that are not in the table become the unknown token."""
        end = text.find("<<") + 2
        if text.startswith(">>") and text[:end] in self._ids:
            return [self._ids[text[:end]], *self._pieces_of(self._source, text[end:])]
        return self._pieces_of(self._source, text)

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a target, which is split by the other model."""
        return self._pieces_of(self._target, text)

    def _pieces_of(self, model: Any, text: str) -> list[int]:
        unknown = self._ids[self.unknown]
        return [self._textual.get(piece, unknown) for piece in model.encode(text, out_type=str)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a target's token ids; special and unknown ones are left out."""
        unknown = self._ids[self.unknown]
        pieces = [
            self._pieces[token]
            for token in self._text_ids(ids)
            if token in self._pieces and token != unknown
        ]
        text: str = self._target.decode_pieces(pieces)
        return text.replace(BLANK, " ").strip()


def _sentencepiece(content: bytes) -> Any:
    import sentencepiece

    if not content:  # which the library takes for no model yet
        raise ValueError("an empty file")
    return sentencepiece.SentencePieceProcessor(model_proto=content)


KINDS: Mapping[str, type[ThirdPartyTokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (HuggingFaceTokenizer, SentencePieceTokenizer, SentencePiecePair)
}
