// Models of tokenizer.json: the ids of a piece of a text.
//
// A model has size, id(token), token(id), and tokenize(text), which returns a list of
// { id, token, from, to }: ids with their tokens, and the bytes of the text that they stand for.

import { InputError, refuse, shown } from "../../errors.js";
import { bytesIn, byteTokens } from "../utf8.js";
import { Merges } from "./merges.js";

const MOST_CACHED = 10_000;

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
  return new Cached(new Model(settings));
}

/** Returns the type of a model in an old file that names no type. */
function guessed({ merges, vocab, continuing_subword_prefix: prefix }) {
  if (merges) return "BPE";
  if (Array.isArray(vocab)) return "Unigram";
  return prefix === undefined ? "WordLevel" : "WordPiece";
}

/** A model that remembers the pieces it has seen. */
class Cached {
  #seen = new Map();

  constructor(model) {
    this.model = model;
  }

  get size() {
    return this.model.size;
  }

  id(token) {
    return this.model.id(token);
  }

  token(id) {
    return this.model.token(id);
  }

  tokenize(text) {
    let found = this.#seen.get(text);
    if (!found) {
      found = this.model.tokenize(text);
      if (this.#seen.size >= MOST_CACHED) this.#seen.clear();
      if (text.length < 100) this.#seen.set(text, found);
    }
    return found;
  }
}

/** A table of words. */
class WordLevel {
  constructor({ vocab, unk_token: unknown }) {
    this.ids = new Map(Object.entries(vocab));
    this.tokens = new Map(Array.from(this.ids, ([token, id]) => [id, token]));
    this.unknown = unknown;
  }

  get size() {
    return this.ids.size;
  }

  id(token) {
    return this.ids.get(token);
  }

  token(id) {
    return this.tokens.get(id);
  }

  tokenize(text) {
    const token = this.ids.has(text) ? text : this.unknown;
    return [this.found(token, 0, bytesIn(text))];
  }

  found(token, from, to) {
    const id = this.ids.get(token);
    if (id === undefined) {
      throw new InputError(`the tokenizer's vocabulary has no ${token}; export the bundle again`);
    }
    return { id, token, from, to };
  }
}

/** Longest matches from the left (Wu et al. 2016), of BERT. */
class WordPiece extends WordLevel {
  constructor(settings) {
    super({ unk_token: "[UNK]", ...settings });
    this.prefix = settings.continuing_subword_prefix ?? "##";
    this.most = settings.max_input_chars_per_word ?? 100;
  }

  tokenize(text) {
    const characters = [...text];
    const unknown = () => [this.found(this.unknown, 0, bytesIn(text))];
    if (characters.length > this.most) return unknown();
    const tokens = [];
    let byte = 0;
    for (let start = 0; start < characters.length; ) {
      let end = characters.length;
      const token = () => (start ? this.prefix : "") + characters.slice(start, end).join("");
      while (end > start && !this.ids.has(token())) end -= 1;
      if (end === start) return unknown();
      const next = byte + bytesIn(characters.slice(start, end).join(""));
      tokens.push(this.found(token(), byte, next));
      [start, byte] = [end, next];
    }
    return tokens;
  }
}

const UNKNOWN_PENALTY = 10;

/** The likeliest pieces by a unigram language model (Kudo 2018). */
class Unigram {
  constructor({ vocab, unk_id: unknown, byte_fallback: spells }) {
    this.vocab = vocab;
    this.ids = new Map(vocab.map(([piece], id) => [piece, id]));
    this.unknown = unknown ?? null;
    this.spells = spells ?? false;
    this.unknownScore = vocab.reduce((least, [, score]) => Math.min(least, score), Infinity) - UNKNOWN_PENALTY;
    this.longest = vocab.reduce((most, [piece]) => Math.max(most, piece.length), 0);
  }

  get size() {
    return this.vocab.length;
  }

  id(token) {
    return this.ids.get(token);
  }

  token(id) {
    return this.vocab[id]?.[0];
  }

  tokenize(text) {
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
    const size = text.length;
    const [scores, starts, ids] = [new Float64Array(size + 1), new Int32Array(size + 1).fill(-1), []];
    const consider = (start, end, score, id) => {
      const sum = score + scores[start];
      if (starts[end] >= 0 && !(sum > scores[end])) return;
      [scores[end], starts[end], ids[end]] = [sum, start, id];
    };
    for (let start = 0; start < size; ) {
      const one = text.codePointAt(start) > 0xffff ? 2 : 1;
      const most = Math.min(size, start + this.longest);
      let single = false;
      for (let end = start + 1; end <= most; end++) {
        const id = this.ids.get(text.slice(start, end));
        if (id === undefined) continue;
        consider(start, end, this.vocab[id][1], id);
        single ||= end - start === one;
      }
      if (!single) consider(start, start + one, this.unknownScore, this.#unknownId());
      start += one;
    }
    const pieces = [];
    let joins = false;
    for (let end = size; end > 0; end = starts[end]) {
      const piece = text.slice(starts[end], end);
      const unknown = ids[end] === this.unknown;
      if (unknown && joins) pieces[pieces.length - 1] = piece + pieces.at(-1);
      else pieces.push(piece);
      joins = unknown;
    }
    return pieces.reverse();
  }
}
