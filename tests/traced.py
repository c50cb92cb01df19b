"""Stands for the exporter's tracing: takes seconds, and depends on shapes alone, not on weights."""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from transferry.export import variants
from transferry.export.trace import graph as graphs
from transferry.export.trace.graph import OPSET, Graph, export_graph
from transferry.runtime.bundle.specs import GraphSpec

Once = Callable[[str, Callable[[Path], object]], Path]


@contextmanager
def traced_once(once: Once) -> Iterator[None]:
    """Traces each graph of a variant once in a run of the suite, and fills in each model's weights.

    A test that changes what is traced calls `export_graph` or `export_graphs` itself.
    """

    def export(module: nn.Module, spec: GraphSpec, opset: int = OPSET) -> Graph:
        # Buffers that no checkpoint stores too, such as the table of sinusoidal positions.
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        types = {name: tensor.dtype for name, tensor in weights.items()}
        config = getattr(getattr(module, "model", None), "config", None)
        key = repr((module, config, types, spec.inputs, spec.outputs, opset))

        def trace(folder: Path) -> None:
            # The exporter stores equal weights once, and those of another model may differ.
            distinct, generator = copy.deepcopy(module), torch.Generator().manual_seed(0)
            for parameter in distinct.parameters():
                nn.init.normal_(parameter, generator=generator)
            folder.mkdir()
            ir.save(export_graph(distinct, spec, opset).model, folder / "graph.onnx")

        folder = once(f"graphs/{hashlib.sha256(key.encode()).hexdigest()}", trace)
        model = ir.load(folder / "graph.onnx")
        for name in model.graph.initializers.keys() & weights.keys():
            model.graph.initializers[name].const_value = TorchTensor(weights[name], name=name)
        return Graph(model, spec)

    def exporter(function: Callable[..., dict[str, Graph]]) -> Callable[..., dict[str, Graph]]:
        def exported(*arguments: Any, **options: Any) -> dict[str, Graph]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(graphs, "export_graph", export)
                return function(*arguments, **options)

        return exported

    with pytest.MonkeyPatch.context() as patch:
        for name in ("export_graphs", "export_fused_graphs"):
            patch.setattr(variants, name, exporter(vars(variants)[name]))
        yield
