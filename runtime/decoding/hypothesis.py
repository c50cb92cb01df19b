"""The result of a search."""

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

FinishReason = Literal["end", "stop", "length", "error"]


@dataclass(frozen=True)
class Hypothesis:
    """One generated output of a sentence.

    Attributes:
        tokens: Ids, without `bos` and the end token.
        log_probability: Sum of the model's log-probabilities of the tokens, forced prefix and end
            token included, in nats, unchanged by logits processors, temperature, top-k and top-p.
            NaN without `options.scores`.
        score: `length_normalised` log-probability; in beam search of the processed
            log-probabilities, see `GenerationOptions`. NaN likewise.
        finish_reason: "end": the model ended it. "stop": its text holds a stop string. "length": it
            reached the maximal length. "error": the model gave NaN or infinity, or no token was
            allowed.
        end: The end token, of a hypothesis with finish reason "end".
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    finish_reason: FinishReason
    _: KW_ONLY
    end: int | None = None

    @property
    def scored_tokens(self) -> tuple[int, ...]:
        """The tokens that the log-probability covers: with the end token, if there is one."""
        return self.tokens if self.end is None else (*self.tokens, self.end)


FAILED = Hypothesis((), -math.inf, -math.inf, "error")


def length_normalised(log_probability: float, length: int, penalty: float) -> float:
    """Returns the score `log_probability / length ** penalty`, the end token counted in the length.

    The form of OpenNMT, CTranslate2 and Hugging Face; Wu et al. (2016), equation 14, divide by
    `((5 + length) / 6) ** penalty` instead.
    """
    return float(log_probability / length**penalty)


def ranked(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    """Sorts best first; equal scores keep their order."""
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)
