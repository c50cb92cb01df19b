// The graph of an encoder-only model: token ids in, hidden states, logits or the head's scores out.

import { UsageError } from "../errors.js";
import { tensor } from "./graph.js";

/** Encodes rows; those that are begun together are one batch. */
export class Encoder {
  #waiting = [];

  /**
   * @param {object} ort onnxruntime
   * @param {Record<string, object>} graphs open graphs by name, see graph.js
   */
  constructor(ort, graphs) {
    Object.assign(this, { ort, graphs });
  }

  /**
   * Encodes one row.
   *
   * @param {number[]} ids special tokens included
   * @param {string} role output to compute: "hidden", "logits" or "head"
   * @returns {Promise<{data: Float32Array, dims: number[]}>} of a batch of one row
   */
  encode(ids, role) {
    if (!this.graphs.encoder?.tensor(role)) throw new UsageError(`the bundle's model gives no ${role}`);
    return new Promise((resolve, reject) => {
      this.#waiting.push({ ids, role, resolve, reject });
      if (this.#waiting.length === 1) queueMicrotask(() => this.#flush());
    });
  }

  #flush() {
    const byRole = new Map();
    for (const row of this.#waiting.splice(0)) byRole.set(row.role, [...(byRole.get(row.role) ?? []), row]);
    for (const [role, rows] of byRole) {
      this.#run(role, rows).catch((error) => rows.forEach(({ reject }) => reject(error)));
    }
  }

  async #run(role, rows) {
    const size = Math.max(...rows.map(({ ids }) => ids.length));
    const filled = (values, rest) => rows.flatMap(({ ids }) => [...values(ids), ...Array(size - ids.length).fill(rest)]);
    const shape = [rows.length, size];
    const inputs = {
      source: [tensor(this.ort, "int64", filled((ids) => ids, 0), shape)],
      source_mask: [tensor(this.ort, "bool", filled((ids) => ids.map(() => 1), 0), shape)],
    };
    const [[{ data, dims }]] = await this.graphs.encoder.run(inputs, role);
    const whole = data.length / rows.length;
    rows.forEach(({ ids, resolve }, row) => {
      const length = dims.length === 3 ? ids.length * dims[2] : whole;
      resolve({ data: data.subarray(row * whole, row * whole + length), dims: [1, ...(dims.length === 3 ? [ids.length] : []), dims.at(-1)] });
    });
  }
}
