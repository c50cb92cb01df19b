"""Parts of the tasks of encoder-only models: heads, pairs of texts, probabilities of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transferry.runtime.engine.preprocess import (
    EncodedRow,
    LongRows,
    Preprocessor,
    WorkItem,
    check_long_rows,
    too_long,
)
from transferry.runtime.engine.result import NOT_FINITE, RowError
from transferry.runtime.engine.tasks.task import Bounds, Difference, Layout, RowOptions, Task
from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.settings import MOST, check_fields, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from transferry.runtime.bundle.head import HeadSettings
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.ort.encoder import EncoderModel, EncoderOutput

    Floats = NDArray[np.float64]
    Scores = NDArray[np.floating[Any]]

EMPTY = RowError("empty", "there is no text to work on")
# Text, and the second text of a pair; None for a single text.
Pair = tuple[str | RowError, str | RowError | None]


@dataclass(frozen=True, kw_only=True)
class PairOptions(RowOptions):
    """Options of classify and rank.

    Attributes:
        pair: Column with the second text of each pair.
    """

    pair: str | None = None


class HeadTask(Task):
    """A task of a head that scores labels, on texts or on pairs of texts."""

    def __init__(self, engine: OpenBundle, options: Any, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        head_of(engine, self.name)
        self.long_rows = options.long_rows or default_long_rows(engine)
        self.pair = self.settings.get("pair")
        self.arguments = {name: self.settings[name] for name in self.settings if name != "pair"}
        if self.pair is not None and layout.format != "jsonl" and self.pair not in layout.columns:
            raise InputError(
                f"{layout.path}: expected a column {self.pair} with the second texts, found "
                f"{', '.join(layout.columns) or 'none besides the text'}; name another with ",
                Option("pair"),
            )

    def given(self, row: Any) -> Any:
        if self.pair is None:
            return row.text
        second = row.fields.get(self.pair)
        if not isinstance(second, str):
            held = "nothing" if second is None else shown(second)
            second = RowError("no-text", f"expected a text in the column {self.pair}, found {held}")
        return row.text, second

    def same(self, row: Any, again: Any, bounds: Bounds) -> Difference:
        found, wanted = row.numbers, again.numbers
        error = 1.0
        if len(found) == len(wanted):
            pairs = zip(found, wanted, strict=True)
            error = max((abs(one - other) for one, other in pairs), default=0.0)
        if error <= bounds.score:
            return "", 0
        return f"a score {error:.1e} away, at most {bounds.score:.1e}", 0


def head_of(engine: OpenBundle, task: str) -> HeadSettings:
    """Returns the head's settings; raises UsageError for a bundle that cannot do the task."""
    _ = engine.encoder  # refuses other architectures
    head = engine.bundle.manifest.head
    if head is None or task not in engine.tasks:
        known = ", ".join(engine.tasks)
        raise UsageError(f"{engine.bundle.folder} has no head for task {task}; its tasks: {known}")
    return head


def default_long_rows(engine: OpenBundle) -> LongRows:
    """Returns the treatment of long rows where no option gives it."""
    head = engine.bundle.manifest.head
    return "truncate" if head is not None and head.longest else "error"


class EncoderCall:
    """A call of a task of an encoder-only model: encodes rows, and makes results of batches.

    Attributes:
        kind: Type of its results.
        output: Output of the model for the results; "head" needs one for the task.
        nothing: Fields of a result without an answer.
    """

    task: str
    kind: type[Any]
    output: EncoderOutput = "head"
    nothing: Mapping[str, Any] = {}

    def __init__(self, engine: OpenBundle, options: RowOptions) -> None:
        """Prepares the call.

        Raises:
            ParityError: A required certificate does not cover the task.
            UsageError: An option has another type or is out of range, the bundle has no such head,
                or the task lacks this treatment of long rows.
        """
        check_fields(options)
        if self.output == "head":
            self.head = head_of(engine, self.task)
        engine.require_task(self.task)
        self.long_rows = options.long_rows or default_long_rows(engine)
        check_long_rows(self.long_rows, f"task {self.task}")
        head, preprocessor = engine.bundle.manifest.head, engine.preprocessor
        longest = (head.longest if head is not None else 0) or MOST
        self.preprocessor = replace(preprocessor, positions=min(preprocessor.positions, longest))
        self.special = engine.bundle.tokenizer.special

    def prepare(self, rows: list[Any]) -> list[Any]:
        """Returns a work item for each row, or the result of an error."""
        return [
            WorkItem(row, len(row.ids))
            if row.error is None
            else self._result(row, row.tokens, **self.nothing, error=row.error)
            for row in self.encoded(rows)
        ]

    def encoded(self, rows: list[Any]) -> Sequence[EncodedRow]:
        """Encodes rows."""
        return self.preprocessor.encode(rows, self.long_rows)

    def compute(self, encoder: EncoderModel, rows: list[Any]) -> list[Any]:
        """Returns the results of a batch of `encoded` rows."""
        from transferry.runtime.decoding.search import pad_sources

        source = pad_sources([row.ids for row in rows], self.special.pad_id)
        found = encoder.encode(*source, (self.output,))[self.output]
        return [self.result(*pair) for pair in zip(rows, found, strict=True)]

    def result(self, row: Any, found: Scores) -> Any:
        """Returns the answer to a row, or an error unless its part of the output is finite."""
        import numpy as np

        own = self.part(row, found)
        failed = {**self.nothing, "error": NOT_FINITE}
        named = self.answer(row, own) if np.isfinite(own).all() else failed
        return self._result(row, len(row.ids), **named, truncated=row.truncated)

    def part(self, row: Any, found: Scores) -> Scores:
        """Returns the part of the output that is the row's, and not of padding."""
        return found

    def answer(self, row: Any, scores: Scores) -> Mapping[str, Any]:
        """Returns the fields of a result from the row's part of the output."""
        raise NotImplementedError

    def _result(self, row: Any, tokens: int, /, **named: Any) -> Any:
        return self.kind(row.text, tokens, **named)


