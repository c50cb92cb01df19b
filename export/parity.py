"""The proof: torch and a bundle answer the same inputs, and every difference is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.config import ModelConfig
from transferry.build_model.transformer import Transformer
from transferry.export.divergence import explain
from transferry.export.torch_decoder import TorchDecoder
from transferry.runtime.batching import length_batches
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.compare import (
    Case,
    Comparison,
    Decisions,
    ObservableDecoder,
    ParityReport,
    State,
    Tolerance,
    Truth,
    compare,
    observe,
    truth,
)
from transferry.runtime.decoder import Decoder
from transferry.runtime.errors import InputError
from transferry.runtime.hypothesis import Hypothesis
from transferry.runtime.onnx_decoder import OnnxDecoder
from transferry.runtime.options import GenerationOptions
from transferry.runtime.reference import RecordedSearch, Reference
from transferry.runtime.search import search
from transferry.runtime.session import SessionOptions
from transferry.runtime.tokenizer import Tokenizer

# What is run on text: the n-best of the beam must agree too, not only the winner.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "beam 4": {"beam": 4, "n_best": 4},
}
NEW_TOKENS = 3  # fed at once in the compared step, so that its causal mask matters


def sweep(config: ModelConfig, *, seed: int = 0) -> Iterator[Case]:
    """Yields the cases that find a size frozen while tracing.

    Batch {1, 2, 7} x source {1, 2, 13, all positions} x past {0, 1, all positions but one}; the
    first row fills the source, the others end earlier.
    """
    most = config.max_positions
    sources = sorted({min(size, most) for size in (1, 2, 13, most)})
    pasts = sorted({0, min(1, most - 1), most - 1})
    for number, (batch, source, past) in enumerate(product((1, 2, 7), sources, pasts)):
        yield random_case(config, batch, source, past, seed=seed + number)


def random_case(config: ModelConfig, batch: int, source: int, past: int, *, seed: int) -> Case:
    """Makes a case of random tokens; all but the first row are of random length."""
    generator = np.random.default_rng(seed)
    first = Tokenizer.first_ordinary_id
    lengths = generator.integers(1, source, size=batch, endpoint=True)
    lengths[0] = source
    mask = np.arange(source) < lengths[:, None]
    tokens = generator.integers(first, config.vocabulary_size, size=(batch, source))
    new = min(NEW_TOKENS, config.max_positions - past)
    target = generator.integers(first, config.vocabulary_size, size=(batch, past + new))
    target[:, 0] = Tokenizer.bos_id
    name = f"batch {batch}, source {source}, past {past}"
    return Case(name, np.where(mask, tokens, Tokenizer.pad_id), mask, target, past)


class Judge:
    """Compares decoders with a reference model, in float32 and as its float64 oracle."""

    def __init__(self, model: Transformer, tolerance: Tolerance) -> None:
        self.config = model.config
        self.tolerance = tolerance
        self.reference = TorchDecoder(model)
        self.oracle = TorchDecoder.oracle(model)

    def truth(self, case: Case) -> Truth:
        """Runs a case on both."""
        return truth(case, observe(self.oracle, case), observe(self.reference, case))

    def numbers(
        self,
        decoder: ObservableDecoder[State],
        cases: Iterable[Case],
        done: Callable[[], None] = lambda: None,
    ) -> list[Comparison]:
        """Compares every tensor of every case; `done` is called after each case."""
        comparisons = []
        for case in cases:
            comparisons += compare(case, self.truth(case), observe(decoder, case), self.tolerance)
            done()
        return comparisons

    def decisions(
        self,
        decoder: Decoder[State],
        name: str,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        done: Callable[[int], None] = lambda rows: None,
    ) -> Decisions:
        """Generates with both, and proves each difference to be a tie or calls it a defect.

        Args:
            decoder: What is judged.
            name: Names the search in the report.
            sources: Token ids of each source, the end token included.
            options: How to search.
            done: Called with the number of rows after each batch.
        """
        identical, score_error = 0, 0.0
        ties: list[str] = []
        defects: list[str] = []
        rows = max(1, 64 // options.beam)
        for batch in length_batches([len(source) for source in sources], rows, 4096):
            chosen = [sources[index] for index in batch]
            wanted = generate(self.reference, chosen, options)
            found = generate(decoder, chosen, options)
            for index, source, left, right in zip(batch, chosen, wanted, found, strict=True):
                if _tokens(left) == _tokens(right):
                    identical += 1
                    for one, other in zip(left, right, strict=True):
                        # Unlike max(), this keeps NaN: what fails on both sides proves nothing.
                        score_error = float(
                            np.maximum(score_error, np.abs(one.score - other.score))
                        )
                    continue
                divergence = explain(
                    source, options, self.reference, decoder, self.oracle, self.tolerance
                )
                (ties if divergence.tie else defects).append(f"row {index}: {divergence}")
            done(len(batch))
        return Decisions(name, len(sources), identical, score_error, ties, defects)

    def record(self, sources: Sequence[Sequence[int]], max_length: int) -> Reference:
        """Records what torch answers, for `runtime.reference`.

        Args:
            sources: Token ids to search over, the end token included.
            max_length: Of the searches.
        """
        most = self.config.max_positions
        sizes = [(1, 1, 0), (2, 13, 1), (7, 6, 5)]
        cases = [
            random_case(self.config, batch, min(source, most), min(past, most - 1), seed=number)
            for number, (batch, source, past) in enumerate(sizes)
        ]
        searches = []
        for name, fields in SEARCHES.items():
            settings = {**fields, "max_length": min(max_length, most)}
            answers = generate(self.reference, sources, GenerationOptions(**settings))
            searches.append(
                RecordedSearch(
                    name,
                    settings,
                    [_tokens(row) for row in answers],
                    [[hypothesis.score for hypothesis in row] for row in answers],
                )
            )
        return Reference([(case, self.truth(case)) for case in cases], sources, searches)


def verify_against(
    checkpoint: Checkpoint,
    bundle: Bundle,
    variant: Variant,
    session: SessionOptions,
    texts: Sequence[str],
    done: Callable[[int, int], None] = lambda done, total: None,
    tolerance: Tolerance | None = None,
) -> ParityReport:
    """Compares a bundle, opened as it will be served, with the run that it came from.

    Args:
        checkpoint: The run.
        bundle: The bundle.
        variant: Which variant.
        session: How to open it.
        texts: Sentences to run every search on.
        done: Called with how many of how many pieces of work are done.
        tolerance: What passes.

    Raises:
        InputError: A text is empty or longer than the model's positions, or run and bundle do not
            have the same tokenizer or shape.
    """
    tolerance = tolerance or Tolerance()
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    if dict(bundle.manifest.model) != config.to_dict():
        raise InputError(
            f"{bundle.folder} holds a model of shape {dict(bundle.manifest.model)}, but the run "
            f"has {config.to_dict()}; give the run that the bundle was exported from"
        )
    if bundle.tokenizer != tokenizer:
        raise InputError(
            f"{bundle.folder} and the run do not have the same tokenizer; give the run that the "
            "bundle was exported from"
        )
    sources = []
    for number, text in enumerate(texts, start=1):
        source = [*tokenizer.encode(text), tokenizer.eos_id]
        if not text.strip():
            raise InputError(f"line {number} is empty, expected a sentence; leave the line out")
        if len(source) > config.max_positions:
            raise InputError(
                f"line {number} has {len(source)} tokens, the end token included; the model takes "
                f"at most {config.max_positions}, so leave the line out"
            )
        sources.append(source)

    decoder = OnnxDecoder(bundle, variant, session)
    judge = Judge(checkpoint.model, tolerance)
    cases = list(sweep(config))
    total = len(cases) + len(SEARCHES) * len(sources)
    finished = 0

    def advance(count: int = 1) -> None:
        nonlocal finished
        finished += count
        done(finished, total)

    comparisons = judge.numbers(decoder, cases, advance)
    decisions = [
        judge.decisions(
            decoder,
            name,
            sources,
            GenerationOptions(**fields, max_length=min(256, config.max_positions)),
            advance,
        )
        for name, fields in SEARCHES.items()
        if sources
    ]
    settings = {**decoder.describe(), "torch": torch.__version__, "against": "the run"}
    return ParityReport(str(bundle.folder), settings, tolerance, comparisons, decisions)


def generate(
    decoder: Decoder[State], sources: Sequence[Sequence[int]], options: GenerationOptions
) -> list[list[Hypothesis]]:
    """Runs the search with the special ids of every transferry tokenizer."""
    return search(
        decoder,
        sources,
        options,
        pad_id=Tokenizer.pad_id,
        bos_id=Tokenizer.bos_id,
        eos_id=Tokenizer.eos_id,
    )


def _tokens(hypotheses: Sequence[Hypothesis]) -> list[tuple[int, ...]]:
    return [hypothesis.tokens for hypothesis in hypotheses]
