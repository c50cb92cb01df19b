"""One graph of a bundle, run through IOBinding with its tensors given and taken by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.bundle import Bundle, GraphSpec, Variant
from transferry.runtime.errors import InputError
from transferry.runtime.processor import instruction_sets, processor_name
from transferry.runtime.session import SessionOptions, assigned_nodes, open_session, tf32


class GraphRunner:
    """One graph, run through IOBinding with tensors given and taken by role."""

    def __init__(self, bundle: Bundle, graph: GraphSpec, options: SessionOptions) -> None:
        self.graph = graph
        self.session = open_session(bundle.graph(graph), options)
        self._device = options.provider
        self._device_id = options.device_id if options.provider != "cpu" else 0
        self._only_what_is_bound = onnxruntime.RunOptions()
        self._only_what_is_bound.only_execute_path_to_fetches = True

    def value(self, array: NDArray[Any]) -> OrtValue:
        """Puts an array on the device."""
        contiguous = np.ascontiguousarray(array)
        return OrtValue.ortvalue_from_numpy(contiguous, self._device, self._device_id)

    def run(
        self,
        inputs: Mapping[Any, Sequence[OrtValue]],
        *outputs: Any,
        host: Mapping[Any, NDArray[Any]] | None = None,
    ) -> list[OrtValue]:
        """Runs the graph.

        Args:
            inputs: All inputs, by role, in the manifest's order.
            outputs: The roles of the outputs that stay on the device and are returned.
            host: Where to write other outputs, by role. What is in neither is not computed.

        Raises:
            InputError: onnxruntime cannot run the graph on these inputs, or has no memory for it.
        """
        binding = self.session.io_binding()
        for role, values in inputs.items():
            for name, value in zip(self.graph.names(role), values, strict=True):
                binding.bind_ortvalue_input(name, value)
        for role, array in (host or {}).items():
            (name,) = self.graph.names(role)
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in (name for role in outputs for name in self.graph.names(role)):
            binding.bind_output(name, self._device, self._device_id)
        try:
            self.session.run_with_iobinding(binding, self._only_what_is_bound)
        except RuntimeError as error:
            raise InputError(
                f"expected {self.graph.file} to run, found: {' '.join(str(error).split())}. Where "
                "memory ran out, make batches smaller; else export the bundle again"
            ) from error
        bound = len(host or {})
        results: list[OrtValue] = list(binding.get_outputs())
        return results[bound:]


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
        "processor": processor_name(),
        "instruction_sets": list(instruction_sets()),
        "onnxruntime": onnxruntime.__version__,
        "nodes": [f"{name} {count}" for name, count in sorted(nodes.items())],
    }
