// Tokens that a tokenizer.json adds to its model: found in a text before it is split.

import { InputError, refuse } from "../../errors.js";
import { bytesIn } from "../utf8.js";
import { literal, Piece, withoutBlanks } from "./piece.js";

const WORD = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u200c\\u200d]";
const BEGINS = new RegExp(`^${WORD}`, "u");

/** Added tokens by their texts; special ones are text where a text has them. */
export class AddedTokens {
  #ids = new Map();
  #tokens = new Map(); // by id
  #texts = new Map();
  #special = new Set();
  #largest = -1;
  readsSpecial = false; // whether special tokens are found in a text
  #plain; // those looked for before the text is normalised
  #normalised;

  /**
   * @param {object[]} records `added_tokens` of tokenizer.json
   * @param {object} model see models.js
   * @param {(piece: Piece) => void} normalise
   */
  constructor(records, model, normalise) {
    for (const record of records) {
      const { content, id, special } = record;
      if (!content) continue;
      if (this.#expected(content, model) !== id) {
        throw new InputError(
          `expected the id ${this.#expected(content, model)} for the tokenizer's added token ` +
            `${JSON.stringify(content)}, found ${id}; export the bundle again`,
        );
      }
      this.#ids.set(content, id);
      this.#tokens.set(id, record);
      this.#largest = Math.max(this.#largest, id);
      if (special) this.#special.add(content);
    }
    const normalised = new Map(); // tokens by normalised text
    for (const [id, record] of this.#tokens) {
      const piece = Piece.of(record.content);
      if (record.normalized) normalise(piece);
      const { text } = piece;
      if (!text) refuse(`the added token ${JSON.stringify(record.content)}, of which no text is left,`);
      if (record.normalized && normalised.has(text)) {
        const both = [normalised.get(text), record.content].map((each) => JSON.stringify(each)).join(" and ");
        throw new InputError(
          `the tokenizer's added tokens ${both} have one text once normalised, so either may be found; remove one`,
        );
      }
      if (record.normalized) normalised.set(text, record.content);
      this.#texts.set(id, text);
    }
    const finder = (kind) =>
      new Finder([...this.#tokens.values()].filter(kind), ({ id }) => this.#texts.get(id));
    this.#plain = finder(({ normalized }) => !normalized);
    this.#normalised = finder(({ normalized }) => normalized);
  }

  /** Returns the id that the library gives a token: the model's, or the next one. */
  #expected(content, model) {
    const known = this.#ids.get(content) ?? model.id(content);
    if (known !== undefined) return known;
    return this.next(model);
  }

  /** Returns the id of a further token. */
  next(model) {
    return Math.max(model.size - 1, this.#largest) + 1;
  }

  id(content) {
    return this.#ids.get(content);
  }

  /** Returns the text of a token, normalised where it is looked for in normalised text. */
  token(id) {
    return this.#texts.get(id);
  }

  isSpecial(content) {
    return this.#special.has(content);
  }

  /** Returns the pieces of a text, normalised; of added tokens with the token. */
  split(whole, normalise) {
    return this.#found(this.#plain, whole).flatMap(([piece, token]) => {
      if (token) return [[piece, token]];
      normalise(piece);
      return this.#found(this.#normalised, piece);
    });
  }

  #found(finder, piece) {
    return finder
      .places(piece.text, this.readsSpecial ? new Set() : this.#special)
      .map(([from, to, record]) => {
        const part = piece.slice(from, to);
        const token = record && { id: record.id, token: part.text, from: 0, to: bytesIn(part.text) };
        return [part, token];
      })
      .filter(([part]) => part.text);
  }
}

/** Finds tokens in a text. */
class Finder {
  #records = new Map();
  #expression = null;

  constructor(records, textOf) {
    for (const record of records) this.#records.set(textOf(record), record);
    if (this.#records.size) this.#expression = literal(...this.#records.keys());
  }

  /** Returns places of tokens, and of the text between them with null (`find_matches`). */
  places(text, special) {
    const found = [];
    let last = 0;
    for (const match of this.#expression ? text.matchAll(this.#expression) : []) {
      const record = this.#records.get(match[0]);
      let from = match.index;
      let to = from + match[0].length;
      if (special.has(record.content)) continue;
      if (record.single_word && (BEGINS.test(lastOf(text, from)) || BEGINS.test(text.slice(to, to + 2)))) continue;
      if (record.lstrip) {
        from = Math.max(withoutBlanks(text, from), last);
      }
      if (record.rstrip) to += /^\p{White_Space}*/u.exec(text.slice(to))[0].length;
      if (last < from) found.push([last, from, null]);
      found.push([from, to, record]);
      last = to;
    }
    if (last !== text.length) found.push([last, text.length, null]);
    return found;
  }
}

/** Returns the character before a place, "" at the beginning. */
function lastOf(text, place) {
  return [...text.slice(Math.max(0, place - 2), place)].at(-1) ?? "";
}
