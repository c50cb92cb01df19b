// Texts in, records out: the records that `transferry run` writes as lines of JSON.

import { Bundle } from "./bundle.js";
import { Decoder } from "./decoder.js";
import { UsageError } from "./errors.js";
import { embed, fillMask } from "./encoder.js";
import { DEFAULTS, generationOptions, room } from "./options.js";
import { encodeRow, rounded, RowError, tooLong } from "./rows.js";
import { Graph, loadOnnxRuntime } from "./runtime.js";
import { search } from "./search.js";

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
   *   options; progress: called with bytes read and bytes in all; tokenizer: see `Bundle.open`
   * @returns {Promise<Engine>}
   */
  static async load(place, { variant = "portable", ort, session, progress, tokenizer } = {}) {
    const bundle = place instanceof Bundle ? place : await Bundle.open(place, { tokenizer });
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
    for (const [name, spec] of Object.entries(chosen.graphs)) {
      if (name === "select") continue; // rows are taken here, see decoder.js
      graphs[name] = await Graph.open(ort, bundle, spec, checked, session ?? {});
    }
    return new Engine(bundle, ort, graphs);
  }

  /** Returns the tasks of the bundle. */
  get tasks() {
    if (this.decoder) return ["generate"];
    return this.bundle.tokenizer.special.mask === null ? ["embed"] : ["embed", "fill-mask"];
  }

  /** Returns generation options: the bundle's, with these fields changed. */
  options(values = {}) {
    const encode = (text) => this.bundle.tokenizer.encode(text);
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
   * With beams the text is that of the likeliest beam, which may be another one a step later.
   *
   * @param {string | number[]} text
   * @param {object} [values] fields of the generation options
   * @param {object} [how] row: number that seeds samples; longRows: "error" or "truncate";
   *   sourceLanguage, targetLanguage: names of the tokenizer's languages
   */
  async *stream(text, values = {}, how = {}) {
    const { decoder } = this;
    if (!decoder) throw new UsageError(`the bundle generates nothing; its tasks are ${this.tasks.join(", ")}`);
    const options = this.options(values);
    if (options.max_length > this.positions) {
      throw new UsageError(
        `max_length is ${options.max_length}, but the model has ${this.positions} positions; lower max_length`,
      );
    }
    const { tokenizer } = this.bundle;
    const source = typeof text === "string" ? text : JSON.stringify(text);
    try {
      const { ids, truncated, ...request } = this.#request(text, options, how);
      const decode = (tokens) => tokenizer.decode(tokens);
      const steps = search(decoder, options, { source: ids, ...request }, tokenizer.special.ends, decode);
      const partial = tokenizer.decodePartial?.bind(tokenizer) ?? decode;
      let step;
      while (!(step = await steps.next()).done) {
        yield { text: cut(partial(step.value), options.stop), tokens: [...step.value] };
      }
      return this.#record(source, ids, truncated, step.value, options);
    } catch (error) {
      if (!(error instanceof RowError)) throw error;
      return failed(source, error, options);
    }
  }

  #request(text, options, { row = 0, longRows, sourceLanguage, targetLanguage }) {
    const { special } = this.bundle.tokenizer;
    const { hasEncoder } = this.decoder;
    const target = targetLanguage === undefined ? null : special.language(targetLanguage);
    const begins = special.beginsWithLanguage;
    const first = target !== null && !begins ? target : options.forced_begin;
    const forced = options.prefix.length + (options.forced_begin === null ? 0 : 1);
    const reserve = hasEncoder ? 0 : forced;
    let { ids, truncated } = this.#encode(text, longRows, reserve);
    if (sourceLanguage !== undefined) {
      const inner = ids.slice(special.before.length, ids.length - special.after.length);
      ids = special.wrapIn(special.language(sourceLanguage), inner);
    }
    const tokens = ids.length;
    if (!hasEncoder && options.max_total_length && tokens >= options.max_total_length) {
      throw new RowError(
        "too-long",
        `${tokens} tokens are not less than max_total_length=${options.max_total_length}; raise ` +
          "it, or shorten the text",
        tokens,
      );
    }
    // The last token of an answer is never read, so it takes up no position.
    const limit = hasEncoder
      ? room(options, 0)
      : Math.max(1, Math.min(room(options, tokens), this.positions - tokens + 1));
    if (options.prefix.length + (first === null ? 0 : 1) > limit) {
      throw new RowError("too-long", `${tokens} tokens leave room for ${limit}, fewer than the prefix has`, tokens);
    }
    const bos = target !== null && begins ? target : special.bos;
    return { ids, truncated, limit, first, bos, row };
  }

  #encode(text, longRows, reserve) {
    const { positions } = this;
    if (typeof text === "string") {
      return encodeRow(text, this.bundle.tokenizer, { positions, longRows, reserve });
    }
    const size = this.bundle.manifest.model.vocabulary_size;
    if (!Array.isArray(text) || !text.every((id) => Number.isInteger(id) && id >= 0 && id < size)) {
      throw new UsageError(`texts must be strings or lists of token ids from 0 to ${size - 1}`);
    }
    if (!text.length) throw new RowError("empty", "there are no tokens to work on");
    if (text.length <= positions) return { ids: text, truncated: false };
    if (longRows === "truncate" && positions > reserve) {
      return { ids: text.slice(0, positions - reserve), truncated: true };
    }
    throw tooLong(text.length, positions);
  }

  #record(source, ids, truncated, hypotheses, options) {
    const usable = hypotheses.filter((each) => each.reason !== "error");
    if (!usable.length) {
      const error = new RowError("not-finite", "the model gave NaN or infinity", ids.length);
      return failed(source, error, options);
    }
    const { tokenizer } = this.bundle;
    const records = usable.map((each) => ({
      text: cut(tokenizer.decode(each.tokens), options.stop),
      score: rounded(each.score),
      finish_reason: each.reason,
    }));
    const record = {
      source,
      ...records[0],
      target_tokens: usable[0].tokens.length,
      source_tokens: ids.length,
    };
    if (options.n_best > 1) record.n_best = records;
    return truncated ? { ...record, truncated } : record;
  }

  /** Fills the masks of each text, in order; see encoder.js. */
  async *fillMask(texts, options) {
    checkSeveral(texts);
    for (const text of texts) yield await fillMask(this, text, options);
  }

  /** Embeds each text, in order; see encoder.js. */
  async *embed(texts, options) {
    checkSeveral(texts);
    for (const text of texts) yield await embed(this, text, options);
  }

  /** Frees the memory of the graphs. */
  async close() {
    for (const graph of Object.values(this.graphs)) await graph.session.release();
  }
}

function failed(source, { kind, message, tokens }, options) {
  const error = { kind, message };
  const record = { source, text: "", finish_reason: "error", error, source_tokens: tokens };
  return options.n_best > 1 ? { ...record, n_best: [] } : record;
}

function checkSeveral(texts) {
  if (typeof texts === "string" || typeof texts?.[Symbol.iterator] !== "function") {
    throw new UsageError("texts must be several, such as a list");
  }
}

function cut(text, stops) {
  const places = stops.map((stop) => text.indexOf(stop)).filter((place) => place >= 0);
  return text.slice(0, Math.min(text.length, ...places));
}
