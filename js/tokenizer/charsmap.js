// Normalisation compiled by SentencePiece: replacements of byte sequences, in a double array
// (Yata et al. 2007, as darts-clone stores it).

import { InputError } from "../errors.js";

/** A table of replacements. */
export class Charsmap {
  #units;
  #normalised;
  #encoder = new TextEncoder();

  /** @param {Uint8Array} content size of the double array in bytes, the array, the replacements */
  constructor(content) {
    const view = new DataView(content.buffer, content.byteOffset, content.byteLength);
    const size = content.length < 4 ? NaN : view.getUint32(0, true);
    if (!(size % 4 === 0 && size + 4 <= content.length)) {
      throw new InputError("the tokenizer's compiled normalisation is damaged; export the bundle again");
    }
    this.#units = Uint32Array.from({ length: size / 4 }, (_, place) => view.getUint32(4 + 4 * place, true));
    this.#normalised = content.subarray(4 + size);
  }

  /**
   * Yields the replacements of beginnings of some bytes, shortest first.
   *
   * @param {Uint8Array} bytes
   * @param {number} start
   * @param {boolean} stopsAtZero whether a zero byte ends the search, as in Hugging Face's reader
   */
  *prefixes(bytes, start, stopsAtZero) {
    const units = this.#units;
    let place = offset(units[0] ?? 0);
    for (let next = start; next < bytes.length; next++) {
      const byte = bytes[next];
      if (byte === 0 && stopsAtZero) return;
      place ^= byte;
      const unit = units[place] ?? 0;
      if ((unit & 0x800000ff) >>> 0 !== byte) return;
      place ^= offset(unit);
      if ((unit >>> 8) & 1) yield [next + 1 - start, (units[place] ?? 0) & 0x7fffffff];
    }
  }

  /** Returns the replacement at a place of the table. */
  text(place) {
    let end = place;
    while (end < this.#normalised.length && this.#normalised[end]) end += 1;
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.#normalised.subarray(place, end));
  }

  /** Returns the replacement of a character or grapheme, null without one: that of its first bytes. */
  replaced(text) {
    for (const [, place] of this.prefixes(this.#encoder.encode(text), 0, true)) return this.text(place);
    return null;
  }
}

function offset(unit) {
  return (unit >>> 10) << ((unit & 0x200) >>> 6);
}
