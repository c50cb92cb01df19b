"""Runs a graph of a bundle through IOBinding, with tensors addressed by role."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import OrtValue
from onnxruntime.capi import onnxruntime_pybind11_state as native

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import REMEDY
from transferry.runtime.bundle.specs import GraphSpec, Role, Variant
from transferry.runtime.errors import (
    AllocationError,
    InputError,
    ProviderError,
    TransferryError,
    install_command,
)
from transferry.runtime.hardware import cpu_name, instruction_sets, usable_cores
from transferry.runtime.ort.cuda import StagingBuffer, cuda_stream, tensorrt_version
from transferry.runtime.ort.external_files import watched_graph
from transferry.runtime.ort.openvino_runner import OpenVinoRunner, openvino_version
from transferry.runtime.ort.session import (
    SessionOptions,
    assigned_nodes,
    is_device_fault,
    is_shortage,
    kernels,
    open_session,
    tf32,
)
from transferry.runtime.precision import Precision

BFLOAT16 = 16  # TensorProto.DataType of onnx
# numpy's names of onnxruntime's types.
_TYPES = {
    **{f"tensor({name})": name for name in ("bool", "int8", "uint8", "int32", "int64", "bfloat16")},
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
}
# Errors that onnxruntime raises while it runs.
ERRORS = (RuntimeError, native.EPFail, native.Fail, native.RuntimeException)


def to_host(value: OrtValue) -> NDArray[Any]:
    """Copies a tensor to the host, bfloat16 as float32: numpy has no such type.

    On the CPU another type is a view. onnxruntime copies no bfloat16 to numpy either, so its bits
    are read as uint16, which a DLPack capsule of the same memory is made to say (dlpack.h: after
    data, device and ndim, code 1 for unsigned integers).
    """
    if value.element_type() != BFLOAT16:
        found: NDArray[Any] = value.numpy()
        return found
    capsule = value._get_c_value().to_dlpack()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = 1
    bits = native.OrtValue.from_dlpack(capsule, False).numpy()
    widened: NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return widened


@dataclass(frozen=True)
class BufferView:
    """Neighbouring rows of a device buffer, bound without a copy.

    Attributes:
        buffer: The whole buffer `[rows, ...]`.
        first: First row of the view.
        count: Number of rows.
    """

    buffer: OrtValue
    first: int
    count: int

    @classmethod
    def of(cls, buffer: OrtValue) -> BufferView:
        """Returns a view of all rows of a buffer."""
        return cls(buffer, 0, int(buffer.shape()[0]))

    def view(self, first: int, count: int) -> BufferView:
        """Returns a view of other rows of the same buffer."""
        return replace(self, first=first, count=count)

    @cached_property
    def where(self) -> tuple[int, list[int], int]:
        """ONNX element type, shape and address of the view."""
        rows, *shape = self.buffer.shape()
        offset = self.buffer.tensor_size_in_bytes() // rows * self.first
        return self.buffer.element_type(), [self.count, *shape], self.buffer.data_ptr() + offset

    @cached_property
    def whole(self) -> bool:
        """Whether the view has all rows of the buffer."""
        return bool(self.count == self.buffer.shape()[0])

    def numpy(self) -> NDArray[Any]:
        """Copies the rows to the host."""
        return to_host(self.buffer)[self.first : self.first + self.count]


Bindable: TypeAlias = OrtValue | BufferView


class GraphRunner:
    """One graph, run through IOBinding with tensors addressed by role.

    On a GPU each graph has memory of its own. After a shortage anywhere its next run releases the
    unused part, so that another graph can have it.
    """

    _shortages: ClassVar[int] = 0  # of all graphs of the process

    def __init__(self, bundle: Bundle, graph: GraphSpec, options: SessionOptions) -> None:
        """Opens a graph of a bundle.

        Raises:
            ProviderError: The provider cannot run here.
            InputError: The graph cannot be opened, differs from the manifest, or reads a file that
                the manifest does not list.
        """
        self.graph = graph
        path = bundle.graph(graph)
        self.session = open_session(path, options, *watched_graph(bundle, graph))
        bundle.files.require_unchanged()
        self._require_described(path)
        specs = (*graph.inputs, *graph.outputs)
        self._names = {spec.role: graph.names(spec.role) for spec in specs}
        self._provider, self._device = options.provider, options.device
        self.on_device = self._device != "cpu"
        self._released = GraphRunner._shortages
        self._device_id = options.device_id if self.on_device else 0
        self._stream = cuda_stream(self._device_id) if self.on_device else None
        self._queueing = self._stream.lock if self._stream else contextlib.nullcontext()

    def _require_described(self, path: Path) -> None:
        """Raises InputError unless the graph has the tensors that the manifest describes."""
        sides = (self.graph.inputs, self.session.get_inputs(), "input")
        others = (self.graph.outputs, self.session.get_outputs(), "output")
        for specs, found, side in (sides, others):
            described = [(spec.name, spec.type, len(spec.shape)) for spec in specs]
            actual = [(arg.name, _TYPES.get(arg.type, arg.type), len(arg.shape)) for arg in found]
            same = [
                size == dim or isinstance(size, str) or not isinstance(dim, int)
                for spec, arg in zip(specs, found, strict=False)
                for size, dim in zip(spec.shape, arg.shape, strict=False)
            ]
            if described != actual or not all(same):
                raise InputError(
                    f"{path}: the manifest describes other {side}s than the graph has; {REMEDY}"
                )

    def nodes(self) -> Mapping[str, int]:
        """Counts the nodes by provider."""
        return assigned_nodes(self.session)

    def value(self, array: NDArray[Any]) -> OrtValue:
        """Copies an array to the device; on the CPU, uses it where it lies if contiguous.

        Raises:
            AllocationError: The device has not enough memory.
        """
        contiguous = np.asarray(array, order="C")  # ascontiguousarray would make [] [1]
        try:
            return OrtValue.ortvalue_from_numpy(contiguous, self._device, self._device_id)
        except ERRORS as error:
            raise self.failure(error) from error

    def zeros(self, role: Role, shape: Sequence[int]) -> OrtValue:
        """Device buffer of zeros, of the element type of a role's tensors."""
        kind = self.graph.tensor(role).type
        if kind != "bfloat16":
            return self.value(np.zeros(shape, kind))
        # numpy has no such type, but zero has the same bits in all 16-bit types.
        where = self._device, self._device_id
        try:
            value = OrtValue.ortvalue_from_shape_and_type(shape, BFLOAT16, *where)
            value.update_inplace(np.zeros(shape, np.uint16))
        except ERRORS as error:
            raise self.failure(error) from error
        return value

    def run(
        self,
        inputs: Mapping[Any, Sequence[Bindable]],
        *outputs: Any,
        host: Mapping[Any, NDArray[Any]] | None = None,
        in_place: Mapping[Any, Sequence[Bindable]] | None = None,
    ) -> list[OrtValue]:
        """Runs the graph.

        Args:
            inputs: All inputs by role, in the manifest's order.
            outputs: Roles of the outputs to return, which stay on the device.
            host: Arrays for other outputs, by role. onnxruntime drops outputs that nobody requests.
            in_place: Device buffers for yet other outputs, by role, perhaps inputs.

        Raises:
            AllocationError: There is not enough memory.
            InputError: onnxruntime cannot run the graph on these inputs.
            ProviderError: The device or its libraries failed.
        """
        binding = self._bound(inputs, host or {}, in_place or {})
        for name in (name for role in outputs for name in self._names.get(role, ())):
            binding.bind_output(name, self._device, self._device_id)
        self.run_bound(binding)
        bound = len(host or {}) + sum(map(len, (in_place or {}).values()))
        results: list[OrtValue] = list(binding.get_outputs())
        return results[bound:]

    def bind(
        self,
        *,
        fixed: Mapping[Any, Sequence[Bindable]],
        changing: Mapping[str, NDArray[Any]] | None = None,
        in_place: Mapping[Any, Sequence[Bindable]] | None = None,
        host: Mapping[Any, NDArray[Any]] | None = None,
    ) -> BoundCall:
        """Binds all inputs and outputs once, for many runs; `in_place` and `host` as for `run`.

        Args:
            fixed: Inputs that stay the same, by role.
            changing: Inputs that every run replaces, by role; the arrays are overwritten.
            in_place: Device buffers for outputs, by role.
            host: Arrays for outputs, by role.
        """
        changing, host, held = changing or {}, host or {}, (fixed, in_place)
        if self._stream is None:
            values = {role: [self.value(array)] for role, array in changing.items()}
            binding = self._bound({**fixed, **values}, host, in_place or {})
            return BoundCall(self, binding, changing, host, held)
        # A single output is copied by onnxruntime, which waits for it.
        direct, staged = (host, {}) if len(host) == 1 else ({}, host)
        try:
            up = StagingBuffer(self._stream, changing) if changing else None
            down = StagingBuffer(self._stream, staged) if staged else None
        except ERRORS as error:
            raise self.failure(error) from error
        binding = self._bound(fixed, direct, in_place or {})
        for buffer, bind in ((up, binding.bind_input), (down, binding.bind_output)):
            for role, address in buffer.addresses.items() if buffer else ():
                (name,) = self.graph.names(cast("Role", role))
                array = {**changing, **host}[role]
                where = self._device, self._device_id, array.dtype.type, array.shape, address
                bind(name, *where)
        changing, host = up.arrays if up else {}, down.arrays if down else direct
        return BoundCall(self, binding, changing, host, held, up, down)

    def run_bound(
        self,
        binding: onnxruntime.IOBinding,
        up: StagingBuffer | None = None,
        down: StagingBuffer | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Runs a binding of all inputs and outputs; raises as `run`.

        Args:
            binding: The binding.
            up: Inputs to copy to the GPU before.
            down: Outputs to copy to the host and to wait for.
            wait: Whether to wait for the GPU at the end of the graph.
        """
        options, shortages = None, GraphRunner._shortages
        if self.on_device and (self._released < shortages or not wait):
            options = onnxruntime.RunOptions()
            entry = "disable_synchronize_execution_providers", "1"
            if self._released < shortages:
                entry = "memory.enable_memory_arena_shrinkage", f"gpu:{self._device_id}"
            options.add_run_config_entry(*entry)
        try:
            with self._queueing:
                if up:
                    up.upload()
                self.session.run_with_iobinding(binding, options)
                if down:
                    down.download()
            if down:
                down.stream.wait()
            self._released = shortages
        except ERRORS as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> TransferryError:
        """Returns the error of `run` for an error of onnxruntime."""
        found = " ".join(str(error).split())
        if is_shortage(error):
            GraphRunner._shortages += 1
            return AllocationError(
                f"there is not enough memory to run {self.graph.file}: {found}. Make batches "
                "smaller"
            )
        if is_device_fault(error):
            return ProviderError(
                f"provider {self._provider} failed in {self.graph.file}: {found}. Run `transferry "
                f"doctor`; for missing libraries: {install_command(self._device)}"
            )
        return InputError(
            f"expected {self.graph.file} to run, found: {found}. Verify the bundle here, or export "
            "it again"
        )

    def _bound(
        self,
        inputs: Mapping[Any, Sequence[Bindable]],
        host: Mapping[Any, NDArray[Any]],
        in_place: Mapping[Any, Sequence[Bindable]],
    ) -> onnxruntime.IOBinding:
        binding, device = self.session.io_binding(), (self._device, self._device_id)
        for role, array in host.items():
            (name,) = self._names[role]
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        sides = (
            (inputs, binding.bind_ortvalue_input, binding.bind_input),
            (in_place, binding.bind_ortvalue_output, binding.bind_output),
        )
        for tensors, bind_value, bind_address in sides:
            for role, values in tensors.items():
                for name, value in zip(self._names.get(role, ()), values, strict=True):
                    if not isinstance(value, BufferView):
                        bind_value(name, value)
                    elif value.whole:  # several times as fast as by its address
                        bind_value(name, value.buffer)
                    else:
                        bind_address(name, *device, *value.where)
        return binding


# Opens a graph of a bundle, as `GraphRunner` does.
Opened = Callable[[Bundle, GraphSpec, SessionOptions], GraphRunner]


@dataclass(frozen=True)
class BoundCall:
    """A graph bound once to fixed buffers, to be run many times.

    On a GPU, a call that returns nothing does not wait for the GPU: a later call must, before
    `changing` changes again.

    Attributes:
        runner: The graph.
        binding: All inputs and outputs.
        changing: Inputs that every run replaces, by role.
        host: Outputs on the host, by role; the next run overwrites them.
        held: Keeps the bound buffers alive.
        up: Buffer of `changing` on a GPU; empty without any.
        down: Buffer of `host` on a GPU, if it has several arrays.
    """

    runner: GraphRunner
    binding: onnxruntime.IOBinding
    changing: Mapping[str, NDArray[Any]]
    host: Mapping[str, NDArray[Any]]
    held: Sequence[Any]
    up: StagingBuffer | None = None
    down: StagingBuffer | None = None

    def run(self, **inputs: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """Runs the graph on new values of changing inputs; returns `host`, raises as `run`."""
        for role, array in inputs.items():
            if array is not (changing := self.changing[role]):
                changing[...] = array
        wait = bool(self.host) and self.down is None
        self.runner.run_bound(self.binding, self.up, self.down, wait=wait)
        return self.host


class PortableRunner(Protocol):
    """One graph of the portable variant, opened by any runtime.

    Values are opaque but for `numpy()` and `shape()`; several threads may run the graph at once.
    """

    graph: GraphSpec

    def nodes(self) -> Mapping[str, int]:
        """Counts the nodes by where they run."""

    def value(self, array: NDArray[Any]) -> Any:
        """Takes an array as an input; see `GraphRunner.value`."""

    def run(
        self,
        inputs: Mapping[Any, Sequence[Any]],
        *outputs: Any,
        host: Mapping[Any, NDArray[Any]] | None = None,
    ) -> list[Any]:
        """Runs the graph; see `GraphRunner.run`."""


def open_graphs(
    bundle: Bundle,
    graphs: Mapping[str, GraphSpec],
    options: SessionOptions,
    opened: Opened = GraphRunner,
) -> dict[str, GraphRunner]:
    """Opens graphs by name, one per core at a time: packing weights takes most of the time.

    Raises:
        ProviderError: The requested provider cannot run here.
        InputError: A graph cannot be opened.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        runners = pool.map(lambda graph: opened(bundle, graph, options), graphs.values())
        return dict(zip(graphs, runners, strict=True))


def _open_in_openvino(
    bundle: Bundle, graphs: Mapping[str, GraphSpec], options: SessionOptions
) -> Mapping[str, PortableRunner]:
    return {name: OpenVinoRunner(bundle, graph, options) for name, graph in graphs.items()}


@dataclass(frozen=True)
class GraphRuntime:
    """A runtime of graphs. No other code depends on the choice of runtime.

    Attributes:
        open: Opens graphs of a portable variant by name; raises as `open_graphs`.
        version: Returns its version; raises ProviderError if it is not installed.
        standard_alone: Whether it runs variants of standard operators alone.
    """

    open: Callable[[Bundle, Mapping[str, GraphSpec], SessionOptions], Mapping[str, PortableRunner]]
    version: Callable[[], str]
    standard_alone: bool


RUNTIMES: Mapping[str, GraphRuntime] = {
    "onnxruntime": GraphRuntime(open_graphs, lambda: onnxruntime.__version__, False),
    "openvino": GraphRuntime(_open_in_openvino, openvino_version, True),
}


def runtime_of(options: SessionOptions) -> GraphRuntime:
    """Returns the runtime that a session asks for."""
    return RUNTIMES[options.runtime]


def versions(options: SessionOptions, variant: Variant) -> dict[str, str]:
    """Returns the versions of the packages that compute a variant's graphs."""
    own = {"transferry-kernels": kernels().version}
    needed = Precision.of(variant.precision).kernels
    return {options.runtime: runtime_of(options).version(), **(own if needed else {})}


def describe(
    variant: Variant, options: SessionOptions, runners: Iterable[PortableRunner]
) -> dict[str, Any]:
    """Returns everything that determines the numbers: settings, hardware, providers of nodes."""
    nodes: Counter[str] = Counter()
    for runner in runners:
        nodes.update(runner.nodes())
    return {
        "variant": variant.name,
        "provider": options.provider,
        "threads": options.threads,
        "optimisation": options.optimisation,
        "tf32": tf32(options),
        **({"tensorrt": tensorrt_version()} if options.provider == "tensorrt" else {}),
        "cpu": cpu_name(),
        "instruction_sets": list(instruction_sets()),
        **versions(options, variant),
        "nodes": [f"{name} {count}" for name, count in sorted(nodes.items())],
    }
