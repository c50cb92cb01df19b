"""Input and output of benchmarks: sentences of a text or of one length, and answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.lines import read_lines
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

if TYPE_CHECKING:
    from transferry.build_model.model.config import ModelConfig
    from transferry.runtime.engine.engine import Engine


class Answer(NamedTuple):
    """Answer of a side to one sentence; ids without start and end tokens."""

    text: str
    tokens: tuple[int, ...]


def search_options(beam: int, max_length: int, min_length: int = 0) -> GenerationOptions:
    """Returns options for both sides; greedy search without scores, which it does not need."""
    return GenerationOptions(
        beam=beam, max_length=max_length, min_length=min_length, scores=beam > 1
    )


def require_fields(
    config: ModelConfig, allowed: Mapping[str, Sequence[object]], library: str
) -> None:
    """Raises a UsageError if a field of the model has a value that a library cannot hold."""
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            raise UsageError(
                f"{library} needs {name} to be one of {', '.join(map(str, values))}, found "
                f"{getattr(config, name)}; compare another model"
            )


def engine_answers(
    engine: Engine, texts: Sequence[str], options: GenerationOptions
) -> list[Answer]:
    """Answers each text with the engine, in order.

    Raises:
        InputError: A text got an error instead of an answer.
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
    """Returns the first `rows` lines of a text that are not blank."""
    return list(itertools.islice((line for line in read_lines(path) if line.strip()), rows))


def fixed_sentences(
    lines: Iterable[str], tokenizer: AnyTokenizer, rows: int, length: int
) -> list[str]:
    """Cuts a text into sentences of one length.

    Returns:
        Texts that `tokenizer` encodes as exactly the tokens that they were cut from.

    Raises:
        InputError: The text is too short.
    """
    around = len(tokenizer.special.wrap([]))
    inner = length - around
    if inner < 1:
        raise InputError(
            f"the length must be at least {around + 1}, {around} of them special tokens, found "
            f"{length}"
        )
    ids = tokenizer.encode(" ".join(lines))
    texts = list(itertools.islice(_cuts(ids, tokenizer, inner), rows))
    if len(texts) < rows:
        raise InputError(
            f"expected text for {rows} sentences of {length} tokens, found {len(texts)}; give more "
            "text or fewer rows"
        )
    return texts


def _cuts(ids: Sequence[int], tokenizer: AnyTokenizer, inner: int) -> Iterator[str]:
    """Distinct texts of `inner` tokens: adjacent ones, then shifted by one token each pass."""
    seen = set()
    for shift in range(inner):
        for start in range(shift, len(ids) - inner + 1, inner):
            wanted = list(ids[start : start + inner])
            text = tokenizer.decode(wanted)
            # A cut inside a word or a character may change the tokens.
            if text not in seen and tokenizer.encode(text) == wanted:
                seen.add(text)
                yield text
