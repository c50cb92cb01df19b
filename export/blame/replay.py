"""Replay of a fault: the operators that show it, with their inputs and torch's results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from msgspec import Struct, structs
from numpy.typing import NDArray
from onnx import external_data_helper, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from transferry.runtime.errors import InputError
from transferry.runtime.io.arrays import open_arrays
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import parse_document
from transferry.runtime.io.outputs import foreign_replay, require_own
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.ort.external_files import external_files
from transferry.runtime.ort.session import Optimisation, SessionOptions, open_session
from transferry.runtime.proof.compare import value_error
from transferry.runtime.proof.report import Origin
from transferry.runtime.tables import table

_STANDARD = ("", "ai.onnx")
MOST_REPLAY = 4 << 30


@dataclass(frozen=True)
class Replay:
    """A fault, isolated from its graph.

    Attributes:
        origin: Its origin.
        session: How the graph was served.
        model: The operators as an ONNX model with its weights and one output.
        inputs: Their inputs by name, as in the served graph.
        oracle: The output in float64, computed from the whole graph's inputs.
        reference: Likewise in float32.
        mask: Entries to compare.
        budget: The largest error that passes.
    """

    origin: Origin
    session: SessionOptions
    model: bytes
    inputs: Mapping[str, NDArray[Any]]
    oracle: NDArray[Any]
    reference: NDArray[Any]
    mask: NDArray[np.bool_]
    budget: float

    def save(self, path: Path) -> None:
        """Writes the file.

        Raises:
            InputError: It cannot be written.
            UsageError: It exists and is not the replay of a fault.
        """
        require_own(path, foreign_replay)
        record = {
            "origin": asdict(self.origin),
            "session": asdict(self.session),
            "inputs": list(self.inputs),
            "budget": self.budget,
        }
        arrays: dict[str, NDArray[Any]] = {
            f"input/{number}": array for number, array in enumerate(self.inputs.values())
        }
        for name in ("oracle", "reference", "mask"):
            arrays[name] = getattr(self, name)
        arrays["model"] = np.frombuffer(self.model, np.uint8)
        arrays["index"] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Replay:
        """Reads a file of `save`; raises InputError if it is missing or damaged."""
        remedy = "write it again with `transferry verify --checkpoint`"
        content = read_bytes(path, MOST_REPLAY)
        with open_arrays(content, str(path), "the replay of a fault", remedy) as file:
            index = parse_document(file["index"].tobytes(), _Index, str(path), remedy)
            model = file["model"].tobytes()
            if elsewhere := external_files(model):
                raise InputError(f"{path}: the graph reads {elsewhere[0]!r}; {remedy}")
            return cls(
                index.origin,
                SessionOptions(**structs.asdict(index.session)),
                model,
                {name: file[f"input/{n}"] for n, name in enumerate(index.inputs)},
                file["oracle"],
                file["reference"],
                file["mask"],
                index.budget,
            )


class _Session(Struct):
    provider: Literal["cpu", "cuda"]
    threads: int
    device_id: int
    optimisation: Optimisation
    provider_options: dict[str, str]


class _Index(Struct):
    origin: Origin
    session: _Session
    inputs: list[str]
    budget: float


@dataclass(frozen=True)
class Replayed:
    """Result of a replay.

    Attributes:
        replay: The fault.
        served: Error of onnxruntime, opened as the graph was served.
        evaluator: Error of onnx's ReferenceEvaluator; None where it lacks an operator.
        reference: Error of torch in float32.
    """

    replay: Replay
    served: float
    evaluator: float | None
    reference: float

    @property
    def passed(self) -> bool:
        """Whether the served error is within the budget; NaN is not."""
        return self.served <= self.replay.budget

    def to_text(self) -> str:
        """Returns the result as text, the verdict first."""
        budget, session = self.replay.budget, self.replay.session
        verdict = "PASSED: the fault does not show" if self.passed else "FAILED: the fault shows"
        if not self.passed and self.evaluator is not None:
            verdict += (
                "; the runtime is at fault: onnx.reference gets it right"
                if self.evaluator <= budget
                else "; the graph is at fault: both runtimes get it wrong"
            )
        errors = {
            f"onnxruntime {onnxruntime.__version__} as served": self.served,
            f"onnx.reference {onnx.__version__}": self.evaluator,
            "torch float32": self.reference,
        }
        rows = [
            (name, f"{error:.1e}", f"{budget:.1e}", "ok" if error <= budget else "FAILED")
            for name, error in errors.items()
            if error is not None
        ]
        return "\n".join(
            [
                verdict,
                "",
                table(("runtime", "error", "limit", "result"), rows),
                "",
                str(self.replay.origin),
                f"Settings: provider {session.provider}; optimisation {session.optimisation}; "
                f"threads {session.threads}",
            ]
        )


def replay(path: Path) -> Replayed:
    """Runs the operators of a file of `Replay.save` on two runtimes.

    Raises:
        InputError: The file is missing or damaged.
        ProviderError: The graph's provider cannot run here.
    """
    item = Replay.load(path)
    feeds = dict(item.inputs)
    (served,) = open_session(path, item.session, item.model).run(None, feeds)
    model = onnx.load_from_string(item.model)
    evaluator = None
    if all(node.domain in _STANDARD for node in model.graph.node):
        (found,) = ReferenceEvaluator(model).run(None, feeds)
        evaluator = value_error(np.asarray(found), item.oracle, item.mask)
    return Replayed(
        item,
        value_error(np.asarray(served), item.oracle, item.mask),
        evaluator,
        value_error(item.reference, item.oracle, item.mask),
    )


def extract(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, NDArray[Any]],
    output: str,
    folder: Path,
) -> bytes:
    """Returns a model of some nodes of a graph, whose external weights lie in the folder."""
    used = {name for node in nodes for name in node.input}
    weights = []
    for tensor in model.graph.initializer:
        if tensor.name in used:
            weight = onnx.TensorProto()
            weight.CopyFrom(tensor)
            if external_data_helper.uses_external_data(weight):
                external_data_helper.load_external_data_for_tensor(weight, str(folder))
                weight = numpy_helper.from_array(numpy_helper.to_array(weight), tensor.name)
            weights.append(weight)
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in inputs.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(output)]
    graph = helper.make_graph(list(nodes), "replay", given, outputs, weights)
    extracted = helper.make_model(graph, opset_imports=model.opset_import)
    extracted.ir_version = model.ir_version
    content: bytes = extracted.SerializeToString()
    return content
