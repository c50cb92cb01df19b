"""The graphs of standard operators in the oldest onnxruntime that docs/portability.md names."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.commands import PATIENCE
from tests.optional import OLDEST
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import TensorSpec

PROGRAM = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.disable_quant_qdq", "1")
session = onnxruntime.InferenceSession(sys.argv[1], options)
numpy.savez(sys.argv[3], *session.run(None, dict(numpy.load(sys.argv[2]))))
print(onnxruntime.__version__)
"""
SIZES = {"batch": 2, "source": 5, "past": 3, "target": 1, "begun": 2, "selected": 3, "length": 3}


def example(spec: TensorSpec, generator: np.random.Generator) -> Any:
    shape = [SIZES[size] if isinstance(size, str) else size for size in spec.shape]
    if spec.type == "float32":
        return generator.normal(size=shape).astype(np.float32)
    if spec.name == "max_length":
        return np.array([12])
    most = SIZES["batch"] if spec.role == "rows" else 90
    return np.ones(shape, bool) if spec.type == "bool" else generator.integers(0, most, shape)


@pytest.mark.optional("oldest")
@pytest.mark.parametrize(
    ("fixture", "variant"),
    [
        *(("whole_bundle_folder", "portable"), ("whole_writer_bundle_folder", "portable")),
        *(("reader_bundle_folder", "portable"), ("weight_only_bundle_folder", "portable-int8")),
    ],
)
def test_computes_as_the_newest_does(
    fixture: str, variant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bundle = Bundle.load(request.getfixturevalue(fixture))
    generator = np.random.default_rng(0)
    for spec in bundle.variant(variant).graphs.values():
        feeds = {each.name: example(each, generator) for each in spec.inputs}
        given, found = tmp_path / "feeds.npz", tmp_path / "found.npz"
        np.savez(given, **feeds)
        command = [OLDEST, "-c", PROGRAM, bundle.graph(spec), given, found]
        ran = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE)
        assert ran.stdout == "1.17.3\n", ran.stderr
        wanted = onnxruntime.InferenceSession(str(bundle.graph(spec))).run(None, feeds)
        with np.load(found) as arrays:
            for one, other in zip(wanted, arrays.values(), strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
