// Embedding of texts: the vector of a model's head, or its hidden states pooled over the tokens.

import { shown, UsageError } from "../errors.js";
import { answered, encodeRow, notFinite, prefixed, Vector } from "../rows.js";
import { headLimits } from "./classify.js";

/**
 * Embeds a text.
 *
 * @param {object} engine see engine.js
 * @param {string} text
 * @param {object} [options] pooling: "mean" over all tokens, the "first" or the "last"; normalise: to length
 *   1; prompt: name of a text of the bundle's to put before it; longRows: "error" or "truncate"
 */
export function embed(engine, text, { pooling, normalise = false, prompt, longRows } = {}) {
  if (engine.decoder) throw new UsageError("the bundle generates and embeds nothing");
  if (![undefined, "mean", "first", "last"].includes(pooling)) {
    throw new UsageError(`pooling must be mean, first or last, found ${shown(pooling)}`);
  }
  if (typeof normalise !== "boolean") throw new UsageError(`normalise must be true or false, found ${shown(normalise)}`);
  const { head } = engine.bundle.manifest;
  const lacking = { sparse: pooling === undefined && "sparse vectors", tokens: "vectors of tokens" }[head?.vectors];
  if (lacking) throw new UsageError(`there are no ${lacking} in JavaScript; embed with the Python engine`);
  const { prompts = {}, default_prompt: usual = "" } = head ?? {};
  const named = prompt ?? usual;
  if (named && !Object.hasOwn(prompts, named)) {
    throw new UsageError(`prompt must be one of the bundle's: ${Object.keys(prompts).join(", ") || "none"}; found ${shown(named)}`);
  }
  const limits = headLimits(engine, longRows);
  return answered(text, {}, async () => {
    const prompted = named ? prefixed(prompts[named], text) : text;
    const { ids, truncated } = encodeRow(prompted, engine.bundle.tokenizer, limits);
    const whole = pooling === undefined && head?.task === "embed";
    const { data, dims } = await engine.encoder.encode(ids, whole ? "head" : "hidden");
    const all = dims.at(-1);
    const width = (whole && head.width) || all;
    const count = whole || pooling === "first" || pooling === "last" ? 1 : ids.length;
    const from = pooling === "last" ? (ids.length - 1) * all : 0;
    const vector = new Float64Array(width);
    for (let place = 0; place < count * all; place++) {
      if (place % all < width) vector[place % all] += data[from + place];
    }
    const divisor = normalise ? Math.hypot(...vector.map((value) => value / count)) || Number.MIN_VALUE : 1;
    const found = Vector.from(vector, (value) => value / count / divisor);
    if (!found.every(Number.isFinite)) throw notFinite({ truncated });
    return { vector: found, truncated };
  });
}
