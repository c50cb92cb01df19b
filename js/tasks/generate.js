// Generation of an answer to a text, as it grows.

import { room } from "../decoding/options.js";
import { search } from "../decoding/search.js";
import { UsageError } from "../errors.js";
import { checkedText, encodeRow, errorOf, finite, isBlank, notFinite, RowError, textOf, tokenIds, tooLong } from "../rows.js";
import { checkVariables, encodeChat, pythonJson } from "../tokenizer/chat.js";

// Difference of the rows that seed neighbouring pieces, as in Python.
const PIECE = 1n << 40n;

/** Returns a text, messages or token ids, or the error of a row that holds another value. */
export function checkedPrompt(source, number) {
  const refused = (what) => new RowError("prompt", `expected ${what}`);
  if (Array.isArray(source) && !source.length) return refused(`messages or token ids in row ${number}, found none`);
  if (!isIds(source) && !isChat(source)) return checkedText(source, number);
  try {
    return pythonJson(source) && source;
  } catch (error) {
    return refused(`JSON values in row ${number}, found others: ${error.message}`);
  }
}

/**
 * Generates an answer to one text; yields its text as it grows, and returns the record.
 *
 * With `split_lines`, the default of encoder-decoders, each line is answered on its own.
 *
 * @param {object} engine see engine.js
 * @param {string | number[] | object[]} text or token ids, or messages
 * @param {object} options all generation options
 * @param {object} how row: number that seeds samples; longRows: "error", "truncate" or "split";
 *   sourceLanguage, targetLanguage: names of the tokenizer's languages; chatTemplateKwargs: further
 *   variables of the chat template
 */
export async function* generate(engine, text, options, how) {
  const { decoder, positions } = engine;
  checkSplit(engine, options, how);
  checkVariables(how.chatTemplateKwargs ?? {});
  if (options.max_length > positions) {
    throw new UsageError(
      `max_length is ${options.max_length}, but the model has ${positions} positions; lower max_length`,
    );
  }
  if (options.split_lines && !decoder.hasEncoder) {
    throw new UsageError("a prompt may hold line breaks, so split_lines needs an encoder-decoder; leave split_lines out");
  }
  const source = isIds(text) || isChat(text) ? pythonJson(text) : textOf(text);
  const splits = typeof text === "string" && (options.split_lines ?? decoder.hasEncoder);
  const { lines, around } = splits ? cutLines(text) : { lines: [], around: [] };
  try {
    if (lines.length > 1 && options.n_best > 1) {
      throw new RowError(
        "lines",
        `a text of ${lines.length} lines has no joined answers for n_best=${options.n_best}; give ` +
          "each line a row, or do not split lines",
      );
    }
    const answer = lines.length
      ? yield* answerPieces(engine, lines, around, options, how, answerWhole)
      : yield* answerWhole(engine, text, options, how);
    return recordOf(source, answer, options);
  } catch (error) {
    if (!(error instanceof RowError)) throw error;
    return failed(source, error, options);
  }
}

function checkSplit({ decoder, sentences }, { n_best: best }, { longRows }) {
  if (longRows !== "split") return;
  const conflict = best > 1 ? `n_best=${best}` : decoder.hasEncoder ? "" : "a decoder-only bundle";
  if (conflict) {
    throw new UsageError(
      `longRows=split and ${conflict} exclude each other: only single answers of an encoder-decoder are ` +
        "joined; choose longRows=truncate or longRows=error",
    );
  }
  if (!sentences) {
    throw new UsageError("longRows=split needs sentences, a function from a text to its sentences; give it to Engine.load");
  }
}

/** Answers a text, or its pieces where it is too long and is to be split. */
async function* answerWhole(engine, text, options, how) {
  const { longRows, ...rest } = how;
  if (longRows !== "split") return yield* answerText(engine, text, options, how);
  try {
    return yield* answerText(engine, text, options, rest);
  } catch (error) {
    if (!(error instanceof RowError && error.cut && typeof text === "string")) throw error;
  }
  const parts = pieces(engine, text);
  if (parts.length === 1) return yield* answerText(engine, parts[0], options, rest);
  return yield* answerPieces(engine, parts, null, options, rest, answerText);
}

/**
 * Answers the lines or pieces of a text one by one, and joins the answers as Python does.
 *
 * @param {string[] | null} around text before, between and after them; null is a blank between
 *   answers that are not empty
 */
