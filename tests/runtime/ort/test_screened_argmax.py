"""The screened argmax against float64, with approximate logits of the kernels in the graphs."""

import dataclasses
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from transferry.export.rewrite.rounded_weights import quantised
from transferry.runtime.decoding.logits import SEGMENT, SegmentMaxima
from transferry.runtime.errors import InputError
from transferry.runtime.ort.screened_argmax import MOST, ScreenedArgmax, ScreeningCounts

Floats = NDArray[np.float32]


class Projection:
    """A vocabulary projection: its int8 product by onnxruntime, its screen and the truth."""

    def __init__(
        self,
        weight: Floats,
        bias: Floats | None = None,
        *,
        integers: NDArray[np.int8] | None = None,
        scales: Floats | None = None,
        fused: bool = False,
    ) -> None:
        if integers is None or scales is None:
            integers, scales = quantised(weight)
        self.weight, self.bias = weight, bias
        self.screen = ScreenedArgmax(weight, integers, scales, bias)
        zeros = np.zeros_like(integers[:, 0])
        constants: dict[str, Any] = {"w": integers.T.copy(), "w_scale": scales, "w_zero": zeros}
        constants |= {} if bias is None else {"b": bias}
        last = "" if bias is None else ", b"
        product = """
  x, x_scale, x_zero = DynamicQuantizeLinear (h)
  q = com.microsoft.MatMulIntegerToFloat (x, w, x_scale, w_scale, x_zero, w_zero"""
        if fused:
            product = "q = com.microsoft.DynamicQuantizeMatMul (h, w, w_scale, w_zero"
        model = onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
g (float[rows, {weight.shape[1]}] h) => (float[rows, {len(weight)}] q) {{ {product}{last}) }}""")
        for name, value in constants.items():
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        onnx.checker.check_model(model)
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )

    def approximate(self, hidden: Floats) -> Floats:
        scores: Floats = self.session.run(["q"], {"h": hidden})[0]
        return scores

    def likeliest(self, hidden: Floats) -> NDArray[np.int64]:
        return self.argmax(hidden, self.approximate(hidden))

    def argmax(
        self, hidden: Floats, approximate: Floats, length: int = SEGMENT
    ) -> NDArray[np.int64]:
        return self.screen.argmax(hidden, approximate, SegmentMaxima.of(approximate, length))

    def exact(self, hidden: Floats) -> NDArray[np.float64]:
        scores = hidden.astype(np.float64) @ self.weight.T.astype(np.float64)
        return scores if self.bias is None else scores + self.bias

    def check(self, hidden: Floats) -> NDArray[np.int64]:
        """Tokens of `hidden`, all of them the best but for float64's own rounding."""
        tokens = self.likeliest(hidden)
        exact = self.exact(hidden)
        assert tokens.dtype == np.int64
        found = exact[np.arange(len(hidden)), tokens]
        size = (
            np.linalg.norm(hidden.astype(np.float64), axis=1)
            * np.linalg.norm(self.weight, axis=1).max()
        )
        size += 0 if self.bias is None else np.abs(self.bias).max()
        assert (found >= exact.max(axis=1) - 1e-13 * size).all()
        return tokens


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def peaked(seed: int, rows: int, weight: Floats) -> Floats:
    """Hidden states that lean towards a token each, as those of a trained model do."""
    generator = np.random.default_rng(seed)
    chosen = generator.integers(0, len(weight), rows)
    return weight[chosen] + 0.3 * normal(seed, rows, weight.shape[1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 16, 17, 1000, 2003])
def test_random_scores_are_screened_exactly(vocabulary: int, fused: bool) -> None:
    projection = Projection(normal(0, vocabulary, 48), fused=fused)
    for seed in range(1, 6):
        projection.check(normal(seed, 64, 48))


@pytest.mark.parametrize("vocabulary", [5, 64, 1000])
def test_the_length_of_segments_changes_nothing(vocabulary: int) -> None:
    projection = Projection(normal(0, vocabulary, 48))
    hidden = normal(1, 64, 48)
    expected = projection.likeliest(hidden).tolist()
    for length in (1, 32, vocabulary):
        found = projection.argmax(hidden, projection.approximate(hidden), length)
        assert found.tolist() == expected


def test_rough_scores_alone_would_choose_otherwise() -> None:
    projection, hidden = Projection(normal(0, 2000, 32)), normal(1, 512, 32)
    best = projection.check(hidden)
    assert (projection.approximate(hidden).argmax(axis=1) != best).sum() > 5


def test_peaked_rows_are_certified_without_a_product() -> None:
    projection = Projection(normal(0, 3000, 64))
    projection.check(peaked(1, 64, projection.weight))
    counts = projection.screen.counts
    assert dataclasses.asdict(counts) == {
        "rows": 64,
        "certified": counts.certified,
        "full": 0,
        "candidates": counts.candidates,
    }
    assert counts.certified > 56
    assert counts.candidates < 64


def edge(term: str) -> tuple[Projection, Floats]:
    """Token 0 is best by a little, and approximate scores put it behind 1 by 0.95 of both radii.

    Every element errs by half a step, in the direction of the other factor, so that the inequality
    of Cauchy and Schwarz is all but an equality.
    """
    d, half = 65, 0.499
    signs = np.where(np.arange(d) % 2, 1.0, -1.0)
    hidden, delta = np.full((1, d), 254.0), np.zeros((2, d))
    integers = np.zeros((2, d), np.int8)
    hidden[0, 0], signs[0] = 255.0, 0.0
    if term == "hidden":
        hidden += half * signs
        integers[0], integers[1] = 100 * signs, -100 * signs
        missing = 2 * half * 100 * (d - 1)
    else:
        delta[0, 1:], delta[1, 1:] = half, -half
        missing = 2 * half * 254 * (d - 1)
    integers[1, 0] = round(0.95 * missing / 255)
    weight = (integers + delta).astype(np.float32)
    scales = np.ones(2, np.float32)
    return Projection(weight, integers=integers, scales=scales), hidden.astype(np.float32)


