"""A fault in every runtime is the graph's, in one that runtime's; none stops the rest."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.export.conftest import opened
from tests.sealed import records
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.blame import cross_check as module
from transferry.export.blame.cross_check import (
    BACKENDS,
    SERVED,
    UNOPTIMISED,
    Arrays,
    Backend,
    NodeBackend,
    ReferenceBackend,
    cross_checks,
)
from transferry.export.checks.check import prove
from transferry.export.oracle.cases import cross_check_cases
from transferry.export.oracle.oracle import Oracle
from transferry.export.trace.store import WEIGHTS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import CrossCheck

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
) -> list[CrossCheck]:
    return prove(cross_checks(oracle, served, bundle, backends)).runtimes


def faulty(result: CrossCheck) -> list[str]:
    return [stage.name for stage in result.stages if stage.faults]


# Four of cross and one case of each size; then logits and four of the cache.
TENSORS = {
    "encoder-decoder": dict(zip(STEPS, [16, 10, 10], strict=True)),
    "decoder-only": {"first step": 10, "later step": 15},
    "encoder-only": {"encoder": 8},
}


def test_all_agree_on_a_right_graph(pair: tuple[Checkpoint, Bundle]) -> None:
    checkpoint, bundle = pair
    tensors = TENSORS[checkpoint.model.config.architecture]
    special = checkpoint.tokenizer.special
    oracle = Oracle.of(checkpoint.model, special, Tolerance())
    checked = prove(cross_checks(oracle, opened(bundle), bundle))
    found = checked.runtimes
    assert checked.steps == 2 + len(BACKENDS) == len(found)
    assert [result.runtime for result in found[:2]] == [SERVED, UNOPTIMISED]
    others = [result.runtime.split()[0] for result in found[2:]]
    assert others == ["onnx.reference", "OpenVINO", "onnxruntime-web"]
    for result in found:
        if "install" in result.absent:
            continue  # an optional runtime; test_backends skips with the reason
        assert [(stage.name, stage.tensors) for stage in result.stages] == list(tensors.items())
        for stage in result.stages:
            assert stage.faults == 0
            assert 0 < stage.ratio < oracle.tolerance.factor
            assert 0 < stage.error < 1e-5


def test_onnxruntime_runs_the_graph_unoptimised_too(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def refuse(bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        given.append(options)
        raise RuntimeError("a fault of the runtime")

    monkeypatch.setattr(module, "open_model", refuse)
    served, unoptimised = ask(oracle, decoder, bundle)
    assert [options.optimisation for options in given] == ["disable"]
    assert [stage.name for stage in served.stages] == STEPS
    assert unoptimised == CrossCheck(UNOPTIMISED, absent="RuntimeError: a fault of the runtime")


def test_a_runtime_that_is_wrong_stands_alone(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle
) -> None:
    found = ask(oracle, decoder, bundle, Inexact)
    assert [faulty(result) for result in found] == [[], [], ["first step", "later step"]]


def test_a_wrong_graph_is_wrong_in_all(oracle: Oracle, bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    path = folder / bundle.variant().name / WEIGHTS
    weights = np.fromfile(path, np.float32)
    weights[: weights.size // 2] *= np.float32(1.01)
    weights.tofile(path)
    manifest = dataclasses.replace(bundle.manifest, files=records(folder))
    broken = dataclasses.replace(bundle, folder=folder, manifest=manifest)
    served = PortableDecoder(broken, broken.variant(), SessionOptions())
    found = ask(oracle, served, broken, ReferenceBackend)
    assert [faulty(result) for result in found] == [STEPS] * 3


def test_a_runtime_that_is_absent_says_why_and_the_rest_goes_on(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    *_, other, node, last = ask(oracle, decoder, bundle, Unopened, NodeBackend, ReferenceBackend)
    assert other == CrossCheck("other", absent="ValueError: unsupported opset")
    assert "no `node` on the PATH" in node.absent
    assert [stage.name for stage in last.stages] == STEPS


def test_cases_that_fail_are_counted_beside_those_that_ran(
    oracle: Oracle, decoder: PortableDecoder, bundle: Bundle
) -> None:
    *_, result = ask(oracle, decoder, bundle, Unable)
    assert [(stage.name, stage.tensors, stage.faults) for stage in result.stages] == [
        ("encoder", 12, 0),
        ("first step", 10, 0),
        ("later step", 5, 0),
    ]
    expected = "1 of 4 cases fail, the first batch 3, source 6, past 5: NotImplementedError: no "
    assert result.absent.startswith(expected)
    assert result.absent.endswith("...")
    assert len(result.absent) < 250


def test_the_cases_are_small_pad_and_select(oracle: Oracle) -> None:
    cases = cross_check_cases(oracle.config)
    assert max(case.source.shape[1] for case in cases) == 16
    assert {case.past for case in cases} >= {0, 1, 5}
    assert any(not case.mask.all() for case in cases)
    assert any(case.rows is not None and len(set(case.rows)) < len(case.rows) for case in cases)
