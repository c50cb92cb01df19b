import importlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from transferry.runtime import doctor
from transferry.runtime.doctor import Check, check_cpu, check_cuda, check_openvino, diagnose
from transferry.runtime.errors import ProviderError
from transferry.runtime.installation import CPU, GPU, installed_version
from transferry.runtime.ort import cuda, openvino_runner, session


def test_finds_this_machine_in_order() -> None:
    checks = {check.name: check for check in diagnose()}
    for name in ("python", "onnxruntime", "cpu", "kernels", "hardware", "tiktoken", "torch"):
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


@pytest.mark.parametrize(("missing", "status"), [(True, "warning"), (False, "fault")])
def test_tensorrt_has_a_line_where_cuda_works(
    monkeypatch: pytest.MonkeyPatch, missing: bool, status: str
) -> None:
    obstacle = cuda.CudaObstacle("libnvinfer is missing", "install it", True) if missing else None
    monkeypatch.setattr(cuda, "tensorrt_obstacle", lambda device_id=0: obstacle)
    monkeypatch.setattr(doctor, "check_cuda", lambda: Check("cuda", "ok", "works"))
    check = named("tensorrt")
    assert check.status == status
    assert check.remedy
    monkeypatch.setattr(doctor, "check_cuda", lambda: Check("cuda", "fault", "no", "install it"))
    assert "tensorrt" not in [check.name for check in diagnose()]


PACKAGES = Path(onnxruntime.__file__).parent.parent
VERSION = onnxruntime.__version__
IN_ONE_FOLDER = (
    "import sys; sys.path[:0] = [sys.argv.pop(1)]; from transferry.cli import main; main()"
)


def installation(folder: Path, distributions: dict[str, str], package: str) -> Path:
    """Makes a folder of installed packages with another onnxruntime.

    Args:
        folder: Where.
        distributions: Versions that the metadata names.
        package: "whole", "empty" as uninstalling a distribution of the same files leaves it, "no
            library", or "absent".
    """
    folder.mkdir()
    (folder / "transferry").symlink_to(Path(doctor.__file__).parent.parent)
    for each in PACKAGES.iterdir():
        if not each.name.startswith(("onnxruntime", "__editable__", "transferry")):
            (folder / each.name).symlink_to(each)
    for name, version in distributions.items():
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if package == "whole":
        (folder / "onnxruntime").symlink_to(PACKAGES / "onnxruntime")
    elif package != "absent":
        (folder / "onnxruntime" / "capi").mkdir(parents=True)
        if package == "no library":
            shutil.copy(PACKAGES / "onnxruntime" / "__init__.py", folder / "onnxruntime")
    return folder


def told(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", IN_ONE_FOLDER, str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("distributions", "package", "found", "remedy"),
    [
        ({GPU: VERSION, CPU: VERSION}, "whole", "the last one wins", "pip download --no-deps"),
        ({}, "absent", "not installed: No module named", 'pip install --no-deps "onnxruntime>='),
        ({GPU: VERSION}, "empty", "cannot be imported", f"--no-deps {GPU}=={VERSION}"),
        ({CPU: VERSION}, "no library", "cannot be imported", f"--no-deps {CPU}=={VERSION}"),
        ({GPU: "1.20.0"}, "whole", "expected 1.31 or a later", f'--no-deps "{GPU}>=1.31,<1.32"'),
        ({GPU: "1.32.0"}, "whole", "expected 1.31 or a later", f'--no-deps "{GPU}>=1.31,<1.32"'),
    ],
)
def test_a_broken_onnxruntime_is_told(
    tmp_path: Path, distributions: dict[str, str], package: str, found: str, remedy: str
) -> None:
    folder = installation(tmp_path / "packages", distributions, package)
    done = told(folder, "doctor", "--json")
    assert done.returncode == ProviderError.exit_code, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["onnxruntime"]["status"] == "fault"
    assert found in checks["onnxruntime"]["found"]
    assert remedy in checks["onnxruntime"]["remedy"]
    assert checks["cpu"]["status"] == ("ok" if package == "whole" else "fault")
    if package != "whole":
        done = told(folder, "run", "bundle", "rows.txt")
        assert (done.returncode, done.stdout) == (ProviderError.exit_code, "")
        assert done.stderr.startswith("Error: onnxruntime: ")
        assert found in done.stderr
        assert remedy in done.stderr
        assert done.stderr.count("\n") == 1


def test_an_onnxruntime_of_another_name_is_none_of_our_business(tmp_path: Path) -> None:
    done = told(installation(tmp_path / "packages", {}, "whole"), "doctor")
    assert done.returncode == 0
    assert f"onnxruntime, of another distribution {VERSION}" in done.stdout


def test_openvino_has_no_line_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transferry.runtime.doctor.installed_version",
        lambda name: None if name == "openvino" else installed_version(name),
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
