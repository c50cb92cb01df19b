// Filling of masks: the likeliest tokens in the place of each mask of a text.

import { Best, logSumExp } from "../decoding/logits.js";
import { shown, UsageError } from "../errors.js";
import { answered, checkLongRows, encodeRow, notFinite, RowError } from "../rows.js";

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
  if (!Number.isSafeInteger(top) || top < 1) throw new UsageError(`top must be at least 1, found ${shown(top)}`);
  if (typeof mask !== "string" || !mask) throw new UsageError(`mask must be text of a character or more, found ${shown(mask)}`);
  checkLongRows(longRows);
  const encodeMasked = (masked) => tokenizer.encodeMasked(masked.split(mask));
  const longest = tokenizer.longestToken && Math.max(tokenizer.longestToken, mask.length + 1);
  return answered(text, { text: "" }, async () => {
    const limits = { positions: engine.positions, longRows, longest };
    const { ids, truncated } = encodeRow(text, tokenizer, limits, encodeMasked);
    const places = [...ids.keys()].filter((place) => ids[place] === special.mask);
    if (!places.length) {
      const side = special.keepsEnd ? "last" : "first";
      const where = truncated ? ` among the ${side} ${ids.length} tokens` : "";
      throw new RowError("no-mask", `there is no ${mask} to fill in${where}`);
    }
    const { data, dims } = await engine.encoder.encode(ids, "logits");
    const filled = [...ids];
    const masks = places.map((place) => {
      const logits = data.subarray(place * dims[2], (place + 1) * dims[2]);
      if (!logits.every(Number.isFinite)) throw notFinite({ truncated });
      const best = new Best(Math.min(top, logits.length));
      logits.forEach((value, token) => best.add(value, token));
      const normaliser = logSumExp(logits);
      [, filled[place]] = best.items[0];
      return best.items.map(([value, token]) => ({
        text: tokenizer.decode([token]),
        log_probability: value - normaliser,
      }));
    });
    return { text: tokenizer.decode(filled), masks, truncated };
  });
}
