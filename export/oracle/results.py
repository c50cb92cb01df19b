"""Inputs of the tasks of an encoder-only model, and their results by a plain second implementation.

The runtime's tokenizer is used, its code of the tasks is not: a fault there shows as a difference.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.oracle.cases import random_sources
from transferry.runtime.bundle.head import Aggregation, HeadSettings, Side
from transferry.runtime.decoding.decoder import Tensors
from transferry.runtime.engine.prompts import Asked, Prompt
from transferry.runtime.engine.tasks.fill_mask import MASK
from transferry.runtime.errors import UsageError

Floats = NDArray[np.float64]

HIDDEN = 7  # one word in so many is hidden
SHORT_ROWS = 6  # different short rows
ALIKE = 2  # short rows of one length, so that sorted by length neighbours differ
LETTERS = 6  # of the word of a short row at most
MADE_UP = 8  # texts of random tokens, without text
WINDOW, SHARED = 384, 128  # tokens of a window of `answer`, and of two neighbours
PROBABILITIES = "probabilities"
VECTORS = {"dense": "vector", "tokens": "vectors", "sparse": "weights"}  # of results of `embed`
LEAST = 1e-38  # number by which another may be measured; a probability may be too small for any
EXACT = 2.0**-22  # of results made of the same tensors, over the largest: float32 rounds vectors


class Once(str):
    """A text that equals no other, so that the engine answers each repetition."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Row:
    """An input of a task.

    Attributes:
        texts: One text, or the two of a pair.
        more: Tokens of its further windows, for `answer`.
    """

    texts: tuple[str, ...]
    ids: tuple[int, ...]
    more: tuple[tuple[int, ...], ...] = ()

    def given(self) -> Any:
        """Returns the row as the engine's methods take it, unequal to all others."""
        texts = tuple(map(Once, self.texts))
        return texts if len(texts) > 1 else texts[0]

    def as_ids(self) -> Asked:
        """Returns the row as the tokens that `embed` takes."""
        return Asked(Prompt(Once(json.dumps(self.ids)), "ids"))


