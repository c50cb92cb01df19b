// Texts in, records out: the records that `transferry run` writes as lines of JSON.

import { Bundle } from "./bundle.js";
import { DEFAULTS, generationOptions } from "./decoding/options.js";
import { UsageError } from "./errors.js";
import { Decoder } from "./ort/decoder.js";
import { Graph, loadOnnxRuntime } from "./ort/graph.js";
import { classify, rank, tag } from "./tasks/classify.js";
import { embed } from "./tasks/embed.js";
import { fillMask } from "./tasks/fill_mask.js";
import { generate } from "./tasks/generate.js";
import { score } from "./tasks/score.js";

/** A bundle with its graphs open. */
export class Engine {
  /** @private use `Engine.load` */
  constructor(bundle, ort, graphs) {
    this.bundle = bundle;
    this.ort = ort;
    this.graphs = graphs;
    this.decoder = "decoder" in graphs ? new Decoder(ort, graphs, bundle.manifest.model) : null;
    this.positions = bundle.manifest.model.max_positions;
  }

  /**
   * Opens a bundle and its graphs.
   *
   * @param {string | URL | object} place see `Bundle.open`
   * @param {object} [options] variant: "portable" by default; ort: onnxruntime; session: its session
   *   options; progress: called with bytes read and bytes in all; tokenizer: see `Bundle.open`;
   *   specialTokens: meaning of text such as "</s>": "as-text" by default, or "as-tokens"
   * @returns {Promise<Engine>}
   */
  static async load(place, { variant = "portable", ort, session, progress, tokenizer, specialTokens } = {}) {
    if (![undefined, "as-text", "as-tokens"].includes(specialTokens)) {
      throw new UsageError(`specialTokens must be as-text or as-tokens, found ${specialTokens}`);
    }
    const bundle = place instanceof Bundle ? place : await Bundle.open(place, { tokenizer });
    if (specialTokens === "as-tokens") bundle.tokenizer.readSpecialTokens();
    const chosen = bundle.variant(variant);
    ort ??= await loadOnnxRuntime();
    const all = bundle.graphFiles(chosen).reduce((sum, file) => sum + bundle.manifest.files[file].size, 0);
    const files = new Map();
    let read = 0;
    const checked = async (name) => {
      if (!files.has(name)) {
        files.set(name, await bundle.read(name, (bytes) => progress?.((read += bytes), all)));
      }
      return files.get(name);
    };
    const graphs = {};
    for (const [name, spec] of bundle.steps(chosen)) {
      graphs[name] = await Graph.open(ort, bundle, spec, checked, session ?? {});
    }
    return new Engine(bundle, ort, graphs);
  }

  /** Returns the tasks of the bundle. */
  get tasks() {
    if (this.decoder) return ["generate", "score"];
    const { manifest, tokenizer } = this.bundle;
    const tasks = tokenizer.special.mask === null ? ["embed"] : ["embed", "fill-mask"];
    const { task = "embed", labels = [] } = manifest.head ?? {};
    if (task === "classify" || task === "tag") tasks.push(task);
    if (task === "classify" && labels.length === 1) tasks.push("rank");
    return tasks;
  }

  /** Returns generation options: the bundle's, with these fields changed. */
  options(values = {}) {
    const encode = (text) => this.bundle.tokenizer.encodeTarget(text);
    const base = { ...DEFAULTS, ...this.bundle.manifest.generation };
    return generationOptions(values, base, encode);
  }

  /**
   * Generates an answer to each text, in order.
   *
   * @param {Iterable<string | number[]>} texts texts, or lists of token ids that the model reads
   * @param {object} [values] fields of the generation options
   * @param {object} [how] firstRow, longRows, sourceLanguage, targetLanguage
   */
  async *generate(texts, values = {}, { firstRow = 0, ...how } = {}) {
    checkSeveral(texts);
    let row = firstRow;
    for (const text of texts) {
      const steps = this.stream(text, values, { ...how, row: row++ });
      let step;
      do step = await steps.next();
      while (!step.done);
      yield step.value;
    }
  }

  /**
   * Generates an answer to one text; yields its text as it grows, and returns the record.
   *
   * With beams the text is the likeliest beam's, perhaps another beam a step later.
   *
   * @param {string | number[]} text
   * @param {object} [values] fields of the generation options
   * @param {object} [how] see tasks/generate.js
   */
  async *stream(text, values = {}, how = {}) {
    if (!this.decoder) throw new UsageError(`the bundle generates nothing; its tasks are ${this.tasks.join(", ")}`);
    return yield* generate(this, text, this.options(values), how);
  }

  /** Scores pairs of source and target, or texts, in order; see tasks/score.js. */
  score(rows, options) {
    return this.#each(score, rows, options);
  }

  /** Fills the masks of each text, in order; see tasks/fill_mask.js. */
  fillMask(texts, options) {
    return this.#each(fillMask, texts, options);
  }

  /** Embeds each text, in order; see tasks/embed.js. */
  embed(texts, options) {
    return this.#each(embed, texts, options);
  }

  /** Scores the labels of texts or pairs of texts, in order; see tasks/classify.js. */
  classify(rows, options) {
    return this.#each(classify, rows, options);
  }

  /** Scores pairs of texts, in order; see tasks/classify.js. */
  rank(pairs, options) {
    return this.#each(rank, pairs, options);
  }

  /** Refuses task answer, which the Python engine has. */
  answer() {
    throw new UsageError("there is no task answer in JavaScript; answer with the Python engine");
  }

  /** Scores the labels of the tokens of texts, in order; see tasks/classify.js. */
  tag(texts, options) {
    return this.#each(tag, texts, options);
  }

  async *#each(task, rows, options) {
    checkSeveral(rows);
    for (const row of rows) yield await task(this, row, options);
  }

  /** Frees the memory of the graphs. */
  async close() {
    for (const graph of Object.values(this.graphs)) await graph.session.release();
  }
}

function checkSeveral(texts) {
  if (typeof texts === "string" || typeof texts?.[Symbol.iterator] !== "function") {
    throw new UsageError("texts must be several, such as a list");
  }
}
