import builtins
import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from transferry.runtime import doctor
from transferry.runtime.doctor import Check, check_cpu, check_cuda, check_openvino, diagnose
from transferry.runtime.ort import cuda, openvino_runner, session


def test_finds_this_machine_in_order() -> None:
    checks = {check.name: check for check in diagnose()}
    for name in ("python", "onnxruntime", "cpu", "hardware", "tiktoken", "torch"):
        assert checks[name].status == "ok", checks[name]
    assert "error" in checks["cpu"].found
    json.dumps([asdict(check) for check in checks.values()])


def test_every_problem_has_a_remedy_of_one_line() -> None:
    for check in diagnose():
        assert "\n" not in check.found + check.remedy
        assert (check.status == "ok") == (check.remedy == ""), check


def test_the_product_graph_is_what_onnx_writes() -> None:
    onnx = pytest.importorskip("onnx")

    def square(name: str) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", "n"])

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["a", "b"], ["y"])],
        "product",
        [square("a"), square("b")],
        [square("y")],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString(deterministic=True) == doctor.PRODUCT_GRAPH


def round_to_tf32(matrix: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    """Rounds float32 to the 10 bits of mantissa that TF32 keeps."""
    bits = matrix.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("damage", ["tf32", "nan"])
def test_a_wrong_product_is_a_fault(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    class WrongSession:
        def run(self, _: None, inputs: dict[str, Any]) -> list[Any]:
            if damage == "nan":
                return [inputs["a"] * np.float32("nan")]
            return [round_to_tf32(inputs["a"]) @ round_to_tf32(inputs["b"])]

    monkeypatch.setattr(session, "open_session", lambda *_: WrongSession())
    check = check_cpu()
    assert check.status == "fault"
    assert check.remedy


def test_a_product_that_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(session, "open_session", refuse)
    check = check_cpu()
    assert (check.status, check.found) == ("fault", "no kernel image is available")


@pytest.mark.parametrize(("gpu_present", "status"), [(True, "fault"), (False, "warning")])
def test_cuda_is_a_fault_only_where_a_gpu_goes_unused(
    monkeypatch: pytest.MonkeyPatch, gpu_present: bool, status: str
) -> None:
    obstacle = cuda.CudaObstacle("cublas is missing", "install cublas", gpu_present)
    monkeypatch.setattr(cuda, "cuda_obstacle", lambda: obstacle)
    assert asdict(check_cuda()) == {
        "name": "cuda",
        "status": status,
        "found": "cublas is missing",
        "remedy": "install cublas",
    }


def test_two_onnxruntime_packages_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "1.31.1")
    check = named("onnxruntime")
    assert check.status == "fault"
    assert "onnxruntime 1.31.1, onnxruntime-gpu 1.31.1" in check.found
    assert "pip uninstall" in check.remedy


def test_an_onnxruntime_that_does_not_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("onnxruntime", "transferry.runtime.ort.session"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    real_import = builtins.__import__

    def broken_import(name: str, *arguments: Any, **more: Any) -> Any:
        if name.split(".")[0] == "onnxruntime":
            raise ImportError("DLL load failed")
        return real_import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", broken_import)
    assert named("onnxruntime").status == "fault"
    assert named("cpu").status == "fault"
    assert check_cuda().status == "warning"


def test_openvino_has_no_line_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name == "openvino" else version(name)
    )
    assert "openvino" not in [check.name for check in diagnose()]


@pytest.mark.optional("openvino")
def test_openvino_is_checked_where_it_is_installed() -> None:
    openvino = importlib.import_module("openvino")
    check = named("openvino")
    assert check.status == "ok"
    assert check.found.startswith(openvino.__version__.split("-")[0])
    assert check.found.endswith("in float32")


@pytest.mark.parametrize("damage", ["bfloat16", "absent"])
def test_an_openvino_that_computes_otherwise_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def compiled(graph: Any) -> Any:
        if damage == "absent":
            raise ImportError("libopenvino.so: cannot open shared object file")
        return lambda feeds: {"y": round_to_tf32(feeds["a"]) @ round_to_tf32(feeds["b"])}

    monkeypatch.setattr(openvino_runner, "compiled_in_float32", compiled)
    check = check_openvino()
    assert check.status == "fault"
    assert "openvino" in check.remedy


@pytest.mark.cuda
def test_cuda_runs_a_product_in_full_float32() -> None:
    assert check_cuda().status == "ok"


def named(name: str) -> Check:
    return next(check for check in diagnose() if check.name == name)
