import json
import math

import pytest

from transferry.runtime.decoding.options import GenerationOptions, options_of_json
from transferry.runtime.errors import UsageError


def test_defaults_are_greedy() -> None:
    options = GenerationOptions()
    assert (options.beam, options.n_best, options.sample) == (1, 1, False)


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"sample": True, "beam": 4}, "sample", "beam=4"),
        ({"n_best": 3, "beam": 2}, "n_best=3", "beam=2"),
        ({"n_best": 2}, "n_best=2", "beam=1"),
        ({"temperature": 0.5}, "temperature=0.5", "sample"),
        ({"top_k": 5, "beam": 2}, "top_k=5", "sample"),
        ({"top_p": 0.9}, "top_p=0.9", "sample"),
        ({"scores": False, "beam": 4}, "scores=False", "beam=4"),
        ({"scores": False, "sample": True}, "scores=False", "sample"),
        ({"min_length": 5, "max_length": 4}, "min_length=5", "max_length=4"),
        ({"prefix": (7, 8, 9), "max_length": 2}, "prefix has 3", "max_length=2"),
    ],
)
def test_a_conflict_names_both_options(
    settings: dict[str, object], first: str, second: str
) -> None:
    with pytest.raises(UsageError) as error:
        GenerationOptions(**settings)  # type: ignore[arg-type]
    assert first in str(error.value)
    assert second in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam", 0),
        ("n_best", 0),
        ("max_length", 0),
        ("min_length", -1),
        ("top_k", -1),
        ("no_repeat_ngram", -1),
        ("length_penalty", -0.1),
        ("length_penalty", math.nan),
        ("length_penalty", math.inf),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_found(name: str, value: float) -> None:
    sampling = name in ("temperature", "top_k", "top_p")
    with pytest.raises(UsageError, match=rf"{name} must be .*, found {value}"):
        GenerationOptions(sample=sampling, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 1.5, "7"])
def test_what_is_suppressed_must_be_ids(token: object) -> None:
    with pytest.raises(UsageError, match=rf"suppress must be ids of at least 0, found {token}"):
        GenerationOptions(suppress=(3, token))  # type: ignore[arg-type]


def test_lists_of_json_become_tuples() -> None:
    stored = json.loads(json.dumps({"beam": 4, "suppress": (7, 8)}))
    assert GenerationOptions(**options_of_json(stored)) == GenerationOptions(
        beam=4, suppress=(7, 8)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"sample": True, "n_best": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9},
        {"beam": 4, "n_best": 4},
        {"min_length": 4, "max_length": 4},
        {"prefix": (7, 8), "max_length": 2},
        {"length_penalty": 0.0, "seed": 2**64 - 1},
        {"scores": False, "no_repeat_ngram": 2},
    ],
)
def test_the_bounds_themselves_are_allowed(settings: dict[str, object]) -> None:
    options = GenerationOptions(**settings)  # type: ignore[arg-type]
    assert {name: getattr(options, name) for name in settings} == settings
