// The portable graphs of a generating model: tokens in, logits out, the cache as a value.

import { InputError } from "../errors.js";
import { tensor } from "./graph.js";

// Sources and prompts are padded to a multiple of these, as in Python: the last bits depend on it.
const SOURCE_UNIT = 4;
const PROMPT_UNIT = 16;

/** Steps one sentence; its rows are beams or samples. */
export class Decoder {
  #lastCross;

  /**
   * @param {object} ort onnxruntime
   * @param {Record<string, object>} graphs open graphs by name, see graph.js
   * @param {object} model of the manifest
   */
  constructor(ort, graphs, model) {
    this.ort = ort;
    this.graphs = graphs;
    this.positions = model.max_positions;
    this.vocabulary = graphs.decoder.tensor("logits").shape.at(-1);
    this.hasEncoder = "encoder" in graphs;
  }

  #ids(ids, size) {
    const padded = [...ids, ...Array(size - ids.length).fill(0)];
    return tensor(this.ort, "int64", padded, [1, size]);
  }

  /** Returns whether a token stands at each place of rows: their own first, then `own` after `size`. */
  #mask(lengths, size, own = 0) {
    const row = (length) => Array.from({ length: size + own }, (_, place) => Number(place < length || place >= size));
    return tensor(this.ort, "bool", lengths.flatMap(row), [lengths.length, size + own]);
  }

  #empty() {
    const { decoder } = this.graphs;
    const { type, shape } = decoder.tensor("past");
    // A KV cache grows from length 0; the state of an SSRU has a fixed size.
    const length = Number.isInteger(shape[2]) ? shape[2] : 0;
    const size = length * shape[1] * shape[3];
    const none = () => tensor(this.ort, type, Array(size).fill(0), [1, shape[1], length, shape[3]]);
    return Array.from({ length: decoder.count("past") }, none);
  }

  /**
   * Encodes a source, or reads a prompt but for its last token.
   *
   * @param {number[]} ids
   * @returns {Promise<object>} the state of one row
   */
  async start(ids) {
    const past = this.#empty();
    if (this.hasEncoder) {
      const size = padded(ids.length, SOURCE_UNIT, this.positions);
      const mask = this.#mask([ids.length], size);
      const inputs = { source: [this.#ids(ids, size)], source_mask: [mask] };
      const [cross] = await this.graphs.encoder.run(inputs, "cross");
      return { cross, past, length: ids.length, size, rows: 1, own: 0 };
    }
    return this.#prompted(ids.slice(0, -1), past);
  }

  async #prompted(read, past) {
    const state = { past, length: read.length, size: 0, rows: 1, own: 0 };
    if (!read.length) return state;
    const size = padded(read.length, PROMPT_UNIT, this.positions);
    const inputs = { target: [this.#ids(read, size)], past_mask: [this.#mask([0], 0)], past };
    [state.past] = await this.graphs.decoder.run(inputs, "present");
    state.size = padded(size, SOURCE_UNIT);
    state.past = state.past.map((value) => this.#widened(value, state.size));
    return state;
  }

  /** Returns the state of a decoder-only model that has read nothing. */
  begin() {
    return this.#prompted([], this.#empty());
  }

  /** Pads keys or values with zeros to more positions. */
  #widened(value, size) {
    const [rows, heads, columns, width] = value.dims;
    if (columns === size) return value;
    const wide = new value.data.constructor(rows * heads * size * width);
    for (let head = 0; head < rows * heads; head++) {
      const part = value.data.subarray(head * columns * width, (head + 1) * columns * width);
      wide.set(part, head * size * width);
    }
    return new this.ort.Tensor(value.type, wide, [rows, heads, size, width]);
  }

  /** Starts several rows with as many columns, see `start`. */
  async startAll(all) {
    const states = [];
    for (const ids of all) states.push(await this.start(ids));
    const size = Math.max(...states.map((state) => state.size));
    const name = this.hasEncoder ? "cross" : "past";
    return states.map((state) => ({ ...state, size, [name]: state[name].map((value) => this.#widened(value, size)) }));
  }

  /**
   * Reads one token a row.
   *
   * @param {number[]} tokens
   * @param {object} state
   * @returns {Promise<{logits: Float32Array[], state: object}>} logits after each token
   */
  async step(tokens, state) {
    const [made] = await this.stepAll([{ tokens, state }]);
    return made;
  }

  /** Reads tokens of one row; no step follows. */
  async read(tokens, state) {
    return (await this.step(tokens, state)).logits;
  }

  /** Makes a step of several states with as many columns in one run; rows of tokens get one width. */
  async stepAll(all) {
    const states = all.map(({ state }) => state);
    const [{ cross, size, own }] = states;
    const lengths = states.flatMap(({ rows, length }) => Array(rows).fill(length));
    const width = Math.max(...all.map((each) => each.tokens.length / each.state.rows));
    // No token sees those after it.
    const tokens = all.flatMap((each) => [...each.tokens, ...Array(width * each.state.rows - each.tokens.length).fill(0)]);
    const past = this.#joined(states.map((state) => state.past));
    const inputs = { target: [tensor(this.ort, "int64", tokens, [lengths.length, width])], past };
    if (cross) {
      inputs.cross = this.#joinedCross(states.map((state) => state.cross));
      inputs.source_mask = [this.#mask(lengths, size)];
    } else inputs.past_mask = [this.#mask(lengths, size, own)];
    const [[scores], present] = await this.graphs.decoder.run(inputs, "logits", "present");
    if (scores.data.length !== tokens.length * this.vocabulary) {
      throw new InputError("the decoder gives other logits than manifest.json says; export the bundle again");
    }
    let [row, first] = [0, 0];
    return all.map(({ tokens: given, state }) => {
      const logits = given.map((_, place) =>
        scores.data.subarray((row + place) * this.vocabulary, (row + place + 1) * this.vocabulary),
      );
      const part = all.length > 1 ? present.map((value) => this.#part(value, first, state.rows)) : present;
      row += width * state.rows;
      first += state.rows;
      return { logits, state: { ...state, past: part, own: own + width } };
    });
  }

  /** Returns rows of a tensor, which share its memory. */
  #part(value, first, rows) {
    const [count, ...shape] = value.dims;
    const size = value.data.length / count;
    return new this.ort.Tensor(value.type, value.data.subarray(first * size, (first + rows) * size), [rows, ...shape]);
  }

  /** Joins the rows of lists of tensors, place by place. */
  #joined([first, ...others]) {
    if (!others.length) return first;
    return first.map((value, place) => {
      const parts = [value, ...others.map((each) => each[place])];
      const all = new value.data.constructor(parts.reduce((sum, { data }) => sum + data.length, 0));
      let end = 0;
      for (const { data } of parts) {
        all.set(data, end);
        end += data.length;
      }
      return new this.ort.Tensor(value.type, all, [parts.reduce((sum, { dims }) => sum + dims[0], 0), ...value.dims.slice(1)]);
    });
  }

  /** Joins keys and values of sources, which stay the same while no search ends. */
  #joinedCross(parts) {
    const last = this.#lastCross;
    if (last?.parts.length !== parts.length || parts.some((each, place) => each !== last.parts[place])) {
      this.#lastCross = { parts, whole: this.#joined(parts) };
    }
    return this.#lastCross.whole;
  }

  /**
   * Takes rows of a state.
   *
   * @param {object} state
   * @param {number[]} rows
   */
  select(state, rows) {
    if (rows.length === state.rows && rows.every((row, place) => row === place)) return state;
    const take = (value) => {
      const [count, ...shape] = value.dims;
      const size = value.data.length / count;
      const taken = new value.data.constructor(rows.length * size);
      rows.forEach((row, place) => taken.set(value.data.subarray(row * size, (row + 1) * size), place * size));
      return new this.ort.Tensor(value.type, taken, [rows.length, ...shape]);
    };
    // All rows have the same source.
    const cross = rows.length === state.rows ? state.cross : state.cross?.map(take);
    return { ...state, cross, past: state.past.map(take), rows: rows.length };
  }
}

function padded(length, unit, limit = Infinity) {
  return Math.max(length, Math.min(Math.ceil(length / unit) * unit, limit));
}

/** A decoder for several searches at once: in each round every search makes one step, equal ones in one run. */
export class Rounds {
  #waiting = [];

  /**
   * @param {Decoder} decoder
   * @param {number} searches how many there are; each calls `leave` at its end
   */
  constructor(decoder, searches) {
    const { vocabulary, hasEncoder } = decoder;
    Object.assign(this, { decoder, searches, vocabulary, hasEncoder });
    this.begin = () => decoder.begin();
    this.select = (state, rows) => decoder.select(state, rows);
  }

  /** See `Decoder`; sources that are read in one round get the size of the longest. */
  start(ids) {
    return this.#next("start", ids);
  }

  /** See `Decoder`. */
  step(tokens, state) {
    return this.#next(`step ${state.size} ${state.own} ${tokens.length / state.rows}`, { tokens, state });
  }

  /** See `Decoder`. */
  read(tokens, state) {
    return this.#next(`read ${state.size}`, { tokens, state });
  }

  /** Ends the part of one search. */
  leave() {
    this.searches -= 1;
    this.#run();
  }

  #next(kind, input) {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ kind, input, resolve, reject });
      this.#run();
    });
  }

  /** Makes a round once every search waits for it. */
  async #run() {
    if (!this.searches || this.#waiting.length < this.searches) return;
    const kinds = new Map();
    for (const each of this.#waiting.splice(0)) kinds.set(each.kind, [...(kinds.get(each.kind) ?? []), each]);
    for (const [kind, all] of kinds) {
      const inputs = all.map(({ input }) => input);
      try {
        const made = kind === "start" ? await this.decoder.startAll(inputs) : await this.decoder.stepAll(inputs);
        all.forEach(({ resolve }, place) => resolve(kind.startsWith("read") ? made[place].logits : made[place]));
      } catch (error) {
        for (const { reject } of all) reject(error);
      }
    }
  }
}