async function* answerPieces(engine, parts, around, options, how, answer) {
  const answers = [];
  const errors = [];
  const row = BigInt(how.row ?? 0);
  const joined = (text) => {
    const texts = [...answers.map(({ found: [first] }) => first.text), text];
    if (!around) return texts.filter(Boolean).join(" ");
    return texts.map((each, place) => around[place] + each).join("");
  };
  let written = [];
  for (const [place, part] of parts.entries()) {
    try {
      const steps = answer(engine, part, options, place ? { ...how, row: row + BigInt(place) * PIECE } : how);
      let step;
      while (!(step = await steps.next()).done) {
        yield { text: joined(step.value.text), tokens: [...written, ...step.value.tokens] };
      }
      answers.push(step.value);
      written = [...written, ...step.value.found[0].tokens];
    } catch (error) {
      if (!(error instanceof RowError)) throw error;
      errors.push([place + 1, error]);
    }
  }
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const read = sum([...answers, ...errors.map(([, error]) => error)].map((each) => each.tokens));
  if (errors.length) {
    const [[place, error]] = errors;
    if (parts.length === 1) throw error;
    throw new RowError(error.kind, `piece ${place} of ${parts.length}: ${error.message}`, read);
  }
  if (parts.length === 1) {
    const found = answers[0].found.map((one) => ({ ...one, text: around[0] + one.text + around[1] }));
    return { ...answers[0], found };
  }
  const best = answers.map(({ found: [first] }) => first);
  const lengths = best.map(({ tokens, reason }) => tokens.length + (reason === "end" ? 1 : 0));
  const { length_penalty: penalty } = options;
  const total = sum(best.map(({ score }, place) => score * lengths[place] ** penalty));
  const whole = {
    tokens: written,
    text: joined(""),
    score: total / sum(lengths) ** penalty,
    reason: ["length", "stop", "end"].find((reason) => best.some((one) => one.reason === reason)),
  };
  return { tokens: read, truncated: answers.some(({ truncated }) => truncated), found: [whole] };
}

/** Answers one text; returns the tokens read, whether it was truncated, and what was found. */
async function* answerText(engine, text, options, how) {
  const { decoder, bundle } = engine;
  const { tokenizer } = bundle;
  const { ids, truncated, ...request } = requestOf(engine, text, options, how);
  const decode = (tokens) => tokenizer.decode(tokens);
  const steps = search(decoder, options, { source: ids, ...request }, tokenizer.special.ends, decode);
  const partial = tokenizer.decodePartial?.bind(tokenizer) ?? decode;
  let step;
  while (!(step = await steps.next()).done) {
    how.signal?.throwIfAborted();
    yield { text: cut(partial(step.value), options.stop), tokens: [...step.value] };
  }
  const found = step.value
    .filter((each) => each.reason !== "error")
    .map((each) => ({ ...each, text: cut(decode(each.tokens), options.stop) }));
  if (!found.length) throw notFinite({ tokens: ids.length, truncated });
  return { tokens: ids.length, truncated, found };
}

/** Returns the lines of a text that are not blank, and the text around each; none of one line. */
function cutLines(text) {
  const parts = text.split(/(\r\n?|\n)/);
  const lines = [];
  const around = [[]];
  for (const part of parts.length > 1 ? parts : []) {
    if (isBlank(part)) around.at(-1).push(part);
    else {
      lines.push(part);
      around.push([]);
    }
  }
  return { lines, around: around.map((each) => each.join("")) };
}

function requestOf(engine, text, options, how) {
  const { special } = engine.bundle.tokenizer;
  // Token ids and chats are read as they are.
  const { sourceLanguage, targetLanguage } = typeof text === "string" ? how : {};
  const { hasEncoder } = engine.decoder;
  const target = targetLanguage === undefined ? null : special.language(targetLanguage);
  const begins = special.beginsWithLanguage;
  const first = target !== null && !begins ? target : options.forced_begin;
  const forced = options.prefix.length + (options.forced_begin === null ? 0 : 1);
  const reserve = hasEncoder ? 0 : forced;
  const read = encode(engine, text, how, reserve);
  let { ids } = read;
  if (sourceLanguage !== undefined) ids = special.wrappedIn(special.language(sourceLanguage), ids);
  const tokens = ids.length;
  if (!hasEncoder && options.max_total_length && tokens >= options.max_total_length) {
    throw new RowError(
      "too-long",
      `${tokens} tokens are not less than max_total_length=${options.max_total_length}; raise ` +
        "it, or shorten the text",
      read.tokens,
    );
  }
  // The last token of an answer is never read, so it takes up no position.
  const limit = hasEncoder
    ? room(options, 0)
    : Math.max(1, Math.min(room(options, tokens), engine.positions - tokens + 1));
  const beginning = options.prefix.length + (first === null ? 0 : 1);
  if (beginning > limit) {
    const message =
      `${tokens} tokens leave room for ${limit} in the model's ${engine.positions} positions, but the ` +
      `prefix has ${beginning}; shorten either`;
    throw new RowError("too-long", message, read.tokens);
  }
  const bos = target !== null && begins ? target : special.bos;
  return { ids, truncated: read.truncated, limit, first, bos, row: how.row ?? 0 };
}

