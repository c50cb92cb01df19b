// Generation of an answer to a text, as it grows.

import { room } from "../decoding/options.js";
import { search } from "../decoding/search.js";
import { UsageError } from "../errors.js";
import { encodeRow, finite, notFinite, RowError, tooLong } from "../rows.js";

/**
 * Generates an answer to one text; yields its text as it grows, and returns the record.
 *
 * @param {object} engine see engine.js
 * @param {string | number[]} text
 * @param {object} options all generation options
 * @param {object} how row: number that seeds samples; longRows: "error" or "truncate";
 *   sourceLanguage, targetLanguage: names of the tokenizer's languages
 */
export async function* generate(engine, text, options, how) {
  const { decoder, positions } = engine;
  if (options.max_length > positions) {
    throw new UsageError(
      `max_length is ${options.max_length}, but the model has ${positions} positions; lower max_length`,
    );
  }
  const { tokenizer } = engine.bundle;
  const source = typeof text === "string" ? text : JSON.stringify(text);
  try {
    const { ids, truncated, ...request } = requestOf(engine, text, options, how);
    const decode = (tokens) => tokenizer.decode(tokens);
    const steps = search(decoder, options, { source: ids, ...request }, tokenizer.special.ends, decode);
    const partial = tokenizer.decodePartial?.bind(tokenizer) ?? decode;
    let step;
    while (!(step = await steps.next()).done) {
      yield { text: cut(partial(step.value), options.stop), tokens: [...step.value] };
    }
    return recordOf(tokenizer, source, ids, truncated, step.value, options);
  } catch (error) {
    if (!(error instanceof RowError)) throw error;
    return failed(source, error, options);
  }
}

function requestOf(engine, text, options, { row = 0, longRows, sourceLanguage, targetLanguage }) {
  const { special } = engine.bundle.tokenizer;
  const { hasEncoder } = engine.decoder;
  const target = targetLanguage === undefined ? null : special.language(targetLanguage);
  const begins = special.beginsWithLanguage;
  const first = target !== null && !begins ? target : options.forced_begin;
  const forced = options.prefix.length + (options.forced_begin === null ? 0 : 1);
  const reserve = hasEncoder ? 0 : forced;
  let { ids, truncated } = encode(engine, text, longRows, reserve);
  if (sourceLanguage !== undefined) {
    const inner = ids.slice(special.before.length, ids.length - special.after.length);
    ids = special.wrapIn(special.language(sourceLanguage), inner);
  }
  const tokens = ids.length;
  if (!hasEncoder && options.max_total_length && tokens >= options.max_total_length) {
    throw new RowError(
      "too-long",
      `${tokens} tokens are not less than max_total_length=${options.max_total_length}; raise ` +
        "it, or shorten the text",
      tokens,
    );
  }
  // The last token of an answer is never read, so it takes up no position.
  const limit = hasEncoder
    ? room(options, 0)
    : Math.max(1, Math.min(room(options, tokens), engine.positions - tokens + 1));
  if (options.prefix.length + (first === null ? 0 : 1) > limit) {
    throw new RowError("too-long", `${tokens} tokens leave room for ${limit}, fewer than the prefix has`, tokens);
  }
  const bos = target !== null && begins ? target : special.bos;
  return { ids, truncated, limit, first, bos, row };
}

function encode(engine, text, longRows, reserve) {
  const { positions } = engine;
  if (typeof text === "string") {
    return encodeRow(text, engine.bundle.tokenizer, { positions, longRows, reserve });
  }
  const size = engine.bundle.manifest.model.vocabulary_size;
  if (!Array.isArray(text) || !text.every((id) => Number.isInteger(id) && id >= 0 && id < size)) {
    throw new UsageError(`texts must be strings or lists of token ids from 0 to ${size - 1}`);
  }
  if (!text.length) throw new RowError("empty", "there are no tokens to work on");
  if (text.length <= positions) return { ids: text, truncated: false };
  if (longRows === "truncate" && positions > reserve) {
    return { ids: text.slice(0, positions - reserve), truncated: true };
  }
  throw tooLong(text.length, positions);
}

function recordOf(tokenizer, source, ids, truncated, hypotheses, options) {
  const usable = hypotheses.filter((each) => each.reason !== "error");
  if (!usable.length) return failed(source, notFinite(ids.length), options);
  const records = usable.map((each) => ({
    text: cut(tokenizer.decode(each.tokens), options.stop),
    score: finite(each.score),
    finish_reason: each.reason,
  }));
  const record = {
    source,
    ...records[0],
    target_tokens: usable[0].tokens.length,
    source_tokens: ids.length,
  };
  if (options.n_best > 1) record.n_best = records;
  return truncated ? { ...record, truncated } : record;
}

function failed(source, { kind, message, tokens }, options) {
  const error = { kind, message };
  const record = { source, text: "", finish_reason: "error", error, source_tokens: tokens };
  return options.n_best > 1 ? { ...record, n_best: [] } : record;
}

function cut(text, stops) {
  const places = stops.map((stop) => text.indexOf(stop)).filter((place) => place >= 0);
  return text.slice(0, Math.min(text.length, ...places));
}
