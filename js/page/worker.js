// The model, away from the page so that it stays responsive.

import { Engine } from "./transferry/engine.js";
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
    sentences,
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

/** Answers a text, and says what of it was not read. */
async function answer(text) {
  const [model] = await engine;
  const begun = performance.now();
  const notes = await (site.method === "generate" ? generate(model, text) : answerLines(model, text));
  if (notes) say({ done: [`${((performance.now() - begun) / 1000).toFixed(1)} s`, ...notes].join(". ") });
}

/** Lets a message from the page in; returns whether it stops the answer. */
async function isStopped() {
  await new Promise((resolve) => setTimeout(resolve));
  return stopped;
}

/** Generates; a text that is too long for the model is answered in pieces. */
async function generate(model, text) {
  const { tokenizer } = model.bundle;
  const isLong = (line) => tokenizer.special.wrap(tokenizer.encode(line)).length > model.positions;
  const byLine = model.options(site.generation).split_lines ?? true;
  const splits = model.decoder.hasEncoder && (byLine ? text.split(/\r\n?|\n/) : [text]).some(isLong);
  const [values, longRows] = splits ? [{ ...site.generation, n_best: 1 }, "split"] : [site.generation, "error"];
  const steps = model.stream(text, values, { longRows });
  let step;
  while (!(step = await steps.next()).done) {
    say({ text: step.value.text });
    if (await isStopped()) return ["Stopped"];
  }
  const { error, text: found, target_tokens: count, finish_reason: reason } = step.value;
  if (error) return void say({ failed: error.message });
  say({ text: found });
  const notes = [`${count} tokens`];
  if (splits) notes.push("Answered in pieces, since it has more tokens than the model reads at once");
  if (reason === "length") notes.push("The answer ends at the limit on its tokens");
  return notes;
}

/** Returns the sentences of a text. */
function sentences(text) {
  if (!Intl.Segmenter) return text.split(/(?<=[.!?] )/);
  return Array.from(new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(text), ({ segment }) => segment);
}

/** Answers each line as a text of its own; the first is compared with the others where a task does so. */
async function answerLines(model, text) {
  const lines = text.split(/\r\n?|\n/).filter((line) => line.trim());
  const [first, ...others] = lines;
  const { template = [] } = model.bundle.manifest.head ?? {};
  const joins = template.length > 0 || model.bundle.tokenizer.special.joinsPairs;
  const ranks = site.method === "rank" && joins && others.length > 0;
  if (template.length && !ranks) return void say({ failed: site.input });
  const method = site.method === "rank" && !ranks ? "classify" : site.method;
  const compares = ranks || (method === "embed" && others.length > 0);
  const rows = ranks ? others.map((other) => [first, other]) : lines.length ? lines : [text];
  const records = [];
  for await (const record of model[method](rows, { longRows: "truncate", ...site.options })) {
    records.push(record);
    if (await isStopped()) return ["Stopped"];
    if (compares) continue;
    if (rows.length === 1 && record.error) return void say({ failed: record.error.message });
    say({ lines: records.flatMap((each, row) => [...(rows.length > 1 ? [[`${row ? "\n" : ""}${rows[row]}`]] : []), ...shown(each)]) });
  }
  if (compares) {
    const scores = ranks ? records.map(({ score }) => score) : likenesses(records);
    const best = others.map((other, row) => [scores[row], other]).filter(([score]) => score !== undefined);
    say({ lines: best.sort(([one], [two]) => two - one).map(([score, other]) => [`${score.toFixed(4)}  ${other}`, score]) });
  }
  const count = (kind) => records.filter((record) => record[kind]).length;
  const notes = rows.length > 1 ? [`${rows.length} texts`] : [];
  if (count("truncated")) notes.push(`${count("truncated")} of ${rows.length} cut to the tokens that the model reads`);
  if (count("error")) notes.push(`${count("error")} without an answer`);
  return notes;
}

/** Returns the cosines of the first vector with the others; undefined without one. */
function likenesses([{ vector: query }, ...others]) {
  const dot = (one, other) => one.reduce((sum, value, place) => sum + value * other[place], 0);
  const length = (vector) => Math.sqrt(dot(vector, vector)) || 1;
  return others.map(({ vector }) => vector && query && dot(query, vector) / length(query) / length(vector));
}

/** Returns a record as lines for people, some with a share that is drawn as a bar. */
function shown(record) {
  if (record.error) return [[record.error.message]];
  if (record.vector) return [[Array.from(record.vector, single).join(" ")]];
  if (record.scores) return [...(record.label ? [[record.label]] : []), ...record.scores.map(labelled)];
  if (record.tags) return record.tags.length ? record.tags.map(labelled) : [["No entity"]];
  const masks = record.masks.flatMap((candidates, place) => [["\nMask " + (place + 1)], ...candidates.map(candidate)]);
  return [[record.text], ...masks];
}

/** Returns a label with its score, and the text that it is of. */
function labelled({ label, score, text }) {
  return [[score, label, text].filter((each) => each !== undefined).join("  "), score];
}

function candidate({ text, log_probability: logProbability }) {
  return [`${Math.exp(logProbability)}  ${text}`, Math.exp(logProbability)];
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
