"""Options of generation, checked once on construction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from transferry.runtime.errors import Option, UsageError, require
from transferry.runtime.settings import (
    MOST,
    Whole,
    check_value,
    field_types,
    hint,
    shown,
)

# More beams than any search needs, and few enough for the memory of a state.
_Few = Annotated[int, msgspec.Meta(le=10_000)]
_Length = Annotated[int, msgspec.Meta(le=1_000_000)]
# Fields that only sampling reads, with the values that leave it as it is.
OF_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
# Fields of at least 0, of at least 1, and of token ids.
_FROM_0 = ("min_length", "min_total_length", "max_total_length", "top_k", "no_repeat_ngram")
_FROM_1 = ("beam", "n_best", "max_length")
# Least and largest value of other fields. float32 holds no logits divided by another temperature.
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("length_penalty", -10, 10, "from -10 to 10"),
    ("temperature", 1e-6, 1e6, "from 1e-6 to 1e6 (for the likeliest token, leave sampling off)"),
    ("min_p", 0, 1, "from 0 to 1"),
    ("repetition_penalty", 1e-3, 1e3, "from 0.001 to 1000"),
    ("seed", 0, 2**64 - 1, "from 0 to 2**64 - 1"),
)
TOKEN_IDS = ("suppress", "suppress_begin", "suppress_sequences", "forced_begin", "forced_end")


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of the search. Conflicts are refused on construction.

    Lengths count the tokens of an answer, the forced prefix included and `bos` excluded.

    Scores: the log-probability of an answer is always the model's own, whatever its tokens were
    chosen by. Beam search ranks by log-probabilities after the logits processors, as transformers
    does: that of a repeated token times `repetition_penalty`, that of a forced begin or end token
    0, all of them renormalised with `renormalise`; an answer's score is their sum, normalised by
    length. Greedy search and sampling have the model's own score.

    Attributes:
        beam: beams per sentence; 1 is greedy search.
        n_best: answers per sentence: the best of the beam, or samples.
        max_length: limit on the tokens of an answer, end token included; an answer cut off there
            has the finish reason "length".
        max_total_length: limit on the tokens of prompt and answer, as max_length of transformers; 0
            is no limit.
        min_length: fewest tokens of an answer, end token excluded.
        min_total_length: fewest tokens of prompt and answer, end token excluded.
        length_penalty: rank answers by `log_probability / length ** length_penalty`, end token
            included.
        early_stopping: end a beam search that has `beam` hypotheses at once (true), when no live
            one can beat them at its present length (false, as transformers), or at any length
            (never).
        sample: draw tokens at random instead of taking the likeliest.
        temperature: divisor of the logits before sampling.
        top_k: sample among the k likeliest tokens only; 0 is no limit.
        top_p: sample among the likeliest tokens of together this probability (nucleus sampling,
            Holtzman et al. 2020).
        min_p: sample among tokens of at least this share of the largest probability (Nguyen et al.
            2024).
        typical_p: sample among the tokens nearest to the entropy, of together this probability
            (Meister et al. 2023).
        seed: seed of sampling; a sample depends on it and the row's number alone.
        repetition_penalty: divide positive logits of tokens of prompt and answer, multiply negative
            ones (Keskar et al. 2019); 1 disables it.
        no_repeat_ngram: size of n-grams that may not occur twice in an answer; 0 is no limit.
        prompt_ngrams: count the n-grams of a prompt too, as transformers does.
        suppress: token ids that no answer may hold, except in its prefix.
        suppress_sequences: sequences of token ids that no answer may hold.
        suppress_begin: token ids that no answer may begin with, after its prefix.
        forced_begin: token id that every answer begins with, before its prefix.
        forced_end: token ids allowed at the last place of an answer of maximal length.
        renormalise: rank beams by log-probabilities normalised after the logits processors.
        prefix: token ids that every answer begins with.
        stop: text before which an answer ends; its tokens stay, and prompts are not searched.
        split_lines: answer each line of a text on its own and join the answers by its line breaks;
            left out, encoder-decoders alone do.
        scores: compute log-probability and score; greedy search is faster without.
    """

    beam: _Few = 1
    n_best: _Few = 1
    max_length: _Length = 256
    max_total_length: _Length = 0
    min_length: _Length = 0
    min_total_length: _Length = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = True
    sample: bool = False
    temperature: float = 1.0
    top_k: Annotated[int, msgspec.Meta(le=MOST)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram: _Length = 0
    prompt_ngrams: bool = False
    suppress: tuple[int, ...] = ()
    suppress_sequences: tuple[tuple[Whole, ...], ...] = ()
    suppress_begin: tuple[Whole, ...] = ()
    forced_begin: Whole | None = None
    forced_end: tuple[Whole, ...] = ()
    renormalise: bool = False
    prefix: tuple[Whole, ...] = ()
    stop: tuple[str, ...] = ()
    split_lines: bool | None = None
    scores: bool = True

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_conflicts()

    @property
    def reranks(self) -> bool:
        """Whether logits processors change the logits of tokens that stay allowed."""
        forces = self.forced_begin is not None or bool(self.forced_end)
        return self.repetition_penalty != 1 or forces or (self.renormalise and self.beam > 1)

    def room(self, prompt: int) -> int:
        """Returns the limit on the tokens of an answer to a prompt of this length."""
        if not self.max_total_length:
            return self.max_length
        return min(self.max_length, self.max_total_length - prompt)

    def _check_ranges(self) -> None:
        for token in self.suppress if isinstance(self.suppress, tuple) else ():
            holds = type(token) is int and 0 <= token <= MOST
            require(holds, "suppress", "ids of at least 0", shown(token).strip("'"))
        for name, kind in field_types(GenerationOptions).items():
            given = getattr(self, name)
            if isinstance(value := check_value(name, given, kind), tuple):
                require(_tuples(given) == value, name, "a list", shown(given))  # a set has no order
                object.__setattr__(self, name, value)
        for name in _FROM_1:
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in _FROM_0:
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name, least, most, expected in _RANGES:
            value = getattr(self, name)
            require(least <= value <= most, name, expected, shown(value))
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            require(0 < value <= 1, name, "above 0 and at most 1", value)
        for name in ("suppress_sequences", "stop"):
            empty = any(not item for item in getattr(self, name))
            require(not empty, name, "entries that are not empty", getattr(self, name))

    def _check_conflicts(self) -> None:
        if self.sample and self.beam > 1:
            raise UsageError(
                *(Option("sample"), " and ", Option("beam"), f"={self.beam} exclude each other: "),
                *("choose ", Option("beam"), "=1, or turn ", Option("sample"), " off"),
            )
        if not self.scores:
            for ranks, name in ((self.beam > 1, "beam"), (self.sample, "sample")):
                if ranks:
                    raise UsageError(
                        *(Option("scores"), "=False and ", Option(name), f"={getattr(self, name)}"),
                        " exclude each other: only greedy search works without scores; turn ",
                        *(Option("scores"), " on, or leave ", Option(name), " out"),
                    )
        if not self.sample:
            for name, off in OF_SAMPLING.items():
                if getattr(self, name) != off:
                    raise UsageError(
                        *(Option(name), f"={getattr(self, name)} has no effect without "),
                        *(Option("sample"), ": turn it on, or leave ", Option(name), " out"),
                    )
            if self.n_best > self.beam:
                raise UsageError(
                    *(Option("n_best"), f"={self.n_best} is more than ", Option("beam")),
                    *(f"={self.beam} can give: set ", Option("beam"), " to at least "),
                    *(f"{self.n_best}, or ", Option("n_best")),
                    f" to at most {self.beam}",
                )
        for least, most in (("min_length", "max_length"), ("min_total_length", "max_total_length")):
            low, high = getattr(self, least), getattr(self, most)
            if low > high and (high or most == "max_length"):
                raise UsageError(
                    *(Option(least), f"={low} is more than ", Option(most), f"={high}: "),
                    "lower the first or raise the second",
                )
        forced = len(self.prefix) + (self.forced_begin is not None)
        if forced > self.max_length:
            name = "prefix" if self.forced_begin is None else "prefix with forced_begin"
            raise UsageError(
                *(f"{name} has {forced} tokens, more than ", Option("max_length")),
                f"={self.max_length}: shorten the first or raise the second",
            )


def generation_options(
    values: Mapping[str, Any], default: GenerationOptions | None = None
) -> GenerationOptions:
    """Returns options with these fields.

    The other fields come from `default`, unless `values` rule them out: options of sampling for
    beams or with sampling turned off, beams for sampling, n_best for fewer beams, least lengths for
    a lower limit. Default: the fields of GenerationOptions itself.

    Raises:
        UsageError: A field is unknown or has another type, or the fields conflict.
    """
    check_generation(values)
    if default is None:
        return replace(GenerationOptions(), **values)
    ruled_out: dict[str, Any] = {}
    sample = values.get("sample", default.sample and values.get("beam", 1) == 1)
    if not sample:
        beam = values.get("beam", default.beam)
        ruled_out |= {"sample": False, **OF_SAMPLING, "n_best": min(default.n_best, beam)}
    elif default.beam > 1:
        ruled_out["beam"] = 1
    for least, most in (("min_length", "max_length"), ("min_total_length", "max_total_length")):
        if values.get(most):
            ruled_out[least] = min(getattr(default, least), values[most])
    return replace(default, **ruled_out | dict(values))


def suppressing(
    values: Mapping[str, Any], default: GenerationOptions, encode: Callable[[str], Sequence[int]]
) -> dict[str, Any]:
    """Returns fields whose suppressed text has become tokens, in addition to `default`'s.

    Args:
        values: Fields, whose `suppress` may hold text beside token ids.
        default: Options with further suppressed tokens.
        encode: Token ids of a target's text.

    Raises:
        UsageError: A text has no tokens.
    """
    suppress = values.get("suppress")
    if not isinstance(suppress, list | tuple):
        return dict(values)
    sequences: dict[tuple[int, ...], None] = {}
    for text in suppress:
        if isinstance(text, str):
            if not text.strip():
                told = f" holds {shown(text)}, which has no tokens; leave it out"
                raise UsageError(Option("suppress"), told)
            # The text itself, and after a blank.
            sequences |= dict.fromkeys(tuple(encode(each)) for each in (text, f" {text}"))
    single = (ids[0] for ids in sequences if len(ids) == 1)
    given = values.get("suppress_sequences", default.suppress_sequences)
    check_value("suppress_sequences", given, field_types(GenerationOptions)["suppress_sequences"])
    ids = (item for item in suppress if not isinstance(item, str))
    return {
        **values,
        "suppress": (*default.suppress, *ids, *single),
        "suppress_sequences": (*given, *(ids for ids in sequences if len(ids) > 1)),
    }


# Our names by those of transformers, CTranslate2 and vLLM.
SYNONYMS = {
    **dict.fromkeys(("num_beams", "beam_size"), "beam"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_decoding_length"), "max_length"),
    **dict.fromkeys(("num_return_sequences", "num_hypotheses"), "n_best"),
    "do_sample": "sample",
    "random_seed": "seed",
    "renormalize_logits": "renormalise",
    "sampling_topk": "top_k",
    "sampling_topp": "top_p",
    "sampling_temperature": "temperature",
    "min_new_tokens": "min_length",
    "min_decoding_length": "min_length",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "stop_strings": "stop",
    "suppress_tokens": "suppress",
    "begin_suppress_tokens": "suppress_begin",
    "bad_words_ids": "suppress_sequences",
    "forced_bos_token_id": "forced_begin",
    "forced_eos_token_id": "forced_end",
}


def check_generation(values: Mapping[str, Any]) -> None:
    """Raises UsageError for a field that is unknown or has another type."""
    if not isinstance(values, Mapping):
        raise UsageError(f"generation must be a table, found {shown(values)}")
    known = field_types(GenerationOptions)
    if unknown := sorted(str(name) for name in values.keys() - known.keys()):
        raise UsageError(
            f"generation has no {', '.join(unknown)}; {hint(unknown, known, SYNONYMS)}"
        )
    for name, value in values.items():
        check_value(name, value, known[name])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
