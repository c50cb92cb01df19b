// Texts in, records out: the records that `transferry run` writes as lines of JSON.

import { Bundle } from "./bundle.js";
import { DEFAULTS, generationOptions } from "./decoding/options.js";
import { checkNames, shown, UsageError } from "./errors.js";
import { Decoder, Rounds } from "./ort/decoder.js";
import { Encoder, Graph } from "./ort/graph.js";
import { loadOnnxRuntime } from "./devices.js";
import { checkedText, checkedTexts, checkLongRows, requirePair } from "./rows.js";
import { classify, rank, tag } from "./tasks/classify.js";
import { embed } from "./tasks/embed.js";
import { fillMask } from "./tasks/fill_mask.js";
import { checkedPrompt, generate } from "./tasks/generate.js";
import { score } from "./tasks/score.js";

// Options of a row, and of each task besides.
const ROW = ["longRows", "signal"];
const LANGUAGES = ["sourceLanguage", "targetLanguage"];
const OF_ANSWERS = [...LANGUAGES, "chatTemplateKwargs"];
const LOADING = ["variant", "device", "ort", "session", "progress", "tokenizer", "specialTokens", "sentences", "chat", "signal"];
const GENERATING = ["error", "truncate", "split"];

/** A bundle with its graphs open. */
export class Engine {
  #closed = null;

  /** @private use `Engine.load` */
  constructor(bundle, ort, graphs, { sentences, chat }) {
    this.bundle = bundle;
    this.ort = ort;
    this.graphs = graphs;
    this.sentences = sentences;
    this.chat = chat;
    this.decoder = "decoder" in graphs ? new Decoder(ort, graphs, bundle.manifest.model) : null;
    this.encoder = new Encoder(ort, graphs);
    this.positions = bundle.manifest.model.max_positions;
  }

  /**
   * Opens a bundle and its graphs.
   *
   * @param {string | URL | object} place see `Bundle.open`
   * @param {object} [options] variant: "portable" by default; device: see `loadOnnxRuntime`; ort:
   *   onnxruntime in place of it; session: its session options; progress: called with bytes read,
   *   bytes in all, and the file, its size and the bytes read of it; tokenizer: see `Bundle.open`;
   *   specialTokens: meaning of text such as "</s>": "as-text" by default, or "as-tokens"; sentences:
   *   a function from a text to its sentences, for longRows "split"; chat: a function from a chat
   *   template and its variables to text; signal: an AbortSignal
   * @returns {Promise<Engine>}
   */
  static async load(place, options = {}) {
    checkNames(options, LOADING);
    const { variant = "portable", device, session, progress, tokenizer, specialTokens, signal } = options;
    if (![undefined, "as-text", "as-tokens"].includes(specialTokens)) {
      throw new UsageError(`specialTokens must be as-text or as-tokens, found ${shown(specialTokens)}`);
    }
    if (options.ort && device !== undefined) {
      throw new UsageError("device has no effect with ort: leave one out");
    }
    const bundle = place instanceof Bundle ? place : await Bundle.open(place, { tokenizer, signal });
    if (specialTokens === "as-tokens") bundle.tokenizer.readSpecialTokens();
    const chosen = bundle.variant(variant);
    const { ort, ...found } = options.ort ? { ort: options.ort } : await loadOnnxRuntime(device);
    const { files } = bundle.manifest;
    const all = bundle.graphFiles(chosen).reduce((sum, file) => sum + files[file].size, 0);
    const contents = new Map();
    let read = 0;
    const checked = async (name) => {
      let loaded = 0;
      const told = (bytes) => {
        [read, loaded] = [read + bytes, loaded + bytes];
        progress?.(read, all, { file: name, loaded, total: files[name].size });
      };
      if (!contents.has(name)) contents.set(name, await bundle.read(name, told, { signal }));
      return contents.get(name);
    };
    const graphs = {};
    try {
      for (const [name, spec] of bundle.steps(chosen)) {
        graphs[name] = await Graph.open(ort, bundle, spec, checked, { ...found.session, ...session });
      }
    } catch (error) {
      for (const graph of Object.values(graphs)) await graph.close();
      throw error;
    }
    const chat = options.chat && (await bundle.chat(options.chat));
    return new Engine(bundle, ort, graphs, { ...options, chat });
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
   * @param {Iterable | AsyncIterable} texts texts, lists of messages, or lists of token ids that the model reads
   * @param {object} [values] fields of the generation options
   * @param {object} [how] firstRow, batch (rows at a time, 1 by default), longRows, sourceLanguage,
   *   targetLanguage, chatTemplateKwargs, signal
   */
  async *generate(texts, values = {}, how = {}) {
    this.#check(how, ["firstRow", "batch", ...OF_ANSWERS], GENERATING);
    const { firstRow: first = 0, batch, ...rest } = how;
    let row = checkRow(first, "firstRow");
    for await (const rows of batches(texts, batch, checkedPrompt)) {
      this.#check(rest, OF_ANSWERS, GENERATING);
      this.#requireDecoder();
      const options = this.options(values);
      yield* await this.#together(rows, async (engine, text) => {
        const steps = generate(engine, text, options, { ...rest, row: row++ });
        let step;
        do step = await steps.next();
        while (!step.done);
        return step.value;
      });
    }
  }

  /** Answers rows side by side, so that the steps of their decoders share runs. */
  #together(rows, answer) {
    if (rows.length === 1 || !this.decoder) return Promise.all(rows.map((row) => answer(this, row)));
    const rounds = new Rounds(this.decoder, rows.length);
    const engine = Object.create(this, { decoder: { value: rounds } });
    return Promise.all(rows.map((row) => answer(engine, row).finally(() => rounds.leave())));
  }

  #requireDecoder() {
    if (!this.decoder) throw new UsageError(`the bundle generates nothing; its tasks are ${this.tasks.join(", ")}`);
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
    this.#check(how, ["row", ...OF_ANSWERS], GENERATING);
    checkRow(how.row ?? 0, "row");
    this.#requireDecoder();
    return yield* generate(this, checkedPrompt(text, 1), this.options(values), how);
  }

  /** Scores pairs of source and target, or texts, in order; see tasks/score.js. */
  score(rows, options) {
    const read = (row, number) => {
      if (this.decoder?.hasEncoder || typeof row !== "string") requirePair(row);
      return checkedTexts(row, number);
    };
    return this.#each(score, rows, options, [...LANGUAGES, "batch"], read);
  }

  /** Fills the masks of each text, in order; see tasks/fill_mask.js. */
  fillMask(texts, options) {
    return this.#each(fillMask, texts, options, ["mask", "top", "batch"]);
  }

  /** Embeds each text, in order; see tasks/embed.js. */
  embed(texts, options) {
    return this.#each(embed, texts, options, ["pooling", "normalise", "prompt", "batch"]);
  }

  /** Scores the labels of texts or pairs of texts, in order; see tasks/classify.js. */
  classify(rows, options) {
    return this.#each(classify, rows, options, ["batch"], checkedTexts);
  }

  /** Scores pairs of texts, in order; see tasks/classify.js. */
  rank(pairs, options) {
    const read = (pair, number) => {
      requirePair(pair);
      return pair.map((text) => checkedText(text, number));
    };
    return this.#each(rank, pairs, options, ["batch"], read);
  }

  /** Refuses task answer, which the Python engine has. */
  answer() {
    throw new UsageError("there is no task answer in JavaScript; answer with the Python engine");
  }

  /** Scores the labels of the tokens of texts, in order; see tasks/classify.js. */
  tag(texts, options) {
    return this.#each(tag, texts, options, ["aggregation", "batch"]);
  }

  async *#each(task, rows, options = {}, names = [], read = checkedText) {
    this.#check(options, names);
    const { batch, signal, ...rest } = options;
    for await (const each of batches(rows, batch, read)) {
      this.#check({ signal });
      // Rows that are begun together reach the encoder together.
      yield* await this.#together(each, async (engine, row) => task(engine, row, rest));
    }
  }

  /** Throws for options that do not exist, an aborted signal, and a closed engine. */
  #check(how, names = [], longRows) {
    checkNames(how, [...ROW, ...names]);
    checkLongRows(how.longRows, longRows);
    how.signal?.throwIfAborted();
    if (this.#closed) throw new UsageError("the engine is closed; load the bundle again");
  }

  /** Frees the memory of the graphs, once what runs on them has ended. */
  close() {
    this.#closed ??= Promise.all(Object.values(this.graphs).map((graph) => graph.close())).then(() => {});
    return this.#closed;
  }

  /** Closes the engine at the end of a block: `await using engine = ...`. */
  [Symbol.asyncDispose ?? Symbol.for("Symbol.asyncDispose")]() {
    return this.close();
  }
}

