// SentencePiece (Kudo and Richardson 2018): normalisation, pieces and texts as its library has them.

import { byteTokens } from "../utf8.js";
import { Charsmap } from "../charsmap.js";
import { refuse } from "../refusal.js";
import { mergedPieces, unigramPieces } from "./segmentation.js";
import { readModel, TYPES } from "./model_file.js";

export const BLANK = "\u2581";
const REPLACEMENT = "\ufffd";

/** An opened model. */
export class SentencePieceModel {
  #model;
  #charsmap;
  #encoder = new TextEncoder();
  #textual = new Map(); // ids of pieces that a text may have
  #reserved = new Map();
  #userDefined;

  /** @param {Uint8Array} content */
  constructor(content) {
    const model = readModel(content);
    this.#model = model;
    if (model.suffix) refuse("blanks after words (treat_whitespace_as_suffix)");
    if (model.denormalises) refuse("a denormaliser");
    this.#charsmap = model.charsmap.length ? new Charsmap(model.charsmap) : null;
    this.pieces = model.pieces;
    this.unknown = model.pieces.findLastIndex(({ type }) => type === TYPES.unknown);
    model.pieces.forEach(({ piece, type }, id) => {
      const textual = [TYPES.normal, TYPES.userDefined, TYPES.unused].includes(type);
      (textual ? this.#textual : this.#reserved).set(piece, id);
    });
    const own = model.pieces.filter(({ type }) => type === TYPES.userDefined).map(({ piece }) => piece);
    // The longest of those that a text begins with.
    this.#userDefined = own.sort((one, other) => other.length - one.length);
  }

  /** Returns the id of a piece, that of unknown text without one. */
  id(piece) {
    return this.#reserved.get(piece) ?? this.#textual.get(piece) ?? this.unknown;
  }

  /** Returns the id of a piece of a text, where an unused one that cannot be taken apart is unknown. */
  #used(piece) {
    const id = this.id(piece);
    return this.isType(id, "unused") ? this.unknown : id;
  }

  isType(id, type) {
    return this.pieces[id]?.type === TYPES[type];
  }

  /** Returns pieces of a text with their ids; unknown neighbours are one piece. */
  encode(text) {
    const normalised = this.#normalise(text.toWellFormed());
    const table = { pieces: this.pieces, ids: this.#textual, unknown: this.unknown };
    const found = this.#model.unigram
      ? unigramPieces(normalised, table)
      : mergedPieces(normalised, table, this.#userDefined).map((piece) => [piece, this.#used(piece)]);
    const made = [];
    let joins = false;
    for (const [piece, id] of found) {
      const unknown = id === this.unknown;
      if (unknown && this.#model.byteFallback) {
        made.push(...byteTokens(piece).map((byte) => [byte, this.id(byte)]));
      } else if (unknown && joins) made.at(-1)[0] += piece;
      else made.push([piece, id]);
      joins = unknown;
    }
    return made;
  }

  #normalise(text) {
    const { addsBlank, removesBlanks, escapesBlanks } = this.#model;
    const blank = escapesBlanks ? BLANK : " ";
    const parts = this.#prefixes(text);
    let first = 0;
    while (removesBlanks && parts[first] === " ") first += 1;
    if (first === parts.length) return "";
    let made = addsBlank ? blank : "";
    let afterBlank = removesBlanks;
    for (const part of parts.slice(first)) {
      const kept = afterBlank ? part.replace(/^ +/, "") : part;
      made += escapesBlanks ? kept.replaceAll(" ", BLANK) : kept;
      if (kept) afterBlank = kept.endsWith(" ");
      if (!removesBlanks) afterBlank = false;
    }
    if (removesBlanks) while (made.endsWith(blank)) made = made.slice(0, -1);
    return made;
  }

  /** Returns the parts of a text, each replaced by its normalised form: the longest known first. */
  #prefixes(text) {
    const bytes = this.#encoder.encode(text);
    const parts = [];
    for (let [unit, byte] = [0, 0]; unit < text.length; ) {
      const own = this.#userDefined.find((piece) => text.startsWith(piece, unit));
      let size = own ? this.#encoder.encode(own).length : 0;
      let part = own;
      if (!own && this.#charsmap) {
        for (const [length, place] of this.#charsmap.prefixes(bytes, byte, false)) {
          [size, part] = [length, place];
        }
        if (size) part = this.#charsmap.text(part);
      }
      if (!size) {
        part = String.fromCodePoint(text.codePointAt(unit));
        size = this.#encoder.encode(part).length;
      }
      parts.push(part);
      for (const end = byte + size; byte < end; ) {
        const code = text.codePointAt(unit);
        unit += code > 0xffff ? 2 : 1;
        byte += code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
      }
    }
    return parts;
  }

  /** Returns the text of pieces; unknown ones that are texts of their own stay. */
  decode(pieces) {
    const { addsBlank, removesBlanks, unknownSurface } = this.#model;
    let text = "";
    let [begins, blankSeen] = [true, false];
    let bytes = [];
    const flush = () => {
      text += charactersOf(bytes);
      bytes = [];
    };
    for (const piece of pieces) {
      const id = this.id(piece);
      if (this.isType(id, "byte")) {
        bytes.push(parseInt(piece.slice(3, 5), 16));
        continue;
      }
      flush();
      if (blankSeen || text) begins = false;
      blankSeen = false;
      if (this.isType(id, "control")) continue;
      if (id === this.unknown) {
        text += this.pieces[id]?.piece === piece ? unknownSurface : piece;
        continue;
      }
      let own = piece;
      if (begins && (addsBlank || removesBlanks) && own.startsWith(BLANK)) {
        own = own.slice(1);
        blankSeen = !removesBlanks; // all blanks at the beginning go
      }
      text += own.replaceAll(BLANK, " ");
    }
    flush();
    return text;
  }
}

/** Returns the text of bytes, U+FFFD for each byte that begins no character. */
function charactersOf(bytes) {
  let text = "";
  for (let place = 0; place < bytes.length; ) {
    const first = bytes[place];
    const size = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    try {
      const part = Uint8Array.from(bytes.slice(place, place + size));
      text += new TextDecoder("utf-8", { ignoreBOM: true, fatal: true }).decode(part);
      place += size;
    } catch {
      text += REPLACEMENT;
      place += 1;
    }
  }
  return text;
}
