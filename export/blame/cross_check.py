"""Cross-check: the same cases on several runtimes, to tell a graph bug from a runtime bug.

A fault on every runtime is the graph's; a fault on one runtime is that runtime's. Each runtime runs
one graph of a variant; a plain decoder or encoder drives the graphs with numpy arrays between the
calls and nothing reused, so that no IOBinding or memory is shared with the served decoder.
"""

import base64
import json
import shutil
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from transferry.export.checks.check import Check, Findings
from transferry.export.oracle.cases import cross_check_cases
from transferry.export.oracle.oracle import Oracle
from transferry.export.trace.store import WEIGHTS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.decoder import (
    ObservableDecoder,
    ObservableEncoder,
    StepOutput,
    longer,
)
from transferry.runtime.errors import ProviderError, TransferryError
from transferry.runtime.ort.graph_runner import RUNTIMES
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.openvino_runner import compiled_in_float32, openvino_version
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Case, Tolerance, Truth, compare, observe
from transferry.runtime.proof.report import CrossCheck, sum_up

Arrays = Sequence[NDArray[Any]]
SERVED = "onnxruntime as served"
# On the CPU, where every bundle can be opened.
UNOPTIMISED = f"onnxruntime {RUNTIMES['onnxruntime'].version()} cpu, unoptimised"
LONGEST_REASON = 160


class Backend(ABC):
    """The graphs of a variant, opened by one runtime.

    Attributes:
        name: Name of the runtime; once opened, with its version: "onnx.reference 1.23.2".
    """

    name: str

    @abstractmethod
    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        """Opens every graph.

        Raises:
            ProviderError: The runtime is not installed; the message tells how to install it. Other
                errors, here and in `run`, are the runtime's own.
        """

    @abstractmethod
    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        """Runs a graph of the variant, such as "decoder".

        Returns:
            The wanted outputs in this order, owned by the caller.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Releases resources outside of this process."""


class ReferenceBackend(Backend):
    """onnx's ReferenceEvaluator: numpy code for clarity, far too slow for real work."""

    name = "onnx.reference"

    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        self.name = f"onnx.reference {onnx.__version__}"
        self._evaluators = {
            name: ReferenceEvaluator(str(bundle.graph(graph)))
            for name, graph in variant.steps.items()
        }

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        return list(self._evaluators[graph].run(list(wanted), dict(feeds)))


class OpenVinoBackend(Backend):
    """OpenVINO on the CPU, in float32."""

    name = "OpenVINO"

    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        self.name = f"OpenVINO {openvino_version()}"
        # With more threads, sums could differ from run to run.
        alone = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
        self._compiled = {
            name: compiled_in_float32(bundle.graph(graph), **alone)
            for name, graph in variant.steps.items()
        }

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        results = self._compiled[graph](dict(feeds), share_outputs=False)
        return [results[name] for name in wanted]


