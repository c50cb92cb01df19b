import math
from typing import Any

import numpy as np
import pytest

from transferry.runtime.decoding.generation_options import (
    GenerationOptions,
    generation_options,
)
from transferry.runtime.errors import UsageError


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
        *((name, 0) for name in ("beam", "n_best", "max_length")),
        *((name, -1) for name in ("min_length", "top_k", "no_repeat_ngram", "seed")),
        *(("length_penalty", value) for value in (-10.1, math.nan, math.inf)),
        *(("temperature", 0.0), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1)),
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
    stored: dict[str, Any] = {
        "beam": 4,
        "suppress": [7, 8],
        "suppress_sequences": [[7], [8, 9]],
        "stop": ["."],
    }
    read = GenerationOptions(**stored)
    assert read == GenerationOptions(
        4, suppress=(7, 8), suppress_sequences=((7,), (8, 9)), stop=(".",)
    )
    assert hash(read) == hash(generation_options(stored))


@pytest.mark.parametrize(
    "name", [name for name, value in vars(GenerationOptions()).items() if value == ()]
)
def test_lists_are_no_sets(name: str) -> None:
    entry: Any = {"stop": ".", "suppress_sequences": (7,)}.get(name, 7)
    wrong: Any
    for wrong in ({entry}, frozenset([entry]), ({7, 8},)):
        with pytest.raises(UsageError, match=rf"^{name} must be "):
            GenerationOptions(**{name: wrong})


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 10**20) for name in ("beam", "n_best", "max_length", "min_length", "top_k")),
        *((name, True) for name in ("beam", "length_penalty", "seed")),
        *((name, "4") for name in ("beam", "length_penalty", "early_stopping", "seed")),
        *(("beam", 4.0), ("beam", None), ("beam", [4]), ("scores", 1)),
        *(("prefix", [-1]), ("prefix", "4"), ("prefix", (2**31,)), ("suppress", 4)),
        *(("temperature", 1e-300), ("temperature", 1e308), ("temperature", math.inf)),
    ],
)
def test_a_value_of_another_type_or_size_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be .*, found "):
        GenerationOptions(sample=name in ("temperature", "top_k"), **{name: value})
    if name != "temperature":
        with pytest.raises(UsageError, match=f"^{name} must be .*, found "):
            generation_options({"sample": name == "top_k", name: value})


def test_a_number_too_long_to_print_is_refused() -> None:
    with pytest.raises(UsageError, match=r"beam must be .*, found a number of 16610 bits"):
        GenerationOptions(beam=10**5000)


def test_numbers_of_numpy_are_numbers() -> None:
    assert GenerationOptions(length_penalty=np.float64(0.5)).length_penalty == 0.5


def test_what_is_no_option_of_generation_is_named() -> None:
    with pytest.raises(UsageError, match="generation has no zz; it knows beam, n_best, "):
        generation_options({"zz": 1})
    with pytest.raises(UsageError, match="generation must be a table, found 5"):
        generation_options(5)  # type: ignore[arg-type]
