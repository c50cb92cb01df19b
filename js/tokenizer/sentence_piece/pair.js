// MarianMT's tokenizer: a SentencePiece model for each side, and tables of ids.

import { InputError } from "../../errors.js";
import { TextTokenizer } from "../text_tokenizer.js";
import { BLANK, SentencePieceModel } from "./model.js";

const UNKNOWN = "<unk>";
const CLEANED = [
  ...[".", "?", "!", ","].map((mark) => [` ${mark}`, mark]),
  [" ' ", "'"],
  ...["n't", "'m", "'s", "'ve", "'re"].map((end) => [` ${end}`, end]),
];
const EDGES = /^[\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu;

/**
 * Two models and a table of ids that they share. A source may begin with a target language of the
 * table, such as ">>fra<<".
 */
export class SentencePiecePair extends TextTokenizer {
  longestToken = null;
  #source;
  #target;
  #ids;
  #pieces;
  #cleans;

  /**
   * @param {object} settings content of tokenizer.json
   * @param {Uint8Array[]} files source.spm, target.spm, vocab.json, perhaps target_vocab.json
   * @param {object} special see text_tokenizer.js
   */
  constructor(settings, [source, target, ...tables], special) {
    super();
    this.special = special;
    this.vocabularySize = settings.vocabulary_size;
    this.#cleans = settings.clean_up_spaces === true;
    this.#source = new SentencePieceModel(source);
    this.#target = new SentencePieceModel(target);
    const read = tables.map(tableOf);
    this.#ids = read[0];
    this.targetIds = read.at(-1);
    this.#pieces = new Map(Array.from(this.targetIds, ([piece, id]) => [id, piece]));
    // SentencePiece passes unknown text through: "</s>" may come out as one piece.
    const named = new Set([...this.skipped].map((id) => this.#pieces.get(id)));
    const around = new Set([...special.before, ...special.after]);
    const textual = (table) =>
      [...table].filter(([piece]) => !named.has(piece) && !(piece.startsWith(">>") && piece.endsWith("<<")));
    this.textualIds = new Map(textual(this.#ids).filter(([, id]) => !around.has(id)));
    this.textualTargetIds = new Map(textual(this.targetIds));
  }

  /** Special ids of a target. */
  get skipped() {
    return this.special.ids;
  }

  /** Returns the token ids of a source; pieces that the table lacks become the unknown token. */
  encodePlain(text) {
    const end = text.indexOf("<<") + 2;
    const language = text.startsWith(">>") ? this.#ids.get(text.slice(0, end)) : undefined;
    const ids = (rest) => idsOf(this.#source, rest, this.textualIds, this.#ids.get(UNKNOWN));
    return language === undefined ? ids(text) : [language, ...ids(text.slice(end))];
  }

  /** Returns the token ids of a target, split by the model of the target language. */
  encodeTarget(text) {
    return this.encodeEach(text, (piece) => this.encodePlainTarget(piece));
  }

  encodePlainTarget(text) {
    return idsOf(this.#target, text, this.textualTargetIds, this.targetIds.get(UNKNOWN));
  }

  /** Returns the text of a target's token ids; special and unknown ones are skipped. */
  decode(ids) {
    const unknown = this.targetIds.get(UNKNOWN);
    const known = ids.filter((id) => this.#pieces.has(id) && !this.skipped.has(id) && id !== unknown);
    let text = this.#target.decode(known.map((id) => this.#pieces.get(id)));
    text = text.replaceAll(BLANK, " ").replace(EDGES, "");
    for (const [found, content] of this.#cleans ? CLEANED : []) text = text.replaceAll(found, content);
    return text;
  }
}

/** The same with a table of ids for each side: tokens around a source are of its own table. */
export class SentencePieceTables extends SentencePiecePair {
  get skipped() {
    const { pad, bos, ends } = this.special;
    return new Set([pad, bos, ...ends]);
  }

  /** The texts of special tokens are those of sources. */
  encodeTarget(text) {
    return this.encodePlainTarget(text);
  }
}

function idsOf(model, text, table, unknown) {
  return model.encode(text).map(([piece]) => table.get(piece) ?? unknown);
}

function tableOf(content) {
  const table = new Map(Object.entries(JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content))));
  if (!table.has(UNKNOWN)) throw new InputError(`a vocabulary has no ${UNKNOWN}; export the bundle again`);
  return table;
}
