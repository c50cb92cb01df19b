"""A folder of another tool's graphs as the subject of an audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.oracle.cases import random_case
from transferry.export.subject.beside import Beside
from transferry.export.subject.foreign_model import ForeignDecoder, ForeignEncoder, Padding
from transferry.export.subject.layout import GraphFile, Layout
from transferry.export.subject.subject import CopiedSubject, FolderCopy
from transferry.runtime.errors import InputError
from transferry.runtime.ort.graph_runner import RUNTIMES
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import observe
from transferry.runtime.proof.report import Claim

PLANTED = "planted.bin"  # the weights of a large graph that was edited
LARGE = 1 << 30  # bytes of weights from which on they lie beside the graph
# Rows and columns of the unpadded input that exporters try a tolerance on (optimum's
# `validate_model_outputs` has its defaults).
TRIED = (2, 16)


class GraphCopy(FolderCopy):
    """A copy of graphs, their weights and the files beside them, with one graph edited.

    Attributes:
        graph: The graph that is edited; `edit` chooses it.
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


class GraphsSubject(CopiedSubject[Any]):
    """Graphs of another tool.

    Attributes:
        beside: The files beside the graphs; None leaves them out.
    """

    beside: Beside | None = None

    def __init__(self, layout: Layout, session: SessionOptions) -> None:
        self.layout, self.session = layout, session

    def describe(self, precision: str) -> Mapping[str, Any]:
        """Returns the settings that decide the numbers of graphs of a precision."""
        layout, session = self.layout, self.session
        share = layout.in_integers()
        return {
            "written by": layout.writer,
            "precision": precision,
            "provider": session.provider,
            "threads": session.threads,
            "torch": torch.__version__,
            "graphs": ", ".join(graph.path.name for graph in layout.graphs),
            "optimisation": session.optimisation,
            "onnxruntime": RUNTIMES["onnxruntime"].version(),
            **({"weights in integers": f"{share:.0%}"} if share else {}),
        }

    def copy(self, folder: Path) -> GraphCopy:
        """Returns an editable copy of the graph that reads the first tokens."""
        beside = self.beside
        moves = beside is not None and beside.folder == self.layout.decoder.path.parent
        return GraphCopy(self.layout, folder, beside.contents() if beside and moves else ())


class ForeignFolder(GraphsSubject):
    """Graphs that read and write tokens, beside a checkpoint.

    Attributes:
        paddings: Sides on which batches are padded.
    """

    def __init__(
        self,
        layout: Layout,
        session: SessionOptions,
        checkpoint: Checkpoint,
        paddings: Sequence[Padding] = (),
        beside: Beside | None = None,
    ) -> None:
        super().__init__(layout, session)
        self.checkpoint, self.beside = checkpoint, beside
        self.paddings = [*paddings] or default_paddings(checkpoint, layout)

    @property
    def reads_pairs(self) -> bool:
        """Whether the graph tells two texts apart, or the reference has pairs of texts alone."""
        config, head = self.checkpoint.model.config, self.checkpoint.head
        alone = head is not None and head.task == "classify" and len(head.labels) == 1
        return not config.segments or alone or "segments" in self.layout.decoder.inputs

    @property
    def decodes(self) -> bool:
        """Whether there is a decoder."""
        return bool(self.checkpoint.model.config.decoder_layers)

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors to compare: those that the graphs give."""
        found: frozenset[str] = self.model.gives
        return found

    def open(self) -> ForeignDecoder | ForeignEncoder:
        """Opens the graphs; raises InputError for those of another architecture."""
        layout, config = self.layout, self.checkpoint.model.config
        pad_id = self.checkpoint.tokenizer.special.pad_id
        both = config.architecture == "encoder-decoder"
        if both != (layout.encoder is not None):
            found = "an encoder and a decoder" if layout.encoder else "one graph without an encoder"
            raise InputError(
                f"the reference is {config.architecture}, the folder holds {found}; name the "
                "reference that the graphs were made from"
            )
        if not self.decodes:
            return ForeignEncoder(layout, self.session, config, pad_id)
        side: Padding = "right" if "right" in self.paddings else "left"
        return ForeignDecoder(layout, self.session, config, pad_id, side)

    def claims(self) -> list[Claim]:
        """Compares genai_config.json with the reference."""
        given = self.layout.config
        if not given:
            return []
        config, special = self.checkpoint.model.config, self.checkpoint.tokenizer.special
        ends = given.get("eos_token_id", [])
        decoder = given.get("decoder", {})
        pairs = {
            "vocab_size": (given.get("vocab_size"), config.vocabulary_size),
            "num_hidden_layers": (decoder.get("num_hidden_layers"), config.decoder_layers),
            "context_length": (given.get("context_length"), config.max_positions),
            "eos_token_id": (
                sorted(ends if isinstance(ends, list) else [ends]),
                sorted(special.ends),
            ),
        }
        return [
            Claim(
                f"genai_config.json: {name}", "" if a == b else f"says {a}, the reference has {b}"
            )
            for name, (a, b) in pairs.items()
        ]

    def reopened(self, folder: Path) -> ForeignFolder:
        """Returns the graphs of a copy beside the same reference."""
        layout, beside = self.layout.moved(folder), self.beside
        if beside is not None and beside.folder == self.layout.decoder.path.parent:
            beside = replace(beside, folder=folder)
        return ForeignFolder(layout, self.session, self.checkpoint, self.paddings, beside)

    def tried(self) -> Sequence[NDArray[Any]]:
        """Returns the outputs on an unpadded input of random tokens."""
        case = random_case(self.checkpoint.model.config, *TRIED, 0, seed=0)
        whole = replace(case, mask=np.ones_like(case.mask), target=case.target[:, :1], rows=None)
        return list(observe(self.model, whole).values())


def default_paddings(checkpoint: Checkpoint, layout: Layout) -> list[Padding]:
    """Returns the sides on which batches are padded.

    Positions that are added to embeddings count from the left edge in an encoder, and in a decoder
    whose graph does not read them, so that torch itself answers otherwise where they are padded
    there. onnxruntime-genai pads the graphs of its builder on the right, for `COUNTING`.
    """
    config = checkpoint.model.config
    counted = config.encoder_layers or "positions" not in layout.decoder.inputs
    if layout.from_left or (counted and config.positions in ("sinusoidal", "learned")):
        return ["right"]
    return ["left", "right"]
