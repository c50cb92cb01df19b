"""Which runtimes open portable graphs, and do they answer as recorded?

    python benchmarks/runtimes.py BUNDLE... >> benchmarks/runtimes.jsonl

Runs in any environment with numpy and one of the runtimes below; each that is installed opens each
graph of `portable`, `portable-int8` and the one graph in a process of its own, so that a crash is a
result too. Tensors are compared with the float64 ones of `reference.npz`, as docs/portability.md
describes, tokens of the one graph with the recorded greedy answers. A line of JSON for each:
`result` is "equal", "differs" (with the share of the largest number), "does not run" or "does not
open", with the runtime's own words. `make docs` writes the table of docs/portability.md from the
last line of each runtime, version, variant and architecture.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Feeds = Mapping[str, Any]
Run = Callable[[Feeds], list[Any]]
Spec = dict[str, Any]
NPM = Path(__file__).resolve().parents[1] / "js" / "node_modules"  # `make js`
LIMIT = 1e-4  # of a tensor's largest number
LONGEST = 600  # seconds for one variant
WORDS = 320  # characters of a refusal
OPENED = "all graphs are open"  # printed by the process of one variant


def _onnxruntime(path: Path, spec: Spec) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Before 1.28 it fuses the integers of portable-int8 into operators that it lacks.
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 28):
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feeds: list(session.run(None, dict(feeds)))


def _reference(path: Path, spec: Spec) -> Run:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))
    return lambda feeds: list(evaluator.run(None, dict(feeds)))


def _openvino(path: Path, spec: Spec) -> Run:
    openvino = importlib.import_module("openvino")
    # By default it rounds the activations of portable-int8 to 8 bits too.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    names = [each["name"] for each in spec["outputs"]]

    def run(feeds: Feeds) -> list[Any]:
        found = compiled(dict(feeds), share_outputs=False)
        return [found[name] for name in names]

    return run


def _node(path: Path, spec: Spec) -> Run:
    script = Path(__file__).parents[1] / "export" / "blame" / "onnxruntime_web.mjs"
    process = subprocess.Popen(
        ["node", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NODE_PATH": str(NPM)},
    )

    def ask(request: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    ask({"graphs": {"graph": str(path)}, "weights": str(path.with_name("weights.bin"))})

    def run(feeds: Feeds) -> list[Any]:
        tensors = {
            name: {
                "type": array.dtype.name,
                "shape": array.shape,
                "data": base64.b64encode(array.tobytes()).decode(),
            }
            for name, array in feeds.items()
        }
        wanted = [each["name"] for each in spec["outputs"]]
        found = ask({"graph": "graph", "feeds": tensors, "wanted": wanted})["outputs"]
        return [
            np.frombuffer(base64.b64decode(each["data"]), each["type"]).reshape(each["shape"])
            for each in found
        ]

    return run


def _tract(path: Path, spec: Spec) -> Run:
    tract = importlib.import_module("tract")
    model = tract.onnx().load(str(path)).into_model().into_runnable()

    def run(feeds: Feeds) -> list[Any]:
        return [each.to_numpy() for each in model.run([feeds[e["name"]] for e in spec["inputs"]])]

    return run


def _tinygrad(path: Path, spec: Spec) -> Run:
    os.environ.setdefault("DEV", "CPU")  # needs clang
    tensor = importlib.import_module("tinygrad").Tensor
    opened = importlib.import_module("tinygrad.nn.onnx").OnnxRunner
    opened(path)

    def run(feeds: Feeds) -> list[Any]:
        # A runner keeps the sizes of its first inputs.
        found = opened(path)({name: tensor(array) for name, array in feeds.items()})
        return [found[each["name"]].numpy() for each in spec["outputs"]]

    return run


def _iree(path: Path, spec: Spec) -> Run:
    compiler, runtime = map(importlib.import_module, ("iree.compiler", "iree.runtime"))
    folder = Path(tempfile.mkdtemp())
    tool = Path(sys.executable).with_name("iree-import-onnx")
    _command(str(tool), str(path), "-o", str(folder / "m.mlir"), "--data-dir", str(path.parent))
    made = compiler.compile_file(
        str(folder / "m.mlir"), target_backends=["llvm-cpu"], input_type="onnx"
    )
    config = runtime.Config("local-task")
    loaded = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, made), config)
    names = loaded.vm_module.function_names
    (function,) = (name for name in names if name != "__init" and not name.endswith("$async"))

    def run(feeds: Feeds) -> list[Any]:
        found = loaded[function](*(feeds[each["name"]] for each in spec["inputs"]))
        found = found if isinstance(found, tuple | list) else [found]
        return [np.asarray(each) for each in found]

    return run


def _onnx2torch(path: Path, spec: Spec) -> Run:
    import onnx
    import torch

    module = importlib.import_module("onnx2torch").convert(onnx.load(path)).eval()

    def run(feeds: Feeds) -> list[Any]:
        with torch.no_grad():
            given = [torch.from_numpy(feeds[each["name"]].copy()) for each in spec["inputs"]]
            found = module(*given)
        found = found if isinstance(found, tuple | list) else [found]
        return [each.numpy() for each in found]

    return run


def _opencv(path: Path, spec: Spec) -> Run:
    net = importlib.import_module("cv2").dnn.readNetFromONNX(str(path))

    def run(feeds: Feeds) -> list[Any]:
        for name, array in feeds.items():
            net.setInput(np.ascontiguousarray(array), name)
        return list(net.forward([each["name"] for each in spec["outputs"]]))

    return run


def _pnnx(path: Path, spec: Spec) -> Run:
    """Converts to ncnn's format: it runs no graph itself."""
    import onnx

    folder = Path(tempfile.mkdtemp())
    onnx.save(onnx.load(path), folder / "m.onnx")  # it reads no external data
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pnnx")), "m.onnx"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if not (folder / "m.ncnn.param").exists():
        found = re.findall("unsupported .*", done.stdout + done.stderr)
        raise RuntimeError(found[0] if found else f"ends with code {done.returncode}")
    raise RuntimeError("converted; not run")


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip())


