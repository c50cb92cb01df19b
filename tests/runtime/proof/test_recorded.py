"""torch's answers are recorded exactly, and holds every decoder to it."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import REFERENCE
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.engine.engine import verify
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.portable_decoder import PortableDecoder, PortableState
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Case, Tolerance, Truth
from transferry.runtime.proof.recorded import (
    RecordedSearch,
    Reference,
    check_reference,
    verify_recorded,
)
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.tokenizer.byte_pair import SOURCES

Tensors = dict[str, NDArray[np.floating[Any]]]

SMALL = Reference(
    cases=[
        (
            Case(
                f"case {number}, past 1",
                np.array([[5, 6, 2], [7, 2, 0]]),
                np.array([[True, True, True], [True, True, False]]),
                np.array([[1, 8], [1, 9]]),
                past=1,
            ),
            Truth(
                {"logits": np.full((2, 1, 3), number + 0.1), "past.0.keys": np.zeros((2, 1, 2, 2))},
                {"logits": np.array([1e-7, 2e-7]), "past.0.keys": np.zeros(4)},
            ),
        )
        for number in range(12)
    ],
    sources=[[5, 6, 2], [7, 2]],
    searches=[
        RecordedSearch(
            "beam 2",
            {"beam": 2},
            [[[8], [9, 8]], [[]]],
            [[-0.1, -0.3], [-1.5]],
            1e-7,
            [[2, None], [2]],
        )
    ],
)


@pytest.fixture(scope="module")
def bundle(bundle_folder: Path) -> Bundle:
    return Bundle.load(bundle_folder)


@pytest.fixture(scope="module")
def recorded(bundle_folder: Path) -> Reference:
    return Reference.load(bundle_folder / REFERENCE)


def report(reference: Reference, decoder: PortableDecoder) -> ParityReport:
    tolerance = Tolerance()
    checked = check_reference(reference, decoder, SOURCES, tolerance)
    return ParityReport("bundle", {}, tolerance, *checked)


def assert_equal(found: Reference, expected: Reference) -> None:
    assert found.sources == expected.sources
    assert found.searches == expected.searches
    for (case, truth), (case_wanted, truth_wanted) in zip(found.cases, expected.cases, strict=True):
        assert (case.name, case.past) == (case_wanted.name, case_wanted.past)
        for part in ("source", "mask", "target"):
            array, wanted = getattr(case, part), getattr(case_wanted, part)
            np.testing.assert_array_equal(array, wanted, strict=True)
        assert truth.errors.keys() == truth_wanted.errors.keys()
        for name, own in truth_wanted.errors.items():
            np.testing.assert_array_equal(truth.errors[name], own)
        assert truth.oracle.keys() == truth_wanted.oracle.keys()
        for name, tensor in truth.oracle.items():
            np.testing.assert_array_equal(tensor, truth_wanted.oracle[name], strict=True)


def test_round_trip(tmp_path: Path) -> None:
    """Of twelve cases, so that the names of case 1 and case 11 could be mixed up."""
    SMALL.save(tmp_path / "reference.npz")
    assert_equal(Reference.load(tmp_path / "reference.npz"), SMALL)


def test_same_reference_same_bytes(
    bundle_folder: Path, recorded: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 2e9)
    recorded.save(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (bundle_folder / REFERENCE).read_bytes()


def test_record_covers_every_stage_and_search(bundle: Bundle, recorded: Reference) -> None:
    decoder = bundle.variant().graphs["decoder"]
    names = {"logits", *decoder.names("cross"), *decoder.names("past")}
    for _, truth in recorded.cases:
        assert truth.oracle.keys() == truth.errors.keys() == names
        assert {tensor.dtype.name for tensor in truth.oracle.values()} == {"float64"}
    assert {case.past == 0 for case, _ in recorded.cases} == {True, False}
    assert any(not case.mask.all() for case, _ in recorded.cases)
    assert [item.name for item in recorded.searches] == ["greedy", "beam 4"]
    assert all(len(item.answers) == len(recorded.sources) == 8 for item in recorded.searches)


def test_the_bundle_agrees_with_its_record(bundle: Bundle) -> None:
    found = verify(bundle.folder)
    found.require()
    assert verify(bundle.folder, variant="portable", options=SessionOptions()) == found
    with pytest.raises(UsageError, match="no variant 'cpu-int8'"):
        verify(bundle.folder, variant="cpu-int8")
    assert [(item.search, item.rows, item.identical) for item in found.decisions] == [
        ("greedy", 8, 8),
        ("beam 4", 8, 8),
    ]
    assert all(item.score_error < 1e-4 for item in found.decisions)
    assert found.settings["against"] == "the recorded answers"
    assert found.settings["provider"] == "cpu"


class Scaled(PortableDecoder):
    """Gives logits that are a thousandth too large, which changes no greedy token."""

    def step(
        self, tokens: NDArray[np.int64], state: PortableState, **wanted: Any
    ) -> tuple[StepOutput, PortableState]:
        output, after = super().step(tokens, state)
        return StepOutput(output.all_logits * np.float32(1.001)), after


def test_numbers_that_are_slightly_wrong_fail(bundle: Bundle, recorded: Reference) -> None:
    found = report(recorded, Scaled(bundle, bundle.variant(), SessionOptions()))
    assert not found.passed
    faulty = [item for item in found.comparisons if item.fault]
    assert [item.tensor for item in faulty] == ["logits"] * len(recorded.cases)
    greedy = next(item for item in found.decisions if item.search == "greedy")
    assert greedy.identical == greedy.rows, "tokens alone would not have shown it"
    assert not greedy.passed, "but the scores do"


class WrongCache(PortableDecoder):
    """Shows a cache with one entry wrong by a thousandth of the largest."""

    def tensors(self, state: PortableState) -> Tensors:
        tensors = super().tensors(state)
        tensor = tensors["past.1.values"]
        tensor[0, 0, 0, 0] += 1e-3 * np.abs(tensor).max()
        return tensors


def test_a_cache_that_is_slightly_wrong_fails(bundle: Bundle, recorded: Reference) -> None:
    found = report(recorded, WrongCache(bundle, bundle.variant(), SessionOptions()))
    faulty = {item.tensor for item in found.comparisons if item.fault}
    assert faulty == {"past.1.values", "selected rows"}


def test_another_token_is_a_defect(bundle: Bundle, recorded: Reference) -> None:
    """The record is changed instead of the graph: one token of one row."""
    greedy, beam = recorded.searches
    answers = [[list(answer) for answer in row] for row in greedy.answers]
    row = next(index for index, (answer,) in enumerate(answers) if answer)
    answers[row][0][-1] += 1
    changed = dataclasses.replace(
        recorded, searches=[dataclasses.replace(greedy, answers=answers), beam]
    )
    found = report(changed, PortableDecoder(bundle, bundle.variant(), SessionOptions()))
    assert not found.passed
    greedy_found, beam_found = found.decisions
    assert (greedy_found.rows, greedy_found.identical) == (8, 7)
    (defect,) = greedy_found.defects
    assert defect.row == row
    assert defect.message.startswith(f"torch chose {answers[row]}")
    assert beam_found.passed
    decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions())
    _, (reduced, _) = check_reference(changed, decoder, SOURCES, Tolerance(), exact=False)
    assert reduced.passed, "reduced precision lists other tokens and does not judge them"
    assert [tie.message.endswith("in reduced precision") for tie in reduced.tolerated] == [True]


def test_an_empty_record_proves_nothing(bundle: Bundle) -> None:
    decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions())
    found = report(Reference((), (), (RecordedSearch("greedy", {}, (), (), 1e-7, ()),)), decoder)
    first, second = found.faults
    assert first == "no tensor was compared"
    assert second.startswith("greedy: 0 of 0 rows agree")


def test_every_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    small = dataclasses.replace(SMALL, cases=SMALL.cases[:1])
    small.save(path)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        for damaged in (bytes(changed), content[:position]):
            path.write_bytes(damaged)
            try:
                found = Reference.load(path)
            except InputError as error:
                refused += 1
                assert f"{path} is not a bundle's reference" in str(error)
                assert "export the bundle again" in str(error)
            else:
                assert_equal(found, small)
    assert refused > len(content) / 7


def test_missing_files_and_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    with pytest.raises(InputError, match=r"reference\.npz: cannot be read"):
        Reference.load(path)
    np.savez(path, index=np.array([{"cases": []}], dtype=object))
    with pytest.raises(InputError, match="allow_pickle"):
        Reference.load(path)


def test_bundle_whose_record_is_damaged_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle_folder, tmp_path / "bundle")
    bundle = Bundle.load(folder)
    (folder / REFERENCE).write_bytes(b"no zip")
    with pytest.raises(InputError, match=r"reference\.npz must have \d+ bytes, but has 6"):
        verify_recorded(bundle, open_model(bundle, bundle.variant(), SessionOptions()))
