// The manifest of a bundle: its fields and their consistency, as in runtime/bundle/manifest.py.

import { DEFAULTS, generationOptions } from "./decoding/options.js";
import { check, parse } from "./document.js";
import { InputError, shown } from "./errors.js";
import { ANSWERS, FORMAT, GRAPHS, IN_PLACE } from "./schema.js";

const NAME = "manifest.json";
const BYTES = { int8: 1, int32: 4, float32: 4 };

/**
 * Parses manifest.json.
 *
 * @param {Uint8Array} content
 * @returns {object} with defaults filled in
 * @throws {InputError} for text that is not JSON, inconsistent, or of another format version
 */
export function parseManifest(content) {
  const manifest = parse(content, NAME);
  if (manifest.format !== FORMAT) {
    throw new InputError(
      `${NAME} has bundle format ${shown(manifest.format)}, but this package reads format ` +
        `${FORMAT}; export the bundle again, or install the version that wrote it`,
    );
  }
  check(manifest, "Manifest", NAME);
  check(manifest.model, "ModelLimits", `${NAME}: model`);
  const refuse = (problem) => {
    throw new InputError(`${NAME}: ${problem}; export the bundle again`);
  };
  for (const problem of problems(manifest)) refuse(problem);
  let options;
  try {
    options = generationOptions(manifest.generation);
  } catch (error) {
    refuse(`generation: ${error.message}`);
  }
  const { max_positions: positions } = manifest.model;
  if (manifest.architecture !== "encoder-only" && options.max_length > positions) {
    refuse(`generation: max_length is ${options.max_length}, but the model has ${positions} positions`);
  }
  return manifest;
}

/** Yields reasons why a variant cannot run, or a file has no hash. */
function* problems(manifest) {
  const { architecture, variants, files, head } = manifest;
  for (const [name, variant] of Object.entries(variants)) {
    for (const problem of ofVariant(name, variant, manifest)) yield `variant '${name}' ${problem}`;
    const { graphs, reference, screen } = variant;
    for (const { file } of [...Object.values(graphs), { file: reference }, ...Object.values(screen ?? {})]) {
      if (!Object.hasOwn(files, file)) yield `'${file}' of variant '${name}' is not among its files`;
    }
    for (const [key, { file, offset, type, shape }] of Object.entries(screen ?? {})) {
      const end = shape.reduce((product, size) => product * size, BYTES[type]) + offset;
      if (end > files[file].size || offset % BYTES[type]) {
        yield `weight '${key}' of variant '${name}' does not lie inside '${file}'`;
      }
    }
  }
  const names = Object.keys(files);
  if (new Set(names.map((name) => name.toLowerCase())).size < names.length) yield "two of its files differ in case alone";
}

function* ofVariant(name, variant, { architecture, head }) {
  const alone = architecture === "encoder-only";
  const { graphs, cache } = variant;
  if (Object.hasOwn(graphs, "generate")) {
    const roles = graphs.generate.outputs.map(({ role }) => role).join();
    const known = [ANSWERS, [...ANSWERS, "scores"]].map(String);
    if (alone || cache?.in_place || !known.includes(roles)) yield "cannot have such a graph 'generate'";
  }
  if (name !== variant.name) yield `calls itself '${variant.name}'`;
  if ((cache === null) !== alone) yield "must say what its KV cache is";
  if (cache?.kind === "state" && architecture !== "encoder-decoder") {
    yield "cannot have a recurrent state: it has no encoder";
  }
  for (const graph of requiredGraphs(variant, architecture)) {
    if (!Object.hasOwn(graphs, graph)) yield `has no graph '${graph}'`;
  }
  if (head) yield* ofHead(head, variant);
  for (const { role, name: output, shape } of Object.values(graphs).flatMap(({ outputs }) => outputs)) {
    if (["logits", "hidden"].includes(role) && typeof shape.at(-1) !== "number") {
      yield `has an output '${output}' without a fixed width`;
    }
  }
}

function requiredGraphs({ cache, top_k: topK, screen }, architecture) {
  const graphs = (cache?.in_place ? IN_PLACE : GRAPHS)[architecture];
  return [
    ...graphs.filter((name) => name !== "gather" || cache.kind !== "state"),
    ...(cache?.type === "int8" ? ["dequantise"] : []),
    ...(topK ? ["top_k"] : []),
    ...(Object.keys(screen ?? {}).length ? ["approximate_logits", "segment_maxima"] : []),
  ];
}

/** Yields mismatches between a graph and the head's settings. */
function* ofHead({ task, labels, vectors, default_prompt: usual, prompts, sides }, { graphs }) {
  const outputs = Object.hasOwn(graphs, "encoder") ? graphs.encoder.outputs : [];
  const [shape, ...others] = outputs.filter(({ role }) => role === "head").map((output) => output.shape);
  const rank = ["tag", "answer"].includes(task) || vectors === "tokens" ? 3 : 2;
  const width = shape?.at(-1);
  if (others.length || shape?.length !== rank || typeof width !== "number") {
    yield `gives no scores or vectors for task ${task}`;
  }
  if (task !== "embed" && vectors !== "dense") yield `gives scores for task ${task}, and no ${vectors} vectors`;
  if (task !== "embed" && width !== labels.length) yield `gives ${width} scores, and there are ${labels.length} labels`;
  if (usual && !Object.hasOwn({ ...prompts, ...sides }, usual)) yield `has no prompt '${usual}'`;
}
