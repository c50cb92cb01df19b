"""The searches that a verification runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transferry.build_model.model.config import ModelConfig
from transferry.export.oracle.cases import room
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options

# Searches over text: of the beam the whole n-best must agree, not only the best.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"beam": 1, "n_best": 1},
    "beam 4": {"beam": 4, "n_best": 4},
    "sampling": {"beam": 1, "n_best": 1, "sample": True, "seed": 1},
    "top-k and top-p sampling": {
        "beam": 1,
        "n_best": 2,
        "sample": True,
        "seed": 2,
        "temperature": 0.7,
        "top_k": 8,
        "top_p": 0.9,
    },
    "constrained beam 2": {
        "beam": 2,
        "n_best": 1,
        "min_length": 8,
        "no_repeat_ngram": 3,
        "early_stopping": False,
        "repetition_penalty": 1.1,
        "renormalise": True,
    },
}
CONSTRAINED = "constrained beam 2"  # with a forced prefix too
WHOLE = ("greedy", "beam 4")  # run on every row, the others on some
BRIEF = ("greedy", "beam 4", "sampling")
# Searches with recorded answers; only an oracle can explain a difference between samples.
RECORDED = ("greedy", "beam 4")
GIVEN = "as given"  # a search with options of the user's


def search_settings(
    name: str,
    generation: Mapping[str, Any],
    config: ModelConfig,
    sources: Sequence[Sequence[int]],
    max_length: int,
) -> dict[str, Any]:
    """Returns the fields of GenerationOptions for one of `SEARCHES`, or those of `generation`.

    An answer has at most `max_length` tokens, fewer where the positions do not suffice. Stop
    strings and total lengths, which end a search and choose no token, are left out.
    """
    length = room(config, sources, max_length)
    base = generation_options({**generation, "max_total_length": 0, "stop": ()})
    chosen = {"sample": False, **SEARCHES[name]} if name in SEARCHES else {}
    changed = vars(generation_options({**chosen, "max_length": length}, base))
    plain = vars(GenerationOptions())
    settings = {
        field: value
        for field, value in changed.items()
        if value != plain[field] or field in (*chosen, "max_length")
    }
    if name == CONSTRAINED:
        # Any token will do: both sides must continue it.
        prefix = (*settings.get("prefix", ()), config.vocabulary_size // 2)
        room_left = length - (settings.get("forced_begin") is not None)
        settings["prefix"] = prefix[:room_left]
    return settings
