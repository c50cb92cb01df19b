// The model, away from the page so that it stays responsive.

import { Engine } from "./transferry/index.js";
import { single } from "./transferry/rows.js";

const site = await (await fetch("site.json")).json();
const say = (message) => postMessage(message);
let stopped = false;

/** Opens the bundle with a provider of onnxruntime-web. */
async function open(provider) {
  const ort = await import(`./onnxruntime/ort.${provider}.min.mjs`);
  ort.env.wasm.wasmPaths = new URL("onnxruntime/", import.meta.url).href;
  // Threads need headers that a static host seldom sends.
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? navigator.hardwareConcurrency : 1;
  return Engine.load(new URL("bundle/", import.meta.url), {
    ort,
    variant: site.variant,
    session: { executionProviders: provider === "wasm" ? ["wasm"] : [provider, "wasm"] },
    progress: (read, all) => say({ read, all }),
  });
}

async function load() {
  const gpu = site.webgpu && (await navigator.gpu?.requestAdapter().catch(() => null));
  if (gpu) {
    try {
      return [await open("webgpu"), "webgpu"];
    } catch (error) {
      console.warn("WebGPU:", error); // a GPU that lacks an operation of the graphs
    }
  }
  return [await open("wasm"), "wasm"];
}

async function answer(text) {
  const [model] = await engine;
  const begun = performance.now();
  const seconds = () => `${((performance.now() - begun) / 1000).toFixed(1)} s`;
  if (site.method === "generate") {
    const steps = model.stream(text, site.generation, { longRows: "truncate" });
    let step;
    let tokens = 0;
    while (!(step = await steps.next()).done) {
      say({ text: step.value.text });
      tokens += 1;
      // Lets a message from the page in.
      await new Promise((resolve) => setTimeout(resolve));
      if (stopped) return say({ done: `Stopped after ${tokens} tokens` });
    }
    const { error, text: found, target_tokens: count } = step.value;
    if (error) return say({ failed: error.message });
    return say({ text: found, done: `${count} tokens in ${seconds()}` });
  }
  for await (const record of model[site.method]([text], { longRows: "truncate", ...site.options })) {
    if (record.error) return say({ failed: record.error.message });
    say({ text: shown(record), done: seconds() });
  }
}

/** Returns a record as text for people. */
function shown(record) {
  if (record.vector) return Array.from(record.vector, single).join(" ");
  if (record.scores) return [record.label, ...record.scores.map(labelled)].join("\n");
  if (record.tags) return record.tags.map(labelled).join("\n") || "No entity";
  const masks = record.masks.map((candidates, place) =>
    [`Mask ${place + 1}`, ...candidates.map(candidate)].join("\n"),
  );
  return [record.text, ...masks].join("\n\n");
}

/** Returns a label with its score, and the text that it is of. */
function labelled({ label, score, text }) {
  return [score, label, text].filter((each) => each !== undefined).join("  ");
}

function candidate({ text, log_probability: logProbability }) {
  return `${Math.exp(logProbability)}  ${text}`;
}

const fail = (fatal) => (error) => say({ failed: error.message, fatal });
const engine = load();
engine.then(([, provider]) => say({ ready: provider === "webgpu" ? "WebGPU" : "WebAssembly" }), fail(true));

onmessage = ({ data }) => {
  if (data.stop) stopped = true;
  else {
    stopped = false;
    answer(data.run).catch(fail(false));
  }
};
