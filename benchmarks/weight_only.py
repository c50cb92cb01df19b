"""What a page gains from variant portable-int8: size, speed in WebAssembly, and changed texts.

    transferry export RUN --out BUNDLE --variant portable-int8
    python benchmarks/weight_only.py BUNDLE lines.en --lines 40

Three ways answer the lines in Node, one thread, through js/: `portable`; `portable-int8` as js/
opens it, so that onnxruntime converts the weights once; and with the weights converted in every
run. The last line is JSON. Needs Node, and onnxruntime-web in js/ (`make js`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from transferry.runtime.bundle.bundle import Bundle

JS = Path(__file__).resolve().parents[1] / "js"
# By name: the variant, and whether what js/ asks of onnxruntime is undone.
WAYS = {
    "portable": ("portable", False),
    "portable-int8": ("portable-int8", False),
    "portable-int8, converted in every run": ("portable-int8", True),
}
NODE = """
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { Engine } from "./index.js";
const [bundle, lines, ways] = JSON.parse(readFileSync(0, "utf8"));
const ort = createRequire(`${process.cwd()}/index.js`)("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const create = ort.InferenceSession.create.bind(ort.InferenceSession);
const found = {};
for (const [name, [variant, undone]] of Object.entries(ways)) {
  ort.InferenceSession.create = (graph, options) => {
    if (undone) options.extra.session.disable_quant_qdq = "0";
    return create(graph, options);
  };
  const session = { executionProviders: ["wasm"] };
  const engine = await Engine.load(bundle, { ort, variant, session });
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


def main() -> None:
    """Runs the three ways and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--lines", type=int, default=40)
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle.resolve())
    lines = options.text.read_text(encoding="utf-8").splitlines()[: options.lines]
    made = subprocess.run(
        ["node", "--input-type=module", "-e", NODE],
        cwd=JS,
        input=json.dumps([str(bundle.folder), lines, WAYS]),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(made.stdout.splitlines()[-1])
    reference = found["portable"]["texts"]
    for name, each in found.items():
        pairs = zip(each.pop("texts"), reference, strict=True)
        weights = bundle.manifest.files[f"{WAYS[name][0]}/weights.bin"].size
        each |= {"bytes": weights, "same": sum(one == other for one, other in pairs)}
        print(
            f"{name}: {weights / 1e6:.1f} MB of weights, {each['milliseconds']:.1f} ms of a core "
            f"per token, {each['same']} of {len(lines)} texts as in float32"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
