"""How much export checks of a model, by its size.

A check costs tokens times parameters, on both sides of the comparison. Of a model of a few
million parameters export checks what `verify` does; of a large one less, so that making a bundle
takes minutes, and `verify` does the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.oracle.cases import (
    LONGEST_ROW,
    fitting,
    largest_batches,
    lengths,
    random_sources,
    single_tokens,
    sizes,
    vocabulary,
)
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.proof.compare import Case

# Products of tokens and parameters: of the recorded answers, and of the cases that judge an int8
# variant. 100 million parameters then take about 10 and 40 seconds of two cores for each variant.
RECORDED_WORK = 2e10
JUDGED_WORK = 2e11

Item = TypeVar("Item")

RECORDED_SOURCES = 8
RECORDED_LENGTH = 64
JUDGED_ROWS = 64
SHORTEST_ANSWER, LONGEST_ANSWER = 8, 256
# The fewest tokens of answers whose share of wrong choices says something of the variant: one in
# fifty may be wrong.
JUDGED_TOKENS = 500
# Tokens computed for one of the answer: greedy search and 4 beams; the others on some rows.
RECORDED_COST, JUDGED_COST = 5, 8
# Tokens of `sizes` and of `largest_batches`, in units of the positions and of the rows.
SIZES_COST, BATCH_COST = 45, 12


@dataclass(frozen=True)
class Effort:
    """How much is checked; by default everything.

    Attributes:
        positions: The longest source and target of random tokens; None for those of the model.
        batch_rows: Most rows that are computed at once; None for those that are served.
        anew: Whether the graphs and the recorded answers of the bundle are made again, and every
            size of a batch is computed.
        stored: Whether stored weights and graphs are compared with the checkpoint's. Off, the
            answers alone must show a fault.
        most_cases: Most cases of random tokens beside those of the vocabulary; None for all.
        loss: Whether what reduced precision loses in answers is limited. Of few answers, a loss
            cannot be told from chance.
    """

    positions: int | None = None
    vocabulary: bool = True
    longest: int = LONGEST_ANSWER
    rows: int = JUDGED_ROWS
    batch_rows: int | None = None
    anew: bool = True
    stored: bool = True
    most_cases: int | None = None
    loss: bool = True

    @classmethod
    def at_export(cls, model: Transformer, batches: BatchOptions) -> Self:
        """Returns how much export checks of a variant that is served in such batches."""
        config, tokens = model.config, JUDGED_WORK / parameters(model)
        quarter, decodes = tokens / 4, bool(model.config.decoder_layers)
        positions = _between(16, quarter / SIZES_COST, config.max_positions)
        longest = _between(SHORTEST_ANSWER, quarter / JUDGED_COST / 8, LONGEST_ANSWER)
        return cls(
            positions,
            config.vocabulary_size + config.source_vocabulary <= quarter,
            longest,
            # A text that is only read costs its tokens, and fewer texts judge nothing.
            _between(4, quarter / JUDGED_COST / longest, JUDGED_ROWS) if decodes else JUDGED_ROWS,
            _between(16, quarter / BATCH_COST, batches.rows),
            anew=False,
            # Each reads every weight about five times, however few its tokens are; that takes as
            # long as computing some 30 tokens.
            most_cases=max(8, int(quarter / 32)),
            loss=not decodes or quarter / JUDGED_COST >= JUDGED_TOKENS,
        )

    def cases(
        self, config: ModelConfig, sources: Sequence[Sequence[int]], rows: int, singles: bool
    ) -> list[Case]:
        """Returns the cases of random tokens, up to the longest source, and of single tokens."""
        longest = min(config.max_positions, self.positions or config.max_positions)
        shorter = replace(config, max_positions=longest)
        found = [
            *sizes(shorter),
            *lengths(shorter, [source[:longest] for source in sources]),
            *largest_batches(config, rows),
        ]
        # These stay: each feeds tokens that no other does, or crosses no border of integers.
        all_of = [single_tokens(config)] if singles else []
        most = min(len(found), self.most_cases - len(all_of) if self.most_cases else len(found))
        chosen = [found[number * len(found) // most] for number in range(most)]
        return [*chosen, *all_of, *(vocabulary(config) if self.vocabulary else ())]

    def texts(self, checkpoint: Checkpoint, texts: Sequence[str]) -> list[str]:
        """Returns the texts that are judged: the first short ones that fit the model."""
        tokenizer = checkpoint.tokenizer
        found = fitting(texts, tokenizer, checkpoint.model.config)
        sizes = [len(tokenizer.encode(text)) for text in found]
        return first_short(found, sizes, max(2 * self.longest, LONGEST_ROW), self.rows)


ALL = Effort()


def recorded_length(model: Transformer) -> int:
    """Returns the most tokens of a recorded answer."""
    tokens = RECORDED_WORK / parameters(model)
    tokens /= RECORDED_SOURCES * RECORDED_COST
    return _between(SHORTEST_ANSWER, tokens, RECORDED_LENGTH)


def recorded_sources(model: Transformer, sources: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Returns the first different sources that are short enough to be recorded, or the shortest.

    Random ones take the place of sources that the text lacks.
    """
    most = max(16, RECORDED_WORK / parameters(model) / RECORDED_SOURCES / 2)
    count, different = recorded_count(model), [*dict.fromkeys(map(tuple, sources))]
    found = first_short(different, [len(source) for source in different], most, count)
    return [*found, *random_sources(model.config, count)[len(found) :]]


def recorded_count(model: Transformer) -> int:
    """Returns how many sources are recorded."""
    tokens = RECORDED_WORK / parameters(model)
    return _between(4, tokens / RECORDED_COST / SHORTEST_ANSWER, RECORDED_SOURCES)


def first_short(
    items: Sequence[Item], lengths: Sequence[int], most: float, count: int
) -> list[Item]:
    """Returns the first items that are no longer than `most`; the shortest ones if all are."""
    places = [place for place, length in enumerate(lengths) if length <= most]
    places = places or sorted(range(len(items)), key=lengths.__getitem__)
    return [items[place] for place in places[:count]]


def parameters(model: Transformer) -> int:
    """Returns the number of parameters."""
    return sum(each.numel() for each in model.parameters())


def _between(least: int, value: float, most: int) -> int:
    return min(most, max(least, int(value)))
