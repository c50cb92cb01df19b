"""Training pairs from the answers of a teacher (Kim and Rush 2016, sections 3.2 and 3.3)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

from sacrebleu.metrics.bleu import BLEU

from transferry.build_model.train.data import ReadReport, SentencePair
from transferry.build_model.train.follow import hold_out
from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.lines import read_lines

# Finish reasons of whole answers; others were cut off at the longest length.
WHOLE = ("end", "stop")


@dataclass(frozen=True)
class DistilledPair:
    """A pair that the student is trained on: a line of pairs.jsonl.

    Attributes:
        source: The text.
        target: Its translation.
        origin: Who wrote the translation.
        rank: Of the teacher, the hypothesis's place in its search, from 1.
        bleu: Of the teacher, the sentence BLEU against the reference, if there is one.
    """

    source: str
    target: str
    origin: Literal["reference", "teacher"]
    rank: int | None = None
    bleu: float | None = None

    @property
    def pair(self) -> SentencePair:
        """The texts alone."""
        return SentencePair(self.source, self.target)

    def line(self) -> bytes:
        """Returns the pair as a line of JSON."""
        record = {name: value for name, value in asdict(self).items() if value is not None}
        return f"{json.dumps(record, ensure_ascii=False)}\n".encode()


def distilled(
    answers: Path, references: Sequence[str] | None, show: Callable[[int], None]
) -> tuple[list[DistilledPair], ReadReport]:
    """Chooses one hypothesis of each answer: see `best_hypothesis`.

    Args:
        answers: Output of a job as JSON lines.
        references: The reference of each row; None without references.
        show: Called with the number of rows that are done.

    Returns:
        The pairs in order, and counts. Rows that hold an error are dropped, and so are those whose
        hypotheses are all empty or cut off.

    Raises:
        InputError: No pair remains.
    """
    made: list[DistilledPair] = []
    dropped: Counter[str] = Counter()
    number = 0
    rows = zip(_records(answers), references or repeat(None), strict=references is not None)
    for number, (answer, reference) in enumerate(rows, start=1):
        show(number)
        if "error" in answer:
            dropped[answer["error"]["kind"]] += 1
        elif (pair := best_hypothesis(answer, reference)) is None:
            dropped["without a whole answer"] += 1
        else:
            made.append(pair)
    report = ReadReport(number, len(made), dict(dropped))
    if not made:
        raise InputError(f"{answers}: expected at least one usable answer, found {report}")
    return made, report


def best_hypothesis(answer: dict[str, Any], reference: str | None) -> DistilledPair | None:
    """Returns the hypothesis with the highest sentence BLEU, or without a reference the likeliest.

    `sacrebleu.sentence_bleu` computes the sentence BLEU; of equal hypotheses the likelier is taken.
    Returns None if every hypothesis is empty or was cut off before its end.

    Args:
        answer: A record of a job, hypotheses best first.
        reference: Reference translation of the source.
    """
    best: DistilledPair | None = None
    for rank, hypothesis in enumerate(answer.get("n_best", [answer]), start=1):
        text = hypothesis["text"]
        if not text.strip() or hypothesis["finish_reason"] not in WHOLE:
            continue
        if reference is None:
            return DistilledPair(answer["source"], text, "teacher", rank)
        bleu = round(_SENTENCE_BLEU.sentence_score(text, [reference]).score, 3)
        if best is None or bleu > (best.bleu or 0.0):
            best = DistilledPair(answer["source"], text, "teacher", rank, bleu)
    return best


def write_pairs(
    taught: Sequence[DistilledPair], corpus: Sequence[SentencePair], pairs: Path, valid: Path | None
) -> None:
    """Writes the training pairs of the student: first the corpus, then the teacher's answers.

    Args:
        taught: Pairs of the teacher.
        corpus: Pairs with references; empty without references.
        pairs: File to write; it appears last.
        valid: File for held-out pairs, of the corpus if there is one; their sources are in no
            training pair. None to hold out nothing.

    Raises:
        InputError: There are too few pairs to hold out a part.
    """
    originals = [DistilledPair(*pair, "reference") for pair in corpus]
    held: frozenset[str] = frozenset()
    if valid is not None:
        base = {pair.pair: pair for pair in originals or taught}
        _, chosen = hold_out(list(base))
        held = frozenset(pair.source for pair in chosen)
        _write(valid, (base[pair] for pair in chosen))
    _write(pairs, (pair for pair in (*originals, *taught) if pair.source not in held))


_SENTENCE_BLEU = BLEU(effective_order=True)


def _records(answers: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, read_lines(answers))


def _write(path: Path, pairs: Iterable[DistilledPair]) -> None:
    with atomic_file(path) as file:
        file.writelines(pair.line() for pair in pairs)
