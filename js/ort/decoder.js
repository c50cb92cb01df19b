// The portable graphs of a generating model: tokens in, logits out, the cache as a value.

import { tensor } from "./graph.js";

// Sources and prompts are padded to a multiple of these, as in Python: the last bits depend on it.
const SOURCE_UNIT = 4;
const PROMPT_UNIT = 16;

/** Steps one sentence; its rows are beams or samples. */
export class Decoder {
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

  #mask(rows, length, size) {
    const row = Array.from({ length: size }, (_, place) => Number(place < length));
    return tensor(this.ort, "bool", Array(rows).fill(row).flat(), [rows, size]);
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
      const mask = this.#mask(1, ids.length, size);
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
    const inputs = { target: [this.#ids(read, size)], past_mask: [this.#mask(1, 0, 0)], past };
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

  #pastMask({ rows, length, size, own }) {
    const row = Array.from({ length: size + own }, (_, place) => Number(place < length || place >= size));
    return tensor(this.ort, "bool", Array(rows).fill(row).flat(), [rows, size + own]);
  }

  /**
   * Reads one token a row, or several of one row.
   *
   * @param {number[]} tokens
   * @param {object} state
   * @returns {Promise<{logits: Float32Array[], state: object}>} logits after each token
   */
  async step(tokens, state) {
    const { rows, cross, past, length, size } = state;
    const shape = [rows, tokens.length / rows];
    const inputs = { target: [tensor(this.ort, "int64", tokens, shape)], past };
    if (cross) {
      inputs.cross = cross;
      inputs.source_mask = [this.#mask(rows, length, size)];
    } else inputs.past_mask = [this.#pastMask(state)];
    const [[scores], present] = await this.graphs.decoder.run(inputs, "logits", "present");
    const logits = tokens.map((_, row) =>
      scores.data.subarray(row * this.vocabulary, (row + 1) * this.vocabulary),
    );
    return { logits, state: { ...state, past: present, own: state.own + shape[1] } };
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
      rows.forEach((row, place) => {
        taken.set(value.data.subarray(row * size, (row + 1) * size), place * size);
      });
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
