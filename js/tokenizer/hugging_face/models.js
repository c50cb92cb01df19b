// Models of tokenizer.json: the ids of a piece of a text.
//
// A model has size, id(token), token(id), and tokenize(text), which returns a list of
// { id, token, from, to }: ids with their tokens, and the bytes of the text that they stand for.

import { InputError, refuse, shown } from "../../errors.js";
import { likeliest } from "../unigram.js";
import { bytesIn, byteTokens } from "../utf8.js";
import { Merges } from "./merges.js";
import { Vocabulary } from "./vocabulary.js";

/** Returns the model of tokenizer.json. */
export function modelOf(settings) {
  const type = settings.type ?? guessed(settings);
  const Model = { BPE: Merges, WordPiece, WordLevel, Unigram }[type];
  if (!Model) refuse(`a model of type ${type}`);
  // Of Unigram a list of tokens and scores.
  const { vocab } = settings;
  const entries = Array.isArray(vocab) ? vocab.map(([token], id) => [token, id]) : Object.entries(vocab);
  const odd = entries.find(([token, id]) => typeof token !== "string" || !Number.isSafeInteger(id));
  if (odd) throw new InputError(`huggingface.json: expected tokens with ids, found ${shown(odd)}; export the bundle again`);
  return new Model(settings, entries);
}

/** Returns the type of a model in an old file that names no type. */
function guessed({ merges, vocab, continuing_subword_prefix: prefix }) {
  if (merges) return "BPE";
  if (Array.isArray(vocab)) return "Unigram";
  return prefix === undefined ? "WordLevel" : "WordPiece";
}

/** A table of words. */
class WordLevel extends Vocabulary {
  constructor({ unk_token: unknown }, entries) {
    super(entries);
    this.unknown = unknown;
  }

  found(text) {
    return [this.named(this.ids.has(text) ? text : this.unknown, 0, bytesIn(text))];
  }

  named(token, from, to) {
    const id = this.ids.get(token);
    if (id === undefined) {
      throw new InputError(`the tokenizer's vocabulary has no ${token}; export the bundle again`);
    }
    return { id, token, from, to };
  }
}

/** Longest matches from the left (Wu et al. 2016), of BERT. */
class WordPiece extends WordLevel {
  constructor(settings, entries) {
    super({ unk_token: "[UNK]", ...settings }, entries);
    this.prefix = settings.continuing_subword_prefix ?? "##";
    this.most = settings.max_input_chars_per_word ?? 100;
  }

  found(text) {
    const characters = [...text];
    const unknown = () => [this.named(this.unknown, 0, bytesIn(text))];
    if (characters.length > this.most) return unknown();
    const tokens = [];
    let byte = 0;
    for (let start = 0; start < characters.length; ) {
      let end = characters.length;
      const token = () => (start ? this.prefix : "") + characters.slice(start, end).join("");
      while (end > start && !this.ids.has(token())) end -= 1;
      if (end === start) return unknown();
      const next = byte + bytesIn(characters.slice(start, end).join(""));
      tokens.push(this.named(token(), byte, next));
      [start, byte] = [end, next];
    }
    return tokens;
  }
}

const UNKNOWN_PENALTY = 10;

/** Pieces with log-probabilities. */
class Unigram extends Vocabulary {
  constructor({ vocab, unk_id: unknown, byte_fallback: spells }, entries) {
    super(entries);
    this.vocab = vocab;
    this.unknown = unknown ?? null;
    this.spells = spells ?? false;
    this.unknownScore = vocab.reduce((least, [, score]) => Math.min(least, score), Infinity) - UNKNOWN_PENALTY;
    this.longest = vocab.reduce((most, [piece]) => Math.max(most, piece.length), 0);
  }

  found(text) {
    let byte = 0;
    return this.#pieces(text).flatMap((token) => {
      const from = byte;
      byte += bytesIn(token);
      const id = this.ids.get(token);
      if (id !== undefined) return [{ id, token, from, to: byte }];
      if (this.spells) {
        const bytes = byteTokens(token);
        if (bytes.every((each) => this.ids.has(each))) {
          return bytes.map((each) => ({ id: this.ids.get(each), token: each, from, to: byte }));
        }
      }
      return [{ id: this.#unknownId(), token, from, to: byte }];
    });
  }

  #unknownId() {
    if (this.unknown === null) {
      throw new InputError("the tokenizer has no token for unknown text; pass a `tokenizer` of your own");
    }
    return this.unknown;
  }

  /** Returns the likeliest pieces, unknown neighbours as one. */
  #pieces(text) {
    const idOf = (piece) => this.ids.get(piece);
    const unknown = () => [this.unknownScore, this.#unknownId()];
    const pieces = [];
    let joins = false;
    for (const [piece, id] of likeliest(text, this.longest, idOf, (_, id) => this.vocab[id][1], unknown)) {
      if (id === this.unknown && joins) pieces[pieces.length - 1] += piece;
      else pieces.push(piece);
      joins = id === this.unknown;
    }
    return pieces;
  }
}
