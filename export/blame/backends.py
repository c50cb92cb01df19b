"""Other runtimes for the cross-check, each reduced to running one graph of a variant.

`plain_decoder` drives the graphs of a backend as a decoder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from transferry.export.trace.store import WEIGHTS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import ProviderError
from transferry.runtime.ort.openvino_runner import PRECISION, openvino_core, openvino_version

Arrays = Sequence[NDArray[Any]]


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
        """Opens every graph."""
        self.name = f"onnx.reference {onnx.__version__}"
        self._evaluators = {
            name: ReferenceEvaluator(str(bundle.graph(graph)))
            for name, graph in variant.steps.items()
        }

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        """Runs a graph; see `Backend.run`."""
        return list(self._evaluators[graph].run(list(wanted), dict(feeds)))


class OpenVinoBackend(Backend):
    """OpenVINO on the CPU, in float32."""

    name = "OpenVINO"
    # With more threads, sums could differ from run to run.
    _SETTINGS: ClassVar[Mapping[str, Any]] = {
        **PRECISION,
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
    }

    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        """Compiles every graph; see `Backend`."""
        self.name = f"OpenVINO {openvino_version()}"
        core = openvino_core()
        self._compiled = {
            name: core.compile_model(str(bundle.graph(graph)), "CPU", dict(self._SETTINGS))
            for name, graph in variant.steps.items()
        }

    def run(self, graph: str, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        """Runs a graph; see `Backend.run`."""
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
        with contextlib.ExitStack() as opened:
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
        with contextlib.suppress(BrokenPipeError):
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
            with contextlib.suppress(BrokenPipeError):
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
