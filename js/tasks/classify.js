// Labels of texts, of pairs of texts and of tokens: the scores of a model's head.

import { shown, UsageError } from "../errors.js";
import { answered, checkLongRows, encodeRow, notFinite, prefixed, requireFull, requireTexts } from "../rows.js";
import { RowError, single, tokenIds, tooLong } from "../rows.js";

const AGGREGATIONS = ["none", "simple", "first", "average", "max"];

/** Returns the limits on rows that a head has: its longest row, to which rows are cut. */
export function headLimits(engine, longRows) {
  checkLongRows(longRows);
  const { longest = 0 } = engine.bundle.manifest.head ?? {};
  return {
    positions: longest ? Math.min(longest, engine.positions) : engine.positions,
    longRows: longRows ?? (longest ? "truncate" : "error"),
  };
}

function headOf(engine, task) {
  if (!engine.tasks.includes(task)) {
    throw new UsageError(`the bundle has no head for task ${task}; its tasks: ${engine.tasks.join(", ")}`);
  }
  return engine.bundle.manifest.head;
}

/**
 * Scores the labels of a text or of a pair of texts.
 *
 * @param {object} engine see engine.js
 * @param {string | [string, string]} row
 * @param {object} [options] longRows: "error" or "truncate"
 */
export function classify(engine, row, { longRows } = {}) {
  const { labels, probabilities: kind } = headOf(engine, "classify");
  return headRecord(engine, row, longRows, (scores) => {
    const values = probabilities(scores, kind);
    const likeliest =
      kind === "sigmoid"
        ? labels.filter((_, place) => values[place] >= 0.5).join(", ")
        : labels[values.indexOf(Math.max(...values))];
    return {
      label: kind === "none" ? "" : likeliest,
      scores: labels.map((label, place) => ({ label, score: values[place] })),
    };
  });
}

/**
 * Scores a pair of texts with a cross-encoder.
 *
 * @param {object} engine see engine.js
 * @param {[string, string]} pair
 * @param {object} [options] longRows: "error" or "truncate"
 */
export function rank(engine, pair, { longRows } = {}) {
  const head = headOf(engine, "rank");
  return headRecord(engine, pair, longRows, (scores) => ({
    score: probabilities(scores, head.rank)[0],
  }));
}

/**
 * Scores the labels of each token of a text.
 *
 * @param {object} engine see engine.js
 * @param {string} text
 * @param {object} [options] aggregation: how tokens are joined to entities, as in `run`; longRows:
 *   "error" or "truncate"
 */
export function tag(engine, text, { aggregation = "none", longRows } = {}) {
  const { labels } = headOf(engine, "tag");
  if (!AGGREGATIONS.includes(aggregation)) {
    throw new UsageError(`aggregation must be one of ${AGGREGATIONS.join(", ")}, found ${shown(aggregation)}`);
  }
  const { tokenizer } = engine.bundle;
  if (!tokenizer.places) {
    throw new UsageError(
      "the bundle's tokenizer does not tell the places of its tokens in a text, which task tag needs",
    );
  }
  const limits = headLimits(engine, longRows);
  return answered(text, {}, async () => {
    const { ids, truncated } = encodeRow(text, tokenizer, limits);
    const { data, dims } = await engine.encoder.encode(ids, "head");
    const width = dims.at(-1);
    const { before, after } = tokenizer.special;
    const rows = ids.slice(before.length, ids.length - after.length).map((_, place) => {
      const first = (before.length + place) * width;
      const scores = data.subarray(first, first + width);
      if (!scores.every(Number.isFinite)) throw notFinite({ truncated });
      return probabilities(scores, "softmax");
    });
    const places = tokenizer.special.cut(tokenizer.places(text), rows.length);
    return { tags: entities(text, places, rows, labels, aggregation), truncated };
  });
}

function headRecord(engine, row, longRows, answer) {
  const [text, pair] = Array.isArray(row) ? row : [row, null];
  const { template = [] } = engine.bundle.manifest.head;
  if (template.length && pair === null) throw new UsageError("the bundle scores pairs of texts, found one");
  if (!template.length && pair !== null && !engine.bundle.tokenizer.special.joinsPairs) {
    throw new UsageError("the bundle's tokenizer joins no pairs of texts; leave the second out");
  }
  const limits = headLimits(engine, longRows);
  const { prompts = {}, default_prompt: usual = "" } = engine.bundle.manifest.head;
  const read = usual ? prefixed(prompts[usual], text) : text;
  const encode = template.length
    ? (_, ...rest) => encodeFilled(template, { query: text, document: pair }, ...rest)
    : pair === null
      ? encodeRow
      : (_, ...rest) => encodePair(read, pair, ...rest);
  return answered(text, {}, async () => {
    const { ids, truncated } = encode(read, engine.bundle.tokenizer, limits);
    requireUndivided(engine.bundle, ids, pair);
    const { data } = await engine.encoder.encode(ids, "head");
    if (!data.every(Number.isFinite)) throw notFinite({ truncated });
    return { ...answer(data), truncated };
  });
}

/** Refuses a text with the token that separates or pads texts; as in `OpenBundle` and `Preprocessor.undivided`. */
function requireUndivided({ manifest, tokenizer }, ids, pair) {
  const { segments, segment_end: end, rereading_layers: rereads, pooling } = manifest.model;
  const { special } = tokenizer;
  const last = String(pooling) === "last" && !special.after.length && !manifest.head.template?.length;
  if (!segments && !rereads && !last) return;
  const separator = rereads || last ? special.pad : end;
  const number = (tokens) => tokens.filter((token) => token === separator).length;
  const usual = last ? [] : special.wrap(pair === null ? [] : special.between);
  if (number(last ? ids.slice(-1) : ids) === number(usual)) return;
  throw new RowError(
    "tokenizer",
    "the text holds the token that separates or pads texts; give two as a pair, or leave the token out",
  );
}

