"""A fault in every runtime is the graph's, in one that runtime's; each runtime by itself."""

import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.commands import PATIENCE
from tests.export.conftest import opened
from tests.export.test_family import config_of
from tests.optional import PACKAGES
from tests.sealed import records
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.blame import cross_check as module
from transferry.export.blame.cross_check import (
    BACKENDS,
    SERVED,
    UNOPTIMISED,
    Arrays,
    Backend,
    NodeBackend,
    OpenVinoBackend,
    ReferenceBackend,
    cross_checks,
)
from transferry.export.bundle import check_bundle, check_one_layer, one_layer
from transferry.export.checks.check import prove
from transferry.export.oracle.cases import random_case
from transferry.export.oracle.oracle import Oracle
from transferry.export.torch_model import TorchDecoder
from transferry.export.trace.store import WEIGHTS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import ProviderError
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance, observe
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
            continue  # an optional runtime; its own tests skip with the reason
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


NODE = pytest.mark.optional("node", "onnxruntime-web")
MARKS = {OpenVinoBackend: pytest.mark.optional("openvino"), NodeBackend: NODE}
of_each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=MARKS.get(kind, ()), id=kind.name) for kind in BACKENDS]
)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_PATH", str(PACKAGES))


def started(kind: type[Backend], bundle: Bundle) -> Backend:
    return kind(bundle, bundle.variant())


