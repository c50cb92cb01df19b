"""The proof: torch and a bundle answer the same inputs, and every difference is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.config import ModelConfig
from transferry.build_model.transformer import Transformer
from transferry.export.divergence import Divergence, explain
from transferry.export.torch_decoder import TorchDecoder
from transferry.export.torch_encoder import TorchEncoder
from transferry.runtime.batching import length_batches
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.compare import (
    Case,
    Comparison,
    Decisions,
    ObservableDecoder,
    ObservableEncoder,
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
from transferry.runtime.logits import log_sum_exp
from transferry.runtime.model import open_model
from transferry.runtime.onnx_encoder import OnnxEncoder
from transferry.runtime.options import GenerationOptions
from transferry.runtime.reference import RecordedSearch, Reference
from transferry.runtime.search import search
from transferry.runtime.session import SessionOptions
from transferry.runtime.tokenizer import AnyTokenizer, SpecialTokens

# What is run on text: the n-best of the beam must agree too, not only the winner.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "beam 4": {"beam": 4, "n_best": 4},
}
HIDE_EVERY = 7  # tokens of a text that an encoder alone fills in
NEW_TOKENS = 3  # fed at once in the compared step, so that its causal mask matters


def sweep(config: ModelConfig, *, seed: int = 0) -> Iterator[Case]:
    """Yields the cases that find a size frozen while tracing.

    Batch {1, 2, 7} x source {1, 2, 13, all positions} x past {0, 1, all positions but one}; the
    first row fills the source, the others end earlier. Without an encoder, source and target
    share the positions, and there may be no source: a prompt of one token.
    """
    most = config.max_positions
    alone = not config.encoder_layers
    sources = {0, 1, 2, 13, most - 1} if alone else {1, 2, 13, most}
    number = 0
    for batch in (1, 2, 7):
        for source in sorted({min(size, most - alone) for size in sources}):
            room = most - source if alone else most
            pasts = {0, min(1, room - 1), room - 1} if config.decoder_layers else {0}
            for past in sorted(pasts):
                yield random_case(config, batch, source, past, seed=seed + number)
                number += 1


def random_case(config: ModelConfig, batch: int, source: int, past: int, *, seed: int) -> Case:
    """Makes a case of random tokens; all but the first row are of random length.

    Source and past are cut to the positions that the model has.
    """
    most = config.max_positions
    source = min(source, most if config.encoder_layers else most - 1)
    room = most if config.encoder_layers else most - source
    past = min(past, room - 1)
    generator = np.random.default_rng(seed)
    lengths = generator.integers(min(1, source), source, size=batch, endpoint=True)
    lengths[0] = source
    mask = np.arange(source) < lengths[:, None]
    tokens = generator.integers(config.vocabulary_size, size=(batch, source))
    new = min(NEW_TOKENS, room - past)
    length = past + new if config.decoder_layers else 0
    target = generator.integers(config.vocabulary_size, size=(batch, length))
    name = f"batch {batch}, source {source}"
    if config.decoder_layers:
        name += f", past {past}"
    return Case(name, tokens, mask, target, past)


class Judge:
    """Compares decoders with a reference model, in float32 and as its float64 oracle."""

    def __init__(self, model: Transformer, special: SpecialTokens, tolerance: Tolerance) -> None:
        self.config = model.config
        self.special = special
        self.tolerance = tolerance
        self.reference = TorchDecoder(model)
        self.oracle = TorchDecoder.oracle(model)

    def truth(self, case: Case) -> Truth:
        """Runs a case on both."""
        if self.config.decoder_layers:
            return truth(case, observe(self.oracle, case), observe(self.reference, case))
        oracle, reference = TorchEncoder(self.oracle.model), TorchEncoder(self.reference.model)
        return truth(case, observe(oracle, case), observe(reference, case))

    def numbers(
        self,
        model: ObservableDecoder[State] | ObservableEncoder,
        cases: Iterable[Case],
        done: Callable[[], None] = lambda: None,
    ) -> list[Comparison]:
        """Compares every tensor of every case; `done` is called after each case."""
        comparisons = []
        for case in cases:
            comparisons += compare(case, self.truth(case), observe(model, case), self.tolerance)
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
            wanted = search(self.reference, chosen, options, self.special)
            found = search(decoder, chosen, options, self.special)
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
                    source,
                    options,
                    self.reference,
                    decoder,
                    self.oracle,
                    self.special,
                    self.tolerance,
                )
                (ties if divergence.tie else defects).append(f"row {index}: {divergence}")
            done(len(batch))
        return Decisions(name, len(sources), identical, score_error, ties, defects)

    def fillings(
        self,
        encoder: ObservableEncoder,
        sources: Sequence[Sequence[int]],
        done: Callable[[int], None] = lambda rows: None,
    ) -> Decisions:
        """Hides tokens of each source, lets both fill them in, and accounts for each difference.

        Args:
            encoder: What is judged.
            sources: Token ids of each source, wrapped.
            done: Called with the number of rows after each.

        Raises:
            InputError: The tokenizer has no mask.
        """
        if self.special.mask_id is None:
            raise InputError("expected a tokenizer with a mask, found none; verify without --text")
        oracle, reference = TorchEncoder(self.oracle.model), TorchEncoder(self.reference.model)
        identical, score_error = 0, 0.0
        ties: list[str] = []
        defects: list[str] = []
        for row, source in enumerate(sources):
            tokens = np.array([source], np.int64)
            places = np.arange(len(self.special.before), len(source), HIDE_EVERY)
            tokens[:, places] = self.special.mask_id
            mask = np.ones_like(tokens, np.bool_)
            exact, left, right = (
                model.encode(tokens, mask)["logits"][0, places].astype(np.float64)
                for model in (oracle, reference, encoder)
            )
            wanted, found = left.argmax(axis=1), right.argmax(axis=1)
            largest = np.abs(exact).max(initial=0.0)
            budget = self.tolerance.budget(np.abs(left - exact).max(initial=0.0) / largest)
            differences = [
                Divergence(
                    int(place),
                    (int(one),),
                    (int(other),),
                    float(np.abs(scores[one] - scores[other])),
                    float(2 * budget * largest),
                )
                for place, one, other, scores in zip(places, wanted, found, exact, strict=True)
                if one != other or not np.isfinite(scores).all()
            ]
            if not np.isfinite(right).all():
                defects.append(f"row {row}: the graph gave NaN or infinity")
            elif not differences:
                identical += 1
                chosen = np.arange(len(places)), wanted
                scores = [logits[chosen] - log_sum_exp(logits) for logits in (left, right)]
                error = np.abs(scores[0] - scores[1]).max(initial=0.0)
                score_error = float(np.maximum(score_error, error))
            else:
                worst = max(differences, key=lambda item: item.margin - item.allowed)
                (ties if worst.tie else defects).append(f"row {row}: {worst}")
            done(1)
        return Decisions("fill-mask", len(sources), identical, score_error, ties, defects)

    def record(
        self,
        sources: Sequence[Sequence[int]],
        max_length: int,
        generation: Mapping[str, Any] | None = None,
    ) -> Reference:
        """Records what torch answers, for `runtime.reference`.

        Args:
            sources: Token ids to search over, the end token included.
            max_length: Of the searches.
            generation: The bundle's defaults of generation.
        """
        sizes = [(1, 1, 0), (2, 13, 1), (7, 6, 5)]
        cases = [
            random_case(self.config, batch, source, past, seed=number)
            for number, (batch, source, past) in enumerate(sizes)
        ]
        searches = []
        for name, fields in SEARCHES.items() if self.config.decoder_layers else ():
            settings = {**(generation or {}), **fields}
            settings["max_length"] = room(self.config, sources, max_length)
            answers = search(self.reference, sources, GenerationOptions(**settings), self.special)
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
    if ModelConfig.from_dict(dict(bundle.manifest.model)) != config:
        raise InputError(
            f"{bundle.folder} holds a model of shape {dict(bundle.manifest.model)}, but the run "
            f"has {config.to_dict()}; give the run that the bundle was exported from"
        )
    if bundle.tokenizer != tokenizer:
        raise InputError(
            f"{bundle.folder} and the run do not have the same tokenizer; give the run that the "
            "bundle was exported from"
        )
    sources = [
        source_of(text, tokenizer, config, number) for number, text in enumerate(texts, start=1)
    ]
    model = open_model(bundle, variant, session)
    judge = Judge(checkpoint.model, tokenizer.special, tolerance)
    cases = list(sweep(config))
    searches = SEARCHES if config.decoder_layers else {"fill-mask": {}}
    total = len(cases) + len(searches) * len(sources)
    finished = 0

    def advance(count: int = 1) -> None:
        nonlocal finished
        finished += count
        done(finished, total)

    comparisons = judge.numbers(model, cases, advance)
    decisions = []
    for name, fields in searches.items() if sources else ():
        if isinstance(model, OnnxEncoder):
            decisions.append(judge.fillings(model, sources, advance))
        else:
            settings = {**bundle.manifest.generation, **fields}
            settings["max_length"] = room(config, sources, 256)
            options = GenerationOptions(**settings)
            decisions.append(judge.decisions(model, name, sources, options, advance))
    how = {**model.describe(), "torch": torch.__version__, "against": "the run"}
    return ParityReport(str(bundle.folder), how, tolerance, comparisons, decisions)


def source_of(text: str, tokenizer: AnyTokenizer, config: ModelConfig, number: int) -> list[int]:
    """Returns what a model reads of a line of text.

    Where there is no encoder it is the beginning of it, as a prompt: the first half, and no more
    than half of the positions, so that there is room for an answer.

    Args:
        text: The line.
        tokenizer: Turns it into ids.
        config: Has the positions.
        number: Of the line, for the error.

    Raises:
        InputError: The line is empty or longer than the model's positions.
    """
    if not text.strip():
        raise InputError(f"line {number} is empty, expected a sentence; leave the line out")
    ids = tokenizer.encode(text)
    if config.architecture == "decoder-only":
        ids = ids[: max(1, min(len(ids), config.max_positions) // 2)]
    source = tokenizer.special.wrap(ids)
    if len(source) > config.max_positions:
        raise InputError(
            f"line {number} has {len(source)} tokens, the end token included; the model takes "
            f"at most {config.max_positions}, so leave the line out"
        )
    return source


def room(config: ModelConfig, sources: Sequence[Sequence[int]], most: int) -> int:
    """Returns how many tokens all answers may have, at most `most`.

    The last one is never read, so that it needs no position.
    """
    longest = 0 if config.encoder_layers else max(map(len, sources), default=1) - 1
    return min(most, config.max_positions - longest)


def _tokens(hypotheses: Sequence[Hypothesis]) -> list[tuple[int, ...]]:
    return [hypothesis.tokens for hypothesis in hypotheses]
