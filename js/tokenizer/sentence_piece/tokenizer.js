// A SentencePiece model with its own ids.

import { SentencePieceModel } from "./model.js";

/** Text to token ids and back; see docs/portability.md. */
export class SentencePieceTokenizer {
  longestToken = null;
  #model;

  /**
   * @param {object} settings content of tokenizer.json
   * @param {Uint8Array[]} files sentencepiece.model
   * @param {object} special see special_tokens.js
   */
  constructor({ vocabulary_size: size }, [content], special) {
    this.special = special;
    this.vocabularySize = size;
    this.#model = new SentencePieceModel(content);
  }

  /** Returns the token ids of a text, without special tokens. */
  encode(text) {
    return this.#model.encode(text).map(([, id]) => id);
  }

  /** Returns the token ids of a text that the model writes. */
  encodeTarget(text) {
    return this.encode(text);
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