def fake_node(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    node = folder / "node"
    node.write_text(f"#!/bin/sh\n{script}\n")
    node.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def zeros(variant: Variant, graph: str, **sizes: int) -> dict[str, np.ndarray[Any, Any]]:
    def shape(dimensions: Sequence[int | str]) -> list[int]:
        return [sizes[size] if isinstance(size, str) else size for size in dimensions]

    return {
        spec.name: np.zeros(shape(spec.shape), spec.type) for spec in variant.graphs[graph].inputs
    }


@of_each_kind
def test_returns_what_was_wanted_and_the_caller_owns_it(
    kind: type[Backend], bundle: Bundle
) -> None:
    feeds = zeros(bundle.variant(), "decoder", batch=2, source=3, target=1, past=0)
    feeds["source_mask"][:] = True
    wanted = ["present.1.values", "logits"]
    with closing(started(kind, bundle)) as backend:
        present, logits = backend.run("decoder", feeds, wanted)
        kept = logits.copy()
        feeds["target"][:] = 7
        _, other = backend.run("decoder", feeds, wanted)
        assert present.shape == (2, 2, 1, 16)
        assert logits.shape == (2, 1, 400)
        assert logits.dtype == np.float32
        assert not np.array_equal(other, kept)
        np.testing.assert_array_equal(logits, kept)
        logits += 1


@of_each_kind
def test_gives_the_same_bits_twice(kind: type[Backend], bundle: Bundle) -> None:
    feeds = zeros(bundle.variant(), "encoder", batch=3, source=16)
    feeds["source"][:] = np.arange(48).reshape(3, 16)
    feeds["source_mask"][:] = True
    wanted = bundle.variant().graphs["encoder"].names("cross")
    with closing(started(kind, bundle)) as one, closing(started(kind, bundle)) as other:
        first = one.run("encoder", feeds, wanted)
        second = other.run("encoder", feeds, wanted)
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OpenVinoBackend, r'pip install .*\[openvino\]"'),
        (NodeBackend, "no `node` on the PATH; install Node"),
        pytest.param(
            *(NodeBackend, "`npm install onnxruntime-web`"), marks=pytest.mark.optional("node")
        ),
    ],
)
def test_an_absent_runtime_says_how_to_get_it(
    kind: type[Backend],
    message: str,
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    if "PATH" in message:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NODE_PATH")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProviderError, match=message):
        started(kind, bundle)


@NODE
def test_what_the_graph_cannot_take_is_an_error_and_the_next_run_goes_on(bundle: Bundle) -> None:
    good = zeros(bundle.variant(), "encoder", batch=1, source=2)
    good["source_mask"][:] = True
    bad = {**good, "source": good["source"].astype(np.float64)}
    with closing(started(NodeBackend, bundle)) as backend:
        with pytest.raises(ProviderError, match="source of type float64"):
            backend.run("encoder", bad, ["cross.0.keys"])
        with pytest.raises(ProviderError, match="source_mask"):
            backend.run("encoder", {"source": good["source"]}, ["cross.0.keys"])
        (keys,) = backend.run("encoder", good, ["cross.0.keys"])
    assert keys.shape == (1, 2, 2, 16)


with_a_stand_in = pytest.mark.skipif(
    sys.platform == "win32", reason="the stand-in for Node is a shell script"
)


@with_a_stand_in
@pytest.mark.parametrize(
    ("script", "timeout", "told"),
    [
        ("exec /bin/sleep 6000", 0.5, "no answer within 0.5 s"),
        (
            "echo 'at x.js' >&2; echo 'RangeError: too big' >&2; exit 7",
            PATIENCE,
            "code 7: RangeError: too",
        ),
        ("exit 3", PATIENCE, "code 3: no message"),
        ("kill -9 $$", PATIENCE, "code -9"),
    ],
)
def test_a_node_that_does_not_start_is_an_error(
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    timeout: float,
    told: str,
) -> None:
    fake_node(tmp_path, monkeypatch, script)
    with pytest.raises(ProviderError, match=told):
        NodeBackend(bundle, bundle.variant(), timeout)


@with_a_stand_in
def test_a_node_that_dies_later_is_an_error_each_time(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_node(tmp_path, monkeypatch, """read line; echo '{"version": "0"}'; read line; exit 4""")
    with closing(NodeBackend(bundle, bundle.variant())) as backend:
        for source in (2, 20000, 2):  # less and more than a buffer and a pipe hold
            feeds = zeros(bundle.variant(), "encoder", batch=1, source=source)
            with pytest.raises(ProviderError, match="code 4"):
                backend.run("encoder", feeds, [])


@with_a_stand_in
def test_closing_ends_a_node_that_does_not_listen(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_node(tmp_path, monkeypatch, """read line; echo '{"version": "0"}'; exec /bin/sleep 6000""")
    begun = time.monotonic()
    NodeBackend(bundle, bundle.variant()).close()
    assert time.monotonic() - begun < PATIENCE


@NODE
def test_closing_ends_node(bundle: Bundle) -> None:
    with closing(started(NodeBackend, bundle)) as backend:
        assert isinstance(backend, NodeBackend)
        process: subprocess.Popen[bytes] = backend._process
        assert process.poll() is None
    assert process.poll() is not None


DEEP: dict[str, tuple[str, dict[str, Any]]] = {
    "both": ("encoder-decoder", {"encoder_layers": 3, "decoder_layers": 2}),
    "windows": (
        "decoder-only",
        {"decoder_layers": 3, "positions": "rotary", "windows": (4, 0, 4), "unrotated": (1,)},
    ),
    "a reader": ("encoder-only", {"encoder_layers": 2, "windows": (4, 0)}),
}


@pytest.mark.parametrize("name", DEEP)
def test_one_layer_shares_the_weights_and_is_a_whole_model(name: str) -> None:
    model = Transformer(config_of(*DEEP[name])).eval()
    shallow = one_layer(model)
    assert {shallow.config.encoder_layers, shallow.config.decoder_layers} <= {0, 1}
    own, found = dict(model.named_parameters()), dict(shallow.named_parameters())
    assert 0 < len(found) < len(own)
    assert all(own[each] is parameter for each, parameter in found.items())
    assert not any(".1." in each for each in found)
    case = random_case(shallow.config, 2, 5, 2, seed=0)
    decodes = bool(shallow.config.decoder_layers)
    side = TorchDecoder(shallow)
    assert np.isfinite(observe(side if decodes else side.encoder, case)["logits"]).all()
    assert model.config.encoder_layers + model.config.decoder_layers > 1


@pytest.mark.thorough
def test_of_a_large_model_the_evaluator_computes_one_layer(
    checkpoint: Checkpoint, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_one_layer(checkpoint)
    assert found
    assert not [item for item in found if item.fault]
    report = check_bundle(bundle, large=checkpoint)
    assert report.passed
    assert len(report.comparisons) > len(found)

    def wrong(self: ReferenceBackend, *arguments: Any) -> Any:
        return [1.01 * each for each in honest(self, *arguments)]

    honest = ReferenceBackend.run
    monkeypatch.setattr(ReferenceBackend, "run", wrong)
    assert [item for item in check_one_layer(checkpoint) if item.fault]
    assert not check_bundle(bundle, large=checkpoint).passed
