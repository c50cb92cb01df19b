// The common part of tokenizers: text that looks like a special token, and masks.

import { UsageError } from "../errors.js";
import { literal } from "./hugging_face/piece.js";

/**
 * A tokenizer that encodes text in which no special token stands (`encodePlain`). Text that looks
 * like a special token is text, unless `readSpecialTokens` was called.
 */
export class TextTokenizer {
  readsSpecial = false;

  /** Texts that look like special tokens, with their ids. */
  get specialTexts() {
    return this.special.texts;
  }

  /** From now on, reads text that looks like a special token as that token. */
  readSpecialTokens() {
    const texts = Object.keys(this.specialTexts);
    if (!texts.length) {
      throw new UsageError("specialTokens has no effect: the bundle's tokenizer names no texts of special tokens");
    }
    this.readsSpecial = true;
    if (this.longestToken) this.longestToken = Math.max(this.longestToken, ...texts.map((text) => text.length));
  }

  /** Returns the token ids of a text, without those around it. */
  encode(text) {
    return this.encodeEach(text, (piece) => this.encodePlain(piece));
  }

  /** Returns the token ids of a text that the model writes. */
  encodeTarget(text) {
    return this.encode(text);
  }

  /** Encodes the text between special tokens. */
  encodeEach(text, encode) {
    if (!this.readsSpecial) return encode(text);
    const texts = this.specialTexts;
    const ids = [];
    let last = 0;
    for (const { 0: found, index } of text.matchAll(literal(...Object.keys(texts)))) {
      if (last < index) ids.push(...encode(text.slice(last, index)));
      ids.push(texts[found]);
      last = index + found.length;
    }
    return last < text.length || !text ? [...ids, ...encode(text.slice(last))] : ids;
  }

  /** Returns the token ids of texts with a mask between each two, to which one blank before belongs. */
  encodeMasked(pieces) {
    const ids = pieces.slice(0, -1).flatMap((piece) => [...this.encode(piece.replace(/ $/, "")), this.special.mask]);
    return [...ids, ...this.encode(pieces.at(-1))];
  }
}
