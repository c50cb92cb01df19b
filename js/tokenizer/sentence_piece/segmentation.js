// Pieces of a normalised text: the likeliest by a unigram language model, or by merges.

import { Heap } from "../heap.js";
import { bytesIn } from "../utf8.js";
import { TYPES } from "./model_file.js";

const UNKNOWN_PENALTY = 10;

/**
 * Returns the likeliest pieces with their ids (`EncodeOptimized` of unigram_model.cc), in float32.
 *
 * @param {string} text
 * @param {object} table pieces by id; ids of those that a text may have; unknown: the unknown id
 */
export function unigramPieces(text, { pieces, ids, unknown }) {
  const normal = pieces.filter(({ type }) => type === TYPES.normal);
  const least = normal.reduce((smallest, { score }) => Math.min(smallest, score), Infinity);
  const longest = pieces.reduce((size, { piece }) => Math.max(size, piece.length), 0);
  const size = text.length;
  const [scores, starts, chosen] = [new Float32Array(size + 1), new Int32Array(size + 1).fill(-1), []];
  const consider = (start, end, score, id) => {
    const sum = Math.fround(score + scores[start]);
    if (starts[end] >= 0 && !(sum > scores[end])) return;
    [scores[end], starts[end], chosen[end]] = [sum, start, id];
  };
  for (let start = 0; start < size; ) {
    const one = text.codePointAt(start) > 0xffff ? 2 : 1;
    let single = false;
    for (let end = start + 1; end <= Math.min(size, start + longest); end++) {
      const id = ids.get(text.slice(start, end));
      if (id === undefined || pieces[id].type === TYPES.unused) continue;
      // The longer a user-defined piece, the better.
      const bonus = () => Math.fround(0.1 * (bytesIn(text.slice(start, end)) - 1));
      consider(start, end, pieces[id].type === TYPES.userDefined ? bonus() : pieces[id].score, id);
      single ||= end - start === one;
    }
    if (!single) consider(start, start + one, Math.fround(least - UNKNOWN_PENALTY), unknown);
    start += one;
  }
  const found = [];
  for (let end = size; end > 0; end = starts[end]) found.push([text.slice(starts[end], end), chosen[end]]);
  return found.reverse();
}

/**
 * Returns pieces by merges, the pair of the best score first (`SampleEncode` of bpe_model.cc).
 *
 * @param {string} text
 * @param {object} table see `unigramPieces`
 * @param {string[]} whole user-defined pieces, the longest first, which are never merged
 */
export function mergedPieces(text, { pieces, ids }, whole) {
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
