"""Options of generation, checked once on construction."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transferry.runtime.errors import UsageError, require


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of the search. Conflicts are refused on construction.

    Lengths count the tokens of an answer, the forced prefix included and `bos` excluded.

    Attributes:
        beam: beams per sentence; 1 is greedy search.
        n_best: answers per sentence: the best of the beam, or independent samples.
        max_length: limit on the tokens of an answer, the end token counted; the bundle may set its
            own default. An answer cut off there has the finish reason "length".
        min_length: fewest tokens of an answer, the end token not counted.
        length_penalty: answers are ranked by `log_probability / length ** length_penalty`, the end
            token counted in the length; 0 ranks by log-probability alone.
        early_stopping: stop a sentence as soon as `beam` hypotheses have ended, instead of when no
            live one can beat them.
        sample: draw tokens at random instead of taking the likeliest.
        temperature: divisor of the logits before sampling.
        top_k: sample among the k likeliest tokens only; 0 is no limit.
        top_p: sample among the likeliest tokens that together have this probability (nucleus
            sampling, Holtzman et al. 2020).
        seed: seed of sampling; a row's samples depend on it and on the row's number alone.
        no_repeat_ngram: size of n-grams that may not occur twice in an answer; 0 is no limit.
        suppress: token ids that no answer may hold, except in its prefix.
        prefix: token ids that every answer begins with.
        scores: compute log-probability and score of answers; greedy search is faster without.
    """

    beam: int = 1
    n_best: int = 1
    max_length: int = 256
    min_length: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = True
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    no_repeat_ngram: int = 0
    suppress: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    scores: bool = True

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_conflicts()

    def _check_ranges(self) -> None:
        for name in ("beam", "n_best", "max_length"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("min_length", "top_k", "no_repeat_ngram"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        require(
            0 <= self.length_penalty <= 10,
            "length_penalty",
            "from 0 to 10",
            self.length_penalty,
        )
        require(
            0 < self.temperature < math.inf,
            "temperature",
            "a finite number above 0 (for the likeliest token, leave sampling off)",
            self.temperature,
        )
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        require(0 <= self.seed < 2**64, "seed", "from 0 to 2**64 - 1", self.seed)
        for token in self.suppress:
            require(type(token) is int and token >= 0, "suppress", "ids of at least 0", token)

    def _check_conflicts(self) -> None:
        if self.sample and self.beam > 1:
            raise UsageError(
                f"sample and beam={self.beam} exclude each other: "
                "sample with beam=1, or search with sample off"
            )
        if not self.scores:
            for ranks, option in ((self.beam > 1, f"beam={self.beam}"), (self.sample, "sample")):
                if ranks:
                    raise UsageError(
                        f"scores=False and {option} exclude each other: only greedy search works "
                        f"without scores; turn scores on, or leave {option} out"
                    )
        if not self.sample:
            for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                if getattr(self, name) != off:
                    raise UsageError(
                        f"{name}={getattr(self, name)} has no effect without sample: "
                        f"turn sample on, or leave {name} out"
                    )
            if self.n_best > self.beam:
                raise UsageError(
                    f"n_best={self.n_best} is more than beam={self.beam} can give: "
                    f"set beam to at least {self.n_best}, or n_best to at most {self.beam}"
                )
        if self.min_length > self.max_length:
            raise UsageError(
                f"min_length={self.min_length} is more than max_length={self.max_length}: "
                "lower the first or raise the second"
            )
        if len(self.prefix) > self.max_length:
            raise UsageError(
                f"prefix has {len(self.prefix)} tokens, more than max_length={self.max_length}: "
                "shorten the first or raise the second"
            )


def options_of_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of GenerationOptions from JSON, which has lists instead of tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
