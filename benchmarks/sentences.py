"""What benchmarks read and count: sentences of a text, sentences of one length, answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.errors import InputError
from transferry.runtime.files import read_lines
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

if TYPE_CHECKING:
    from transferry.runtime.engine.engine import Engine


class Answer(NamedTuple):
    """What a side gave for a sentence.

    Attributes:
        text: The tokens as text.
        tokens: Ids, without the start and end tokens.
    """

    text: str
    tokens: tuple[int, ...]


def search_options(beam: int, max_length: int, min_length: int = 0) -> GenerationOptions:
    """Returns a search without what only some of its callers want.

    Greedy search needs no scores: where the engine can leave them out, it does, and so does the
    other side.
    """
    settings: dict[str, Any] = dict(beam=beam, max_length=max_length, min_length=min_length)
    if beam == 1 and "scores" in {field.name for field in dataclasses.fields(GenerationOptions)}:
        settings["scores"] = False
    return GenerationOptions(**settings)


def engine_answers(
    engine: Engine, texts: Sequence[str], options: GenerationOptions
) -> list[Answer]:
    """Answers each text with the engine, in order.

    Raises:
        InputError: A text has no answer.
    """
    answers = []
    for number, result in enumerate(engine.generate(texts, options), start=1):
        if result.error is not None:
            raise InputError(
                f"sentence {number} has no answer: {result.error.message}; leave it out, so that "
                "all sides have the same work"
            )
        answers.append(Answer(result.text, result.hypotheses[0].tokens))
    return answers


def read_sentences(path: Path, rows: int | None = None) -> list[str]:
    """Returns the first lines of a text that are not blank, or all of them."""
    return list(itertools.islice((line for line in read_lines(path) if line.strip()), rows))


def fixed_sentences(
    lines: Iterable[str], tokenizer: AnyTokenizer, rows: int, length: int
) -> list[str]:
    """Cuts a text into sentences of one length.

    Args:
        lines: The text.
        tokenizer: Counts the tokens; those that it puts around a source count too.
        rows: How many sentences are wanted.
        length: How many tokens each has.

    Returns:
        Texts that `tokenizer` turns into exactly the tokens that they were cut from.

    Raises:
        InputError: The text is too short.
    """
    around = len(tokenizer.special.wrap([]))
    inner = length - around
    if inner < 1:
        raise InputError(
            f"a sentence of {length} tokens has no text: {around} of them are around it; give "
            f"at least {around + 1}"
        )
    ids = tokenizer.encode(" ".join(lines))
    texts = list(itertools.islice(_cuts(ids, tokenizer, inner), rows))
    if len(texts) < rows:
        raise InputError(
            f"the text gives {len(texts)} sentences of {length} tokens, not {rows}; give more "
            "text or ask for fewer rows"
        )
    return texts


def _cuts(ids: Sequence[int], tokenizer: AnyTokenizer, inner: int) -> Iterator[str]:
    """Distinct texts of `inner` tokens, first side by side, then each time one token further."""
    seen = set()
    for shift in range(inner):
        for start in range(shift, len(ids) - inner + 1, inner):
            wanted = list(ids[start : start + inner])
            text = tokenizer.decode(wanted)
            # A cut within a word may give its halves other tokens, or half a character.
            if text not in seen and tokenizer.encode(text) == wanted:
                seen.add(text)
                yield text
