"""Everything of CUDA but the arithmetic, on a stand-in for its driver and libraries.

FUZZ=long adds the three variants for a GPU of every imported model type, in half an hour.
"""

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHECKOUT
from tests.runtime.ort.simulated_gpu import build, provider_library
from transferry.runtime.doctor import check_cuda
from transferry.runtime.ort.cuda import _TENSORRT_LIBRARIES

# Operators that onnxruntime leaves to the CPU because their inputs lie there: sizes of tensors.
OF_SIZES = {"Add", "Concat", "Less", "Reshape", "Squeeze", "Sub"}
VARIANTS = ("portable", "cuda-fp16", "cuda-bf16")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (provider := provider_library()) is None:
        pytest.skip("needs gcc, nm and onnxruntime-gpu")
    if importlib.util.find_spec("nvidia") or check_cuda().status == "ok":
        pytest.skip("CUDA's own libraries would be found first")
    folder = tmp_path_factory.mktemp("cuda") / "stand-in"
    build(folder, provider)
    return folder


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(stand_in: Path) -> Run:
    """Runs bundles in a process of its own, which writes nothing but its record."""

    def run(*bundles: Path) -> dict[str, Any]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.ort.on_stand_in"]
        done = subprocess.run(
            [*command, stand_in, *bundles],
            env=os.environ | {"LD_LIBRARY_PATH": str(stand_in)},
            capture_output=True,
            text=True,
            cwd=CHECKOUT,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    return run


@pytest.fixture(scope="module")
def record(
    run: Run,
    whole_bundle_folder: Path,
    writer_bundle_folder: Path,
    reader_bundle_folder: Path,
    device_bundle_folder: Path,
    writer_run_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    from transferry.build_model.checkpoint import load_checkpoint

    # RMSNorm in bfloat16, which lacks kernels.
    folder = tmp_path_factory.mktemp("variants") / "writer"
    write_variant(folder, load_checkpoint(writer_run_folder).model, "cuda-bf16")
    whole = whole_bundle_folder, writer_bundle_folder, reader_bundle_folder
    return run(*whole, folder, device_bundle_folder)


def write_variant(folder: Path, model: Any, variant: str) -> None:
    """Writes the graphs of a variant with their manifest alone."""
    from tests.export.conftest import graphs_of, written

    folder.mkdir(parents=True)
    bundle = written(folder, model, variant, graphs_of(model, variant))
    (folder / "manifest.pickle").write_bytes(pickle.dumps(bundle.manifest))


def variants(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, found) for name, found in record.items() if "ends" in found)


def test_each_missing_part_is_named(record: dict[str, Any]) -> None:
    found = record["missing"]
    needed = {"libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"}
    for name in needed:
        if found[name] != "elsewhere":
            assert found[name].startswith(f"CUDA's libraries are missing: {name}; pip install ")
    assert found["libcuda.so.1"].startswith("there is no NVIDIA driver")
    # Without these onnxruntime starts, as without cuDNN, which the stand-in does not have.
    for name in ("", "libnvrtc.so.13", "libcufft.so.12"):
        assert found[name] in ("", "elsewhere")
    assert "supports CUDA 12, and onnxruntime" in record["old"]
    assert "offers no GPU (cuInit answered 100)" in record["none"]


def test_tensorrt_without_its_libraries_is_refused(record: dict[str, Any]) -> None:
    """Those that onnxruntime's provider is linked with; CUDA's are checked before."""
    provider = provider_library()
    assert provider is not None
    own = provider.with_name("libonnxruntime_providers_tensorrt.so")
    needed = subprocess.run(["readelf", "-d", own], check=True, capture_output=True, text=True)
    linked = re.findall(r"\[(lib(?:cudnn|nv)\S+)\]", needed.stdout)
    assert sorted(linked) == sorted(_TENSORRT_LIBRARIES)
    missing = ", ".join(_TENSORRT_LIBRARIES)
    reason = f"provider tensorrt was requested, but TensorRT's libraries are missing: {missing}. "
    assert record["tensorrt"].startswith(
        f'{reason}To fix it: pip install "tensorrt-cu13-libs==10.*"'
    )
    assert "\n" not in record["tensorrt"]


def require_sound(name: str, found: dict[str, Any]) -> None:
    """Nodes of sizes alone on the CPU, nothing leaked, one line without memory."""
    others = {
        graph: rest for graph, nodes in found["on_cpu"].items() if (rest := {*nodes} - OF_SIZES)
    }
    assert (name, others) == (name, {})
    kept = {key: found[key] for key in ("held", "pinned", "torn", "strays")}
    assert (name, kept) == (name, dict.fromkeys(kept, 0))
    assert {*found["ends"]} == {"AllocationError in 1 line"}, name


def test_every_variant_runs_on_the_device(record: dict[str, Any]) -> None:
    found = dict(variants(record))
    assert len(found) == 6
    for name, each in found.items():
        require_sound(name, each)


def test_a_step_copies_and_waits_as_often_as_documented(record: dict[str, Any]) -> None:
    """docs/performance.md has the numbers."""
    for name, found in variants(record):
        for search, calls in found.get("steps", {}).items():
            cuda = "cuda-" in name
            assert (name, search, calls["to_host"]) == (name, search, 1)
            # Of two layers with shared key-value heads, 6 arrays of pointers each come on top.
            assert calls["to_device"] <= (1 if cuda else 2) + 2 * 6, name
            assert calls["syncs"] <= (1 if cuda else 5), name
            assert (calls["mallocs"], calls["torn"], calls["strays"]) == (0, 0, 0), name


def test_results_and_inputs_wait_for_their_copies(record: dict[str, Any]) -> None:
    assert record["hazards"] == {
        "sound": [0, 0, True],
        "changed": [1, 0, True],
        "read early": [0, 0, False],
        "on another stream": [0, 1, True],
    }


def test_short_memory_halves_the_rows(record: dict[str, Any]) -> None:
    answered, first, *tried = record["halved"]
    assert answered == 256
    assert max(tried) > min(tried)
    assert first == 1


@pytest.mark.skipif(os.environ.get("FUZZ") != "long", reason="FUZZ=long tries all types")
def test_every_imported_type_runs_on_the_device(run: Run, tmp_path: Path) -> None:
    from tests.build_model.importing.huggingface.drawn import TYPES, Drawn

    folders = []
    for kind in TYPES:
        model = Drawn(kind, 0, tmp_path / "theirs" / kind, depth=1).ours.float()
        for variant in VARIANTS:
            folders.append(tmp_path / f"{kind}-{variant}")
            write_variant(folders[-1], model, variant)
    for name, found in variants(run(*folders)):
        require_sound(name, found)
