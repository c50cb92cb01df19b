"""Operators of search: the largest logits of a row, and the sum of its exponentials."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels.graphs import Array, Operator, Values, layer, product, quantised

INPUTS = 64


def head(rng: np.random.Generator, rows: int, tokens: int, count: int) -> Values:
    """An LM head and hidden states; many logits are equal."""
    values: Values = {"x": rng.standard_normal((rows, INPUTS)).astype(np.float32)}
    values |= layer(rng, INPUTS, tokens) | {"count": np.array([count])}
    values["weight"][1::3] = values["weight"][::3][: len(values["weight"][1::3])]
    values["scales"][:], values["bias"] = 2e-3, None
    return values


def likeliest(logits: Array, count: int) -> Array:
    """Tokens by logit, of equal ones the lower first."""
    order: Array = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return order


@given(rows=st.integers(0, 40), tokens=st.integers(1, 600), share=st.floats(0, 1))
@example(rows=3, tokens=1, share=1)
@example(rows=9, tokens=4096, share=0.002)
@example(rows=9, tokens=4097, share=0.002)
@example(rows=2, tokens=9001, share=0.5)
@example(rows=1, tokens=40000, share=0.001)
def test_the_largest_logits_are_those_of_a_stable_sort(
    library: Path, rows: int, tokens: int, share: float
) -> None:
    count = max(1, int(share * tokens))
    values = head(np.random.default_rng(tokens), rows, tokens, count)
    logits = product(quantised(values["x"], values), values)
    top, ids, sums = Operator(library, "LinearRank", values, "x count")(values)
    np.testing.assert_array_equal(ids, likeliest(logits, count))
    np.testing.assert_array_equal(top, np.take_along_axis(logits, ids, axis=1))
    np.testing.assert_allclose(sums, np.exp(logits.astype(np.float64)).sum(axis=1), rtol=1e-6)
    sums_alone, maxima = Operator(library, "ExpSums", {"logits": logits}, "logits")(
        {"logits": logits}
    )
    assert sums_alone.tobytes() == sums.tobytes()
    whole = tokens // 64 * 64
    wanted = logits[:, :whole].reshape(rows, whole // 64, 64).max(axis=2)
    np.testing.assert_array_equal(maxima, np.concatenate([wanted, logits[:, whole:]], axis=1))


def test_exponentials_are_accurate_up_to_the_ends_of_float32(library: Path) -> None:
    logits = np.linspace(-87, 88, 4001, dtype=np.float32)[:, None]
    sums, _ = Operator(library, "ExpSums", {"logits": logits}, "logits")({"logits": logits})
    np.testing.assert_allclose(sums, np.exp(logits[:, 0].astype(np.float64)), rtol=2e-7)


@pytest.mark.parametrize(
    ("odd", "wanted"),
    [
        ((np.nan,), np.nan),
        ((np.inf, np.nan), np.nan),
        ((np.inf,), np.inf),
        ((100.0,), np.inf),
        ((-np.inf, -100.0), 298.0),
    ],
)
def test_what_is_not_finite_shows(library: Path, odd: tuple[float, ...], wanted: float) -> None:
    """A row of zeros, and others beside it, which do not change."""
    logits = np.zeros((3, 300), np.float32)
    logits[1, 7 : 7 + len(odd)] = odd
    sums, _ = Operator(library, "ExpSums", {"logits": logits}, "logits")({"logits": logits})
    np.testing.assert_array_equal(sums, [300, wanted, 300])


def test_a_layer_without_a_number_ranks_none(library: Path) -> None:
    values = head(np.random.default_rng(0), 3, 300, 4)
    values["bias"] = np.full(300, np.nan, np.float32)
    top, ids, sums = Operator(library, "LinearRank", values, "x count")(values)
    assert np.isnan(sums).all()
    assert (top == -np.inf).all()
    assert (ids == 0).all()
