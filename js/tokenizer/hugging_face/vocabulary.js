// The tokens of a model of tokenizer.json.

const MOST_CACHED = 10_000;

/** Tokens with their ids; a subclass finds those of a piece of a text (`found`). */
export class Vocabulary {
  #seen = new Map();

  /** @param {[string, number][]} entries tokens with their ids */
  constructor(entries) {
    this.size = entries.length;
    this.ids = new Map(entries);
    this.tokens = new Map(entries.map(([token, id]) => [id, token]));
  }

  id(token) {
    return this.ids.get(token);
  }

  token(id) {
    return this.tokens.get(id);
  }

  /** Returns the tokens of a piece, see models.js; short pieces are remembered. */
  tokenize(text) {
    let found = this.#seen.get(text);
    if (!found) {
      found = this.found(text);
      if (this.#seen.size >= MOST_CACHED) this.#seen.clear();
      if (text.length < 100) this.#seen.set(text, found);
    }
    return found;
  }
}
