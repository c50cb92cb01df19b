"""An editable copy of another tool's graphs, for planting faults."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from transferry.export.subject.layout import GraphFile, Layout
from transferry.export.subject.subject import FolderCopy

PLANTED = "planted.bin"  # the weights of a large graph that was edited
LARGE = 1 << 30  # bytes of weights from which on they lie beside the graph


class GraphCopy(FolderCopy):
    """A copy of graphs, their weights and the files beside them, with one graph edited.

    Attributes:
        layout: The copied graphs.
        graph: The graph that is edited; `edit` chooses it.
        model: The same, loaded.
    """

    def __init__(self, layout: Layout, folder: Path, beside: Iterable[str] = ()) -> None:
        """Copies the files that the graphs name, and those named in `beside`; see `FolderCopy`."""
        super().__init__(layout.decoder.path.parent, folder, {*layout.files(), *beside})
        self.layout = layout.moved(folder)
        self.edit(self.layout.decoder)

    def edit(self, graph: GraphFile) -> None:
        """Chooses the graph to edit."""
        self.graph, self.model = graph, ir.load(graph.path)

    def seal(self) -> None:
        """Writes the graph; weights that lay in a file beside it go to another file."""
        ir.external_data.load_to_model(self.model)
        self.touched |= {self.graph.path.name, PLANTED}
        save_graph(self.model, self.graph.path, PLANTED)


def save_graph(model: ir.Model, path: Path, file: str) -> None:
    """Writes an edited graph, its weights into a file beside it if they are large."""
    model.graph.sort()
    values = model.graph.initializers.values()
    size = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    ir.save(model, path, external_data=file if size > LARGE else None)