# Package that must be importable, name in the table, distribution that has the version.
RUNTIMES: dict[str, tuple[str, str, Callable[[Path, Spec], Run]]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime", _onnxruntime),
    "onnxruntime-web": ("", "onnxruntime-web", _node),
    "onnx.reference": ("onnx.reference", "onnx", _reference),
    "OpenVINO": ("openvino", "openvino", _openvino),
    "tract": ("tract", "tract", _tract),
    "IREE": ("iree.compiler", "iree-base-compiler", _iree),
    "tinygrad": ("tinygrad", "tinygrad", _tinygrad),
    "onnx2torch": ("onnx2torch", "onnx2torch", _onnx2torch),
    "OpenCV": ("cv2", "opencv-python-headless", _opencv),
    "pnnx": ("pnnx", "pnnx", _pnnx),
}


class Graphs:
    """The graphs of a variant, called by role."""

    def __init__(self, bundle: Path, variant: str, opened: Callable[[Path, Spec], Run]) -> None:
        self.manifest = json.loads((bundle / "manifest.json").read_bytes())
        self.specs: dict[str, Spec] = self.manifest["variants"][variant]["graphs"]
        self._bundle, self._open = bundle, opened
        self._runs: dict[str, Run] = {}

    def open(self, *names: str) -> None:
        """Opens graphs."""
        for name in names:
            self._runs[name] = self._open(self._bundle / self.specs[name]["file"], self.specs[name])

    def run(self, name: str, **given: Any) -> dict[str, list[Any]]:
        """Runs a graph; tensors and lists of them by role."""
        spec = self.specs[name]
        feeds: dict[str, Any] = {}
        for role, values in given.items():
            names = [each["name"] for each in spec["inputs"] if each["role"] == role]
            feeds |= dict(
                zip(names, values if isinstance(values, list) else [values], strict=False)
            )
        found: dict[str, list[Any]] = {}
        for each, value in zip(spec["outputs"], self._runs[name](feeds), strict=True):
            found.setdefault(each["role"], []).append(value)
        return found


def steps(graphs: Graphs, file: Mapping[str, Any], case: int, past: int) -> dict[str, Any]:
    """Returns the tensors of a recorded case of one row or two, by their names in the file."""
    source, mask, target = (file[f"{case}/{name}"] for name in ("source", "mask", "target"))
    rows = len(source)
    if "decoder" not in graphs.specs:
        found = graphs.run("encoder", source=source, source_mask=mask)
        return {name: each[0] for name, each in found.items()}
    shapes = [e["shape"] for e in graphs.specs["decoder"]["inputs"] if e["role"] == "past"]
    cache = [np.zeros((rows, heads, 0, width), np.float32) for _, heads, _, width in shapes]
    named: dict[str, Any] = {}
    context: dict[str, Any] = {"past_mask": np.ones((rows, 0), bool)}
    if "encoder" in graphs.specs:
        cross = graphs.run("encoder", source=source, source_mask=mask)["cross"]
        context = {"source_mask": mask, "cross": cross}
    elif source.size:
        cache = graphs.run("decoder", target=source, past=cache, **context)["present"]
        context = {"past_mask": mask}
    if past:
        cache = graphs.run("decoder", target=target[:, :past], past=cache, **context)["present"]
        if "past_mask" in context:
            ones = np.ones((rows, past), bool)
            context["past_mask"] = np.concatenate([context["past_mask"], ones], 1)
    found = graphs.run("decoder", target=target[:, past:], past=cache, **context)
    named["logits"] = found["logits"][0]
    for place, tensor in enumerate(found["present"]):
        named[f"past.{place // 2}.{('keys', 'values')[place % 2]}"] = tensor
    return named


