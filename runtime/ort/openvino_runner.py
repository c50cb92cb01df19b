"""Runs a portable graph in OpenVINO on the CPU, in float32, with tensors addressed by role.

It stands in for `GraphRunner`: decoder and encoder are the same with either runtime. A step's
results are computed into buffers that the next step reads, so that the cache is not copied.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import REMEDY
from transferry.runtime.bundle.specs import GraphSpec
from transferry.runtime.errors import InputError, ProviderError, install_command
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.external_files import watched_graph
from transferry.runtime.ort.session import SessionOptions

# By default OpenVINO computes in bfloat16 or float16 where the CPU can.
PRECISION: Mapping[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
}

OPENVINO_TELEMETRY = "openvino_telemetry"

_opening = threading.Lock()
_core: Any = None


def openvino_module() -> Any:
    """Imports OpenVINO without its telemetry; raises ProviderError if it is not installed.

    `import openvino` sends an event to Google Analytics, and no variable prevents it. Where the
    package `openvino_telemetry` is absent, OpenVINO has a stub in its place.
    """
    absent: Any = None
    blocked = sys.modules.setdefault(OPENVINO_TELEMETRY, absent) is absent
    try:
        import openvino
    except ImportError as error:
        raise ProviderError(f"OpenVINO is not installed; {install_command('openvino')}") from error
    finally:
        if blocked:
            del sys.modules[OPENVINO_TELEMETRY]
    return openvino


def openvino_core() -> Any:
    """Returns the only Core of this process, which lives as long as the process.

    A Core has the thread that loads its first model handle signals on a stack of the Core's, and
    when it is destroyed restores the previous stack: another Core's, perhaps gone by then. With
    OpenVINO 2026.4 the next Ctrl-C after two are destroyed in the order of their making is a
    segmentation fault. Raises ProviderError if OpenVINO is not installed.
    """
    global _core
    with _opening:
        if _core is None:
            _core = openvino_module().Core()
        return _core


def openvino_version() -> str:
    """Returns the version of OpenVINO; raises ProviderError if it is not installed."""
    return str(openvino_module().__version__).split("-")[0]


def compiled_in_float32(path: Path, **settings: Any) -> Any:
    """Compiles a graph for the CPU, to be computed in float32.

    Raises:
        ProviderError: OpenVINO is not installed, or computes in another precision here.
        RuntimeError: It cannot compile the graph.
    """
    compiled = openvino_core().compile_model(str(path), "CPU", {**PRECISION, **settings})
    precision = compiled.get_property("INFERENCE_PRECISION_HINT")
    if precision != openvino_module().Type.f32:
        raise ProviderError(
            f"OpenVINO was told to compute in float32, but computes in {precision.get_type_name()};"
            " choose --runtime onnxruntime"
        )
    return compiled


class HostValue:
    """A tensor in host memory, with the used methods of onnxruntime's OrtValue."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def numpy(self) -> NDArray[Any]:
        """The tensor itself, not a copy."""
        return self.array

    def shape(self) -> list[int]:
        """Sizes of the tensor."""
        return list(self.array.shape)


class OpenVinoRunner:
    """One graph, compiled by OpenVINO; several threads may run it at once."""

    def __init__(self, bundle: Bundle, graph: GraphSpec, options: SessionOptions) -> None:
        """Compiles a graph of a bundle.

        Raises:
            ProviderError: OpenVINO is not installed, or does not compute in float32 here.
            InputError: The graph cannot be compiled, differs from the manifest, or reads a file
                that the manifest does not list.
        """
        self._openvino = openvino_module()
        self.graph, path = graph, bundle.graph(graph)
        watched_graph(bundle, graph)
        # One stream for each replica that the cores can take.
        streams = max(1, usable_cores() // options.threads)
        threads = streams * options.threads
        try:
            self._compiled = compiled_in_float32(
                path, NUM_STREAMS=streams, INFERENCE_NUM_THREADS=threads
            )
        except RuntimeError as error:
            raise InputError(
                f"expected a graph that OpenVINO can run at {path}, found: {_reason(error)}; "
                "choose --runtime onnxruntime"
            ) from error
        bundle.files.require_unchanged()
        self._require_described(str(path))
        self._of_thread = threading.local()

    def _require_described(self, path: str) -> None:
        """Raises InputError unless the graph has the tensors that the manifest describes."""
        sides = (
            (self.graph.inputs, self._compiled.inputs, "input"),
            (self.graph.outputs, self._compiled.outputs, "output"),
        )
        for specs, found, side in sides:
            described = {spec.name: (spec.type, len(spec.shape)) for spec in specs}
            # A tensor may have the name of an operator besides that passes it on.
            actual = {
                next((each for each in described if each in port.get_names()), ""): (
                    port.get_element_type().to_dtype().name,
                    port.get_partial_shape().rank.get_length(),
                )
                for port in found
            }
            if described != actual:
                raise InputError(
                    f"{path}: the manifest describes other {side}s than the graph has; {REMEDY}"
                )

    def nodes(self) -> dict[str, int]:
        """Counts the operators that OpenVINO runs, all on the CPU."""
        return {"OpenVINO CPU": len(self._compiled.get_runtime_model().get_ops())}

    def value(self, array: NDArray[Any]) -> HostValue:
        """Takes an array where it lies, if contiguous."""
        return HostValue(np.ascontiguousarray(array))

    def run(
        self,
        inputs: Mapping[Any, Sequence[Any]],
        *outputs: Any,
        host: Mapping[Any, NDArray[Any]] | None = None,
    ) -> list[HostValue]:
        """Runs the graph; see `GraphRunner.run`.

        Raises:
            InputError: OpenVINO cannot run the graph on these inputs.
        """
        request = getattr(self._of_thread, "request", None)
        if request is None:
            request = self._of_thread.request = self._compiled.create_infer_request()
        given = {
            name: value.array
            for role, values in inputs.items()
            for name, value in zip(self.graph.names(role), values, strict=True)
        }
        shared = {name: self._tensor(array) for name, array in given.items()}
        sizes: dict[str, int] = {}
        for spec in self.graph.inputs:
            for size, found in zip(spec.shape, given[spec.name].shape, strict=True):
                sizes.setdefault(str(size), found)
        results = {self.graph.names(role)[0]: array for role, array in (host or {}).items()}
        wanted = [name for role in outputs for name in self.graph.names(role)]
        for spec in self.graph.outputs:
            parts = [str(size).split(" + ") for size in spec.shape]
            known = all(part.isdigit() or part in sizes for each in parts for part in each)
            if known and spec.name not in results:
                shape = [
                    sum(int(part) if part.isdigit() else sizes[part] for part in each)
                    for each in parts
                ]
                results[spec.name] = np.empty(shape, spec.type)
        try:
            for name, tensor in shared.items():
                request.set_tensor(name, tensor)
            for name, array in results.items():
                request.set_tensor(name, self._tensor(array))
            request.infer()
        except RuntimeError as error:
            raise InputError(
                f"expected {self.graph.file} to run in OpenVINO, found: {_reason(error)}. Verify "
                "the bundle here, or choose --runtime onnxruntime"
            ) from error
        # An output whose size the graph decides lies in memory that the next run overwrites.
        return [
            HostValue(results[name] if name in results else request.get_tensor(name).data.copy())
            for name in wanted
        ]

    def _tensor(self, array: NDArray[Any]) -> Any:
        return self._openvino.Tensor(array, shared_memory=True)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
