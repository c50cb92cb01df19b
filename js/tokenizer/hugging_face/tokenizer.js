// A tokenizer.json of Hugging Face's `tokenizers`, as that library reads it.

import { AddedTokens } from "./added_tokens.js";
import { decoder } from "./decoders.js";
import { modelOf } from "./models.js";
import { normalizer } from "./normalizers.js";
import { Piece } from "./piece.js";
import { preTokenizer } from "./pre_tokenizers.js";
import { TextTokenizer } from "../text_tokenizer.js";
import { unitsOfBytes } from "../utf8.js";

/** Text to token ids and back; see docs/portability.md. */
export class HuggingFaceTokenizer extends TextTokenizer {
  /** White space may be dropped, and a word of any length may be one unknown token. */
  longestToken = null;
  #model;
  #added;
  #normalise;
  #split;
  #join;
  #record;

  /**
   * @param {object} settings content of the bundle's tokenizer.json
   * @param {Uint8Array[]} files huggingface.json
   * @param {object} special see text_tokenizer.js
   */
  constructor({ vocabulary_size: size }, [content], special) {
    super();
    this.special = special;
    this.vocabularySize = size;
    const record = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content));
    this.#record = record;
    this.#model = modelOf(record.model);
    this.#normalise = normalizer(record.normalizer);
    this.#split = preTokenizer(record.pre_tokenizer);
    this.#join = decoder(record.decoder);
    this.#added = new AddedTokens(record.added_tokens ?? [], this.#model, this.#normalise);
    trimmed([], record.post_processor); // fails at once for another form
  }

  get specialTexts() {
    const special = (this.#record.added_tokens ?? []).filter((each) => each.special);
    return Object.fromEntries(special.map(({ content, id }) => [content, id]));
  }

  readSpecialTokens() {
    super.readSpecialTokens();
    this.#added.readsSpecial = true;
  }

  encode(text) {
    return this.#tokens(text).flatMap(([, tokens]) => tokens.map(({ id }) => id));
  }

  /** Returns the token ids of texts with masks between; the token's flags say which blanks are its own. */
  encodeMasked(pieces) {
    const mask = this.special.mask;
    const content = this.#added.token(mask) ?? this.#model.token(mask);
    if (this.readsSpecial) return this.encode(pieces.join(content));
    const record = this.#record.added_tokens?.find(({ id }) => id === mask);
    if (!record) return super.encodeMasked(pieces);
    const mark = markOf(pieces.join(""));
    const marked = { ...record, content: mark + record.content, id: this.#added.next(this.#model), special: false };
    const added = new AddedTokens([...this.#record.added_tokens, marked], this.#model, this.#normalise);
    const tokens = this.#tokens(pieces.join(marked.content), added);
    return tokens.flatMap(([, found]) => found.map(({ id }) => (id === marked.id ? mask : id)));
  }

  /** Yields pieces of a text with their tokens. */
  #tokens(text, added = this.#added) {
    return added.split(Piece.of(text.toWellFormed()), this.#normalise).flatMap(([piece, token]) => {
      if (token) return [[piece, [token]]];
      return this.#split(piece)
        .filter((each) => each.text)
        .map((each) => [each, this.#model.tokenize(each.text)]);
    });
  }

  /**
   * Returns where each token of `encode` stands in a text, in code points, and whether it continues
   * the word of the token before (`gather_pre_entities` of transformers).
   */
  places(text) {
    const { continuing_subword_prefix: prefix, unk_token: word, unk_id: number } = this.#record.model;
    const unknown = typeof word === "string" ? this.#id(word) : number;
    const characters = [...text];
    const found = this.#tokens(text).flatMap(([piece, tokens]) => {
      const units = unitsOfBytes(piece.text);
      return tokens.map(({ id, token, from, to }) => ({
        id,
        token,
        start: piece.starts[units[from]] ?? 0,
        end: piece.ends[units[to - 1]] ?? 0,
      }));
    });
    return trimmed(found, this.#record.post_processor).map(({ id, token, start, end }) => {
      const blank = characters.slice(Math.max(0, start - 1), start + 1).includes(" ");
      const continues = prefix ? [...token].length !== end - start : start > 0 && !blank;
      return { start, end, continues: continues && id !== unknown };
    });
  }

  #id(token) {
    return this.#added.id(token) ?? this.#model.id(token);
  }

  /** Returns the text of token ids; ids without text are skipped. */
  decode(ids) {
    const tokens = [];
    for (const id of ids) {
      if (this.special.ids.has(id)) continue;
      const token = this.#added.token(id) ?? this.#model.token(id);
      if (token !== undefined && !this.#added.isSpecial(token)) tokens.push(token);
    }
    return this.#join(tokens).join("");
  }
}

/** Returns a character of the private use area that a text lacks. */
function markOf(text) {
  for (let code = 0xe000; ; code++) if (!text.includes(String.fromCharCode(code))) return String.fromCharCode(code);
}

// Blanks at the beginning of a token.
const BLANKS = (token) => /^[\u0120\p{White_Space}]*/u.exec(token)[0];

/** Returns tokens whose places hold no blanks at their ends (`process_offsets`). */
function trimmed(tokens, processor) {
  if (processor?.type === "Sequence") return processor.processors.reduce(trimmed, tokens);
  if (!["ByteLevel", "RobertaProcessing"].includes(processor?.type) || processor.trim_offsets === false) {
    return tokens;
  }
  const { add_prefix_space: blank = true } = processor;
  return tokens.map((each, place) => {
    let { start, end } = each;
    let leading = [...BLANKS(each.token)].length;
    const trailing = [...BLANKS([...each.token].reverse().join(""))].length;
    // One alone was added; more were there before.
    if (leading === 1 && blank && (place === 0 || start === 0)) leading = 0;
    start = Math.min(start + leading, end);
    if (trailing && end >= trailing) end = Math.max(end - trailing, start);
    return { ...each, start, end };
  });
}
