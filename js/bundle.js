// The bundle: its manifest, its files checked against their hashes, and its tokenizer.

import { parse } from "./document.js";
import { checkNames, InputError, UsageError, shown } from "./errors.js";
import { parseManifest } from "./manifest.js";
import { sourceOf } from "./source.js";
import { FORMAT, MOST_JSON } from "./schema.js";
import { openTokenizer, tokenizerFiles } from "./tokenizer/tokenizer.js";

export { FORMAT };
// Rows are taken in ort/decoder.js, and "generate" is a search of its own.
const UNUSED = ["select", "generate"];

/** A bundle: only bytes that match the manifest are ever used. */
export class Bundle {
  /**
   * @param {object} source where the files are, see source.js
   * @param {object} manifest content of manifest.json
   * @param {object} tokenizer see tokenizer/tokenizer.js
   */
  constructor(source, manifest, tokenizer) {
    this.source = source;
    this.manifest = manifest;
    this.tokenizer = tokenizer;
  }

  /**
   * Opens a bundle: reads its manifest and its tokenizer. Graphs are read when an engine opens.
   *
   * @param {string | URL | object} place folder (Node), URL, or any object with `read(name)`
   * @param {{tokenizer?: object, signal?: AbortSignal}} [options] `tokenizer` replaces that of the
   *   bundle, see README.md
   * @returns {Promise<Bundle>}
   */
  static async open(place, options = {}) {
    checkNames(options, ["tokenizer", "signal"]);
    const { tokenizer, signal } = options;
    const source = sourceOf(place);
    const content = await source.read("manifest.json", undefined, { most: MOST_JSON, signal });
    const manifest = parseManifest(content);
    const bundle = new Bundle(source, manifest, tokenizer);
    const settings = parse(await bundle.read("tokenizer.json", undefined, { signal }), "tokenizer.json");
    const contents = {};
    if (!tokenizer) {
      for (const name of tokenizerFiles(settings)) contents[name] = await bundle.read(name, undefined, { signal });
    }
    bundle.settings = settings;
    bundle.tokenizer = openTokenizer(settings, contents, tokenizer);
    const size = manifest.model.vocabulary_size;
    if (bundle.tokenizer.vocabularySize !== size) {
      throw new InputError(
        `expected a tokenizer of ${size} ids as in manifest.json, found ` +
          `${bundle.tokenizer.vocabularySize}; export the bundle again`,
      );
    }
    return bundle;
  }

  /**
   * Reads a file that the manifest lists, and checks its size and sha256.
   *
   * @param {string} name path in the bundle
   * @param {(bytes: number) => void} [progress]
   * @param {{signal?: AbortSignal}} [options]
   * @returns {Promise<Uint8Array>}
   */
  async read(name, progress, { signal } = {}) {
    const record = Object.hasOwn(this.manifest.files, name) ? this.manifest.files[name] : null;
    if (!record) throw new InputError(`manifest.json does not list ${name}; export the bundle again`);
    const content = await this.source.read(name, progress, { most: record.size, signal });
    const found = await sha256(content);
    if (found !== record.sha256) {
      throw new InputError(
        `${name} is not the file that was exported: expected ${record.size} bytes of sha256 ` +
          `${record.sha256.slice(0, 16)}, found ${content.length} of ${found.slice(0, 16)}; copy ` +
          "the bundle again",
      );
    }
    return content;
  }

  /** Returns the chat template as `encodeChat` takes it; null without one. */
  async chat(render) {
    if (!this.settings.chat) return null;
    const source = new TextDecoder().decode(await this.read("chat_template.jinja"));
    return { source, ...this.settings.chat, render };
  }

  /**
   * Returns a variant whose graphs any runtime can run.
   *
   * @param {string} name
   */
  variant(name) {
    const { variants } = this.manifest;
    if (!Object.hasOwn(variants, name)) {
      throw new UsageError(
        `the bundle has no variant ${shown(name)}; it has ${Object.keys(variants).join(", ")}`,
      );
    }
    const { cache, graphs, precision } = variants[name];
    if (cache?.in_place || precision === "int8-kernels") {
      const why = cache?.in_place ? "keeps its cache in place" : "has operators of transferry-kernels";
      throw new UsageError(`variant ${name} ${why}, which this package does not run; choose portable`);
    }
    const problem = Object.entries(graphs).map(([graph, spec]) => defect(graph, spec)).find(Boolean);
    if (problem) throw new InputError(`manifest.json: variant ${name}: ${problem}; export the bundle again`);
    return variants[name];
  }

  /** Returns names and specifications of the graphs that a search here drives. */
  steps(variant) {
    return Object.entries(variant.graphs).filter(([name]) => !UNUSED.includes(name));
  }

  /** Returns the names of the files that graphs of a variant need: graphs and weights. */
  graphFiles(variant) {
    const files = this.steps(variant).map(([, graph]) => graph.file);
    const weights = new Set(files.map((file) => weightsOf(file)));
    return [...files, ...weights].filter((file) => Object.hasOwn(this.manifest.files, file));
  }
}

/** Returns the path of the weights beside a graph. */
export function weightsOf(file) {
  return file.replace(/[^/]*$/, "weights.bin");
}

async function sha256(content) {
  if (!globalThis.crypto?.subtle) {
    throw new UsageError(
      "hashes cannot be checked here: browsers have WebCrypto on https and localhost only",
    );
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const MOST_NUMBERS = 2 ** 28; // of a state before the first token
// Roles of inputs and outputs of the graphs that are run here.
const ROLES = {
  encoder: [["source", "source_mask"], ["cross", "hidden", "logits", "head"]],
  decoder: [
    ["target", "past", "past_mask", "cross", "source_mask"],
    ["logits", "present"],
  ],
};

/** Returns what a graph takes or gives that is not known here; "" without such. */
function defect(name, { inputs, outputs }) {
  if (!Object.hasOwn(ROLES, name)) return "";
  const [taken, given] = ROLES[name];
  const strange = inputs.find(({ role }) => !taken.includes(role)) ?? outputs.find(({ role }) => !given.includes(role));
  if (strange) return `graph ${name} has ${strange.name} of role ${strange.role}`;
  const has = (list, role) => list.some((each) => each.role === role);
  if (!taken.slice(0, 2).every((role) => has(inputs, role))) return `graph ${name} lacks inputs ${taken.slice(0, 2).join(", ")}`;
  if (name === "decoder" && !given.every((role) => has(outputs, role))) return "graph decoder lacks logits or present";
  const ranks = { logits: 3, past: 4, present: 4, cross: 4, target: 2, source: 2 };
  const odd = [...inputs, ...outputs].find(({ role, shape }) => Object.hasOwn(ranks, role) && shape.length !== ranks[role]);
  if (odd) return `${odd.name} has ${odd.shape.length} dimensions`;
  const sizes = [...inputs, ...outputs].flatMap(({ role, shape }) =>
    role === "logits" ? [shape[2]] : role === "past" ? [shape[1], shape[3], shape[1] * shape[3] * (Number(shape[2]) || 1)] : [],
  );
  const wrong = sizes.find((size) => !(size <= MOST_NUMBERS));
  return wrong === undefined ? "" : `graph ${name} has a size of ${shown(wrong)}, expected a number up to ${MOST_NUMBERS}`;
}
