// Scoring of given texts: log-probability of each token, in one pass and without generation.

import { logSumExp } from "../decoding/logits.js";
import { shown, UsageError } from "../errors.js";
import { answered, checkLongRows, encodeRow, notFinite, RowError, textOf, tooLong } from "../rows.js";

/**
 * Scores a target given its source, or a text of a decoder-only model.
 *
 * @param {object} engine see engine.js
 * @param {[string, string] | string} row
 * @param {object} [options] longRows: "error" or "truncate"; sourceLanguage, targetLanguage: names of
 *   the tokenizer's languages
 */
export function score(engine, row, { longRows, sourceLanguage, targetLanguage } = {}) {
  const { decoder } = engine;
  if (!decoder) throw new UsageError("the bundle is encoder-only and scores nothing");
  const [source, target] = Array.isArray(row) ? row : [row, null];
  if (!decoder.hasEncoder && target !== null) {
    throw new UsageError(`the bundle scores texts without a target, found ${shown(target)}; leave it out`);
  }
  checkLongRows(longRows);
  const blank = decoder.hasEncoder ? { target: textOf(target) } : {};
  const { special } = engine.bundle.tokenizer;
  const languages = [sourceLanguage, targetLanguage].map((name) => (name === undefined ? name : special.language(name)));
  return answered(source, blank, async () => {
    const request = decoder.hasEncoder
      ? ofPair(engine, source, target ?? "", longRows, languages)
      : ofText(engine, source, longRows);
    const { ids, given, wanted, truncated } = request;
    const state = decoder.hasEncoder ? await decoder.start(ids) : await decoder.begin();
    const logits = await decoder.read(given, state);
    const first = given.length - wanted.length;
    const values = wanted.map((token, place) => {
      const scores = logits[first + place];
      return scores[token] - logSumExp(scores);
    });
    if (!values.every(Number.isFinite)) throw notFinite({ truncated });
    const total = values.reduce((sum, value) => sum + value, 0);
    return { ...blank, total, tokens: wanted, log_probabilities: values, truncated };
  });
}

function ofText({ bundle, positions }, text, longRows) {
  const { ids, truncated } = encodeRow(text, bundle.tokenizer, { positions, longRows });
  if (ids.length === 1) {
    throw new RowError("too-short", "a text of one token has nothing to be scored after it");
  }
  return { given: ids.slice(0, -1), wanted: ids.slice(1), truncated };
}

function ofPair({ bundle, positions }, source, target, longRows, [sourceLanguage, language]) {
  const { tokenizer } = bundle;
  const { special } = tokenizer;
  const limits = { positions, longRows };
  let { ids, truncated } = encodeRow(source, tokenizer, limits);
  if (sourceLanguage !== undefined) ids = special.wrappedIn(sourceLanguage, ids);
  const encode = (text) => tokenizer.encodeTarget(text);
  const wrap = (inner) => [...inner, special.ends[0]];
  const answer = encodeRow(target, tokenizer, { ...limits, wrap }, encode);
  const wanted = answer.truncated ? answer.ids.slice(0, -1) : answer.ids;
  const begins = special.beginsWithLanguage;
  const begin = language === undefined ? [special.bos] : begins ? [language] : [special.bos, language];
  const given = [...begin, ...wanted.slice(0, -1)];
  if (given.length > positions) throw tooLong(given.length, positions);
  return { ids, given, wanted, truncated: truncated || answer.truncated };
}