function encode(engine, text, { longRows, chatTemplateKwargs }, reserve) {
  const { positions } = engine;
  if (isChat(text)) return chatIds(engine, text, chatTemplateKwargs);
  if (!isIds(text)) return encodeRow(text, engine.bundle.tokenizer, { positions, longRows, reserve });
  const last = engine.bundle.manifest.model.vocabulary_size - 1;
  const strange = text.find((id) => id < 0 || id > last);
  if (strange !== undefined) throw new RowError("prompt", `expected token ids from 0 to ${last}, found ${strange}`);
  const tokens = text.length;
  const room = positions - reserve;
  if (longRows === "truncate" && room > 0 && tokens > room) {
    return { ids: engine.bundle.tokenizer.special.cut(text, room), tokens, truncated: true };
  }
  if (tokens > positions) throw tooLong(tokens, positions);
  return { ids: text, tokens, truncated: false };
}

function isIds(text) {
  return Array.isArray(text) && text.length > 0 && [...text].every(Number.isInteger);
}

function isChat(text) {
  const isMessage = (each) => each !== null && typeof each === "object" && !Array.isArray(each);
  return Array.isArray(text) && text.length > 0 && text.every(isMessage);
}

/** A chat ends with the turn to be answered, so it is never cut. */
function chatIds({ bundle, chat, positions }, messages, variables) {
  if (!bundle.settings.chat) throw new UsageError("the bundle has no chat template; give texts or token ids");
  if (!chat) throw new UsageError("messages need chat, a function that renders a template; give it to Engine.load");
  const ids = encodeChat(messages, chat, bundle.tokenizer, variables);
  if (ids.length > positions) throw tooLong(ids.length, positions);
  return { ids, tokens: ids.length, truncated: false };
}

function recordOf(source, { tokens, truncated, found }, options) {
  const records = found.map(({ text, score, reason }) => ({ text, score: finite(score), finish_reason: reason }));
  const record = { source, ...records[0], target_tokens: found[0].tokens.length, source_tokens: tokens };
  return { ...record, ...(options.n_best > 1 && { n_best: records }), ...(truncated && { truncated }) };
}

function failed(source, failure, options) {
  const { error, ...truncated } = errorOf(failure);
  const record = { source, text: "", finish_reason: "error", error, source_tokens: failure.tokens };
  return { ...record, ...(options.n_best > 1 && { n_best: [] }), ...truncated };
}

function cut(text, stops) {
  const places = stops.map((stop) => text.indexOf(stop)).filter((place) => place >= 0);
  return text.slice(0, Math.min(text.length, ...places));
}

const WORD = /[\p{White_Space}\x1c-\x1f]*[^\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu;

/**
 * Splits a text into neighbouring sentences, as many as fit; a sentence that does not fit is split at
 * white space, a word at characters. Only white space between the pieces is lost.
 *
 * @param {object} engine see engine.js
 * @param {string} text
 */
function pieces({ bundle: { tokenizer }, positions, sentences }, text) {
  const unless = (failed, count) => {
    try {
      return count();
    } catch (error) {
      if (!(error instanceof RowError)) throw error;
      return failed(error);
    }
  };
  const tokens = (piece) => unless((error) => error.tokens, () => encodeRow(piece, tokenizer, { positions }).tokens);
  // A unit without ids is cut further, and its last piece becomes an error.
  const count = (unit) => unless(() => Infinity, () => tokenIds(unit, (each) => tokenizer.encode(each)).length);
  const room = positions - tokenizer.special.wrap([]).length;
  const split = (whole, [cut, ...finer]) => {
    const stripped = strip(whole);
    if (!cut || tokens(stripped) <= positions) return stripped ? [stripped] : [];
    const units = cut(stripped);
    const counts = units.map(count);
    const found = [];
    for (let first = 0, last; first < units.length; first = last) {
      let sum = counts[first];
      for (last = first + 1; last < units.length && sum + counts[last] <= room; last++) sum += counts[last];
      // A text may have more tokens than its units together, or without the blank in front.
      const joined = () => units.slice(first, last).join("");
      while (last > first + 1 && tokens(strip(joined())) > positions) last--;
      found.push(...split(joined(), finer));
    }
    return found;
  };
  return split(text, [sentences, (each) => each.match(WORD) ?? [], (each) => [...each]]);
}

function strip(text) {
  let [first, last] = [0, text.length];
  while (first < last && isBlank(text[first])) first++;
  while (last > first && isBlank(text[last - 1])) last--;
  return text.slice(first, last);
}