class NodeBackend(Backend):
    """onnxruntime-web under Node: WebAssembly, as in a browser.

    One process serves all runs; onnxruntime_web.mjs is its side of the pipe.

    Attributes:
        timeout: Limit in seconds for opening all graphs, and for each run.
    """

    name = "onnxruntime-web"

    def __init__(self, bundle: Bundle, variant: Variant, timeout: float = 120.0) -> None:
        """Starts Node and opens every graph.

        Raises:
            ProviderError: Node or the npm package is missing, or a graph cannot be opened.
        """
        self.timeout = timeout
        node = shutil.which("node")
        if node is None:
            raise ProviderError(
                "no `node` on the PATH; install Node 18 or later and `npm install onnxruntime-web`"
            )
        files = {name: bundle.graph(graph).resolve() for name, graph in variant.steps.items()}
        weights = next(iter(files.values())).with_name(WEIGHTS)
        graphs = {name: str(path) for name, path in files.items()}
        with ExitStack() as opened:
            self._stderr = opened.enter_context(tempfile.TemporaryFile())
            self._process = opened.enter_context(
                subprocess.Popen(
                    [node, str(Path(__file__).with_name("onnxruntime_web.mjs"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                )
            )
            opened.callback(self._end)
            reply = self._ask({"graphs": graphs, "weights": str(weights)})
            self._opened = opened.pop_all()
        self.name = f"onnxruntime-web {reply['version']}"

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        """Runs a graph; see `Backend.run`.

        Raises:
            ProviderError: Node ended, took too long, or could not run the graph.
        """
        tensors = {
            name: {
                "type": array.dtype.name,
                "shape": array.shape,
                "data": base64.b64encode(array.tobytes()).decode(),
            }
            for name, array in feeds.items()
        }
        reply = self._ask({"graph": graph, "feeds": tensors, "wanted": list(wanted)})
        return [
            np.frombuffer(bytearray(base64.b64decode(item["data"])), item["type"]).reshape(
                item["shape"]
            )
            for item in reply["outputs"]
        ]

    def close(self) -> None:
        """Ends Node."""
        self._opened.close()

    def _end(self) -> None:
        self._process.kill()
        # Closing flushes what Node did not read, into a broken pipe.
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one line of JSON and returns the reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self.timeout, stop)
        timer.start()
        line = b""
        try:
            # If Node has ended already, the pipe is broken and there is no line to read.
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            code = None if line.endswith(b"\n") else self._process.wait()
        finally:
            timer.cancel()
        if late.is_set():
            raise ProviderError(f"Node gave no answer within {self.timeout:g} s")
        if code is not None:
            raise ProviderError(f"Node ended with code {code}: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ProviderError(reply["error"])
        return reply

    def _last_words(self) -> str:
        """Returns Node's stderr, without its stack trace."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        told = [line.strip() for line in lines if "Error" in line] or lines[-1:]
        return told[0] if told else "no message"


BACKENDS: tuple[type[Backend], ...] = (ReferenceBackend, OpenVinoBackend, NodeBackend)


@dataclass(frozen=True)
class PlainState:
    """Inputs of a step besides the tokens; shapes as in the manifest."""

    mask: NDArray[np.bool_]
    cross: Arrays
    past: Arrays


class PlainDecoder:
    """Runs a variant's graphs as a `Decoder`."""

    shares_cache = False

    def __init__(self, variant: Variant, backend: Backend) -> None:
        self._graphs, self._backend = variant.graphs, backend
        self.has_encoder = "encoder" in self._graphs
        self.vocabulary_size = int(self._graphs["decoder"].tensor("logits").shape[-1])

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> PlainState:
        names = self._graphs["decoder"].names("past")
        spec = self._graphs["decoder"].tensor("past")
        shape = [0 if isinstance(size, str) else size for size in spec.shape[1:]]
        past: Arrays = [np.zeros((len(source), *shape), spec.type)] * len(names)
        if self.has_encoder:
            cross = self._run("encoder", {"source": [source], "source_mask": [mask]}, "cross")
            return PlainState(mask, cross, past)
        if source.shape[1]:
            nothing = mask[:, :0]
            inputs: dict[Any, Arrays] = {"target": [source], "past_mask": [nothing], "past": past}
            past = self._run("decoder", inputs, "present")
        return PlainState(mask, [], past)

    def step(
        self,
        tokens: NDArray[np.int64],
        state: PlainState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, PlainState]:
        inputs: dict[Any, Arrays] = {
            "target": [tokens],
            "source_mask" if self.has_encoder else "past_mask": [state.mask],
            "cross": state.cross,
            "past": state.past,
        }
        logits, *present = self._run("decoder", inputs, "logits", "present")
        mask = state.mask if self.has_encoder else longer(state.mask, tokens)
        return StepOutput(logits), PlainState(mask, state.cross, present)

    def select(self, state: PlainState, rows: NDArray[np.int64]) -> PlainState:
        cross = state.cross
        if self.has_encoder:
            cross = self._run("select", {"rows": [rows], "state": cross}, "selected")
        if isinstance(self._graphs["decoder"].tensor("past").shape[2], int):  # of an SSRU
            return PlainState(state.mask[rows], cross, [each[rows] for each in state.past])
        past = self._run("select", {"rows": [rows], "state": state.past}, "selected")
        return PlainState(state.mask[rows], cross, past)

    def tensors(self, state: PlainState) -> dict[str, NDArray[Any]]:
        """Returns the cross and past of a state, by their names in the graph."""
        graph = self._graphs["decoder"]
        names = [*graph.names("cross"), *graph.names("past")]
        return dict(zip(names, [*state.cross, *state.past], strict=True))

    def _run(self, name: str, inputs: Mapping[Any, Arrays], *outputs: Any) -> Arrays:
        graph = self._graphs[name]
        feeds = {
            tensor: array
            for role, arrays in inputs.items()
            for tensor, array in zip(graph.names(role), arrays, strict=True)
        }
        wanted = [tensor for role in outputs for tensor in graph.names(role)]
        return self._backend.run(name, feeds, wanted)


class PlainEncoder:
    """Runs the graph of an encoder-only model."""

    def __init__(self, variant: Variant, backend: Backend) -> None:
        self._graph, self._backend = variant.graphs["encoder"], backend

    def encode(
        self, source: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.floating[Any]]]:
        names = [spec.name for spec in self._graph.outputs]
        feeds = dict(zip([spec.name for spec in self._graph.inputs], (source, mask), strict=True))
        return dict(zip(names, self._backend.run("encoder", feeds, names), strict=True))


def plain_model(variant: Variant, backend: Backend) -> PlainDecoder | PlainEncoder:
    """Returns the model of a variant's graphs: a decoder, or an encoder."""
    return (PlainDecoder if "decoder" in variant.graphs else PlainEncoder)(variant, backend)


# Gives the runtime's name, with its version, and the model opened in it until the stack closes.
Opener = Callable[[ExitStack], tuple[str, ObservableDecoder[Any] | ObservableEncoder]]


def cross_checks(
    oracle: Oracle,
    served: ServedModel,
    bundle: Bundle,
    backends: Sequence[type[Backend]] = BACKENDS,
) -> list[Check]:
    """Returns a check of a few small cases for the served model and for every other runtime.

    A runtime that is absent or fails raises nothing; its result has the reason.
    """
    cases = [(case, oracle.truth(case)) for case in cross_check_cases(oracle.config)]
    variant = served.variant
    unoptimised = SessionOptions(optimisation="disable")
    openers: list[tuple[str, Opener]] = [
        (SERVED, lambda _: (SERVED, served)),
        (UNOPTIMISED, lambda _: (UNOPTIMISED, open_model(bundle, variant, unoptimised))),
        *((backend.name, partial(_opened, backend, bundle, variant)) for backend in backends),
    ]

    def check(name: str, opener: Opener) -> Check:
        def run(so_far: Findings) -> Iterator[Findings]:
            yield Findings(runtimes=[_run(name, opener, cases, oracle.tolerance)], steps=1)

        return Check(name, run, 1)

    return [check(*each) for each in openers]


def _opened(
    kind: type[Backend], bundle: Bundle, variant: Variant, stack: ExitStack
) -> tuple[str, Any]:
    backend = stack.enter_context(closing(kind(bundle, variant)))
    return backend.name, plain_model(variant, backend)


def _run(
    name: str, opener: Opener, expected: Sequence[tuple[Case, Truth]], tolerance: Tolerance
) -> CrossCheck:
    comparisons, failures = [], []
    with ExitStack() as opened:
        try:
            name, model = opener(opened)
        except Exception as reason:  # noqa: BLE001 - reported, whatever a runtime raises
            return CrossCheck(name, absent=_brief(reason))
        for case, truth in expected:
            try:
                found = observe(model, case)
            except Exception as reason:  # noqa: BLE001 - as above
                failures.append(f"{case.name}: {_brief(reason)}")
            else:
                comparisons += compare(case, truth, found, tolerance)
    absent = ""
    if failures:
        absent = f"{len(failures)} of {len(expected)} cases fail, the first {failures[0]}"
    return CrossCheck(name, sum_up(comparisons, tolerance), absent)


def _brief(reason: Exception) -> str:
    text = " ".join(str(reason).split())
    if not isinstance(reason, TransferryError):
        text = f"{type(reason).__name__}: {text}"
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
