"""Export of a large model takes little more memory than its weights."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import exported
from transferry.build_model.checkpoint import load_checkpoint, load_samples
from transferry.export import bundle as exporting
from transferry.export.bundle import Contents
from transferry.export.make import make

# A reader of 42 million parameters as the export treats larger ones: nothing is kept in float64,
# and onnx's evaluator would compute one layer, which of two layers is half of the model.
PEAK = """
import ctypes, dataclasses, gc, json, re, sys
from pathlib import Path
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export import arithmetic, bundle, torch_model

def memory(name):
    found = re.search(rf"{name}:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024

arithmetic.KEPT = bundle.MAPPED = 0
bundle.LARGE, bundle.check_one_layer = 0, lambda checkpoint: []
run, out = map(Path, sys.argv[1:])
small = load_checkpoint(run)
config = dataclasses.replace(small.model.config, d_model=1024, d_ff=8192)
checkpoint = dataclasses.replace(small, model=Transformer(config).eval())
bundle.export_bundle(checkpoint, out)
weights = sum(each.nbytes for each in checkpoint.model.parameters())
peak = memory("VmHWM")
del checkpoint, small
gc.collect()
if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
    trim(0)
# What is left belongs to Python and its packages.
print(json.dumps({"weights": weights, "more": peak - memory("VmRSS")}))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_little_more_than_the_weights(reader_run_folder: Path, tmp_path: Path) -> None:
    """Beyond Python and its packages. Where torch and the session both hold the weights: above 2.

    Besides the session's weights, the oracle converts one of them at a time to float64.
    """
    command = [sys.executable, "-c", PEAK, str(reader_run_folder), str(tmp_path / "bundle")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 160e6
    assert found["more"] < 1.7 * found["weights"], found


def test_a_variant_is_gone_when_the_next_is_made(
    reader_run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def watched(*arguments: Any) -> Any:
        assert not any(graph() is not None for graph in made)
        graphs = make(*arguments)
        made.extend(map(weakref.ref, graphs.values()))
        return graphs

    monkeypatch.setattr(exporting, "make", watched)
    monkeypatch.setattr(exporting, "MAPPED", 0)
    checkpoint = load_checkpoint(reader_run_folder)
    texts, variants = load_samples(reader_run_folder), ["cpu-fp32", "cpu-int8"]
    bundle = exported(checkpoint, tmp_path / "bundle", Contents(texts, variants, texts))
    assert list(bundle.manifest.variants) == ["portable", *variants]
    assert len(made) == 3
