"""A fault in every runtime is the graph's, in one that runtime's; none stops the rest."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.build_model.checkpoint import load_checkpoint
from transferry.export.backends import cross_check as opinions
from transferry.export.backends.backends import Arrays, Backend, NodeBackend, ReferenceBackend
from transferry.export.backends.cross_check import RUNTIMES, SERVED, UNOPTIMISED, cross_check
from transferry.export.graphs.external_data import WEIGHTS
from transferry.export.parity.cases import cross_check_cases
from transferry.export.parity.oracle import Oracle
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import STAGES, Tolerance, observe
from transferry.runtime.parity.report import CrossCheck

STEPS = ["encoder", "first step", "later step"]


class Inexact(ReferenceBackend):
    """A runtime whose logits are a little off."""

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        outputs = super().run(graph, feeds, wanted)
        return [
            array + np.float32(1e-3) if name == "logits" else array
            for name, array in zip(wanted, outputs, strict=True)
        ]


class Unable(ReferenceBackend):
    """A runtime that cannot run some inputs."""

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        if any(len(array) == 3 for array in feeds.values()):
            raise NotImplementedError("no kernel\nfor three rows" + " of this and that" * 50)
        return super().run(graph, feeds, wanted)


class Unopened(ReferenceBackend):
    """A runtime that cannot read the graphs."""

    name = "other"

    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        raise ValueError("unsupported opset")


def ask(
    oracle: Oracle, served: PortableDecoder, bundle: Bundle, *backends: type[Backend]
) -> dict[str, list[CrossCheck]]:
    cases = cross_check_cases(oracle.config)
    found = cross_check(oracle, served, bundle, bundle.variant(), cases, backends=backends)
    return {
        name: [item for item in found if item.runtime == name]
        for name in dict.fromkeys(item.runtime for item in found)
    }


@pytest.mark.parametrize(
    ("prefix", "stages", "tensors"),
    [
        # Four of cross and one case of each size; then logits and four of the cache.
        ("", STEPS, [16, 10, 10]),
        ("writer_", STEPS[1:], [10, 15]),
        ("reader_", STEPS[:1], [8]),
    ],
)
def test_all_agree_on_a_right_graph(
    prefix: str, stages: list[str], tensors: list[int], request: pytest.FixtureRequest
) -> None:
    checkpoint = load_checkpoint(request.getfixturevalue(f"{prefix}run_folder"))
    bundle = Bundle.load(request.getfixturevalue(f"{prefix}bundle_folder"))
    variant = bundle.variant()
    oracle = Oracle(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
    done: list[int] = []
    found = cross_check(
        oracle,
        open_model(bundle, variant, SessionOptions()),
        bundle,
        variant,
        cross_check_cases(oracle.config),
        done.append,
    )
    assert sum(done) == RUNTIMES
    names = list(dict.fromkeys(item.runtime for item in found))
    assert names[:2] == [SERVED, UNOPTIMISED]
    assert [name.split()[0] for name in names[2:]] == [
        "onnx.reference",
        "OpenVINO",
        "onnxruntime-web",
    ]
    for name in names:
        rows = [item for item in found if item.runtime == name]
        if any("install" in item.absent for item in rows):
            continue  # an optional runtime; test_backends skips, and says so
        assert [item.stage for item in rows] == stages
        assert [item.tensors for item in rows] == tensors
        for item in rows:
            assert item.faults == 0
            assert 0 < item.ratio < oracle.tolerance.factor
            assert 0 < item.error < 1e-5


def test_one_opinion_is_that_of_the_graph_as_it_was_written(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def refuse(bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        opened.append(options)
        raise RuntimeError("a fault of the runtime")

    monkeypatch.setattr(opinions, "open_model", refuse)
    found = ask(oracle, decoder, bundle)
    assert [options.optimisation for options in opened] == ["disable"]
    assert [item.stage for item in found[SERVED]] == STEPS
    reason = "RuntimeError: a fault of the runtime"
    assert found[UNOPTIMISED] == [CrossCheck(UNOPTIMISED, "", absent=reason)]


def test_a_runtime_that_is_wrong_stands_alone(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle
) -> None:
    found = ask(oracle, decoder, bundle, Inexact)
    *right, wrong = found
    assert right == [SERVED, UNOPTIMISED]
    assert all(item.faults == 0 for name in right for item in found[name])
    assert [item.stage for item in found[wrong] if item.faults] == ["first step", "later step"]


def test_a_wrong_graph_is_wrong_in_all(oracle: Oracle, bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    path = folder / bundle.variant().name / WEIGHTS
    weights = np.fromfile(path, np.float32)
    weights[: weights.size // 2] *= np.float32(1.01)
    weights.tofile(path)
    broken = dataclasses.replace(bundle, folder=folder)
    served = PortableDecoder(broken, broken.variant(), SessionOptions())
    found = ask(oracle, served, broken, ReferenceBackend)
    assert len(found) == 3
    for rows in found.values():
        assert [item.stage for item in rows if item.faults] == STEPS


def test_what_cannot_be_asked_says_why_and_the_rest_goes_on(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    found = ask(oracle, decoder, bundle, Unopened, NodeBackend, ReferenceBackend)
    assert found["other"] == [CrossCheck("other", "", absent="ValueError: unsupported opset")]
    (node,) = found["onnxruntime-web"]
    assert "no `node` on the PATH" in node.absent
    *_, last = found.values()
    assert [item.stage for item in last] == STEPS


def test_cases_that_fail_are_counted_after_those_that_ran(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle
) -> None:
    *_, rows = ask(oracle, decoder, bundle, Unable).values()
    *ran, failed = rows
    assert [(item.stage, item.tensors, item.faults) for item in ran] == [
        ("encoder", 12, 0),
        ("first step", 10, 0),
        ("later step", 5, 0),
    ]
    expected = "1 of 4 cases fail, the first batch 3, source 6, past 5: NotImplementedError: no "
    assert failed.absent.startswith(expected)
    assert failed.absent.endswith("...")
    assert len(failed.absent) < 250
    assert failed.stage == ""


def test_the_cases_are_small_and_meet_every_stage(oracle: Oracle, decoder: PortableDecoder) -> None:
    cases = cross_check_cases(oracle.config)
    assert max(case.source.shape[1] for case in cases) == 16
    assert {case.past for case in cases} >= {0, 1, 5}
    assert any(not case.mask.all() for case in cases)
    assert any(case.rows is not None and len(set(case.rows)) < len(case.rows) for case in cases)
    stages = set()
    for case in cases:
        for item in oracle.numbers(decoder, [case]):
            stages.add(item.stage)
        assert observe(decoder, case)["logits"].shape[:2] == (len(case.kept), 3)
    assert stages == set(STAGES) - {"text"}
