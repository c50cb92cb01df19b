"""What a page would gain from weights of 8 bits: size, speed in WebAssembly, and changed texts.

Copies a bundle with its portable graphs changed: each matrix is stored as int8 with a scale for
each output, and a DequantizeLinear makes float32 of it, so that all operators are standard ones and
the loop of js/ stays. Three ways answer the lines: float32; int8 as it is; int8 with
session.disable_quant_qdq, where onnxruntime converts the weights once, as it opens the graph.

    python benchmarks/weight_only.py bundles/ende lines.en --lines 40

Needs the extra `export`, Node, and onnxruntime-web in js/ (`make js`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

JS = Path(__file__).resolve().parents[1] / "js"
GRAPHS = ("encoder", "decoder")
SMALLEST = 4096  # numbers of a matrix that is worth a scale
NODE = """
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { Engine } from "./index.js";
const [lines, ...ways] = JSON.parse(readFileSync(0, "utf8"));
const ort = createRequire(`${process.cwd()}/index.js`)("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const found = {};
for (const [name, bundle, qdq] of ways) {
  const session = { executionProviders: ["wasm"], extra: { session: { disable_quant_qdq: qdq } } };
  const engine = await Engine.load(bundle, { ort, session });
  const begun = process.cpuUsage().user;
  const texts = [];
  let tokens = 0;
  for await (const record of engine.generate(lines, { max_length: 40 })) {
    texts.push(record.text);
    tokens += record.target_tokens ?? 0;
  }
  found[name] = { texts, milliseconds: (process.cpuUsage().user - begun) / 1000 / tokens };
  await engine.close();
}
console.log(JSON.stringify(found));
"""


def output_axis(graph: Any, name: str) -> int:
    """Returns the axis of a matrix along which each output has a row or a column of its own."""
    node, place = next(
        (node, place)
        for node in graph.node
        for place, read in enumerate(node.input)
        if read == name
    )
    transposed = any(each.name == "transB" and each.i for each in node.attribute)
    return 0 if place == 0 or transposed else 1


class Store:
    """Content of weights.bin; equal tensors share a place."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.places: dict[bytes, int] = {}

    def put(self, tensor: TensorProto, raw: bytes) -> TensorProto:
        """Moves the content of a tensor into the file."""
        if raw not in self.places:
            self.content += bytes(-len(self.content) % 64)
            self.places[raw] = len(self.content)
            self.content += raw
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (
            ("location", "weights.bin"),
            ("offset", self.places[raw]),
            ("length", len(raw)),
        ):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def rounded(source: Path, store: Store) -> bytes:
    """Returns a graph with its matrices in int8."""
    model = onnx.load(source)
    graph, kept, nodes = model.graph, [], []
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim != 2 or values.dtype != np.float32 or values.size < SMALLEST:
            kept.append(store.put(tensor, values.tobytes()) if values.nbytes > 1024 else tensor)
            continue
        axis = output_axis(graph, tensor.name)
        scales = np.abs(values).max(axis=1 - axis, keepdims=True) / 127
        scales[scales == 0] = 1
        integers = np.clip(np.rint(values / scales), -127, 127).astype(np.int8)
        names = [f"{tensor.name}.{part}" for part in ("int8", "scales")]
        kept.append(store.put(numpy_helper.from_array(integers, names[0]), integers.tobytes()))
        kept.append(numpy_helper.from_array(scales.astype(np.float32).ravel(), names[1]))
        nodes.append(helper.make_node("DequantizeLinear", names, [tensor.name], axis=axis))
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)
    content: bytes = model.SerializeToString()
    return content


def smaller(bundle: Path, copy: Path) -> int:
    """Writes a copy of a bundle with rounded weights; returns the size of its weights in bytes."""
    shutil.copytree(bundle, copy)
    store = Store()
    files = {
        f"portable/{name}.onnx": rounded(bundle / "portable" / f"{name}.onnx", store)
        for name in GRAPHS
        if (bundle / "portable" / f"{name}.onnx").exists()
    }
    files["portable/weights.bin"] = bytes(store.content)
    manifest = json.loads((copy / "manifest.json").read_text())
    for name, content in files.items():
        (copy / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][name] |= {"sha256": digest, "size": len(content)}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return len(store.content)


def main() -> None:
    """Runs the three ways and prints a line for each; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--lines", type=int, default=40)
    options = parser.parse_args()
    bundle = options.bundle.resolve()
    lines = options.text.read_text(encoding="utf-8").splitlines()[: options.lines]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "bundle"
        sizes = {"float32": (bundle / "portable" / "weights.bin").stat().st_size}
        sizes["int8"] = sizes["int8, converted once"] = smaller(bundle, copy)
        places = dict(zip(sizes, ((bundle, "0"), (copy, "0"), (copy, "1")), strict=True))
        ways = [[name, str(place), qdq] for name, (place, qdq) in places.items()]
        command = ["node", "--input-type=module", "-e", NODE]
        given = json.dumps([lines, *ways])
        made = subprocess.run(
            command, cwd=JS, input=given, capture_output=True, text=True, check=True
        )
    found = json.loads(made.stdout.splitlines()[-1])
    reference = found["float32"]["texts"]
    for name, each in found.items():
        pairs = zip(each.pop("texts"), reference, strict=True)
        each |= {"bytes": sizes[name], "same": sum(one == other for one, other in pairs)}
        print(
            f"{name}: {each['bytes'] / 1e6:.1f} MB of weights, {each['milliseconds']:.1f} ms of a "
            f"core per token, {each['same']} of {len(lines)} texts as in float32"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
