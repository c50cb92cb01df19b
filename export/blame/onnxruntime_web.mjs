// Runs the graphs of a bundle in onnxruntime-web, for NodeBackend in backends.py: a line of JSON on
// stdin is a request, a line of JSON on stdout its reply. Tensors are base64 of little-endian bytes.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, join } from "node:path";
import { createInterface } from "node:readline";

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

// stdout belongs to the replies.
console.log = console.info = console.debug = console.error;

// From the user's folder, not from this file's; and require() heeds NODE_PATH, which import does not.
const require = createRequire(join(process.cwd(), "here.cjs"));
const sessions = {};
let ort;

function load() {
  try {
    return require("onnxruntime-web");
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
    throw new Error(
      "no npm package onnxruntime-web here or in NODE_PATH; `npm install onnxruntime-web`",
    );
  }
}

async function open({ graphs, weights }) {
  ort = load();
  ort.env.wasm.numThreads = 1;
  const externalData = [{ path: basename(weights), data: readFileSync(weights) }];
  for (const [name, file] of Object.entries(graphs)) {
    sessions[name] = await ort.InferenceSession.create(readFileSync(file), {
      executionProviders: ["wasm"],
      externalData,
    });
  }
  return { version: ort.env.versions.web };
}

async function run({ graph, feeds, wanted }) {
  const tensors = {};
  for (const [name, { type, shape, data }] of Object.entries(feeds)) {
    if (!(type in ARRAYS)) throw new Error(`no array in JavaScript for ${name} of type ${type}`);
    // Copied: a Buffer may begin anywhere in its memory, a typed array may not.
    const { buffer } = new Uint8Array(Buffer.from(data, "base64"));
    tensors[name] = new ort.Tensor(type, new ARRAYS[type](buffer), shape);
  }
  const results = await sessions[graph].run(tensors, wanted);
  const outputs = wanted.map((name) => {
    const { type, dims, data } = results[name];
    const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
    return { type, shape: dims, data: bytes.toString("base64") };
  });
  return { outputs };
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let reply;
  try {
    reply = await (request.graphs ? open : run)(request);
  } catch (error) {
    reply = { error: String(error?.message ?? error) };
  }
  process.stdout.write(JSON.stringify(reply) + "\n");
}