class Inputs:
    """Rows of texts for each task, encoded without the runtime's preprocessing."""

    def __init__(self, checkpoint: Checkpoint, texts: Sequence[str]) -> None:
        """Takes the tokenizer and head of a checkpoint; without texts, random tokens as text."""
        self.tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
        self.special = special = self.tokenizer.special
        self.head = checkpoint.head or HeadSettings("embed")
        self.with_head = checkpoint.head is not None
        sides = self.head.sides.values()
        longest = max([self.head.longest, *(side.longest for side in sides)])
        self.positions = min(config.max_positions, special.longest or config.max_positions)
        self.prompt = "" if self.head.sides else self.head.prompt(None)
        self.most = min(self.positions, longest or self.positions)
        random = map(self.tokenizer.decode, random_sources(config, MADE_UP))
        self.texts = [text for text in texts or random if text.strip()] or ["a"]

    @property
    def has_places(self) -> bool:
        """Whether the tokenizer tells the places of tokens in a text, as `tag` needs."""
        try:
            self.tokenizer.places("a")
        except UsageError:
            return False
        return True

    @property
    def embeds(self) -> bool:
        """Whether a head makes the vectors."""
        return self.with_head and self.head.task == "embed"

    def values(self, tensors: Tensors) -> dict[str, Floats]:
        """Returns the numbers of results that tensors of one row decide, by name."""
        found = {"vector": _vector(self, tensors, None, normalise=False)}
        if (kind := self.head.probabilities) != "none":
            scores = tensors["head"][0]
            scores = scores.T if self.head.task == "answer" else scores
            found[PROBABILITIES] = _probabilities(scores, kind)
        return found

    def units(self, tensors: Tensors, least: float) -> dict[str, float]:
        """Returns the unit of the errors of `values`: 1 of probabilities.

        Of a vector it is the largest mean of a channel's sizes, since a mean may cancel, or the
        largest output of a head; `least` is the lower bound of a head's unit.
        """
        large = {name: np.abs(tensors[name]) for name in ("hidden", "head") if name in tensors}
        vector = _vector(self, large, None, normalise=False)
        unit = float(vector.max(initial=least if self.embeds else 0.0))
        return {"vector": unit or 1.0, PROBABILITIES: 1.0}

    def _kept(self, ids: Sequence[int], most: int) -> tuple[int, ...]:
        room = most - len(self.special.wrap([]))
        left = max(0, len(ids) - room) if self.special.keeps_end else 0
        return tuple(self.special.wrap(ids[left : left + room]))

    def plain(self, text: str, prompt: str = "") -> Row:
        """Returns a text after a prompt, or as a side of a search, which a prompt names."""
        if self.head.sides:
            return self._sided(text, self.head.sides[prompt or self.head.default_prompt])
        return Row((text,), self._kept(self.tokenizer.encode(prompt + text), self.most))

    def queries(self) -> list[Row]:
        """Returns the texts as queries, where these are read in a way of their own."""
        return [self.plain(text, "query") for text in self.texts if "query" in self.head.sides]

    def _sided(self, text: str, side: Side) -> Row:
        first, *wrapped = self.special.wrap(self.tokenizer.encode(text))
        inner = wrapped[: len(wrapped) - len(self.special.after)]
        most = min(self.most, side.longest)
        room = most - 1 - len(side.before) - len(self.special.after)
        left = max(0, len(inner) - room) if self.special.keeps_end else 0
        ids = [first, *side.before, *inner[left : left + room], *self.special.after]
        return Row((text,), (*ids, *[side.fill] * (most - len(ids) if side.fill >= 0 else 0)))

    def masked(self, text: str) -> Row:
        """Returns a text with some of its words hidden."""
        words = text.split(" ")
        hidden = len(words) // 2 % HIDDEN
        some = [MASK if at % HIDDEN == hidden else each for at, each in enumerate(words)]
        for chosen in (some, [MASK] * len(words)):  # a text may be cut between two masks
            text = " ".join(chosen)
            # The head's longest row limits other tasks.
            ids = self._kept(self.tokenizer.encode_masked(text.split(MASK)), self.positions)
            if self.special.mask_id in ids:
                break
        return Row((text,), ids)

    def pair(self, one: str, other: str) -> Row:
        """Returns a pair of texts, cut only where a template joins them."""
        if self.head.template:
            pieces = list(self.head.template)
            for name, given in (("query", one), ("document", other)):
                pieces[pieces.index(name, 1, -1)] = given
            return Row((one, other), self._kept(self.tokenizer.encode("".join(pieces)), self.most))
        left, right = map(self.tokenizer.encode, (self.head.prompt(None) + one, other))
        ids = self.special.wrap([*left, *self.special.between, *right])
        return Row((one, other), tuple(ids))

    def cuts(self, tokens: int, question: int) -> list[slice]:
        """Returns the tokens of each window of a context; none if the question is too long."""
        window = min(WINDOW, self.most)
        shared = min(SHARED, window // 2)
        room = window - question - len(self.special.wrap(self.special.between))
        if tokens > room <= shared:
            return []
        step = max(1, room - shared)
        firsts = [0, *range(step, tokens - shared, step)]
        found = [slice(first, min(first + room, tokens)) for first in firsts]
        if self.special.keeps_end:
            found = [slice(tokens - each.stop, tokens - each.start) for each in found]
        return found

    def asked(self, question: str, context: str) -> list[Row]:
        """Returns a question about a context, as far as it leaves room for that."""
        left, right = map(self.tokenizer.encode, (question, context))
        between, special = self.special.between, self.special
        windows = [
            tuple(special.wrap([*left, *between, *right[cut]]))
            for cut in self.cuts(len(right), len(left))
        ]
        return [Row((question, context), windows[0], tuple(windows[1:]))] if windows else []

    def rows(self, task: str) -> list[Row]:
        """Returns the texts as rows of a task.

        Of `classify` each text with the next too, where the pair fits.
        """
        if task == "rank":
            return [row for row in self.rows("classify") if len(row.texts) > 1]
        if task == "fill-mask":
            return [self.masked(text) for text in self.texts]
        if task == "answer":
            asked = pairwise([*self.texts, self.texts[0]])
            return [row for each in asked for row in self.asked(*each)]
        prompt = "" if task == "tag" else self.prompt
        paired = task == "classify" and bool(self.head.template)
        rows = [] if paired else [self.plain(text, prompt) for text in self.texts]
        if paired or (task == "classify" and self.special.joins_pairs):
            pairs = (self.pair(*each) for each in pairwise([*self.texts, self.texts[0]]))
            rows += [pair for pair in pairs if len(pair.ids) <= self.most]
        return rows

    def special_rows(self, task: str, most: int) -> list[Row]:
        """Returns the longest row, the shortest one, and short ones of up to `most` tokens."""
        masks = task == "fill-mask"
        made: Any = self.masked if masks else self.plain
        prompt = () if masks or task == "tag" else (self.prompt,)
        if self.head.template:
            made = lambda text, _: self.pair(text, text)  # noqa: E731
        joined = " ".join(islice(cycle(self.texts), self.most))
        words = joined.split()
        if task == "answer":
            # A word of the context is the question.
            made = lambda text: (self.asked(text.split()[0], text) or self.rows(task))[0]  # noqa: E731
            prompt = ()
        short: dict[tuple[int, ...], Row] = {}
        for number, word in enumerate(words):
            piece = word[: 1 + number % LETTERS]
            row = made(f"{piece} {piece}" if masks else piece, *prompt)
            alike = sum(len(ids) == len(row.ids) for ids in short)
            if len(row.ids) <= most and alike < ALIKE:
                short[row.ids] = row
            if len(short) == SHORT_ROWS:
                break
        return [made(joined, *prompt), made(words[0][:1], *prompt), *short.values()]


def _probabilities(scores: NDArray[Any], kind: str) -> Floats:
    exact = scores.astype(np.float64)
    if kind == "softmax":
        powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
        exact = powers / powers.sum(axis=-1, keepdims=True)
    elif kind == "sigmoid":
        exact = 1 / (1 + np.exp(np.minimum(-exact, 700)))
    return exact


def _vector(inputs: Inputs, tensors: Tensors, pooling: str | None, *, normalise: bool) -> Floats:
    if pooling is None and inputs.embeds:
        vector = tensors["head"][0].astype(np.float64)
        vector = vector[: inputs.head.width or len(vector)]
    else:
        hidden = tensors["hidden"][0].astype(np.float64)
        place = {"first": 0, "last": -1}.get(pooling or "")
        vector = hidden.sum(axis=0) / len(hidden) if place is None else hidden[place]
    if normalise:
        vector = vector / (math.sqrt(math.fsum(each * each for each in vector)) or 1.0)
    found: Floats = vector
    return found


def _alike(found: Any, wanted: Any, least: float = LEAST) -> bool:
    """Whether numbers are the same but for float32's rounding of the largest, or of `least`."""
    one, other = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if one.shape != other.shape:
        return False
    return bool((np.abs(one - other) <= EXACT * np.abs(other).max(initial=least)).all())


def _plain_embed(
    inputs: Inputs,
    row: Row,
    result: Any,
    tensors: Tensors,
    pooling: str | None = None,
    normalise: bool = False,
    top: int | None = None,
    prompt: str | None = None,
) -> bool:
    wanted = _vector(inputs, tensors, pooling, normalise=normalise)
    kind = "dense" if pooling is not None else inputs.head.vectors
    if not hasattr(result, VECTORS[kind]):  # a wrong manifest
        return False
    if kind == "tokens":
        skipped = inputs.head.sides[prompt or inputs.head.default_prompt].skipped
        places = [place for place, token in enumerate(row.ids) if token not in skipped]
        return _alike(result.vectors, wanted[places])
    if kind == "dense":
        return _alike(result.vector, wanted)
    best = np.sort(wanted[wanted > 0])[::-1][:top]
    apart = len(set(result.indices)) == len(result.indices)
    places, known = [*result.indices], inputs.tokenizer.vocabulary()
    told = [known.get(token, at) for token, at in zip(result.tokens, places, strict=False)]
    return (
        apart
        and told == places
        and all(_alike(result.weights, each) for each in (best, wanted[places]))
    )


def _plain_classify(inputs: Inputs, row: Row, result: Any, tensors: Tensors) -> bool:
    head, scores = inputs.head, tensors["head"][0]
    values = _probabilities(scores, head.probabilities)
    label = {"softmax": head.labels[int(scores.argmax())], "none": ""}.get(
        head.probabilities,
        ", ".join(name for name, score in zip(head.labels, scores, strict=True) if score >= 0),
    )
    named = [each.label for each in result.scores] == list(head.labels)
    return named and result.label == label and _alike(result.numbers, values)


def _plain_rank(inputs: Inputs, row: Row, result: Any, tensors: Tensors) -> bool:
    (score,) = tensors["head"][0]
    return _alike(result.score, _probabilities(np.array(score), inputs.head.rank))


def _plain_fill_mask(inputs: Inputs, row: Row, result: Any, tensors: Tensors, top: int = 5) -> bool:
    ids, decode = np.array(row.ids), inputs.tokenizer.decode
    top = min(top, tensors["logits"].shape[-1])
    places = np.flatnonzero(ids == inputs.special.mask_id)
    logits = tensors["logits"][0, places].astype(np.float64)
    sizes = np.abs(logits).max(axis=-1, initial=4.0)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    if len(places) != len(result.candidates):
        return False
    for own, size, candidates in zip(scores, sizes, result.candidates, strict=True):
        tokens = [each.token for each in candidates]
        given = [each.log_probability for each in candidates]
        best = np.sort(np.partition(own, -top)[-top:])[::-1]
        told = all(each.text == decode([each.token]) for each in candidates)
        apart = len(set(tokens)) == len(best)
        # In float32 a sum of exponentials moves each logarithm by some units of 1, and the
        # difference of a logit and the log-sum-exp by one of theirs.
        same = all(_alike(given, each, size) for each in (own[tokens], best))
        if not (told and apart and same):
            return False
    ids[places] = [each[0].token for each in result.candidates]
    return bool(result.text == decode(ids.tolist()))


def _plain_tag(
    inputs: Inputs, row: Row, result: Any, tensors: Tensors, aggregation: Aggregation = "none"
) -> bool:
    special, (text,) = inputs.special, row.texts
    count = len(row.ids) - len(special.wrap([]))
    own = _probabilities(tensors["head"][0], "softmax")[len(special.before) :][:count]
    places = inputs.tokenizer.places(text)
    places = places[len(places) - count :] if special.keeps_end else places[:count]
    words: list[list[int]] = []
    for number, place in enumerate(places):
        if words and place.continues and aggregation not in ("none", "simple"):
            words[-1].append(number)
        else:
            words.append([number])
    spans: list[list[tuple[list[int], str, float]]] = []  # tokens, label and score of each word
    for word in words:
        scores = own[word[0]]
        if aggregation == "average":
            scores = own[word].sum(axis=0) / len(word)
        elif aggregation == "max":
            scores = max(own[word], key=lambda one: float(one.max()))
        label = inputs.head.labels[int(scores.argmax())]
        joins = aggregation != "none" and spans and not label.startswith("B-")
        if not joins or _entity(spans[-1][-1][1]) != _entity(label):
            spans.append([])
        spans[-1].append((word, label, float(scores.max())))
    wanted, means = [], []
    for span in spans:
        start, end = places[span[0][0][0]].start, places[span[-1][0][-1]].end
        # transformers names entities by their labels after the first hyphen.
        label = span[0][1] if aggregation == "none" else span[0][1].split("-", 1)[-1]
        if aggregation == "none" or label != "O":
            wanted.append((text[start:end], start, end, label))
            means.append(sum(score for *_, score in span) / len(span))
    found = [(each.text, each.start, each.end, each.label) for each in result.tags]
    return found == wanted and _alike([each.score for each in result.tags], means)


def _plain_answer(
    inputs: Inputs,
    row: Row,
    result: Any,
    *windows: Tensors,
    top: int = 1,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
) -> bool:
    question, context = row.texts
    places, asked = inputs.tokenizer.places(context), len(inputs.tokenizer.encode(question))
    found: dict[str, float] = {}
    nothing = [0.0] if not inputs.special.before else []
    for tensors, cut in zip(windows, inputs.cuts(len(places), asked), strict=True):
        own, scores = places[cut], tensors["head"][0].astype(np.float64)
        scores = scores[: len(scores) - len(inputs.special.after)]
        # No token of the question takes part in the softmax.
        hidden = np.arange(len(scores)) < len(scores) - len(own)
        hidden[: bool(inputs.special.before)] = False
        scores[hidden] = -np.inf
        start, end = _probabilities(scores.T, "softmax")
        nothing += [float(start[0] * end[0])] if inputs.special.before else []
        spans = []
        for first, begin in enumerate(start[-len(own) :].tolist()):
            ends = end[-len(own) :][first : first + max_answer_len].tolist()
            spans += [(begin * stop, first, first + more) for more, stop in enumerate(ends)]
        for score, first, last in sorted(spans, key=lambda one: -one[0])[: 2 * top + 10]:
            same = [
                [each for each in own if each.word == own[at].word and each.word is not None]
                or [own[at]]
                for at in (first, last)
            ]
            text = context[same[0][0].start : same[1][-1].end].lower()
            if score > 0:
                found[text] = found.get(text, 0.0) + score
    wanted = sorted(found.values())
    if handle_impossible_answer or not wanted:
        wanted = sorted([*wanted, min(nothing)])
    told = [each.score for each in result.answers]
    for each in result.answers:
        score = found.get(each.text.lower(), 0.0) if each.text else min(nothing)
        if context[each.start : each.end] != each.text or not _alike(each.score, score):
            return False
    apart = len({each.text.lower() for each in result.answers}) == len(told)
    return apart and _alike(told, wanted[::-1][:top])


def _entity(label: str) -> str:
    return label[2:] if label[:2] in ("B-", "I-") else label


# Whether the result of a row follows from its tensors, by task; given the settings of the call.
RESULTS: Mapping[str, Callable[..., bool]] = {
    "embed": _plain_embed,
    "classify": _plain_classify,
    "rank": _plain_rank,
    "tag": _plain_tag,
    "answer": _plain_answer,
    "fill-mask": _plain_fill_mask,
}
