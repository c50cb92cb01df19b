"""Traces of the whole test run: each takes seconds and depends on shapes alone, not on weights."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx_ir as ir
from torch import nn

from transferry.export.bundle import export_bundle
from transferry.export.trace.graph import Graph, Traces, export_graph, trace_key
from transferry.export.verify import verify_against
from transferry.runtime.bundle.specs import GraphSpec

Once = Callable[[str, Callable[[Path], object]], Path]


class SharedTraces(Traces):
    """Traces of all models of a test run.

    Attributes:
        once: Keeps the traces on disk, for all workers. The fixture `traces` sets it; without,
            they stay in memory.
    """

    once: Once | None = None

    def __init__(self) -> None:
        super().__init__(self._traced_on_disk)

    def _traced_on_disk(self, module: nn.Module, spec: GraphSpec, opset: int) -> Graph:
        def trace(folder: Path) -> None:
            folder.mkdir()
            ir.save(export_graph(module, spec, opset).model, folder / "graph.onnx")

        if self.once is None:
            return export_graph(module, spec, opset)
        key = hashlib.sha256(repr(trace_key(module, spec, opset)).encode()).hexdigest()
        return Graph(ir.load(self.once(f"graphs/{key}", trace) / "graph.onnx"), spec)


TRACES = SharedTraces()


def unproven(*given: object) -> None:
    """Stands for `prove_variant` where other tests verify such a bundle."""


exported = partial(export_bundle, traces=TRACES)
unverified = partial(exported, prove=unproven)
verify = partial(verify_against, traces=TRACES)
