// The tokenizer of a bundle, by the kind that tokenizer.json names.
//
// A tokenizer has special, vocabularySize, longestToken (most characters of one id, null if
// unlimited), encode(text), encodeTarget(text) for targets, decode(ids), and perhaps
// decodePartial(ids) and places(text).

import { check } from "../document.js";
import { InputError, UsageError } from "../errors.js";
import { BytePairTokenizer } from "./byte_pair.js";
import { HuggingFaceTokenizer } from "./hugging_face/tokenizer.js";
import { SentencePiecePair, SentencePieceTables } from "./sentence_piece/pair.js";
import { SentencePieceTokenizer } from "./sentence_piece/tokenizer.js";
import { SpecialTokens, TextTokenizer } from "./text_tokenizer.js";

const FORMAT = 1;
const PAIR = ["source.spm", "target.spm", "vocab.json"];
const OF_RANKS = ["name", "pattern", "first_ordinary_id", "kept_ranks"];
const KINDS = {
  tiktoken: [BytePairTokenizer, ["ranks.tiktoken"]],
  tokenizers: [HuggingFaceTokenizer, ["huggingface.json"]],
  sentencepiece: [SentencePieceTokenizer, ["sentencepiece.model"]],
  "sentencepiece-pair": [SentencePiecePair, PAIR],
  "sentencepiece-tables": [SentencePieceTables, [...PAIR, "target_vocab.json"]],
};

function kindOf(settings) {
  if (settings.format_version !== FORMAT) {
    throw new InputError(
      `tokenizer.json: expected format version ${FORMAT}, found ${settings.format_version}; ` +
        "export the bundle again",
    );
  }
  const { kind = "tiktoken" } = settings;
  if (!Object.hasOwn(KINDS, kind)) {
    throw new UsageError(
      `the bundle's tokenizer is of kind ${kind}, and this package reads ${Object.keys(KINDS).join(", ")}; ` +
        "pass `tokenizer` with encode(text) and decode(ids)",
    );
  }
  return KINDS[kind];
}

/** Returns the files beside tokenizer.json that are read. */
export function tokenizerFiles(settings) {
  return kindOf(settings)[1];
}

/**
 * Opens a tokenizer.
 *
 * @param {object} settings content of tokenizer.json
 * @param {Record<string, Uint8Array>} contents of the files of `tokenizerFiles`
 * @param {{encode(text: string): number[], decode(ids: number[]): string}} [other] replaces it
 */
export function openTokenizer(settings, contents, other) {
  const { kind = "tiktoken" } = settings;
  const missing = (kind === "tiktoken" ? OF_RANKS : ["vocabulary_size"]).find((name) => !Object.hasOwn(settings, name));
  if (missing) throw new InputError(`tokenizer.json: expected the key ${missing}; export the bundle again`);
  check(settings, "TokenizerSettings", "tokenizer.json");
  const special = new SpecialTokens(settings.special);
  if (other) return new OtherTokenizer(settings, special, other);
  const [Tokenizer, names] = kindOf(settings);
  const files = names.map((name) => contents[name]);
  try {
    const made = new Tokenizer(settings, files, special);
    const largest = Math.max(...special.ids, ...special.ends, ...Object.values(special.texts));
    if (!(largest < made.vocabularySize)) {
      throw new InputError(`tokenizer.json: expected ids below ${made.vocabularySize}, found ${largest}; export the bundle again`);
    }
    made.decode(tried(made));
    return made;
  } catch (error) {
    const kinds = ["TypeError", "SyntaxError", "RangeError", "InvalidCharacterError"];
    if (!kinds.includes(error.name)) throw error;
    throw new InputError(`${names.join(" or ")} cannot be read (${error.message}); export the bundle again`);
  }
}

/** Returns ids of a text, so that a part of another form fails at once; none if it has no ids. */
function tried(tokenizer) {
  try {
    return tokenizer.encode("A b1");
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    return [];
  }
}

/** A tokenizer that replaces that of a bundle. */
class OtherTokenizer extends TextTokenizer {
  longestToken = null;

  constructor(settings, special, other) {
    super();
    this.special = special;
    this.vocabularySize = settings.vocabulary_size;
    this.other = other;
  }

  encodePlain(text) {
    return Array.from(this.other.encode(text), Number);
  }

  decode(ids) {
    return this.other.decode(ids.filter((id) => !this.special.ids.has(id)));
  }
}
