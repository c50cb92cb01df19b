"""Given answers show where errors grow and how clear each choice was."""

import numpy as np
import pytest

from transferry.export.oracle.teacher_forcing import TeacherForcing

ORACLE = np.array([[1.0, 4.0, 2.0], [0.0, -1.0, 0.5], [8.0, 0.0, 7.5]])


def test_errors_are_summed_up_by_place() -> None:
    forcing = TeacherForcing()
    found = ORACLE.copy()
    found[1, 2] += 0.08
    forcing.add([9, 1, 2, 0], ORACLE, ORACLE, found)
    short = ORACLE[:1].copy()
    short[0, 0] += 0.4
    forcing.add([9, 1], ORACLE[:1], short, ORACLE[:1])
    assert [item.step for item in forcing.growth()] == [0, 1, 2]
    # Of log-probabilities, in units of the distance from the best logit to the median.
    (_, error, _), (own, _, _) = (
        [getattr(item, name) for item in forcing.growth()] for name in ("error", "reference_error")
    )
    for found_error, row, moved in ((error, ORACLE[1], found[1]), (own, ORACLE[0], short[0])):
        exact, other = (each - np.log(np.exp(each).sum()) for each in (row, moved))
        unit = np.sort(row)[-1] - np.sort(row)[1]
        scale = np.maximum(unit, row.max() - row)
        assert found_error == pytest.approx((np.abs(other - exact) / scale).max())
    assert [item.error for item in forcing.growth()][::2] == [0.0, 0.0]


def test_what_lies_behind_the_target_is_left_out() -> None:
    forcing = TeacherForcing()
    found = ORACLE.copy()
    found[2] = np.nan
    forcing.add([9, 1, 2], ORACLE, ORACLE, found)
    assert [item.error for item in forcing.growth()] == [0.0, 0.0]
    assert forcing.tokens == 2
    nothing = TeacherForcing()
    nothing.add([9], ORACLE, ORACLE, ORACLE)
    assert (nothing.margins(), nothing.growth()) == (None, [])


def test_margins_are_those_of_the_oracle() -> None:
    forcing = TeacherForcing()
    forcing.add([9, 1, 2, 0], ORACLE, ORACLE, ORACLE + np.eye(3) * 1e-3)
    margins = forcing.margins()
    assert margins is not None
    assert margins.smallest == pytest.approx(0.5)
    assert 5e-4 < margins.error < 1e-3, "less the change of the log-sum-exp"
    assert sum(margins.counts) == 3
    place = int(np.searchsorted(margins.edges, 0.5)) - 1
    assert margins.counts[place] == 2, "0.5 twice, and 2 once"


def test_perplexity_is_that_of_what_was_fed() -> None:
    forcing = TeacherForcing()
    even = np.ones((2, 4))
    forcing.add([9, 1, 2], even, even, even + np.array([0.0, np.log(4.0), 0.0, 0.0]))
    task = forcing.perplexity(0.1)
    assert task.reference == pytest.approx(4.0)
    assert task.found == pytest.approx(7 / 4**0.5)
    assert task.change == pytest.approx(1 - 7 / 8)
    far = np.array([[0.0, 2000.0]])
    forcing.add([9, 0] + [0] * 9, *[np.repeat(far, 10, axis=0)] * 3)
    assert forcing.perplexity(np.inf).passed, "no number in float64 is as large"


def test_nan_stays() -> None:
    forcing = TeacherForcing()
    forcing.add([9, 1], ORACLE[:1], ORACLE[:1], np.full((1, 3), np.nan))
    forcing.add([9, 1], ORACLE[:1], ORACLE[:1], ORACLE[:1])
    assert np.isnan(forcing.growth()[0].error)
    assert not forcing.perplexity(1.0).passed
