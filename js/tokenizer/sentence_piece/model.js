// SentencePiece (Kudo and Richardson 2018): normalisation, pieces and texts as its library has them.

import { InputError, refuse } from "../../errors.js";
import { Charsmap } from "../charsmap.js";
import { Heap } from "../heap.js";
import { likeliest } from "../unigram.js";
import { bytesIn, byteTokens } from "../utf8.js";

export const BLANK = "\u2581";
const REPLACEMENT = "\ufffd";
const TYPES = { normal: 1, unknown: 2, control: 3, userDefined: 4, unused: 5, byte: 6 };
const UNKNOWN_PENALTY = 10;

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
        const character = String.fromCodePoint(text.codePointAt(unit));
        unit += character.length;
        byte += bytesIn(character);
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

/**
 * Returns the likeliest pieces with their ids (`EncodeOptimized` of unigram_model.cc), in float32.
 *
 * @param {string} text
 * @param {object} table pieces by id; ids of those that a text may have; unknown: the unknown id
 */
function unigramPieces(text, { pieces, ids, unknown }) {
  const normal = pieces.filter(({ type }) => type === TYPES.normal);
  const least = normal.reduce((smallest, { score }) => Math.min(smallest, score), Infinity);
  const longest = pieces.reduce((size, { piece }) => Math.max(size, piece.length), 0);
  const idOf = (piece) => {
    const id = ids.get(piece);
    return pieces[id]?.type === TYPES.unused ? undefined : id;
  };
  // The longer a user-defined piece, the better.
  const scoreOf = (piece, id) =>
    pieces[id].type === TYPES.userDefined ? Math.fround(0.1 * (bytesIn(piece) - 1)) : pieces[id].score;
  return likeliest(text, longest, idOf, scoreOf, () => [Math.fround(least - UNKNOWN_PENALTY), unknown], Math.fround);
}

/**
 * Returns pieces by merges, the pair of the best score first (`SampleEncode` of bpe_model.cc).
 *
 * @param {string} text
 * @param {object} table see `unigramPieces`
 * @param {string[]} whole user-defined pieces, the longest first, which are never merged
 */
function mergedPieces(text, { pieces, ids }, whole) {
  const symbols = [];
  for (let place = 0; place < text.length; ) {
    const own = whole.find((piece) => text.startsWith(piece, place));
    const piece = own ?? String.fromCodePoint(text.codePointAt(place));
    symbols.push({ piece, frozen: own !== undefined, before: symbols.length - 1, after: symbols.length + 1 });
    place += piece.length;
  }
  const halves = new Map(); // of unused pieces
  const waiting = new Heap();
  const consider = (left, right) => {
    const [one, other] = [symbols[left], symbols[right]];
    if (!one || !other || one.frozen || other.frozen) return;
    const id = ids.get(one.piece + other.piece);
    if (id === undefined) return;
    const size = one.piece.length + other.piece.length;
    waiting.push({ rank: -pieces[id].score, place: left, right, size });
    if (pieces[id].type === TYPES.unused) halves.set(one.piece + other.piece, [one.piece, other.piece]);
  };
  for (let place = 1; place < symbols.length; place++) consider(place - 1, place);
  for (let pair; (pair = waiting.pop()); ) {
    const [left, right] = [symbols[pair.place], symbols[pair.right]];
    if (!left.piece || !right.piece || left.piece.length + right.piece.length !== pair.size) continue;
    left.piece += right.piece;
    left.after = right.after;
    if (right.after < symbols.length) symbols[right.after].before = pair.place;
    right.piece = "";
    consider(left.before, pair.place);
    consider(pair.place, left.after);
  }
  const apart = (piece) =>
    pieces[ids.get(piece)]?.type === TYPES.unused && halves.has(piece)
      ? halves.get(piece).flatMap(apart)
      : [piece];
  return symbols.filter(({ piece }) => piece).flatMap(({ piece }) => apart(piece));
}

/**
 * Reads a model.
 *
 * @param {Uint8Array} content
 * @returns {object} pieces: { piece, score, type } by id; unigram: whether it is of type unigram, else
 *   BPE; byteFallback; suffix: whether blanks belong to the word before; unknownSurface; charsmap;
 *   addsBlank; removesBlanks; escapesBlanks; denormalises
 */
function readModel(content) {
  const fields = fieldsOf(content);
  const pieces = (fields[1] ?? []).map((each) => {
    const { 1: piece, 2: score, 3: type } = fieldsOf(each);
    return {
      piece: utf8(piece?.at(-1)),
      score: score ? new DataView(Uint32Array.of(score.at(-1)).buffer).getFloat32(0, true) : 0,
      type: type ? Number(type.at(-1)) : TYPES.normal,
    };
  });
  const merged = (messages = []) => fieldsOf(joined(messages));
  const [trainer, normaliser, denormaliser] = [merged(fields[2]), merged(fields[3]), merged(fields[5])];
  const flag = (message, field, usual) => (message[field] ? message[field].at(-1) !== 0n : usual);
  const type = Number(trainer[3]?.at(-1) ?? 1n);
  if (![1, 2].includes(type) || !pieces.length) {
    throw new InputError(
      "the SentencePiece model is of a type that is not read, expected unigram or BPE; pass a " +
        "`tokenizer` of your own",
    );
  }
  return {
    pieces,
    unigram: type === 1,
    byteFallback: flag(trainer, 35, false),
    suffix: flag(trainer, 24, false),
    unknownSurface: trainer[44] ? utf8(trainer[44].at(-1)) : " \u2047 ",
    charsmap: normaliser[2]?.at(-1) ?? new Uint8Array(),
    addsBlank: flag(normaliser, 3, true),
    removesBlanks: flag(normaliser, 4, true),
    escapesBlanks: flag(normaliser, 5, true),
    denormalises: Boolean(denormaliser[2]?.at(-1).length),
  };
}

/** Returns values of a message by field: numbers of 4 bytes, BigInts of varints, bytes of others. */
function fieldsOf(content) {
  const fields = {};
  let place = 0;
  const varint = () => {
    for (let [value, shift] = [0n, 0n]; ; shift += 7n) {
      const byte = content[place++];
      if (byte === undefined || shift > 63n) throw new RangeError("it ends within a number");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (place < content.length) {
    const tag = Number(varint());
    const [field, kind] = [tag >>> 3, tag & 7];
    let value;
    if (kind === 0) value = varint();
    else if (kind === 1 || kind === 5 || kind === 2) {
      const size = kind === 2 ? Number(varint()) : kind === 1 ? 8 : 4;
      if (place + size > content.length) throw new RangeError("it ends within a field");
      value = content.subarray(place, place + size);
      if (kind === 5) value = new DataView(value.buffer, value.byteOffset, 4).getUint32(0, true);
      place += size;
    } else throw new RangeError("it is no protocol buffer");
    (fields[field] ??= []).push(value);
  }
  return fields;
}

function joined(messages) {
  return Uint8Array.from(messages.flatMap((message) => [...message]));
}

function utf8(bytes) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}
