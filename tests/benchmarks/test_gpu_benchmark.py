"""The stages of benchmarks/gpu.py, on the CPU and on small models."""

import json
import os
import select
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shapes
from gpu import MODELS, STAGES, line_of, stage_apart
from gpu_stages import Setup, corpus, nodes_on_cpu, run_stage, summary
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import InputError


@pytest.fixture
def setup(
    tmp_path: Path, run_folder: Path, bundle_folder: Path, reader_bundle_folder: Path
) -> Setup:
    for model, bundle in {"small": bundle_folder, "bert": reader_bundle_folder}.items():
        (tmp_path / model).mkdir()
        (tmp_path / model / "bundle").symlink_to(bundle)
    (tmp_path / "small" / "checkpoint").symlink_to(run_folder)
    return Setup(tmp_path, "cpu", batches=(1, 3), new_tokens=3, rounds=1)


def test_the_stages_are_of_the_models_and_exist(setup: Setup) -> None:
    assert {model for stage in STAGES if (model := stage.rpartition("-")[0])} == {*MODELS}
    with pytest.raises(KeyError):
        run_stage(setup, "small-nothing")
    with pytest.raises(InputError):  # no such model is there
        run_stage(setup, "llama-recorded")


def test_answers_and_nodes(setup: Setup) -> None:
    for model in ("small", "bert"):
        recorded = run_stage(setup, f"{model}-recorded")
        assert recorded == {"portable": {"passed": True, "faults": []}}
        graphs = run_stage(setup, f"{model}-nodes")["portable"]
        assert {*graphs} == {*Bundle.load(setup.bundle(model)).variant().steps}
        assert all(found["microseconds"] == found["of"] for found in graphs.values())
        assert graphs["encoder"]["of"] > 0


@pytest.mark.thorough
def test_every_side_gives_all_tokens(setup: Setup) -> None:
    shapes.make("small", corpus(1000), setup.folder / "small/model", 1)
    cells = run_stage(setup, "small-speed")
    sides = {"portable": (1, 4), "transformers": (1, 4), "reference": (1,)}
    assert {name: found["tokens"] for name, found in cells.items()} == {
        f"{side}, beam {beam}, {rows} rows": 3 * rows
        for side, beams in sides.items()
        for beam in beams
        for rows in (1, 3)
    }
    assert all(cell["per_second"] > 0 and cell["mb"] == 0 for cell in cells.values())


def test_a_row_beside_others_and_a_record_of_the_file(setup: Setup, tmp_path: Path) -> None:
    setup = replace(setup, path=tmp_path / "record.json")
    alone = run_stage(setup, "small-alone")
    assert alone == {"portable": {"3 rows": {"logits": 0.0, "same_answer": True}}}
    assert json.loads((tmp_path / "record.json").read_text()) == alone
    assert json.loads(line_of("a", alone).removeprefix("a: ")) == alone
    assert len(line_of("a", {"long": "x" * 999})) < 450


def test_a_stopped_stage_keeps_its_record(tmp_path: Path) -> None:
    """The command that it runs ends with it: it holds the other end of a pipe."""
    path = tmp_path / "record.json"
    script = f"echo '{{\"first\": 1}}' > {path}; sleep 60"
    read, write = os.pipe()
    os.set_inheritable(write, True)
    command = ["sh", "-c", f"sh -c 'sleep 60; :' & {script}"]
    inherited = partial(subprocess.Popen, pass_fds=[write])
    assert stage_apart(command, path, 1, inherited) == {"stopped": "after 1 s", "first": 1}
    os.close(write)
    assert select.select([read], [], [], 10)[0], "it still runs"
    os.close(read)


def test_a_trace_is_summed_up() -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm"}
    events: list[dict[str, Any]] = [
        {**kernel, "ts": 10.0, "dur": 4.0},
        {**kernel, "ts": 12.0, "dur": 4.0},  # beside the first
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 20.0, "dur": 1.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 1.0, "dur": 30.0},
        {"ph": "M", "name": "thread_name"},
    ]
    assert summary(events, 50e-6) == {
        "wall_microseconds": 50,
        "busy_microseconds": 7,
        "kinds": {"cudaStreamSynchronize": [1, 30], "kernel": [2, 8], "gpu_memcpy": [1, 1]},
        "kernels": {"gemm": 8},
    }
    node = {"cat": "Node", "name": "a_kernel_time", "dur": 3}
    cpu = {"provider": "CPUExecutionProvider", "op_name": "Concat"}
    gpu = {"provider": "CUDAExecutionProvider", "op_name": "MatMul"}
    assert nodes_on_cpu([{**node, "args": cpu}, {**node, "args": cpu}, {**node, "args": gpu}]) == {
        "nodes": {"Concat": 1},
        "microseconds": 6,
        "of": 9,
    }
