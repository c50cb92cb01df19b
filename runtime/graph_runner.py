"""One graph of a bundle, run through IOBinding with its tensors given and taken by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import OrtValue
from onnxruntime.capi import onnxruntime_pybind11_state as native

from transferry.runtime.bundle import Bundle, GraphSpec, Role, Variant
from transferry.runtime.errors import AllocationError, InputError
from transferry.runtime.processor import instruction_sets, processor_name, usable_cores
from transferry.runtime.session import SessionOptions, assigned_nodes, open_session, tf32

BFLOAT16 = 16  # TensorProto.DataType of onnx
# What onnxruntime calls a run that is neither recorded nor played back; and how many of a graph it
# may keep, each of which takes memory on the device.
NOT_CAPTURED = -1
MOST_CAPTURES = 256
# What onnxruntime raises while it works, and what is said where memory is short: by its arena, when
# it gets no more or may not grow, by C++ of either compiler, by CUDA, by CUDA's libraries.
ERRORS = (RuntimeError, native.EPFail, native.Fail, native.RuntimeException)
SHORTAGES = (
    *("Failed to allocate memory", "is smaller than requested bytes"),
    *("bad_alloc", "bad allocation", "out of memory", "ALLOC_FAILED"),
)


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a buffer, bound where they lie.

    Attributes:
        buffer: [rows, ...], on the device.
        first: The first of them.
        count: How many.
        lent: Held as long as the buffer is wanted, where it belongs to a pool.
    """

    buffer: OrtValue
    first: int
    count: int
    lent: object = None

    @classmethod
    def of(cls, buffer: OrtValue) -> Rows:
        """All rows of a buffer."""
        return cls(buffer, 0, int(buffer.shape()[0]))

    def part(self, first: int, count: int) -> Rows:
        """Other rows of the same buffer."""
        return replace(self, first=first, count=count)

    def shape(self) -> list[int]:
        """The shape of these rows alone."""
        return [self.count, *self.buffer.shape()[1:]]

    @cached_property
    def where(self) -> tuple[int, list[int], int]:
        """Type of element as ONNX numbers it, shape and address."""
        offset = self.buffer.tensor_size_in_bytes() // self.buffer.shape()[0] * self.first
        return self.buffer.element_type(), self.shape(), self.buffer.data_ptr() + offset

    def numpy(self) -> NDArray[Any]:
        """Copies them to the host."""
        rows: NDArray[Any] = self.buffer.numpy()[self.first : self.first + self.count]
        return rows


Bindable: TypeAlias = OrtValue | Rows


