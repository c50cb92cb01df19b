// The common part of tokenizers: special tokens, text that looks like one, and masks; see
// docs/portability.md.

import { shown, UsageError } from "../errors.js";
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
    return encodeBetween(text, this.specialTexts, encode);
  }

  /** Returns the token ids of texts with a mask between each two, to which one blank before belongs. */
  encodeMasked(pieces) {
    const ids = pieces.slice(0, -1).flatMap((piece) => [...this.encode(piece.replace(/ $/, "")), this.special.mask]);
    return [...ids, ...this.encode(pieces.at(-1))];
  }
}

/** Returns the ids of a text: those of tokens by their texts, and those of `encode` between. */
export function encodeBetween(text, ids, encode) {
  const parts = []; // lists of ids: a function takes no more than some 100,000 arguments
  let last = 0;
  for (const { 0: found, index } of text.matchAll(anyOf(ids))) {
    if (last < index) parts.push(encode(text.slice(last, index)));
    parts.push([ids[found]]);
    last = index + found.length;
  }
  if (last < text.length) parts.push(encode(text.slice(last)));
  return parts.flat();
}

/** Returns an expression that matches any of the texts that are keys. */
export function anyOf(ids) {
  const texts = Object.keys(ids);
  return texts.length ? literal(...texts) : /(?!)/gu;
}

/** Special ids of a tokenizer. */
export class SpecialTokens {
  /** @param {object} fields `special` of tokenizer.json */
  constructor(fields) {
    this.pad = fields.pad_id;
    this.bos = fields.bos_id;
    this.mask = fields.mask_id ?? null;
    this.before = fields.before;
    this.after = fields.after;
    this.between = fields.between ?? [];
    this.joinsPairs = (fields.joins ?? false) || this.between.length > 0;
    this.ends = [fields.eos_id, ...(fields.more_ends ?? [])];
    this.languages = fields.languages ?? {};
    this.beginsWithLanguage = fields.begins_with_language ?? false;
    this.longest = fields.longest ?? 0;
    this.keepsEnd = fields.keeps_end ?? false;
    this.texts = fields.texts ?? {};
    const around = [...this.before, ...this.between, ...this.after];
    const named = [this.pad, this.bos, fields.eos_id, ...around, ...Object.values(this.languages)];
    this.ids = new Set(this.mask === null ? named : [...named, this.mask]);
  }

  /** Adds the ids before and after a text. */
  wrap(ids) {
    return [...this.before, ...ids, ...this.after];
  }

  /** Returns the ids that a truncated text keeps, at most `room`. */
  cut(ids, room) {
    return this.keepsEnd ? ids.slice(Math.max(0, ids.length - room)) : ids.slice(0, room);
  }

  /** Returns the id of a language. */
  language(name) {
    const known = Object.keys(this.languages);
    if (!known.length) {
      throw new UsageError(`the bundle's tokenizer has no languages, so language ${shown(name)} has no effect; leave it out`);
    }
    if (!known.includes(name)) {
      throw new UsageError(`there is no language ${shown(name)}; the bundle's tokenizer has ${known.join(", ")}`);
    }
    return this.languages[name];
  }

  /** Returns the ids of a source with another language among those around its text. */
  wrappedIn(language, ids) {
    const own = new Set(Object.values(this.languages));
    const last = ids.length - this.after.length;
    return ids.map((id, place) => ((place < this.before.length || place >= last) && own.has(id) ? language : id));
  }
}
