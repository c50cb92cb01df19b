// Pieces of a text that fit the model, as in Python.

import { encodeRow, isBlank, RowError, tokenIds } from "../rows.js";

const WORD = /[\p{White_Space}\x1c-\x1f]*[^\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu;

/**
 * Splits a text into neighbouring sentences, as many as fit; a sentence that does not fit is split at
 * white space, a word at characters. Only white space between the pieces is lost.
 *
 * @param {object} engine see engine.js
 * @param {string} text
 */
export function pieces({ bundle: { tokenizer }, positions, sentences }, text) {
  const tokens = (piece) => {
    try {
      return encodeRow(piece, tokenizer, { positions }).tokens;
    } catch (error) {
      if (!(error instanceof RowError)) throw error;
      return error.tokens;
    }
  };
  const count = (unit) => {
    try {
      return tokenIds(unit, (each) => tokenizer.encode(each)).length;
    } catch (error) {
      if (!(error instanceof RowError)) throw error;
      return Infinity; // It is cut further, and its last piece becomes an error.
    }
  };
  const room = positions - tokenizer.special.wrap([]).length;
  const split = (whole, [cut, ...finer]) => {
    const stripped = strip(whole);
    if (!cut || tokens(stripped) <= positions) return stripped ? [stripped] : [];
    const units = cut(stripped);
    const counts = units.map(count);
    const found = [];
    for (let first = 0, last; first < units.length; first = last) {
      let sum = counts[first];
      for (last = first + 1; last < units.length && sum + counts[last] <= room; last++) sum += counts[last];
      // A text may have more tokens than its units together, or without the blank in front.
      const joined = () => units.slice(first, last).join("");
      while (last > first + 1 && tokens(strip(joined())) > positions) last--;
      found.push(...split(joined(), finer));
    }
    return found;
  };
  return split(text, [sentences, (each) => each.match(WORD) ?? [], (each) => [...each]]);
}

function strip(text) {
  let [first, last] = [0, text.length];
  while (first < last && isBlank(text[first])) first++;
  while (last > first && isBlank(text[last - 1])) last--;
  return text.slice(first, last);
}
