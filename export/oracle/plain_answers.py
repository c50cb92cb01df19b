"""Answers of an engine, from text to text, beside those of the plain search over torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from transferry.build_model.model.config import ModelConfig
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.plain_search import Row, plain_text, scorer
from transferry.runtime.decoding.decoder import Decoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.proof.report import Decisions, Difference
from transferry.runtime.proof.tally import ExpectedAnswers, Tally
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

PLAINLY = "plain search"
# Rows and tokens of an answer, and texts among which those of such a length are chosen.
PLAIN_ROWS, PLAIN_LENGTH, PLAIN_AMONG = 4, 8, 64
REPEATING = 2.0**-7  # a repetition penalty that makes tokens come again
# Answers texts, such as an engine's.
Generate = Callable[[Sequence[str], GenerationOptions], Iterable[GenerationResult]]


def plain_length(options: GenerationOptions) -> int:
    """Returns the most tokens of an answer that is searched plainly: a few after its beginning."""
    begun = len(options.prefix) + (options.forced_begin is not None)
    return min(options.max_length, PLAIN_LENGTH + begun)


@dataclass(frozen=True)
class PlainAnswers:
    """Texts that an engine and the plain search answer.

    Attributes:
        logits: torch's, of each; see `Row`.
    """

    oracle: Oracle
    decoder: Decoder[Any]
    texts: Sequence[str]
    sources: Sequence[Sequence[int]]
    logits: Sequence[Any]
    text: Callable[[Sequence[int]], str]

    @classmethod
    def of(
        cls, oracle: Oracle, decoder: Decoder[Any], tokenizer: AnyTokenizer, texts: Sequence[str]
    ) -> Self:
        """Encodes a few of the texts; a few words without any."""
        texts = _few_texts(oracle.config, tokenizer, texts)
        special = tokenizer.special
        sources = [special.wrap(tokenizer.encode(text)) for text in texts]
        first = special.bos_id if decoder.has_encoder else None
        logits = [scorer(oracle.reference, source, first) for source in sources]
        return cls(oracle, decoder, texts, sources, logits, plain_text(tokenizer))

    def rows(self, options: GenerationOptions) -> list[Row]:
        """Returns each source, and the first once more."""
        special, config = self.oracle.special, self.oracle.config
        first = special.bos_id if self.decoder.has_encoder else None
        given = first, special.ends, config.max_positions, options
        places = [*range(len(self.texts)), 0]
        return [
            Row(self.logits[place], self.text, self.sources[place], number, *given)
            for number, place in enumerate(places)
        ]

    def ruled(self) -> dict[str, GenerationOptions]:
        """Returns searches that go through every rule, made of the tokens of torch's answers.

        Whatever the text, a rule alone decides tokens of the first answer: without it, that would
        be greedy search's, or its tokens would come again.
        """
        length = min(PLAIN_LENGTH, self.oracle.config.max_positions)
        greedy = GenerationOptions(max_length=length)
        row = self.rows(greedy)[0]
        tokens, ends = row.answers()[0].tokens, self.oracle.special.ends
        special = self.oracle.special.ids()
        likely, text = tokens[:1], row.shown(tokens)
        allowed = [each for each in range(self.oracle.config.vocabulary_size) if each not in ends]
        rules: dict[str, Any] = {
            "suppress_sequences": (tokens[:2],) if tokens else (),
            "repetition_penalty": 1.3,
            "no_repeat_ngram": 2,
            "min_length": min(3, length),
            "forced_end": ends[:1],
        }
        repeats: dict[str, Any] = {
            "suppress": likely,
            "repetition_penalty": REPEATING,
            "no_repeat_ngram": 2,
            "min_length": length,
        }
        beams: dict[str, Any] = {
            **rules,
            "suppress": likely,
            "beam": 3,
            "n_best": 2,
            "early_stopping": False,
            "length_penalty": 0.6,
            "prefix": (allowed[len(allowed) // 2],),
            "suppress_begin": likely,
            "prompt_ngrams": True,
            "renormalise": True,
        }
        # The end tokens compete with the least likely token alone.
        logits = row.logits([()])[0]
        least = min(allowed, key=lambda each: (each in special, logits[each]))
        cut: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
        return {
            "rules": replace(greedy, **rules),
            "rules, repeating": replace(greedy, **repeats),
            "rules, beam 3": replace(greedy, **beams),
            "minimum length": replace(
                greedy,
                suppress=tuple(each for each in allowed if each != least),
                min_length=length // 2,
            ),
            "samples": replace(greedy, sample=True, n_best=2, seed=3, typical_p=0.95, **cut),
            "stop string": replace(greedy, stop=(text[len(text) // 2],) if text else ()),
        }

    def compare(self, searches: Mapping[str, GenerationOptions], generate: Generate) -> Decisions:
        """Answers by both sides, in these searches and in those of every rule, and compares."""
        every = {**searches, **self.ruled()}
        found = [self.search(name, options, generate) for name, options in every.items()]
        return _summed(found, len(self.texts))

    def search(self, name: str, options: GenerationOptions, generate: Generate) -> Decisions:
        """Compares one search.

        Tokens, finish reasons, scores and texts are compared, and that a text given again and the
        lines of a text have the answers of the same texts alone.
        """
        rows, again = self.rows(options), len(self.texts)
        given = [*self.texts, self.texts[0]]
        splits = self.decoder.has_encoder and options.split_lines is not False
        if joins := splits and again > 1 and not options.sample and options.n_best == 1:
            given.append("\n".join(self.texts[:2]))
        found = list(generate(given, options))
        wrong = [
            Difference(number, problem)
            for number, text in enumerate(given)
            if (problem := _answers(found[number : number + 1], text))
        ]
        if wrong:
            return Decisions(name, len(rows), 0, 0.0, defects=wrong)
        wanted = [row.answers() for row in rows]
        sources, scored = [row.source for row in rows], partial(self.oracle.scores, options=options)
        exact = scored(sources, wanted) if options.scores else ()
        expected = ExpectedAnswers(range(len(rows)), sources, wanted, exact)
        # The plain scores are torch's too.
        answers = [[one.hypotheses, plain] for one, plain in zip(found, wanted, strict=False)]
        tally = Tally(name, self.oracle.tolerance)
        tally.add(expected, answers, self.oracle.explainer(self.decoder, options), scored)
        for row, result in zip(rows, found, strict=False):
            for one in result.hypotheses:
                if one.text != (text := row.shown(one.tokens)):
                    message = f"the text is {one.text!r}, its tokens spell {text!r}"
                    wrong.append(Difference(row.number, message))
        if not options.sample and found[again].hypotheses != found[0].hypotheses:
            wrong.append(Difference(again, "a text that came again has another answer"))
        if joins and found[-1].text != "\n".join(each.text for each in found[:2]):
            wrong.append(Difference(len(rows), "two lines have other answers than each alone"))
        found_so = tally.decisions()
        return replace(found_so, defects=[*found_so.defects, *wrong])


def _few_texts(config: ModelConfig, tokenizer: AnyTokenizer, texts: Sequence[str]) -> list[str]:
    """Returns the first texts that are about as long as an answer and leave room for one."""
    sizes = {text: len(tokenizer.encode(text)) for text in dict.fromkeys(texts[:PLAIN_AMONG])}
    room = config.max_positions - PLAIN_LENGTH - len(tokenizer.special.wrap(()))
    fit = [text for text, size in sizes.items() if 0 < size <= room and len(text.splitlines()) == 1]
    fit.sort(key=lambda text: abs(sizes[text] - PLAIN_LENGTH))
    return fit[:PLAIN_ROWS] or ["a", "one two"]


def _answers(found: Sequence[GenerationResult], text: str) -> str:
    """Describes why a result is no answer to a text; empty if it is."""
    if not found or found[0].source != text:
        return f"expected an answer to {text!r}, found {found[0].source if found else 'none'!r}"
    return "" if found[0].error is None else f"{text!r} has no answer: {found[0].error.message}"


def _summed(parts: Sequence[Decisions], rows: int) -> Decisions:
    """Sums up searches over some rows: of each row the worst difference, which names its search."""
    worst: dict[int, tuple[str, Difference]] = {}
    for kind in ("defects", "tolerated", "ties"):
        for part in parts:
            for each in getattr(part, kind):
                row = each.row if each.row < rows else 0  # the first one again
                shown = replace(each, row=row, message=f"{part.search}: {each.message}")
                worst.setdefault(row, (kind, shown))

    def listed(kind: str) -> list[Difference]:
        return [difference for found, difference in worst.values() if found == kind]

    return Decisions(
        PLAINLY,
        rows,
        rows - sum(not each.wrong_score for _, each in worst.values()),
        float(np.max([part.score_error for part in parts])),
        float(np.max([part.score_ratio for part in parts])),
        *(listed(kind) for kind in ("ties", "defects", "tolerated")),
    )
