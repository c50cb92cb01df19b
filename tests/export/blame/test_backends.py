"""Each runtime returns the wanted outputs, and the error of an absent or dead one names it."""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import PATIENCE
from tests.export.test_family import config_of
from tests.optional import PACKAGES
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.blame.cross_check import (
    BACKENDS,
    Backend,
    NodeBackend,
    OpenVinoBackend,
    ReferenceBackend,
)
from transferry.export.bundle import check_bundle, check_one_layer, one_layer
from transferry.export.oracle.cases import random_case
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import ProviderError
from transferry.runtime.proof.compare import observe

NODE = pytest.mark.optional("node", "onnxruntime-web")
MARKS = {OpenVinoBackend: pytest.mark.optional("openvino"), NodeBackend: NODE}
of_each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=MARKS.get(kind, ()), id=kind.name) for kind in BACKENDS]
)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_PATH", str(PACKAGES))


def opened(kind: type[Backend], bundle: Bundle) -> Backend:
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
    with closing(opened(kind, bundle)) as backend:
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
    with closing(opened(kind, bundle)) as one, closing(opened(kind, bundle)) as other:
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
        opened(kind, bundle)


@NODE
def test_what_the_graph_cannot_take_is_an_error_and_the_next_run_goes_on(bundle: Bundle) -> None:
    good = zeros(bundle.variant(), "encoder", batch=1, source=2)
    good["source_mask"][:] = True
    bad = {**good, "source": good["source"].astype(np.float64)}
    with closing(opened(NodeBackend, bundle)) as backend:
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
    with closing(opened(NodeBackend, bundle)) as backend:
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