class GraphRunner:
    """One graph, run through IOBinding with tensors given and taken by role."""

    def __init__(
        self, bundle: Bundle, graph: GraphSpec, options: SessionOptions, *, captured: bool = False
    ) -> None:
        """Opens the graph.

        Args:
            bundle: Where it lies.
            graph: Which one.
            options: How to run it.
            captured: Whether its bound calls are recorded and played back, if the options want
                that of any.
        """
        self.graph = graph
        self.captured = captured and options.cuda_graphs
        options = replace(options, cuda_graphs=self.captured)
        self.session = open_session(bundle.graph(graph), options)
        self._captures = 0
        self._device = options.provider
        self.on_device = options.provider != "cpu"
        self._device_id = options.device_id if options.provider != "cpu" else 0

    def value(self, array: NDArray[Any]) -> OrtValue:
        """Puts an array on the device.

        Raises:
            AllocationError: It has no memory for it.
        """
        contiguous = np.ascontiguousarray(array)
        try:
            return OrtValue.ortvalue_from_numpy(contiguous, self._device, self._device_id)
        except ERRORS as error:
            raise self._failure(error) from error

    def zeros(self, role: Role, shape: Sequence[int]) -> OrtValue:
        """Returns a buffer of zeros on the device, of the type that tensors of a role have."""
        kind = self.graph.tensor(role).type
        if kind != "bfloat16":
            return self.value(np.zeros(shape, kind))
        # numpy has no such type; zero is zero in all of 16 bits.
        value = OrtValue.ortvalue_from_shape_and_type(
            shape, BFLOAT16, self._device, self._device_id
        )
        value.update_inplace(np.zeros(shape, np.uint16))
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
            inputs: All inputs, by role, in the manifest's order.
            outputs: The roles of the outputs that stay on the device and are returned.
            host: Where to write other outputs, by role. What is asked for nowhere is dropped; but
                onnxruntime computes it.
            in_place: Where yet other outputs go, by role: buffers on the device, such as inputs.

        Raises:
            AllocationError: There is no memory for it.
            InputError: onnxruntime cannot run the graph on these inputs.
        """
        binding = self._bound(inputs, host or {}, in_place or {})
        for name in (name for role in outputs for name in self.graph.names(role)):
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
        """Binds all inputs and outputs once, for many runs.

        Where calls are captured, this is one that can be: nothing that it reads or writes on the
        device ever moves.

        Args:
            fixed: Inputs that stay as they are, by role.
            changing: Inputs that each run is given anew, by role; these arrays are written over.
            in_place: As for `run`.
            host: As for `run`.
        """
        values = {role: (array, self.value(array)) for role, array in (changing or {}).items()}
        inputs = {**fixed, **{role: [value] for role, (_, value) in values.items()}}
        if not self.captured:
            binding = self._bound(inputs, host or {}, in_place or {})
            return BoundCall(self, binding, values, host or {}, held=(fixed, in_place))
        # What is played back copies nothing to the host.
        copied = {
            role: OrtValue.ortvalue_from_shape_and_type(
                array.shape, array.dtype.type, self._device, self._device_id
            )
            for role, array in (host or {}).items()
        }
        in_place = {**(in_place or {}), **{role: [value] for role, value in copied.items()}}
        self._captures += 1
        number = self._captures if self._captures <= MOST_CAPTURES else NOT_CAPTURED
        binding = self._bound(inputs, {}, in_place)
        held = (fixed, in_place)
        return BoundCall(self, binding, values, host or {}, held, copied, number)

    def run_bound(self, binding: onnxruntime.IOBinding, number: int = NOT_CAPTURED) -> None:
        """Runs what is bound.

        Args:
            binding: All inputs and outputs.
            number: Where calls are captured, which of them this is.

        Raises:
            AllocationError: As `run`.
            InputError: As `run`.
        """
        try:
            if not self.captured:
                self.session.run_with_iobinding(binding)
                return
            options = onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(number))
            self.session.run_with_iobinding(binding, options)
        except ERRORS as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> InputError:
        found = " ".join(str(error).split())
        if any(shortage in found for shortage in SHORTAGES):
            return AllocationError(
                f"there is not enough memory to run {self.graph.file}: {found}. Make batches "
                "smaller"
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
        for role, values in inputs.items():
            for name, value in zip(self.graph.names(role), values, strict=True):
                if isinstance(value, Rows):
                    binding.bind_input(name, *device, *value.where)
                else:
                    binding.bind_ortvalue_input(name, value)
        for role, array in host.items():
            (name,) = self.graph.names(role)
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for role, values in in_place.items():
            for name, value in zip(self.graph.names(role), values, strict=True):
                if isinstance(value, Rows):
                    binding.bind_output(name, *device, *value.where)
                else:
                    binding.bind_ortvalue_output(name, value)
        return binding


@dataclass(frozen=True)
class BoundCall:
    """A graph bound once to buffers that stay, to be run many times.

    Attributes:
        host: Outputs on the host, by role; the next run writes over them.
        held: So that what is bound is not freed.
        copied: Outputs that are copied to the host after a run, by role.
        number: Of the captured call; see `GraphRunner.run_bound`.
    """

    runner: GraphRunner
    binding: onnxruntime.IOBinding
    changing: Mapping[str, tuple[NDArray[Any], OrtValue]]
    host: Mapping[str, NDArray[Any]]
    held: Sequence[Any]
    copied: Mapping[str, OrtValue] = field(default_factory=dict)
    number: int = NOT_CAPTURED

    def give(self, **inputs: NDArray[Any]) -> None:
        """Gives new values of changing inputs, by role: of the first rows, if not of all."""
        for role, array in inputs.items():
            host, value = self.changing[role]
            host[: len(array)] = array
            if self.runner.on_device:
                value.update_inplace(host)

    def run(self, **inputs: NDArray[Any]) -> None:
        """Runs the graph on new values of changing inputs; see `give`.

        Raises:
            AllocationError: As `GraphRunner.run`.
            InputError: As `GraphRunner.run`.
        """
        self.give(**inputs)
        self.runner.run_bound(self.binding, self.number)
        for role, value in self.copied.items():
            np.copyto(self.host[role], value.numpy())


def open_graphs(
    bundle: Bundle,
    graphs: Mapping[str, GraphSpec],
    options: SessionOptions,
    captured: Collection[str] = (),
) -> dict[str, GraphRunner]:
    """Opens graphs, as many at once as there are cores: laying out weights takes most of the time.

    Args:
        bundle: Where they lie.
        graphs: By name.
        options: How to run them.
        captured: Names of those whose bound calls are recorded; see `GraphRunner`.

    Raises:
        ProviderError: The provider asked for cannot run here.
        InputError: A graph cannot be opened.
    """

    def opened(name: str) -> GraphRunner:
        return GraphRunner(bundle, graphs[name], options, captured=name in captured)

    with ThreadPoolExecutor(usable_cores()) as pool:
        return dict(zip(graphs, pool.map(opened, graphs), strict=True))


def describe(
    variant: Variant, options: SessionOptions, runners: Iterable[GraphRunner]
) -> dict[str, Any]:
    """What decides the numbers: the settings, and where the nodes of the graphs really ran."""
    nodes: Counter[str] = Counter()
    for runner in runners:
        nodes.update(assigned_nodes(runner.session))
    return {
        "variant": variant.name,
        "provider": options.provider,
        "threads": options.threads,
        "optimisation": options.optimisation,
        "tf32": tf32(options),
        "cuda_graphs": options.cuda_graphs,
        "processor": processor_name(),
        "instruction_sets": list(instruction_sets()),
        "onnxruntime": onnxruntime.__version__,
        "nodes": [f"{name} {count}" for name, count in sorted(nodes.items())],
    }
