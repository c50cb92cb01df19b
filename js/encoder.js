// Tasks of an encoder-only model: filling of masks, and embedding.

import { UsageError } from "./errors.js";
import { Best, logSumExp } from "./logits.js";
import { encodeRow, rounded, RowError } from "./rows.js";
import { tensor } from "./runtime.js";

async function encode({ ort, graphs }, ids, role) {
  const inputs = {
    source: [tensor(ort, "int64", ids, [1, ids.length])],
    source_mask: [tensor(ort, "bool", ids.map(() => 1), [1, ids.length])],
  };
  if (!graphs.encoder?.tensor(role)) throw new UsageError(`the bundle's model gives no ${role}`);
  const [[output]] = await graphs.encoder.run(inputs, role);
  return output;
}

async function answered(source, blank, record) {
  try {
    return await record();
  } catch (error) {
    if (!(error instanceof RowError)) throw error;
    return { source, ...blank, error: { kind: error.kind, message: error.message } };
  }
}

/**
 * Fills the masks of a text, each as if the others stayed.
 *
 * @param {object} engine see engine.js
 * @param {string} text
 * @param {object} [options] mask: the mask as the text spells it; top: candidates of each mask;
 *   longRows: "error" or "truncate"
 */
export function fillMask(engine, text, { mask = "[MASK]", top = 5, longRows } = {}) {
  const { tokenizer } = engine.bundle;
  const { special } = tokenizer;
  if (engine.decoder || special.mask === null) throw new UsageError("the bundle has no mask to fill in");
  if (!Number.isInteger(top) || top < 1) throw new UsageError(`top must be at least 1, found ${top}`);
  if (!mask) throw new UsageError("mask must be a text");
  const encodeMasked = (masked) =>
    masked.split(mask).flatMap((piece, place, pieces) =>
      // One blank before a mask belongs to it, as to any word.
      place < pieces.length - 1
        ? [...tokenizer.encode(piece.replace(/ $/, "")), special.mask]
        : tokenizer.encode(piece),
    );
  const longest = tokenizer.longestToken && Math.max(tokenizer.longestToken, mask.length + 1);
  return answered(text, { text: "" }, async () => {
    const limits = { positions: engine.positions, longRows, longest };
    const { ids, truncated } = encodeRow(text, tokenizer, limits, encodeMasked);
    const places = [...ids.keys()].filter((place) => ids[place] === special.mask);
    if (!places.length) {
      const where = truncated ? ` among the first ${ids.length} tokens` : "";
      throw new RowError("no-mask", `there is no ${mask} to fill in${where}`);
    }
    const { data, dims } = await encode(engine, ids, "logits");
    const filled = [...ids];
    const masks = places.map((place) => {
      const logits = data.subarray(place * dims[2], (place + 1) * dims[2]);
      if (!logits.every(Number.isFinite)) {
        throw new RowError("not-finite", "the model gave NaN or infinity");
      }
      const best = new Best(Math.min(top, logits.length));
      logits.forEach((value, token) => best.add(value, token));
      const normaliser = logSumExp(logits);
      [, filled[place]] = best.items[0];
      return best.items.map(([value, token]) => ({
        text: tokenizer.decode([token]),
        log_probability: rounded(value - normaliser),
      }));
    });
    const record = { source: text, text: tokenizer.decode(filled), masks };
    return truncated ? { ...record, truncated } : record;
  });
}

/**
 * Embeds a text.
 *
 * @param {object} engine see engine.js
 * @param {string} text
 * @param {object} [options] pooling: "mean" over all tokens or the "first" one; normalise: to length
 *   1; prompt: name of a text of the bundle's to put before it; longRows: "error" or "truncate"
 */
export function embed(engine, text, { pooling, normalise = false, prompt, longRows } = {}) {
  if (engine.decoder) throw new UsageError("the bundle generates and embeds nothing");
  if (![undefined, "mean", "first"].includes(pooling)) {
    throw new UsageError(`pooling must be mean or first, found ${pooling}`);
  }
  const { head } = engine.bundle.manifest;
  const { prompts = {}, longest = 0, default_prompt: usual = "" } = head ?? {};
  const named = prompt ?? usual;
  if (named && !Object.hasOwn(prompts, named)) {
    throw new UsageError(`prompt must be one of the bundle's: ${Object.keys(prompts).join(", ") || "none"}`);
  }
  const limits = {
    positions: longest ? Math.min(longest, engine.positions) : engine.positions,
    longRows: longRows ?? (longest ? "truncate" : "error"),
  };
  return answered(text, {}, async () => {
    const prompted = text.trim() && named ? prompts[named] + text : text;
    const { ids, truncated } = encodeRow(prompted, engine.bundle.tokenizer, limits);
    const whole = pooling === undefined && head?.task === "embed";
    const { data, dims } = await encode(engine, ids, whole ? "head" : "hidden");
    const width = dims.at(-1);
    const count = whole || pooling === "first" ? 1 : ids.length;
    const vector = new Float64Array(width);
    for (let place = 0; place < count * width; place++) vector[place % width] += data[place];
    const divisor = normalise ? Math.hypot(...vector.map((value) => value / count)) || Number.MIN_VALUE : 1;
    const found = Float32Array.from(vector, (value) => value / count / divisor);
    if (!found.every(Number.isFinite)) throw new RowError("not-finite", "the model gave NaN or infinity");
    const record = { source: text, vector: found };
    return truncated ? { ...record, truncated } : record;
  });
}
