// The tokenizer of a bundle, by the kind that tokenizer.json names.

import { BytePairTokenizer } from "./byte_pair.js";
import { InputError, UsageError } from "./errors.js";

const FORMAT = 1;
const NAMES = { tiktoken: ["ranks.tiktoken"] };

function kindOf(settings) {
  if (settings.format_version !== FORMAT) {
    throw new InputError(
      `tokenizer.json: expected format version ${FORMAT}, found ${settings.format_version}; ` +
        "export the bundle again",
    );
  }
  return settings.kind ?? "tiktoken";
}

/** Returns the files beside tokenizer.json that are read. */
export function tokenizerFiles(settings) {
  const kind = kindOf(settings);
  if (!Object.hasOwn(NAMES, kind)) {
    throw new UsageError(
      `the bundle's tokenizer is of kind ${kind}, and this package reads byte-level BPE only; pass ` +
        "`tokenizer` with encode(text) and decode(ids), such as one of @huggingface/transformers",
    );
  }
  return NAMES[kind];
}

/**
 * Opens a tokenizer.
 *
 * @param {object} settings content of tokenizer.json
 * @param {Record<string, Uint8Array>} contents of the files of `tokenizerFiles`
 * @param {{encode(text: string): number[], decode(ids: number[]): string}} [other] replaces it
 */
export function openTokenizer(settings, contents, other) {
  const special = new SpecialTokens(settings.special);
  if (!other) return new BytePairTokenizer(settings, contents["ranks.tiktoken"], special);
  kindOf(settings);
  const textual = (ids) => ids.filter((id) => !special.ids.has(id));
  return {
    special,
    vocabularySize: settings.vocabulary_size,
    longestToken: null,
    encode: (text) => Array.from(other.encode(text), Number),
    decode: (ids) => other.decode(textual(ids)),
  };
}

/** Ids without text, and those around a model's input; see docs/portability.md. */
export class SpecialTokens {
  constructor(fields) {
    this.pad = fields.pad_id;
    this.bos = fields.bos_id;
    this.mask = fields.mask_id ?? null;
    this.before = fields.before;
    this.after = fields.after;
    this.ends = [fields.eos_id, ...(fields.more_ends ?? [])];
    this.languages = fields.languages ?? {};
    this.beginsWithLanguage = fields.begins_with_language ?? false;
    const around = [...this.before, ...(fields.between ?? []), ...this.after];
    const named = [this.pad, this.bos, fields.eos_id, ...around, ...Object.values(this.languages)];
    this.ids = new Set(this.mask === null ? named : [...named, this.mask]);
  }

  /** Adds the ids before and after a text. */
  wrap(ids) {
    return [...this.before, ...ids, ...this.after];
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
