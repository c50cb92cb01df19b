"""From texts to token ids: special tokens, and texts longer than the model's positions.

A text that is too long is an error, or truncated, or split into pieces that are answered one by
one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import length_hint
from typing import Any, Generic, Literal, TypeVar, get_args

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import Option, UsageError, from_extra
from transferry.runtime.settings import shown
from transferry.runtime.tokenizer.special_tokens import SpecialTokens, TextError
from transferry.runtime.tokenizer.third_party import well_formed

Row = TypeVar("Row")
LongRows = Literal["error", "truncate", "split"]
# The graph begins the second segment after the first separator, transformers with the second text.
# Classifiers of transformers read the token before padding, the graph the last.
DIVIDED = RowError(
    "tokenizer",
    "the text holds the token that separates or pads texts; give two as a pair, or leave the token "
    "out",
)


@dataclass(frozen=True)
class InLanguages:
    """A text with the names of its language and its answer's; None is the bundle's own."""

    text: str
    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class EncodedRow:
    """An input row as token ids, or why it cannot be one.

    Attributes:
        text: The input text; empty if the input was an error.
        ids: Token ids for the model, special tokens included; empty on an error.
        tokens: Length of the whole text, special tokens included; a lower bound if the text is far
            too long to be tokenised.
        error: Why the model does not read the row; None if it does.
        truncated: Whether `ids` are only a part of the text.
        row_id: Seeds the samples of the row.
        target: Token of the language of the answer; None is the bundle's own.
        options: Its generation options; None for tasks that generate nothing.
    """

    text: str
    ids: Sequence[int] = ()
    tokens: int = 0
    error: RowError | None = None
    truncated: bool = False
    row_id: int = 0
    target: int | None = None
    options: GenerationOptions | None = None


@dataclass(frozen=True, eq=False)
class WorkItem(Generic[Row]):
    """A row to be computed. If it stands for several equal input rows, all get its answer.

    Attributes:
        row: The row, as the task encodes it.
        tokens: Its length: rows of similar length are computed together.
        group: Hashable; only rows of one group are computed together.
        width: Rows of a batch that it takes.
    """

    row: Row
    tokens: int
    group: Any = None
    width: int = 1


@dataclass(frozen=True)
class Preprocessor:
    """Encodes texts for a model.

    Attributes:
        encode_batch: Returns the token ids of each text; raises TextError if one has none.
        special: Special tokens around them.
        positions: Limit on the tokens of a row.
        longest_token: Characters of the longest token, so that the length of a text bounds its
            tokens from below and a text that must be too long is not tokenised. None if the
            tokenizer may drop or join characters.
        separator: Token that ends a segment, or pads; None where texts may hold any token.
        at_end: Only the end of a text may not be that token.
    """

    encode_batch: Callable[[list[str]], list[list[int]]]
    special: SpecialTokens
    positions: int
    longest_token: int | None = None
    separator: int | None = None
    at_end: bool = False

    def encode(
        self,
        texts: Sequence[str | RowError | InLanguages],
        long_rows: LongRows = "error",
        reserve: int = 0,
    ) -> list[EncodedRow]:
        """Encodes rows, in order; errors in the place of texts stay.

        A text that is too long is an error, or with "truncate" cut so that `reserve` positions are
        free.
        """
        room = self.positions
        if long_rows == "truncate":
            room = max(0, min(room - reserve, self.special.longest or room))
        plain = [text.text if isinstance(text, InLanguages) else text for text in texts]
        heads = [self._head(text, room, long_rows) for text in plain if isinstance(text, str)]
        ids = iter(self.token_ids(heads))
        rows = [
            self._row(text, next(ids), room, long_rows)
            if isinstance(text, str)
            else EncodedRow("", error=text)
            for text in plain
        ]
        return [
            self._in_languages(row, text) if isinstance(text, InLanguages) else row
            for row, text in zip(rows, texts, strict=True)
        ]

    def token_ids(self, texts: Sequence[str]) -> Sequence[Sequence[int] | RowError]:
        """Returns the token ids of each text, or why it has none."""
        try:
            return self.encode_batch(list(texts))
        except TextError as error:
            if len(texts) == 1:
                return [RowError("tokenizer", str(error))]
        return [found for text in texts for found in self.token_ids([text])]

    def _in_languages(self, row: EncodedRow, text: InLanguages) -> EncodedRow:
        """Returns a row with the tokens of its languages, or why it has none."""
        special = self.special
        try:
            source, target = (
                None if name is None else special.language(name)
                for name in (text.source, text.target)
            )
        except UsageError as error:
            return EncodedRow(row.text, error=row.error or RowError("language", str(error)))
        if source is not None and row.error is None:
            inner = row.ids[len(special.before) : len(row.ids) - len(special.after)]
            row = replace(row, ids=special.of_source(source).wrap(inner))
        return replace(row, target=target)

    def _least(self, text: str) -> int:
        """Returns a lower bound of the tokens of a text."""
        return -(-len(text) // self.longest_token) if self.longest_token else 0

    def _head(self, text: str, room: int, long_rows: LongRows) -> str:
        """Returns the part of a text that determines its row."""
        if self._least(text) <= self.positions:
            return text
        assert self.longest_token is not None
        if long_rows == "truncate" and self.special.keeps_end:
            return text  # its tokens may depend on all that comes before
        return text[: room * self.longest_token] if long_rows == "truncate" else ""

    def _row(
        self, text: str, ids: Sequence[int] | RowError, room: int, long_rows: LongRows
    ) -> EncodedRow:
        if isinstance(ids, RowError):
            return EncodedRow(text, error=ids)
        uncounted = self._least(text) > self.positions
        wrapped = self.special.wrap(ids)
        around = len(wrapped) - len(ids)
        tokens = self._least(text) + around if uncounted else len(wrapped)
        if not text.strip():
            error = RowError("empty", "there is no text to work on")
        elif tokens <= room:
            return self.undivided(EncodedRow(text, wrapped, tokens))
        elif long_rows == "truncate" and room > around:
            kept = self.special.wrap(self.special.cut(ids, room - around))
            return self.undivided(EncodedRow(text, kept, tokens, truncated=True))
        else:
            error = too_long(tokens, self.positions, "at least " * uncounted)
        return EncodedRow(text, (), tokens, error)

    def undivided(self, row: EncodedRow, between: Sequence[int] = ()) -> EncodedRow:
        """Returns a row, or its error if a text holds the separator.

        `between` are the tokens between the two texts of a pair.
        """
        end, read, usual = self.separator, row.ids, self.special.wrap(between)
        if self.at_end:
            read, usual = read[-1:], []
        if end is None or read.count(end) == usual.count(end):
            return row
        return EncodedRow(row.text, (), row.tokens, DIVIDED)

    def pieces(self, text: str) -> list[str]:
        """Splits a text into pieces that fit the model: neighbouring sentences, as many as fit.

        A sentence that does not fit is split at white space, a word at characters. Only white space
        between the pieces is lost.
        """
        return list(self._pieces(text, [sentences, _words, list]))

    def _pieces(self, text: str, cuts: Sequence[Callable[[str], list[str]]]) -> Iterator[str]:
        text = text.strip()
        if self._fits(text) or not cuts:
            if text:
                yield text
            return
        cut, *finer = cuts
        units = cut(text)
        room = self.positions - len(self.special.wrap([]))
        # A unit that cannot be encoded is cut further, and its last piece becomes an error.
        counts = [
            room + 1 if isinstance(ids, RowError) else len(ids) for ids in self.token_ids(units)
        ]
        first = 0
        while first < len(units):
            last, tokens = first + 1, counts[first]
            while last < len(units) and tokens + counts[last] <= room:
                tokens += counts[last]
                last += 1
            # A text may have more tokens than its units together, or without the blank in front.
            while last > first + 1 and not self._fits("".join(units[first:last]).strip()):
                last -= 1
            yield from self._pieces("".join(units[first:last]), finer)
            first = last

    def _fits(self, text: str) -> bool:
        (row,) = self.encode([text])
        return row.tokens <= self.positions


def too_long(tokens: int, positions: int, about: str = "") -> RowError:
    """Returns the error of a row with more tokens than the model has positions."""
    return RowError(
        "too-long",
        f"{about}{tokens} tokens, but the model has {positions} positions; shorten or split the "
        "text",
    )


class Checked(Iterator[Any]):
    """Rows with their numbers through a function, and a hint of how many there are."""

    def __init__(self, rows: Iterable[Any], function: Callable[[Any, int], Any]) -> None:
        self._rows, self._found = rows, map(function, rows, count(1))

    def __next__(self) -> Any:
        return next(self._found)

    def __length_hint__(self) -> int:
        return length_hint(self._rows)


def checked_texts(
    texts: Iterable[Any], also: type | tuple[()] = (), *, pairs: bool = False
) -> Iterator[Any]:
    """Yields texts, and with `pairs` pairs of texts, and errors in the place of other values.

    `also` is a further type that passes.

    Raises UsageError for a single text, a dictionary or a table.
    """
    texts = require_several(texts)

    def checked(text: Any, number: int) -> Any:
        if isinstance(text, also):
            return text
        alone = isinstance(text, tuple) and not pairs
        return no_text(text, number) if alone else _checked_text(text, number)

    return Checked(texts, checked)


def require_several(
    texts: Iterable[Any], what: str = "texts", columns: str = 'one column, such as table["text"]'
) -> Iterable[Any]:
    """Returns the rows; raises UsageError for a single text, a dictionary or a table.

    `columns` says what to give of a table.
    """
    rows = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | Mapping)
    if not rows or getattr(texts, "ndim", 1) != 1 or hasattr(texts, "columns"):
        found = f"a table; give {columns}" if hasattr(texts, "columns") else shown(texts)
        raise UsageError(f"{what} must be several, such as a list, found {found}")
    # A column of Arrow yields scalars of Arrow.
    return texts.to_pylist() if hasattr(texts, "to_pylist") else texts


def checked_pairs(
    pairs: Iterable[Any], *, both: bool = False, alone: bool = False
) -> Iterator[Any]:
    """Yields pairs of texts as `checked_texts`; the second may be None unless `both`.

    With `alone` a text is a pair with None.

    Raises UsageError for another value than a pair, such as two letters.
    """

    def checked(pair: Any, number: int) -> Any:
        if alone and isinstance(pair, str):
            return pair, None
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise UsageError(f"expected pairs, such as (text, target), found {shown(pair)}")
        first, second = _checked_text(pair, number)
        return first, no_text(second, number) if both and second is None else second

    columns = 'columns, such as zip(table["text"], table["target"])'
    return Checked(require_several(pairs, "pairs", columns), checked)


def _checked_text(text: Any, number: int) -> Any:
    if isinstance(text, tuple) and len(text) == 2:
        first, second = text
        second = None if second is None else _checked_text(second, number)
        return _checked_text(first, number), second
    return text if isinstance(text, str | RowError | InLanguages) else no_text(text, number)


def no_text(value: Any, number: int) -> RowError:
    """Returns the error of a row that holds another value than text."""
    return RowError("no-text", f"expected text in row {number}, found {shown(value)}")


def in_languages(
    texts: Iterable[Any], source: str | None, target: str | None, special: SpecialTokens
) -> Iterable[Any]:
    """Gives languages to texts without languages of their own; None is the bundle's own.

    Raises:
        UsageError: There is no such language.
    """
    named = [name for name in (source, target) if name is not None]
    for name in named:
        special.language(name)
    if not named:
        return texts
    return (
        InLanguages(one.text, one.source or source, one.target or target)
        if isinstance(one, InLanguages)
        else InLanguages(one, source, target)
        if isinstance(one, str)
        else one
        for one in texts
    )


def check_long_rows(long_rows: LongRows, conflict: str = "") -> None:
    """Rejects a treatment of long rows, and "split" where `conflict` excludes it.

    Raises:
        UsageError: The treatment is unknown or excluded, or its library is not installed.
    """
    if str(long_rows) not in get_args(LongRows):
        names = ", ".join(get_args(LongRows))
        raise UsageError(Option("long_rows"), f" must be one of {names}, found {long_rows!r}")
    if long_rows != "split":
        return
    if conflict:
        raise UsageError(
            *(Option("long_rows"), "=split and ", conflict, " exclude each other: only single "),
            *("answers of an encoder-decoder are joined; choose ", Option("long_rows")),
            *("=truncate or ", Option("long_rows"), "=error"),
        )
    sentences("")


def sentences(text: str) -> list[str]:
    """Splits a text of any language into sentences, which together are the text."""
    with from_extra("sentences", Option("long_rows"), " split needs sentencex"):
        import sentencex
    # sentencex applies its English rules to languages that it does not know.
    found: list[str] = sentencex.segment("en", well_formed(text))
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)
