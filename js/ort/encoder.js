// The graph of an encoder-only model: token ids in, hidden states, logits or the head's scores out.

import { UsageError } from "../errors.js";
import { tensor } from "./graph.js";

/**
 * Encodes one row.
 *
 * @param {object} engine see engine.js
 * @param {number[]} ids special tokens included
 * @param {string} role output to compute: "hidden", "logits" or "head"
 * @returns {Promise<{data: Float32Array, dims: number[]}>} of a batch of one row
 */
export async function encodeIds({ ort, graphs }, ids, role) {
  if (!graphs.encoder?.tensor(role)) throw new UsageError(`the bundle's model gives no ${role}`);
  const inputs = {
    source: [tensor(ort, "int64", ids, [1, ids.length])],
    source_mask: [tensor(ort, "bool", ids.map(() => 1), [1, ids.length])],
  };
  const [[output]] = await graphs.encoder.run(inputs, role);
  return output;
}
