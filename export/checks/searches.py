"""Searches over text: the subject's tokens and scores beside torch's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from transferry.build_model.model.config import ModelConfig
from transferry.export.checks.check import Check, Findings, Pairs
from transferry.export.oracle.cases import (
    GIVEN,
    RECORDED,
    SEARCHES,
    WHOLE,
    random_sources,
    search_settings,
)
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.plain_answers import (
    PLAINLY,
    Generate,
    PlainAnswers,
    plain_length,
)
from transferry.export.oracle.served import Answers, serve
from transferry.export.subject.bundle import BundleSubject
from transferry.export.subject.subject import Subject
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import Decoder
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options
from transferry.runtime.proof.tally import Decode, Tally
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

SCREENED = "greedy, screened"
GIVEN_BEGINNINGS = "given beginnings, in one graph"
ROWS = 7  # of the given beginnings


@dataclass(frozen=True)
class Text:
    """Text of a proof and how it is searched.

    Attributes:
        generation: The bundle's defaults of generation.
        fed: Targets to feed whole, from the start token on. Default: torch's greedy answers.
        sampled: Searches other than `WHOLE` run on one source in so many.
        given: Fields of GenerationOptions of one search more, besides the bundle's defaults.
        decode: Returns the text of token ids, for the report; None leaves the texts out.
        standard: Names of the other searches.
    """

    config: ModelConfig
    sources: Sequence[Sequence[int]]
    generation: Mapping[str, Any]
    longest: int
    fed: Sequence[Sequence[int]] | None = None
    sampled: int = 1
    given: Mapping[str, Any] | None = None
    decode: Decode | None = None
    standard: Sequence[str] = tuple(SEARCHES)

    @property
    def searches(self) -> list[str]:
        """Names of the searches: the standard ones, and the one that is given."""
        return [*self.standard, *([] if self.given is None else [GIVEN])]

    def every(self, name: str) -> int:
        """Returns how many sources there are for each that a search runs on."""
        return 1 if name in (*WHOLE, GIVEN) else self.sampled

    def options(self, name: str) -> GenerationOptions:
        """Returns the options of a search."""
        given = (self.given or {}) if name == GIVEN else {}
        length = min(self.longest, given.get("max_length", self.longest))
        generation = vars(generation_options(given, generation_options(self.generation)))
        settings = search_settings(name, generation, self.config, self.sources, length)
        return GenerationOptions(**settings)

    def plain(self) -> dict[str, GenerationOptions]:
        """Returns the bundle's search and the user's as they are, for short answers."""
        default = generation_options(self.generation)
        searches = {"defaults": default}
        if self.given:
            searches[GIVEN] = generation_options(self.given, default)
        most = self.config.max_positions
        return {
            name: generation_options({"max_length": min(plain_length(each), most)}, each)
            for name, each in searches.items()
        }


@dataclass(frozen=True)
class Search:
    """One way to answer sources.

    Attributes:
        decoder: Steps as this way does; explains differing tokens.
        answers: Returns the hypotheses of each source, once for each time that it was answered.
        rows: Most rows that torch searches at once; see `Oracle.expected`.
    """

    name: str
    decoder: Decoder[Any]
    sources: Sequence[Sequence[int]]
    options: GenerationOptions
    answers: Callable[[], Sequence[Answers]]
    prefixes: Sequence[Sequence[int]] | None = None
    rows: int | None = None

    def add_to(self, tally: Tally, oracle: Oracle) -> Iterator[int]:
        """Adds the comparison of the answers to a tally; yields the number of rows of each batch.

        Scores are compared if the options ask for them.
        """
        explain = oracle.explainer(self.decoder, replace(self.options, scores=True))
        explain = replace(explain, same_search=True)
        scored = partial(oracle.scores, options=self.options)
        given = self.answers()
        more: dict[str, Any] = {"prefixes": self.prefixes, "rows": self.rows}
        for batch in oracle.expected(self.sources, self.options, **more):
            found = [given[row] for row in batch.rows]
            if self.options.scores:
                batch = oracle.scored(batch, found, self.options)
            tally.add(batch, found, explain, scored)
            yield len(batch.rows)

    def check(
        self,
        oracle: Oracle,
        *,
        best: str = "",
        trained: bool = False,
        decode: Decode | None = None,
    ) -> Check:
        """Returns the check of this search.

        It keeps the best answers under the name `best`: the model's, and torch's, if `trained` as
        trained, not with the rounding of the variant. `decode` gives the report its texts.
        """

        def run(so_far: Findings) -> Iterator[Findings]:
            tally = Tally(self.name, oracle.tolerance)
            for rows in self.add_to(tally, oracle):
                yield Findings(steps=rows)
            pairs: Pairs = [tally.best[row] for row in sorted(tally.best)]
            if trained:
                answers = oracle.trained_answers(self.sources, self.options)
                both = zip(answers, pairs, strict=True)
                pairs = [(wanted[0], found) for wanted, (_, found) in both]
            kept = {best: pairs} if best else {}
            yield Findings(decisions=[tally.decisions(decode)], best=kept)

        return Check(self.name, run, len(self.sources))


def served_searches(
    subject: Subject[Any],
    oracle: Oracle,
    text: Text,
    variant: Variant,
    batches: BatchOptions,
) -> list[Check]:
    """Returns a check of each search over text, through the path that serves."""

    def served(name: str, options: GenerationOptions, every: int) -> Search:
        sources = text.sources[::every]

        def answers() -> Sequence[Answers]:
            numbers = range(len(sources))
            return serve(subject.model, sources, options, oracle.special, batches, numbers)

        return Search(name, subject.model, sources, options, answers)

    checks = []
    for name in text.searches if text.sources else ():
        every = text.every(name)
        called = name if every == 1 else f"{name} of every {every}th row"
        search = served(called, text.options(name), every)
        # Of beams, only the metrics of targets read the answers of the model as trained.
        read = RECORDED if text.fed is not None and text.config.encoder_layers else RECORDED[:1]
        trained = oracle.rounds and name in read
        checks.append(search.check(oracle, best=name, trained=trained, decode=text.decode))
    if variant.screen and text.sources:
        unscored = replace(text.options("greedy"), scores=False)
        checks.append(served(SCREENED, unscored, 1).check(oracle, decode=text.decode))
    return checks


def whole_searches(subject: BundleSubject, oracle: Oracle, text: Text, rows: int) -> list[Check]:
    """Returns checks of tokens and log-probabilities of the graph `generate`.

    Every source is answered alone, in a batch and padded on the left. Beginnings of random tokens,
    which a search seldom chooses, go through the decoder of a model with an encoder. The step
    graphs search again where tokens differ.
    """
    sources = text.sources or random_sources(oracle.config, ROWS)
    options = one_graph_options(text, subject.one_graph.beam)

    def answers() -> Sequence[Answers]:
        return subject.one_graph.answers_all_ways(sources, options, oracle.special, rows)

    found = [Search(subject.one_graph.name, subject.model, sources, options, answers)]
    if oracle.config.encoder_layers:
        found.append(_given_beginnings(subject, oracle, sources[:ROWS], text.generation))
    return [search.check(oracle) for search in found]


def _given_beginnings(
    subject: BundleSubject,
    oracle: Oracle,
    sources: Sequence[Sequence[int]],
    generation: Mapping[str, Any],
) -> Search:
    """Feeds random beginnings as long as the positions allow, up to the whole vocabulary."""
    config, special = oracle.config, oracle.special
    length = max(0, min(config.max_positions - 1, config.vocabulary_size - len(special.ends)))
    generator = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(config.vocabulary_size), special.ends)
    prefixes = [generator.permutation(allowed)[:length].tolist() for _ in sources]
    # The graph has the rules of the defaults, whatever the beginning is.
    given = {name: value for name, value in generation.items() if name != "prefix"}
    options = one_graph_options(Text(config, sources, given, length + 1), subject.one_graph.beam)
    if options.forced_begin is not None:
        prefixes = [prefix[1:] for prefix in prefixes]

    def answers() -> Sequence[Answers]:
        found = subject.one_graph.answers(sources, options, special, prefixes=prefixes)
        return [[each] for each in found]

    return Search(GIVEN_BEGINNINGS, subject.model, sources, options, answers, prefixes)


def one_graph_options(text: Text, beam: int) -> GenerationOptions:
    """Returns the options of the search in the graph `generate`."""
    return replace(text.options("greedy"), beam=beam, n_best=beam, scores=True)


def plain_searches(
    oracle: Oracle,
    decoder: Decoder[Any],
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    text: Text,
    generate: Generate,
) -> Check:
    """Returns the check of an engine, from text to text, beside a plain search over torch."""

    def run(so_far: Findings) -> Iterator[Findings]:
        plain = PlainAnswers.of(oracle, decoder, tokenizer, texts)
        yield Findings(decisions=[plain.compare(text.plain(), generate)])

    return Check(PLAINLY, run)
