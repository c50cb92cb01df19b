// Special tokens: ids without text, and those around a model's input; see docs/portability.md.

import { UsageError } from "../errors.js";

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
    if (!Object.hasOwn(this.languages, name)) {
      const known = Object.keys(this.languages).join(", ") || "none";
      throw new UsageError(`there is no language ${name}; the bundle's tokenizer has ${known}`);
    }
    return this.languages[name];
  }

  /** Returns the ids of a source with another language among those around it. */
  wrapIn(language, ids) {
    const own = new Set(Object.values(this.languages));
    const changed = (around) => around.map((id) => (own.has(id) ? language : id));
    return [...changed(this.before), ...ids, ...changed(this.after)];
  }
}