def probabilities(scores: Scores, kind: str) -> Floats:
    """Returns probabilities of scores `[..., labels]`, or the scores where kind is "none"."""
    import numpy as np

    exact = scores.astype(np.float64)
    if kind == "none":
        return exact
    if kind == "sigmoid":
        found: Floats = np.exp(-np.logaddexp(0.0, -exact))
        return found
    powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def written(score: float, *, single: bool) -> float:
    """Returns a score for a record; of a float32 the number whose text is its shortest."""
    import numpy as np

    return float(str(np.float32(score))) if single else score


@dataclass(frozen=True)
class PairRow(EncodedRow):
    """Token ids of a text or pair, with its second text."""

    pair: str | RowError | None = None


class PairCall(EncoderCall):
    """A call of classify or rank."""

    def encoded(self, rows: list[Any]) -> list[PairRow]:
        """Encodes texts and pairs."""
        pairs: list[Pair] = [row if isinstance(row, tuple) else (row, None) for row in rows]
        prompt = self.head.prompt(None)
        prompted = [
            (prompt + one if isinstance(one, str) and one.strip() else one, two)
            for one, two in pairs
        ]
        if self.head.template:
            encoded = encode_filled(self.preprocessor, self.head, pairs, self.long_rows)
        else:
            encoded = encode_pairs(self.preprocessor, prompted, self.long_rows)
        texts = [first if isinstance(first, str) else "" for first, _ in pairs]
        return [
            PairRow(**vars(row) | {"text": text}, pair=second)
            for row, text, (_, second) in zip(encoded, texts, pairs, strict=True)
        ]

    def _result(self, row: PairRow, tokens: int, /, **named: Any) -> Any:
        return super()._result(row, tokens, **named, pair=row.pair)


def encode_pairs(
    preprocessor: Preprocessor, pairs: Sequence[Pair], long_rows: LongRows
) -> list[EncodedRow]:
    """Encodes texts, and pairs joined as the tokenizer's template says.

    Raises UsageError for pairs that the tokenizer does not join.
    """
    firsts = preprocessor.encode([first for first, _ in pairs], long_rows)
    if all(second is None for _, second in pairs):
        return firsts
    if not preprocessor.special.joins_pairs:
        raise UsageError("the bundle's tokenizer joins no pairs of texts; leave the second out")
    texts = [each if isinstance(each, str) else "" for pair in pairs for each in pair]
    ids = iter(preprocessor.token_ids(texts))
    both = zip(ids, ids, strict=True)
    return [
        alone if second is None else _joined(preprocessor, (first, second), found, long_rows)
        for alone, (first, second), found in zip(firsts, pairs, both, strict=True)
    ]


def encode_filled(
    preprocessor: Preprocessor, head: HeadSettings, pairs: Sequence[Pair], long_rows: LongRows
) -> list[EncodedRow]:
    """Encodes pairs as the texts that the head's template makes of them.

    Raises UsageError for a single text.
    """
    texts: list[str | RowError] = []
    for first, second in pairs:
        if second is None:
            raise UsageError(
                "the bundle scores pairs of texts, found one; name the second's column with ",
                Option("pair"),
            )
        wrong = next((each for each in (first, second) if isinstance(each, RowError)), None)
        if wrong is None and not (str(first).strip() and str(second).strip()):
            wrong = EMPTY
        texts.append(head.filled(str(first), str(second)) if wrong is None else wrong)
    return preprocessor.encode(texts, long_rows)


def _joined(
    preprocessor: Preprocessor,
    pair: tuple[str | RowError, str | RowError],
    ids: tuple[Any, Any],
    long_rows: LongRows,
) -> EncodedRow:
    special, positions = preprocessor.special, preprocessor.positions
    if long_rows == "truncate":
        positions = min(positions, special.longest or positions)
    text = pair[0] if isinstance(pair[0], str) else ""
    for side in (*pair, *ids):
        error = EMPTY if isinstance(side, str) and not side.strip() else side
        if isinstance(error, RowError):
            return EncodedRow(text, error=error)
    left, right = ids
    room = positions - len(special.wrap(special.between))
    tokens = len(special.wrap([*left, *special.between, *right]))
    cut = len(left) + len(right) > room
    if cut and (long_rows != "truncate" or room < 2):
        return EncodedRow(text, (), tokens, too_long(tokens, positions))
    if cut:
        most = longest_first(len(left), len(right), room)
        left, right = (list(special.cut(*each)) for each in zip((left, right), most, strict=True))
    joined = special.wrap([*left, *special.between, *right])
    return preprocessor.undivided(EncodedRow(text, joined, tokens, truncated=cut), special.between)


def longest_first(left: int, right: int, room: int) -> tuple[int, int]:
    """Returns the lengths of two truncated texts: the longer one down to the other's first.

    As truncation "longest_first" of Hugging Face's tokenizers (`truncate_encodings`).
    """
    short, long = sorted((left, right))
    long = min(long, max(short, room - short))
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if left <= right else (long, short)