@pytest.mark.parametrize("term", ["hidden", "weight"])
def test_a_token_at_the_edge_of_the_bound_is_found(term: str) -> None:
    projection, hidden = edge(term)
    assert projection.approximate(hidden).argmax() == 1
    assert projection.exact(hidden).argmax() == 0
    assert projection.likeliest(hidden).tolist() == [0]


def test_rounding_to_a_large_bias_is_allowed_for() -> None:
    # Where neighbouring numbers lie 1 apart, 0.48 rounds to 0 and 0.53 to 1.
    weight = np.array([[0.52, 0], [0.51, 0]], np.float32)
    scales, integers = np.array([0.48, 0.53], np.float32), np.array([[1, 0], [1, 0]], np.int8)
    bias = np.full(2, 2.0**23, np.float32)
    projection = Projection(weight, bias, integers=integers, scales=scales)
    hidden = np.array([[1, 0]], np.float32)
    assert (projection.approximate(hidden) - bias).tolist() == [[0, 1]]
    assert projection.likeliest(hidden).tolist() == [0]


def test_a_bias_decides() -> None:
    bias = normal(7, 1001)
    projection = Projection(normal(0, 1001, 32), bias)
    small = projection.check(normal(1, 64, 32) * np.float32(1e-3))
    assert (small == bias.argmax()).mean() > 0.5
    projection.check(normal(2, 64, 32))


def test_the_lowest_of_equal_tokens_is_chosen() -> None:
    weight = normal(0, 500, 32)
    weight[[499, 33, 17]] = weight[250]
    weight[[400, 300]] = weight[100]
    projection = Projection(weight)
    hidden = 2 * weight[[250, 100, 250]]
    assert projection.check(hidden).tolist() == [17, 100, 17]


@pytest.mark.parametrize("vocabulary", [100, 2000])
def test_rows_of_zeros_have_the_bias_or_token_0(vocabulary: int) -> None:
    weight, bias = normal(0, vocabulary, 16), normal(1, vocabulary)
    zeros = np.zeros((3, 16), np.float32)
    assert Projection(weight).likeliest(zeros).tolist() == [0, 0, 0]
    assert Projection(weight, bias).likeliest(zeros).tolist() == [bias.argmax()] * 3
    hidden = np.concatenate([zeros[:1], normal(2, 1, 16)])
    assert Projection(weight).check(hidden)[0] == 0


def test_tokens_of_zeros_are_screened_too() -> None:
    weight = np.abs(normal(0, 100, 16))
    weight[41] = 0
    assert Projection(weight).check(-np.abs(normal(1, 5, 16))).tolist() == [41] * 5


@pytest.mark.parametrize(("noise", "most"), [(1e-2, 40), (1e-5, 4000), (1e-6, 4001)])
def test_flat_rows_are_scored_in_full(noise: float, most: int) -> None:
    weight = normal(0, 1, 64) + normal(1, 4000, 64) * np.float32(noise)
    projection = Projection(weight)
    assert len(weight) > MOST
    projection.check(normal(2, 64, 64))
    assert projection.screen.counts.full == 64
    assert projection.screen.counts.candidates < 64 * most


@pytest.mark.parametrize("scale", [1e-42, 1e-37, 1e-25, 1e25, 1e36])
def test_extreme_hidden_states_are_screened_exactly(scale: float) -> None:
    projection = Projection(normal(0, 1100, 16))
    projection.check((normal(1, 8, 16) * scale).astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    projection, hidden = Projection(normal(0, 1100, 16)), normal(1, 6, 16)
    expected = projection.likeliest(hidden)
    hidden[2, 3] = value
    expected[2] = -1
    assert projection.likeliest(hidden).tolist() == expected.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_rough_score_that_is_not_finite_costs_a_full_row(value: float) -> None:
    projection, hidden = Projection(normal(0, 1100, 16)), normal(1, 6, 16)
    expected, approximate = projection.likeliest(hidden), projection.approximate(hidden)
    approximate[2, 3] = value
    projection.screen.counts = ScreeningCounts()
    assert projection.argmax(hidden, approximate).tolist() == expected.tolist()
    assert projection.screen.counts.full == 1


def test_a_row_alone_has_the_token_that_it_has_in_a_batch() -> None:
    projection = Projection(normal(0, 1500, 24), normal(3, 1500))
    hidden = normal(1, 40, 24) * np.geomspace(0.01, 10, 40, dtype=np.float32)[:, None]
    together = projection.check(hidden)
    alone = [int(projection.likeliest(row[None])[0]) for row in hidden]
    assert together.tolist() == alone


def test_no_rows_have_no_tokens() -> None:
    projection = Projection(normal(0, 100, 16))
    empty = np.empty((0, 16), np.float32), np.empty((0, 100), np.float32)
    assert projection.argmax(*empty).tolist() == []


def test_weights_that_do_not_fit_are_refused() -> None:
    weight = normal(0, 50, 8)
    integers, scales = quantised(weight)
    with pytest.raises(InputError, match="found \\[\\(49, 8\\)"):
        ScreenedArgmax(weight, integers[:49], scales)
    with pytest.raises(InputError, match="bias a token"):
        ScreenedArgmax(weight, integers, scales, np.zeros(49, np.float32))
    weight[3, 3] = np.nan
    with pytest.raises(InputError, match="NaN"):
        ScreenedArgmax(weight, integers, scales)
