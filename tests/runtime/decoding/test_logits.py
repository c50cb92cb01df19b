"""Log-sum-exp and top k against plain numpy."""

import numpy as np
import pytest

from tests.runtime.decoding.fakes import Logits
from transferry.runtime.decoding.logits import log_sum_exp, top_k


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_log_sum_exp_survives_large_logits_and_many_rows(dtype: type) -> None:
    rng = np.random.default_rng(0)
    logits: Logits = (
        rng.normal(size=(70, 5000)) * 10 + 900 * (-1) ** np.arange(70)[:, None]
    ).astype(dtype)
    wide = logits.astype(np.float64)
    largest = wide.max(axis=1)
    expected = largest + np.log(np.exp(wide - largest[:, None]).sum(axis=1))
    tolerance = 1e-12 if dtype is np.float64 else 1e-6
    np.testing.assert_allclose(log_sum_exp(logits), expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(log_sum_exp(logits[33:34]), log_sum_exp(logits)[33:34])


@pytest.mark.parametrize("vocabulary", [1, 5, 31, 200, 1003])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_is_the_stable_sort(vocabulary: int, k: int) -> None:
    rng = np.random.default_rng(vocabulary)
    # Whole numbers tie often, also across the k-th place.
    logits = rng.integers(-6, 6, (20, vocabulary)).astype(np.float32)
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    values, tokens = top_k(logits, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    expected = np.take_along_axis(logits, order, axis=1)
    width = order.shape[1]
    np.testing.assert_array_equal(values[:, :width], expected)
    np.testing.assert_array_equal(tokens[:, :width], np.where(expected > -np.inf, order, 0))
    assert np.isneginf(values[:, width:]).all()
    assert values.dtype == logits.dtype