/** Yields lists of at most `size` rows; `read` checks a row, given its number from 1. */
async function* batches(rows, size = 1, read) {
  const iterates = typeof (rows?.[Symbol.asyncIterator] ?? rows?.[Symbol.iterator]) === "function";
  if (typeof rows === "string" || !iterates) throw new UsageError("texts must be several, such as a list");
  if (!Number.isSafeInteger(size) || size < 1) throw new UsageError(`batch must be at least 1, found ${shown(size)}`);
  let waiting = [];
  let number = 0;
  for await (const row of rows) {
    if (waiting.push(read(row, ++number)) === size) yield waiting.splice(0);
  }
  if (waiting.length) yield waiting;
}

function checkRow(row, name) {
  if (!(Number.isSafeInteger(row) && row >= 0)) throw new UsageError(`${name} must be a whole number from 0, found ${shown(row)}`);
  return row;
}

/**
 * Opens a bundle for a task.
 *
 * @param {string} task "generate", "score", "embed", "fill-mask", "classify", "rank" or "tag"
 * @param {string | URL | object} place see `Bundle.open`
 * @param {object} [options] see `Engine.load`
 * @returns {Promise<Function>} answers one row with a record, a list of rows with a list of records,
 *   given the options of the task; it has `engine` and `close()`
 */
export async function pipeline(task, place, options) {
  const engine = await Engine.load(place, options);
  if (!engine.tasks.includes(task)) {
    await engine.close();
    throw new UsageError(`the bundle has no task ${shown(task)}; its tasks: ${engine.tasks.join(", ")}`);
  }
  const method = task.replace(/-./, (found) => found[1].toUpperCase());
  const pairs = task === "rank" || (task === "score" && engine.decoder.hasEncoder);
  const answer = async (rows, ...rest) => {
    // One row may be a list itself: token ids, messages, or a pair of texts.
    const first = rows?.[0];
    const isRow = typeof first === "number" || (pairs && typeof first === "string") || (first && "role" in Object(first));
    const several = Array.isArray(rows) && !isRow;
    const records = [];
    for await (const record of engine[method](several ? rows : [rows], ...rest)) records.push(record);
    return several ? records : records[0];
  };
  return Object.assign(answer, { engine, close: () => engine.close() });
}
