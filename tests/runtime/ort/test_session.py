import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from transferry.runtime.doctor import PRODUCT_GRAPH
from transferry.runtime.errors import InputError, ProviderError, UsageError
from transferry.runtime.ort import cuda
from transferry.runtime.ort.cuda import CudaObstacle, cuda_obstacle, tensorrt_obstacle
from transferry.runtime.ort.session import (
    Provider,
    SessionOptions,
    assigned_nodes,
    open_session,
    tf32,
)

onnx = pytest.importorskip("onnx")
preload_cuda_libraries = cuda._preload_cuda_libraries


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "product.onnx"
    path.write_bytes(PRODUCT_GRAPH)
    return path


def obstacle(device_id: int = 0) -> CudaObstacle:
    found = cuda_obstacle(device_id)
    assert found is not None
    return found


@pytest.fixture
def working_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine on which nothing seems to be missing; each test takes one thing away."""
    driver = cuda._Driver(status=0, devices=2, cuda_major=99)
    providers = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(cuda, "_query_driver", lambda: driver)
    monkeypatch.setattr(cuda, "_preload_cuda_libraries", lambda: "")
    monkeypatch.setattr(cuda, "_tensorrt_library", lambda name: object())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "unset")
    monkeypatch.setattr(cuda, "_stream", lambda device_id: SimpleNamespace(handle=77))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "cuda_version", "13.0")
    yield monkeypatch


@pytest.mark.parametrize("provider", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_runs_on_its_provider_and_tells_so(graph: Path, provider: Provider) -> None:
    session = open_session(graph, SessionOptions(provider))
    a = np.arange(9, dtype=np.float32).reshape(3, 3)
    np.testing.assert_array_equal(session.run(None, {"a": a, "b": a})[0], a @ a)
    name = f"{provider.upper()}ExecutionProvider"
    assert session.get_providers()[0] == name
    assert assigned_nodes(session) == {name: 1}
    if provider == "cuda":
        assert session.get_provider_options()[name]["use_tf32"] == "0"


def test_passes_its_settings_on(graph: Path) -> None:
    options = SessionOptions(threads=2, optimisation="basic")
    settings = open_session(graph, options).get_session_options()
    assert settings.intra_op_num_threads == 2
    assert settings.inter_op_num_threads == 1
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert settings.graph_optimization_level == level
    assert settings.get_session_config_entry("session.force_spinning_stop") == "1"


def test_leaves_a_trace_where_asked(graph: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    a = np.zeros((3, 3), np.float32)
    open_session(graph, SessionOptions()).run(None, {"a": a, "b": a})
    assert not list(folder.iterdir())
    open_session(graph, SessionOptions(profile=folder)).run(None, {"a": a, "b": a})
    (trace,) = folder.iterdir()
    assert trace.name.startswith("product_")
    events = json.loads(trace.read_text(encoding="utf-8"))
    assert "model_run" in {event["name"] for event in events}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("provider", "gpu"), ("optimisation", "most"), ("threads", 0), ("device_id", -1)],
)
def test_refuses_settings_out_of_range(setting: str, value: Any) -> None:
    with pytest.raises(UsageError, match=str(value)):
        dataclasses.replace(SessionOptions(), **{setting: value})


@pytest.mark.parametrize("content", [None, b"", b"not a graph" * 20, PRODUCT_GRAPH[:60]])
def test_refuses_a_missing_or_damaged_file(graph: Path, content: bytes | None) -> None:
    graph.unlink() if content is None else graph.write_bytes(content)
    with pytest.raises(InputError, match=r"product\.onnx"):
        open_session(graph, SessionOptions())


def test_refuses_a_graph_whose_weights_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "weighted.onnx"
    model = onnx.load_from_string(PRODUCT_GRAPH)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "b"))
    del model.graph.input[1]
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    open_session(path, SessionOptions())

    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InputError, match=r"weighted\.onnx.*weights\.bin"):
        open_session(path, SessionOptions())


def test_a_type_without_a_kernel_is_the_providers_fault(graph: Path) -> None:
    model = onnx.load_from_string(PRODUCT_GRAPH)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    onnx.save(model, graph)
    with pytest.raises(ProviderError, match=r"provider cpu cannot run .*MatMul"):
        open_session(graph, SessionOptions())


def test_cuda_without_a_driver_is_refused(
    graph: Path, working_cuda: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    working_cuda.setattr(cuda, "_query_driver", lambda: None)
    with pytest.raises(ProviderError, match=r"provider cuda .*no NVIDIA driver.*To fix it: ") as e:
        open_session(graph, SessionOptions(provider="cuda"))
    assert e.value.exit_code == 5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("driver", "missing", "gpu_present"),
    [
        (None, "no NVIDIA driver", False),
        ({"status": 100, "devices": 0, "cuda_major": 13}, "cuInit answered 100", False),
        ({"status": 0, "devices": 1, "cuda_major": 13}, "device 1 does not exist", True),
        ({"status": 0, "devices": 2, "cuda_major": 12}, "supports CUDA 12, .*needs CUDA 13", True),
    ],
)
def test_names_what_the_driver_lacks(
    working_cuda: pytest.MonkeyPatch, driver: dict[str, int] | None, missing: str, gpu_present: bool
) -> None:
    answer = cuda._Driver(**driver) if driver else None
    working_cuda.setattr(cuda, "_query_driver", lambda: answer)
    found = obstacle(device_id=1)
    assert re.search(missing, found.missing)
    assert found.gpu_present == gpu_present
    assert found.remedy


def test_names_a_package_without_cuda(working_cuda: pytest.MonkeyPatch) -> None:
    working_cuda.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "has no CUDA in it" in obstacle().missing
    assert "[cuda]" in obstacle().remedy


def test_names_missing_libraries_and_keeps_stdout_clean(
    working_cuda: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def preload() -> None:
        print("Failed to load /site/nvidia/libcurand.so.10: wrong ELF class")
        print("Failed to load libcublasLt.so.13: no such file\nPlease follow https://...")

    working_cuda.setattr(cuda, "_preload_cuda_libraries", preload_cuda_libraries)
    working_cuda.setattr(onnxruntime, "preload_dlls", preload)
    found = obstacle()
    assert found.missing == "CUDA's libraries are missing: libcublasLt.so.13"
    assert "[cuda]" in found.remedy
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("away", ["driver", "build", "libraries"])
def test_names_what_tensorrt_lacks(
    graph: Path, working_cuda: pytest.MonkeyPatch, away: str
) -> None:
    missing = "no NVIDIA driver"
    if away == "driver":
        working_cuda.setattr(cuda, "_query_driver", lambda: None)
    elif away == "build":
        missing = "has no TensorRT in it"
        found = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        working_cuda.setattr(onnxruntime, "get_available_providers", lambda: found)
    else:
        missing = "TensorRT's libraries are missing: .*nvinfer.*10.*: pip install"
        working_cuda.setattr(cuda, "_tensorrt_library", lambda name: None)
    with pytest.raises(
        ProviderError, match=f"provider tensorrt was requested, but .*{missing}"
    ) as e:
        open_session(graph, SessionOptions("tensorrt"))
    assert (e.value.exit_code, "\n" in str(e.value)) == (5, False)


def test_nothing_is_missing_where_all_is_there(working_cuda: pytest.MonkeyPatch) -> None:
    assert cuda_obstacle(device_id=1) is None
    assert tensorrt_obstacle(device_id=1) is None


class SilentFallback:
    """The session of onnxruntime where CUDA was requested and a CPU session was opened."""

    def __init__(self, providers: list[str], nodes: dict[str, int]) -> None:
        self.providers = providers
        self.nodes = nodes

    def get_providers(self) -> list[str]:
        return self.providers

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [Subgraph(name, count) for name, count in self.nodes.items()]


@dataclasses.dataclass
class Subgraph:
    ep_name: str
    count: int

    def get_nodes(self) -> list[None]:
        return [None] * self.count


@pytest.mark.parametrize(
    ("provider", "providers", "nodes"),
    [
        ("cuda", ["CPUExecutionProvider"], {}),
        ("cuda", ["CPUExecutionProvider"], {"CPUExecutionProvider": 7}),
        ("cuda", ["CUDAExecutionProvider", "CPUExecutionProvider"], {"CPUExecutionProvider": 7}),
        ("tensorrt", ["CUDAExecutionProvider", "CPUExecutionProvider"], {}),
        ("tensorrt", ["TensorrtExecutionProvider"], {"CUDAExecutionProvider": 7}),
    ],
    ids=[
        *("an empty CPU session", "a CPU session", "a CUDA session with every node on the CPU"),
        *("a CUDA session", "a TensorRT session with every node on CUDA"),
    ],
)
def test_a_silent_fallback_is_refused(
    graph: Path,
    working_cuda: pytest.MonkeyPatch,
    provider: Provider,
    providers: list[str],
    nodes: dict[str, int],
) -> None:
    fallback = SilentFallback(providers, nodes)
    working_cuda.setattr(onnxruntime, "InferenceSession", lambda *_, **__: fallback)
    with pytest.raises(
        ProviderError, match=rf"{provider} was.*ExecutionProvider.*transferry doctor"
    ):
        open_session(graph, SessionOptions(provider))


def test_asks_for_cuda_without_tf32_and_without_fallback(
    graph: Path, working_cuda: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def create(*_: Any, **settings: Any) -> SilentFallback:
        asked.update(settings)
        return SilentFallback(["CUDAExecutionProvider"], {"CUDAExecutionProvider": 7})

    working_cuda.setattr(onnxruntime, "InferenceSession", create)
    options = SessionOptions(provider="cuda", device_id=1, provider_options={"arena": "small"})
    open_session(graph, options)
    given = {"device_id": "1", "use_tf32": "0", "arena": "small", "user_compute_stream": "77"}
    assert asked == {
        "providers": [("CUDAExecutionProvider", given)],
        "enable_fallback": 0,
        "disabled_optimizers": ["BiasSoftmaxFusion"],
    }

    open_session(graph, dataclasses.replace(options, provider_options={"use_tf32": "1"}))
    assert asked["providers"][0][1]["use_tf32"] == "1"


@pytest.mark.parametrize(("use_tf32", "variable"), [("0", "0"), ("1", "unset")])
def test_asks_for_tensorrt_before_cuda_on_one_stream(
    graph: Path, working_cuda: pytest.MonkeyPatch, use_tf32: str, variable: str
) -> None:
    asked: list[Any] = []

    def create(*_: Any, providers: Any, **settings: Any) -> SilentFallback:
        asked.extend(providers)
        assert settings["enable_fallback"] == 0
        return SilentFallback(["TensorrtExecutionProvider"], {"TensorrtExecutionProvider": 1})

    working_cuda.setattr(onnxruntime, "InferenceSession", create)
    given = {"trt_timing_cache_enable": "True", "use_tf32": use_tf32}
    open_session(graph, SessionOptions("tensorrt", device_id=1, provider_options=given))
    shared = {"device_id": "1", "user_compute_stream": "77"}
    assert asked == [
        ("TensorrtExecutionProvider", {**shared, "trt_timing_cache_enable": "True"}),
        ("CUDAExecutionProvider", {**shared, "use_tf32": use_tf32}),
    ]
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == variable


def test_tells_a_broken_file_from_a_broken_provider(
    graph: Path, working_cuda: pytest.MonkeyPatch
) -> None:
    """Both look alike when CUDA opens the file; only the CPU provider can tell them apart."""
    create = onnxruntime.InferenceSession

    def without_cuda(model: str, settings: Any, providers: list[Any], **more: Any) -> Any:
        if providers[0][0] == "CUDAExecutionProvider":
            raise RuntimeError("CUDA failure 35: the driver is too old")
        return create(model, settings, providers=providers, **more)

    working_cuda.setattr(onnxruntime, "InferenceSession", without_cuda)
    with pytest.raises(ProviderError, match="driver is too old"):
        open_session(graph, SessionOptions(provider="cuda"))
    graph.write_bytes(PRODUCT_GRAPH[:60])
    with pytest.raises(InputError, match=r"product\.onnx"):
        open_session(graph, SessionOptions(provider="cuda"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SessionOptions(), "none"),
        (SessionOptions("cuda"), "off"),
        (SessionOptions("cuda", provider_options={"use_tf32": "1"}), "on"),
    ],
)
def test_tf32_is_off_unless_asked_for(options: SessionOptions, expected: str) -> None:
    assert tf32(options) == expected