def compared(bundle: Path, kind: str, opened: Callable[[Path, Spec], Run]) -> str:
    """Opens and runs; returns the result, or raises the runtime's own error."""
    variant = "portable" if kind == "one graph" else kind
    graphs = Graphs(bundle, variant, opened)
    names = ["generate"] if kind == "one graph" else [n for n in graphs.specs if n != "generate"]
    graphs.open(*names)
    print(OPENED, flush=True)
    record = graphs.manifest["variants"][variant].get("reference") or "reference.npz"
    far = 0.0
    with np.load(bundle / record) as file:
        index = json.loads(file["index"].tobytes())
        if kind == "one graph":
            return _searched(graphs, index)
        for number, case in enumerate(index["cases"]):
            if f"{number}/rows" in file:
                continue
            mask = file[f"{number}/mask"]
            for name, tensor in steps(graphs, file, number, case["past"]).items():
                wanted = file[f"{number}/oracle/{name}"]
                off = np.abs(np.asarray(tensor, np.float64) - wanted)
                if name.startswith("past") and "encoder" not in graphs.specs:
                    off = np.swapaxes(off, 1, 2)[:, : mask.shape[1]][mask]
                elif "decoder" not in graphs.specs and off.shape[:2] == mask.shape:
                    off = off[mask]
                far = max(far, float(off.max() / np.abs(wanted).max()))
    return "equal" if far <= LIMIT else f"differs: by {far:.1e} of the largest number"


def _searched(graphs: Graphs, index: Any) -> str:
    search = next(each for each in index["searches"] if each["name"] == "greedy")
    sources = index["sources"]
    tokenizer = json.loads((graphs._bundle / "tokenizer.json").read_bytes())
    for source, answers, ends in zip(sources, search["answers"], search["ends"], strict=True):
        given: dict[str, Any] = {
            "source": np.array([source]),
            "source_mask": np.ones((1, len(source)), bool),
            "max_length": np.array([search["options"]["max_length"]]),
        }
        if "encoder" in graphs.specs:
            given["target"] = np.array([[tokenizer["special"]["bos_id"]]])
        found = graphs.run("generate", **given)
        tokens = np.asarray(found["tokens"][0])[0, : int(np.asarray(found["lengths"][0])[0])]
        wanted = [*answers[0], *([] if ends[0] is None else [ends[0]])]
        if tokens.tolist() != wanted:
            return f"differs: {tokens.tolist()[:8]} in place of {wanted[:8]}"
    return "equal"


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """Returns how far a process came, and the first words of its error without paths."""
    stage = "does not run" if OPENED in done.stdout.splitlines() else "does not open"
    *_, text = re.split(
        r"^(?=[\w.]+(?:[eE]rror|Exception|Fail|Implemented): )", done.stderr, flags=re.M
    )
    text = text.split("Diagnostics:")[-1]  # of IREE
    text = re.sub(
        r"\x1b\[\d+m|0x[0-9a-f]+|/[\w./+-]*/|Stack backtrace.*", "", " ".join(text.split())
    )
    return f"{stage}: {text[:WORDS] or f'ends with code {done.returncode}'}"


def version(name: str) -> str | None:
    """Returns the version of a runtime; None where it is absent."""
    package, distribution, _ = RUNTIMES[name]
    if not package:
        path = NPM / distribution / "package.json"
        return json.loads(path.read_bytes())["version"] if path.exists() else None
    try:
        importlib.import_module(package)
    except ImportError:
        return None
    for each in (distribution, f"{distribution}-gpu"):
        try:
            return importlib.metadata.version(each)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def main() -> None:
    """Reads the arguments, opens and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--runtime", choices=RUNTIMES, action="append")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:  # the process of one runtime and kind
        (name,), (bundle,) = arguments.runtime, arguments.bundles
        print(f"\n{compared(bundle, arguments.only, RUNTIMES[name][2])}")
        return
    for name in arguments.runtime or RUNTIMES:
        if (found := version(name)) is None:
            print(f"{name}: not installed", file=sys.stderr)
            continue
        for bundle in arguments.bundles:
            manifest = json.loads((bundle / "manifest.json").read_bytes())
            for kind in ("portable", "portable-int8", "one graph"):
                variant = manifest["variants"].get(kind.replace("one graph", "portable"))
                if variant is None or (kind == "one graph" and "generate" not in variant["graphs"]):
                    continue
                command = [sys.executable, __file__, str(bundle), "--only", kind, "--runtime", name]
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, check=False, timeout=LONGEST
                    )
                    *_, result = ["", *done.stdout.splitlines()]
                    result = failure(done) if done.returncode else result
                except subprocess.TimeoutExpired:
                    result = f"does not run: no answer within {LONGEST} s"
                row = {
                    "runtime": name,
                    "version": found,
                    "architecture": manifest["architecture"],
                    "graphs": kind,
                    "result": result,
                    "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
