// From texts to token ids: special tokens, and texts longer than the model's positions.

import { InputError, shown, UsageError } from "./errors.js";

const BLANK = /^[\p{White_Space}\x1c-\x1f]*$/u;

/** Why an input has no answer: a word for programs, a sentence, and the input's tokens. */
export class RowError extends Error {
  constructor(kind, message, tokens = 0) {
    super(message);
    this.kind = kind;
    this.tokens = tokens;
  }
}

/** Its text has more tokens than the model has positions. */
class TooLong extends RowError {
  cut = true;
}

/**
 * Returns the token ids of a text for a model, special tokens included.
 *
 * @param {string | RowError} text
 * @param {object} tokenizer see tokenizer/tokenizer.js
 * @param {object} limits positions: most tokens; longRows: "error" or "truncate"; reserve:
 *   positions to leave free when truncating; wrap: puts special tokens around the ids of a target,
 *   which is cut at its end
 * @param {(text: string) => number[]} [encode] default: that of the tokenizer
 * @returns {{ids: number[], tokens: number, truncated: boolean}}
 * @throws {RowError} of kind empty, tokenizer or too-long, or that in place of the text
 */
export function encodeRow(text, tokenizer, limits, encode = (each) => tokenizer.encode(each)) {
  requireTexts(text);
  const { positions, longRows = "error", reserve = 0 } = limits;
  const { special } = tokenizer;
  const wrap = limits.wrap ?? ((ids) => special.wrap(ids));
  const keepsEnd = !limits.wrap && special.keepsEnd;
  const truncates = longRows === "truncate";
  const most = (!limits.wrap && special.longest) || positions;
  const room = truncates ? Math.max(0, Math.min(positions - reserve, most)) : positions;
  const around = wrap([]).length;
  // The length of a text bounds its tokens from below, so one of megabytes is not split at all.
  const longest = limits.longest ?? tokenizer.longestToken;
  const characters = longest && text.length > positions * longest ? [...text] : null;
  const least = characters ? Math.ceil(characters.length / longest) : 0;
  const far = least > positions;
  const head = !far || (truncates && keepsEnd) ? text : truncates ? characters.slice(0, room * longest).join("") : "";
  const ids = tokenIds(head, encode);
  const tokens = (far ? least : ids.length) + around;
  requireFull(text, tokens);
  if (tokens <= room) return { ids: wrap(ids), tokens, truncated: false };
  if (truncates && room > around) {
    const kept = room - around;
    return { ids: wrap(keepsEnd ? special.cut(ids, kept) : ids.slice(0, kept)), tokens, truncated: true };
  }
  throw tooLong(tokens, positions, far ? "at least " : "");
}

/** Returns the token ids of a text; throws RowError for one that the tokenizer cannot encode. */
export function tokenIds(text, encode) {
  try {
    return encode(text);
  } catch (error) {
    if (!(error instanceof InputError || error instanceof RangeError)) throw error;
    throw new RowError("tokenizer", `the tokenizer cannot encode the text: ${error.message}`);
  }
}

/** Throws UsageError for another value than a pair, such as two letters. */
export function requirePair(row) {
  if (Array.isArray(row) && row.length === 2) return;
  throw new UsageError(`expected pairs, such as [text, target], found ${shown(row)}`);
}

/** Returns a text, or the error of a row that holds another value; rows count from 1. */
export function checkedText(text, number) {
  return typeof text === "string" ? text : new RowError("no-text", `expected text in row ${number}, found ${shown(text)}`);
}

/** Returns a text, or the texts of a pair, the second of which may be null; see `checkedText`. */
export function checkedTexts(row, number) {
  if (!(Array.isArray(row) && row.length === 2)) return checkedText(row, number);
  const [first, second = null] = row;
  return [checkedText(first, number), second === null ? null : checkedText(second, number)];
}

/** Throws the errors among texts. */
export function requireTexts(...texts) {
  for (const text of texts) if (text instanceof RowError) throw text;
}

/** Throws RowError for a blank text. */
export function requireFull(text, tokens) {
  if (isBlank(text)) throw new RowError("empty", "there is no text to work on", tokens);
}

export function tooLong(tokens, positions, about = "") {
  return new TooLong(
    "too-long",
    `${about}${tokens} tokens, but the model has ${positions} positions; shorten or split the text`,
    tokens,
  );
}

/** The model gave no numbers for a row, perhaps for the part of it that was read. */
export function notFinite({ tokens, truncated }) {
  const error = new RowError("not-finite", "the model gave NaN or infinity; verify the bundle on this provider", tokens);
  return Object.assign(error, { truncated });
}

/** Whether a text is white space alone. */
export function isBlank(text) {
  return BLANK.test(text);
}

/** Returns a text with a prompt before it, unless it is blank or no text. */
export function prefixed(prompt, text) {
  return isBlank(textOf(text)) ? text : prompt + text;
}

/** Returns the source of a row's record: "" where it is no text. */
export function textOf(source) {
  return typeof source === "string" ? source : "";
}

/** Throws UsageError for a treatment of long rows that a task does not have. */
export function checkLongRows(longRows, known = ["error", "truncate"]) {
  if (![undefined, ...known].includes(longRows)) {
    throw new UsageError(`longRows must be ${known.join(" or ")}, found ${shown(longRows)}`);
  }
}

/** Returns the fields of a record that tell of an error. */
export function errorOf({ kind, message, truncated }) {
  return { error: { kind, message }, ...(truncated && { truncated }) };
}

/** Returns a record: the source and its answer, or `blank` and the error. */
export async function answered(source, blank, answer) {
  try {
    const { truncated, ...found } = await answer();
    return { source, ...found, ...(truncated && { truncated }) };
  } catch (error) {
    if (!(error instanceof RowError)) throw error;
    return { source: textOf(source), ...blank, ...errorOf(error) };
  }
}

/** Returns a number of a record; null for NaN and infinity, since JSON has neither. */
export function finite(value) {
  return Number.isFinite(value) ? value : null;
}

/** A vector whose JSON is a list of the shortest numbers. */
export class Vector extends Float32Array {
  /** Returns the list. */
  toJSON() {
    return Array.from(this, single);
  }
}

/** Returns the number whose text is the shortest that gives a float32 back. */
export function single(value) {
  for (let digits = 1; digits < 9; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return short;
  }
  return Number(value.toPrecision(9));
}