/** Returns the ids of a pair in a template, with the names of both at odd places; see `encodeRow`. */
function encodeFilled(template, texts, ...rest) {
  requireTexts(...Object.values(texts));
  Object.values(texts).forEach((text) => requireFull(text));
  return encodeRow(template.map((each, place) => (place % 2 ? texts[each] : each)).join(""), ...rest);
}

/** Returns the ids of two texts joined as the tokenizer's template says; see `encodeRow`. */
function encodePair(first, second, tokenizer, { positions: most, longRows }) {
  const { special } = tokenizer;
  const positions = longRows === "truncate" ? Math.min(most, special.longest || most) : most;
  for (const text of [first, second]) {
    requireTexts(text);
    requireFull(text);
  }
  let [left, right] = [first, second].map((text) => tokenIds(text, (each) => tokenizer.encode(each)));
  const join = () => special.wrap([...left, ...special.between, ...right]);
  const tokens = join().length;
  const room = positions - special.wrap(special.between).length;
  const truncated = left.length + right.length > room;
  if (truncated && (longRows !== "truncate" || room < 2)) throw tooLong(tokens, positions);
  if (truncated) {
    const kept = longestFirst(left.length, right.length, room);
    left = special.cut(left, kept[0]);
    right = special.cut(right, kept[1]);
  }
  return { ids: join(), tokens, truncated };
}

/**
 * Returns the lengths to which two texts are cut: the longer one down to the other's first, as
 * truncation "longest_first" of Hugging Face's tokenizers (`truncate_encodings`).
 */
function longestFirst(left, right, room) {
  let [short, long] = [Math.min(left, right), Math.max(left, right)];
  long = Math.min(long, Math.max(short, room - short));
  if (short + long > room) {
    short = Math.floor(room / 2);
    long = room - short;
  }
  return left <= right ? [short, long] : [long, short];
}

/** Returns probabilities of scores in float64; the scores themselves, see `single`, if kind is "none". */
export function probabilities(scores, kind) {
  const exact = Array.from(scores);
  if (kind === "none") return exact.map(single);
  if (kind === "sigmoid") return exact.map((value) => 1 / (1 + Math.exp(-value)));
  const largest = Math.max(...exact);
  const powers = exact.map((value) => Math.exp(value - largest));
  const sum = powers.reduce((total, value) => total + value, 0);
  return powers.map((value) => value / sum);
}

const OUTSIDE = "O"; // the label of tokens outside of entities

/**
 * Returns the tokens of a text with their likeliest labels, or its entities.
 *
 * @param {string} text
 * @param {{start: number, end: number, continues: boolean}[]} places of its tokens, in code points;
 *   a text that was cut has more places than rows
 * @param {number[][]} rows probabilities of each label for each of the first tokens
 * @param {string[]} labels
 * @param {string} aggregation "none" for every token; "simple" to join neighbours of one entity;
 *   "first", "average" and "max" give all tokens of a word one label before
 */
function entities(text, places, rows, labels, aggregation) {
  const characters = [...text];
  const tokens = rows.map((row, place) => ({ ...places[place], row }));
  const whole = !["none", "simple"].includes(aggregation);
  const groups = whole ? words(tokens) : tokens.map((token) => [token]);
  const cut = (start, end) => characters.slice(start, end).join("");
  const tags = groups.map((group) => {
    const chosen = chosenRow(group, aggregation);
    const best = chosen.indexOf(Math.max(...chosen));
    const [{ start }, { end }] = [group[0], group.at(-1)];
    return { text: cut(start, end), start, end, label: labels[best], score: chosen[best] };
  });
  return aggregation === "none" ? tags : joined(tags, cut);
}

function words(tokens) {
  const found = [];
  for (const token of tokens) {
    if (found.length && token.continues) found.at(-1).push(token);
    else found.push([token]);
  }
  return found;
}

function chosenRow(group, aggregation) {
  const rows = group.map(({ row }) => row);
  if (aggregation === "average") {
    return rows[0].map((_, label) => rows.reduce((sum, row) => sum + row[label], 0) / rows.length);
  }
  if (aggregation !== "max") return rows[0];
  const most = rows.map((row) => Math.max(...row));
  return rows[most.indexOf(Math.max(...most))];
}

/** Joins neighbours of one entity, which B- begins; those outside are left out. */
function joined(tags, cut) {
  const groups = [];
  for (const each of tags) {
    const last = groups.at(-1)?.at(-1);
    if (last && !each.label.startsWith("B-") && kindOf(each.label) === kindOf(last.label)) {
      groups.at(-1).push(each);
    } else groups.push([each]);
  }
  return groups.flatMap((group) => {
    const [, label] = /^(?:[^-]*-)?(.*)$/s.exec(group[0].label);
    if (label === OUTSIDE) return [];
    const [{ start }, { end }] = [group[0], group.at(-1)];
    const score = group.reduce((sum, each) => sum + each.score, 0) / group.length;
    return [{ text: cut(start, end), start, end, label, score }];
  });
}

function kindOf(label) {
  return /^[BI]-/.test(label) ? label.slice(2) : label;
}
