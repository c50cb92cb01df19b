// A SentencePiece model with its own ids.

import { UsageError } from "../../errors.js";
import { TextTokenizer } from "../text_tokenizer.js";
import { SentencePieceModel } from "./model.js";

/** Text to token ids and back; see docs/portability.md. */
export class SentencePieceTokenizer extends TextTokenizer {
  longestToken = null;
  #model;

  /**
   * @param {object} settings content of tokenizer.json
   * @param {Uint8Array[]} files sentencepiece.model
   * @param {object} special see text_tokenizer.js
   */
  constructor({ vocabulary_size: size }, [content], special) {
    super();
    this.special = special;
    this.vocabularySize = size;
    this.#model = new SentencePieceModel(content);
  }

  get specialTexts() {
    const { pieces, unknown } = this.#model;
    const named = [...pieces.entries()].filter(([id]) => id === unknown || this.#model.isType(id, "control"));
    return Object.fromEntries(named.map(([id, { piece }]) => [piece, id]));
  }

  readSpecialTokens() {
    throw new UsageError("specialTokens as-tokens needs a tokenizer.json, found a tokenizer.model alone");
  }

  encodePlain(text) {
    return this.#model.encode(text).map(([, id]) => id);
  }

  /** Returns the text of token ids; special and unknown ones are skipped. */
  decode(ids) {
    const { pieces, unknown } = this.#model;
    const known = ids.filter(
      (id) =>
        !this.special.ids.has(id) && id in pieces && id !== unknown && !this.#model.isType(id, "control"),
    );
    return this.#model.decode(known.map((id) => pieces[id].piece));
  }
}
