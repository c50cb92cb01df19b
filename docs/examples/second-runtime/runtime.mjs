// A second runtime of bundles, written from docs/portability.md alone: byte-level BPE by ranks,
// searches and their rules, for encoder-decoders and decoder-only models.
//
//   npm install onnxruntime-node
//   node runtime.mjs BUNDLE < lines.txt                   a record of JSON for each line
//   node runtime.mjs BUNDLE '{"beam": 4}' < lines.txt     with options, or a list of them
//   node runtime.mjs BUNDLE --check                       compares with the bundle's recorded answers

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { inflateRawSync } from "node:zlib";
import ort from "onnxruntime-node";

// Opening

class Files {
  constructor(folder) {
    this.folder = folder;
    this.manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"));
    if (this.manifest.format !== 9) throw new Error(`expected format 9, found ${this.manifest.format}`);
  }

  read(name) {
    const listed = this.manifest.files[name];
    if (!listed) throw new Error(`${name} is not in the manifest`);
    const bytes = readFileSync(join(this.folder, name));
    const found = createHash("sha256").update(bytes).digest("hex");
    if (bytes.length !== listed.size || found !== listed.sha256) throw new Error(`${name} was changed`);
    return bytes;
  }
}

// Patterns in the syntax of Rust's fancy-regex, rewritten for JavaScript: possessive quantifiers
// become a lookahead and a reference to what it matched.

const CLASSES = {
  s: "\\p{White_Space}",
  S: "\\P{White_Space}",
  d: "\\p{Nd}",
  w: "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}",
};

class Pattern {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.groups = 0;
    this.anyCase = false;
    this.regExp = new RegExp(this.alternatives(), "gu");
    if (this.at < source.length) throw new Error(`unexpected ) in the pattern ${source}`);
  }

  take(text) {
    const there = this.source.startsWith(text, this.at);
    if (there) this.at += text.length;
    return there;
  }

  alternatives() {
    let written = "";
    while (this.at < this.source.length && this.source[this.at] !== ")") {
      written += this.take("|") ? "|" : this.repeated();
    }
    return written;
  }

  repeated() {
    const atom = this.atom();
    const quantifier = /^(?:[*+?]|\{\d*,?\d*\})?/.exec(this.source.slice(this.at))[0];
    this.at += quantifier.length;
    if (quantifier && this.take("+")) {
      const name = `p${this.groups++}`;
      return `(?:(?=(?<${name}>${atom}${quantifier}))\\k<${name}>)`;
    }
    return atom + quantifier + (quantifier && this.take("?") ? "?" : "");
  }

  atom() {
    if (this.take("[")) return this.set();
    const opening = /^\((?:\?(?:i:|:|=|!|<=|<!))?/.exec(this.source.slice(this.at))?.[0];
    if (opening) {
      this.at += opening.length;
      const before = this.anyCase;
      this.anyCase ||= opening === "(?i:";
      const inside = this.alternatives();
      this.anyCase = before;
      if (!this.take(")")) throw new Error(`a group without end in the pattern ${this.source}`);
      return `${opening.replace(/^\((?:\?i:)?$/, "(?:")}${inside})`;
    }
    if (this.source[this.at] === "\\") {
      const escape = this.escape();
      return escape.startsWith("\\p") && escape.length > 12 ? `[${escape}]` : escape;
    }
    const [letter] = this.source.slice(this.at);
    this.at += letter.length;
    return this.anyCase ? `[${cases(letter)}]` : letter;
  }

  set() {
    let written = this.take("^") ? "[^" : "[";
    while (!this.take("]")) {
      if (this.at >= this.source.length) throw new Error(`a set without end in ${this.source}`);
      if (this.source[this.at] === "\\") written += this.escape();
      else {
        const letter = String.fromCodePoint(this.source.codePointAt(this.at));
        this.at += letter.length;
        if (letter === "[" || letter === "&") throw new Error(`${letter} in a set of ${this.source}`);
        written += this.anyCase ? cases(letter) : letter;
      }
    }
    return `${written}]`;
  }

  escape() {
    const [all, property, letter] = /^\\(?:([pP]\{[^}]+\}|[pP]\w)|(.))/su.exec(this.source.slice(this.at));
    this.at += all.length;
    if (property) return property[1] === "{" ? all : `\\${property[0]}{${property[1]}}`;
    if (letter in CLASSES) return CLASSES[letter];
    if (/[rntfv]/.test(letter) || /[\^$\\.*+?()[\]{}|/-]/.test(letter)) return all;
    if (/\w/.test(letter)) throw new Error(`the escape ${all} in the pattern ${this.source}`);
    return letter;
  }
}

function cases(letter) {
  const folded = { s: "\u017f", k: "\u212a" }[letter.toLowerCase()] ?? "";
  const both = new Set([letter, letter.toLowerCase(), letter.toUpperCase()]);
  return [...both].join("") + folded;
}

// The tokenizer

class Tokenizer {
  constructor(files) {
    const settings = JSON.parse(files.read("tokenizer.json").toString("utf8"));
    if ((settings.kind ?? "tiktoken") !== "tiktoken") throw new Error(`a tokenizer of kind ${settings.kind}`);
    if (settings.format_version !== 1) throw new Error(`tokenizer.json of format ${settings.format_version}`);
    this.special = settings.special;
    this.ends = [this.special.eos_id, ...(this.special.more_ends ?? [])];
    this.pattern = new Pattern(settings.pattern).regExp;
    this.ranks = new Map();
    const bytesOfRank = new Map();
    for (const line of files.read("ranks.tiktoken").toString("latin1").split("\n")) {
      if (!line) continue;
      const [base64, rank] = line.split(" ");
      const bytes = Buffer.from(base64, "base64").toString("latin1");
      this.ranks.set(bytes, Number(rank));
      bytesOfRank.set(Number(rank), bytes);
    }
    const kept = settings.kept_ranks ?? [...bytesOfRank.keys()].sort((a, b) => a - b);
    this.idOfRank = new Map(kept.map((rank, k) => [rank, settings.first_ordinary_id + k]));
    this.bytesOfId = new Map(kept.map((rank, k) => [settings.first_ordinary_id + k, bytesOfRank.get(rank)]));
  }

  /** The ids of a text, without `before` and `after`. */
  ids(text) {
    const characters = [...text.toWellFormed()];
    const found = [];
    for (let start = 0; start < characters.length; start += 500_000) {
      const part = characters.slice(start, start + 500_000).join("");
      for (const [word] of part.matchAll(this.pattern)) {
        for (const bytes of this.merged(Buffer.from(word, "utf8").toString("latin1"))) {
          const id = this.idOfRank.get(this.ranks.get(bytes));
          if (id !== undefined) found.push(id);
          else for (const byte of bytes) found.push(this.idOfRank.get(this.ranks.get(byte)));
        }
      }
    }
    return found;
  }

  merged(word) {
    if (this.ranks.has(word)) return [word];
    const parts = [...word];
    for (;;) {
      let [best, place] = [Infinity, -1];
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(parts[i] + parts[i + 1]) ?? Infinity;
        if (rank < best) [best, place] = [rank, i];
      }
      if (place < 0) return parts;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
  }

  /** The ids that the model reads: of a source or a prompt. */
  row(text) {
    if (/^[\p{White_Space}\x1c-\x1f]*$/u.test(text)) throw new Error("a text of white space alone");
    return [...(this.special.before ?? []), ...this.ids(text), ...(this.special.after ?? [])];
  }

  text(ids) {
    const bytes = ids.map((id) => this.bytesOfId.get(id) ?? "").join("");
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Buffer.from(bytes, "latin1"));
  }
}

// Computing

const integers = (row) => new ort.Tensor("int64", BigInt64Array.from(row, BigInt), [1, row.length]);
const flags = (row) => new ort.Tensor("bool", Uint8Array.from(row, Number), [1, row.length]);

class Graph {
  static async open(files, described) {
    const weights = { path: "weights.bin", data: files.read("portable/weights.bin") };
    const options = { externalData: [weights], intraOpNumThreads: 1 };
    return new Graph(await ort.InferenceSession.create(files.read(described.file), options), described);
  }

  constructor(session, described) {
    Object.assign(this, { session, described });
  }

  inputs(role) {
    return this.described.inputs.filter((tensor) => tensor.role === role);
  }

  /** Runs with tensors by role, and returns tensors by role; a role may have several. */
  async run(byRole) {
    const feeds = {};
    for (const [role, tensors] of Object.entries(byRole)) {
      this.inputs(role).forEach(({ name }, i) => (feeds[name] = tensors[i]));
    }
    const found = await this.session.run(feeds);
    const results = {};
    for (const { role, name } of this.described.outputs) (results[role] ??= []).push(found[name]);
    return results;
  }
}

/** The rows of a tensor, along its first axis. */
function gather({ type, dims, data }, rows) {
  const size = dims.slice(1).reduce((a, b) => a * b, 1);
  const taken = new data.constructor(rows.length * size);
  rows.forEach((row, i) => taken.set(data.subarray(row * size, (row + 1) * size), i * size));
  return new ort.Tensor(type, taken, [rows.length, ...dims.slice(1)]);
}

/** The answers of a row in the making: one at the beginning. */
class Reading {
  static async begin(model, row) {
    const reading = new Reading();
    Object.assign(reading, { decoder: model.graphs.decoder, mask: [], fixed: {} });
    reading.past = reading.decoder.inputs("past").map(({ type, shape }) => {
      if (type !== "float32") throw new Error(`a cache of ${type}`);
      const sizes = shape.map((size) => (typeof size === "number" ? size : size === "past" ? 0 : 1));
      return new ort.Tensor(type, new Float32Array(sizes.reduce((a, b) => a * b)), sizes);
    });
    if (model.graphs.encoder) {
      const [source, mask] = model.padded(row, 4);
      const source_mask = [flags(mask)];
      const { cross } = await model.graphs.encoder.run({ source: [integers(source)], source_mask });
      reading.fixed = { source_mask, cross };
    } else if (row.length > 1) {
      const [target, mask] = model.padded(row.slice(0, -1), 16);
      await reading.step(integers(target));
      reading.mask = mask;
    }
    return reading;
  }

  async step(target) {
    const rows = Array(target.dims[0]).fill(0);
    const inputs = { past_mask: [gather(flags(this.mask), rows)] };
    for (const role in this.fixed) inputs[role] = this.fixed[role].map((one) => gather(one, rows));
    const { present, logits } = await this.decoder.run({
      target: [target],
      ...inputs,
      past: this.past,
    });
    this.past = present;
    return logits[0];
  }

  /** Lets each token follow the answer of its parent; gives the logits of the tokens after them. */
  async next(tokens, parents) {
    this.past = this.past.map((one) => gather(one, parents));
    const target = new ort.Tensor("int64", BigInt64Array.from(tokens, BigInt), [tokens.length, 1]);
    const { data } = await this.step(target);
    this.mask.push(true);
    const width = data.length / tokens.length;
    return tokens.map((_, i) => data.subarray(i * width, (i + 1) * width));
  }
}

class Model {
  static async open(folder) {
    const model = new Model();
    const files = new Files(folder);
    const variant = files.manifest.variants.portable;
    Object.assign(model, { files, tokenizer: new Tokenizer(files), graphs: {} });
    model.positions = files.manifest.model.max_positions;
    model.decoderOnly = files.manifest.architecture === "decoder-only";
    for (const name of ["encoder", "decoder"]) {
      if (name in variant.graphs) model.graphs[name] = await Graph.open(files, variant.graphs[name]);
    }
    if (!model.graphs.decoder) throw new Error("an encoder-only model does not generate");
    return model;
  }

  padded(row, multiple) {
    const length = Math.min(Math.ceil(row.length / multiple) * multiple, this.positions);
    const pad = Array(length - row.length).fill(this.tokenizer.special.pad_id);
    return [
      [...row, ...pad],
      [...row.map(() => true), ...pad.map(() => false)],
    ];
  }

  /** The answers to a row, best first; their tokens include an end token. */
  async answers(row, options, number = 0) {
    if (row.length > this.positions) throw new Error(`${row.length} tokens of at most ${this.positions}`);
    const { special, ends } = this.tokenizer;
    const prompt = this.decoderOnly ? row : [special.bos_id];
    const limit = this.limit(options, this.decoderOnly ? row.length : 0);
    const rules = new Rules(options, { ends, prompt, limit, decoderOnly: this.decoderOnly });
    const search = {
      options,
      limit,
      rules,
      reading: await Reading.begin(this, row),
      last: prompt.at(-1),
    };
    const count = options.n_best ?? 1;
    if ((options.beam ?? 1) > 1) return (await this.beams(search)).slice(0, count);
    if (!options.sample) return [await this.single(search, largest)];
    const found = [];
    for (let sample = 0; sample < count; sample++) {
      search.reading = await Reading.begin(this, row);
      found.push(await this.single(search, sampler(options, number, sample)));
    }
    return found.sort((a, b) => b.score - a.score);
  }

  /** One answer, of tokens that `choose` takes. */
  async single({ options, limit, rules, reading, last }, choose) {
    let answer = { tokens: [], log_probability: 0, total: 0 };
    while (!answer.finish_reason) {
      const [logits] = await reading.next([answer.tokens.at(-1) ?? last], [0]);
      const token = choose(rules.applied(logits, answer.tokens));
      const own = logits[token] - logSumExp(logits);
      answer = this.longer(answer, token, own, own, options, limit);
    }
    return answer;
  }

  async beams({ options, limit, rules, reading, last }) {
    const width = options.beam;
    const most = (1 + this.tokenizer.ends.length) * width;
    const penalty = options.length_penalty ?? 1;
    let beams = [{ tokens: [], log_probability: 0, total: 0, parent: 0 }];
    let kept = [];
    for (let length = 1; length <= limit && beams.length; length++) {
      const read = beams.map(({ tokens }) => tokens.at(-1) ?? last);
      const logits = await reading.next(
        read,
        beams.map(({ parent }) => parent),
      );
      const candidates = logits.flatMap((row, parent) => {
        const sum = logSumExp(row);
        const own = Float64Array.from(row, (value) => value - sum);
        const changed = rules.applied(own, beams[parent].tokens);
        const ranked = [...changed.keys()].filter((token) => changed[token] > -Infinity);
        ranked.sort((a, b) => changed[b] - changed[a] || a - b);
        return ranked
          .slice(0, most)
          .map((token) => [beams[parent], parent, token, own[token], changed[token]]);
      });
      const total = ([beam, , , , value]) => beam.total + value;
      candidates.sort((a, b) => total(b) - total(a) || a[1] - b[1] || a[2] - b[2]);
      const longer = candidates.slice(0, most).map(([beam, parent, token, own, value]) => {
        return { ...this.longer(beam, token, own, value, options, limit), parent };
      });
      kept.push(...longer.slice(0, width).filter(({ finish_reason }) => finish_reason));
      kept = kept.sort((a, b) => b.score - a.score).slice(0, width);
      beams = longer.filter(({ finish_reason }) => !finish_reason).slice(0, width);
      if (kept.length < width || !beams.length) continue;
      const early = options.early_stopping ?? true;
      const reached = early === "never" && penalty > 0 ? limit : length;
      if (early === true || beams[0].total / reached ** penalty <= kept.at(-1).score) break;
    }
    return kept;
  }

  /** An answer with one more token, of which `own` is the model's log-probability. */
  longer({ tokens, log_probability, total }, token, own, value, options, limit) {
    const { ends } = this.tokenizer;
    const longer = { tokens: [...tokens, token], total: total + value };
    longer.log_probability = log_probability + own;
    longer.score = longer.total / longer.tokens.length ** (options.length_penalty ?? 1);
    longer.text = this.tokenizer.text(longer.tokens.filter((id) => !ends.includes(id)));
    const stops = (options.stop ?? []).map((stop) => longer.text.indexOf(stop)).filter((at) => at >= 0);
    if (ends.includes(token)) longer.finish_reason = "end";
    else if (stops.length) {
      longer.finish_reason = "stop";
      longer.text = longer.text.slice(0, Math.min(...stops));
    } else if (longer.tokens.length === limit) longer.finish_reason = "length";
    return longer;
  }

  limit(options, prompt) {
    let limit = Math.min(options.max_length, this.positions);
    if (options.max_total_length) limit = Math.min(limit, options.max_total_length - prompt);
    if (this.decoderOnly) limit = Math.min(limit, this.positions - prompt + 1);
    return Math.max(limit, 1);
  }
}

function logSumExp(values) {
  let most = -Infinity;
  for (const value of values) if (!(value <= most)) most = value;
  let sum = 0;
  for (const value of values) sum += Math.exp(value - most);
  const found = most + Math.log(sum);
  if (!Number.isFinite(found)) throw new Error("logits without a finite log-sum-exp");
  return found;
}

function largest(values) {
  let best = 0;
  for (let id = 1; id < values.length; id++) if (values[id] > values[best]) best = id;
  return best;
}

/** Draws tokens of one sample of a row. */
function sampler(options, row, sample) {
  const { temperature = 1, top_k = 0, top_p = 1, min_p = 0, typical_p = 1, seed = 0 } = options;
  let [drawn, block] = [0, []];
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  // Keeps ids in the order of a measure until their weights reach a share, and what ties.
  const reach = (weights, share, measure) => {
    const ids = [...weights.keys()].filter((id) => weights[id] > 0).sort((a, b) => measure[a] - measure[b]);
    const wanted = share * sum(weights);
    let [i, reached] = [0, 0];
    while (i < ids.length && reached < wanted) reached += weights[ids[i++]];
    const bound = measure[ids[i - 1]];
    return weights.map((weight, id) => (measure[id] <= bound ? weight : 0));
  };
  return (values) => {
    const most = values[largest(values)];
    let weights = Float64Array.from(values, (value) => Math.exp((value - most) / temperature));
    if (top_k) {
      const bound = weights.toSorted().at(-Math.min(top_k, weights.length));
      weights = weights.map((weight) => (weight >= bound ? weight : 0));
    }
    if (top_p < 1)
      weights = reach(
        weights,
        top_p,
        weights.map((weight) => -weight),
      );
    if (min_p) weights = weights.map((weight) => (weight >= min_p * Math.max(...weights) ? weight : 0));
    if (typical_p < 1) {
      const all = sum(weights);
      const information = weights.map((weight) => -Math.log(weight / all));
      const entropy = sum(weights.map((weight, id) => (weight ? (weight / all) * information[id] : 0)));
      weights = reach(
        weights,
        typical_p,
        information.map((one) => Math.abs(one - entropy)),
      );
    }
    if (drawn % 4 === 0)
      block = philox([BigInt(seed), BigInt(row)], [BigInt(drawn / 4 + 1), 0n, 0n, BigInt(sample)]);
    const u = Number(block[drawn++ % 4] >> 11n) * 2 ** -53;
    let cumulative = 0;
    const bound = u * sum(weights);
    return weights.findIndex((weight) => (cumulative += weight) > bound);
  };
}

/** Philox4x64-10 of Salmon et al. 2011. */
function philox([k0, k1], [c0, c1, c2, c3]) {
  const low = (value) => BigInt.asUintN(64, value);
  for (let round = 0; round < 10; round++) {
    const [a, b] = [c0 * 0xd2e7470ee14c6c93n, c2 * 0xca5a826395121157n];
    [c0, c1, c2, c3] = [(b >> 64n) ^ c1 ^ k0, low(b), (a >> 64n) ^ c3 ^ k1, low(a)];
    [k0, k1] = [low(k0 + 0x9e3779b97f4a7c15n), low(k1 + 0xbb67ae8584caa73bn)];
  }
  return [c0, c1, c2, c3];
}

// Rules of search, in the page's order

class Rules {
  constructor(options, situation) {
    Object.assign(this, { options, ...situation });
    this.forced = [options.forced_begin ?? [], options.prefix ?? []].flat();
  }

  applied(logits, tokens) {
    const { options, ends, prompt, limit } = this;
    const values = logits.slice();
    const forbid = (id) => (values[id] = -Infinity);
    const all = [...prompt, ...tokens];
    const penalty = options.repetition_penalty ?? 1;
    if (penalty !== 1) {
      for (const id of new Set(all))
        values[id] = values[id] < 0 ? values[id] * penalty : values[id] / penalty;
    }
    this.repeated(options.prompt_ngrams ? all : tokens).forEach(forbid);
    const total = (options.min_total_length ?? 0) - (this.decoderOnly ? prompt.length : 0);
    if (tokens.length < Math.max(options.min_length ?? 0, total)) ends.forEach(forbid);
    (options.suppress ?? []).forEach(forbid);
    for (const sequence of options.suppress_sequences ?? []) {
      const before = sequence.slice(0, -1);
      if (endsWith(all, before)) forbid(sequence.at(-1));
    }
    if (tokens.length === this.forced.length) (options.suppress_begin ?? []).forEach(forbid);
    const only = (allowed, value) => {
      const kept = allowed.map((id) => [id, value ?? logits[id]]);
      values.fill(-Infinity);
      for (const [id, each] of kept) values[id] = each;
    };
    if (options.forced_end?.length && tokens.length + 1 === limit) only(options.forced_end, 0);
    if (tokens.length < this.forced.length) only([this.forced[tokens.length]]);
    if (options.forced_begin != null && tokens.length === 0) only([this.forced[0]], 0);
    if (options.renormalise && values instanceof Float64Array) {
      const sum = logSumExp(values);
      return values.map((value) => value - sum);
    }
    return values;
  }

  /** Tokens that would repeat an n-gram. */
  repeated(tokens) {
    const n = this.options.no_repeat_ngram ?? 0;
    if (!n || tokens.length < n - 1) return [];
    const beginning = tokens.slice(tokens.length - n + 1);
    const found = [];
    for (let i = n - 1; i < tokens.length; i++) {
      if (endsWith(tokens.slice(0, i), beginning)) found.push(tokens[i]);
    }
    return found;
  }
}

const endsWith = (tokens, end) =>
  tokens.length >= end.length && end.every((id, i) => id === tokens[tokens.length - end.length + i]);

// Recorded answers: an npz is a zip of arrays, its `index` is JSON

function member(zip, wanted) {
  let at = zip.readUInt32LE(zip.lastIndexOf("PK\x05\x06", undefined, "latin1") + 16);
  while (zip.readUInt32LE(at) === 0x02014b50) {
    const [size, name, extra, comment] = [
      zip.readUInt32LE(at + 20),
      ...[28, 30, 32].map((i) => zip.readUInt16LE(at + i)),
    ];
    if (zip.toString("utf8", at + 46, at + 46 + name) === wanted) {
      const local = zip.readUInt32LE(at + 42);
      const start = local + 30 + zip.readUInt16LE(local + 26) + zip.readUInt16LE(local + 28);
      const bytes = zip.subarray(start, start + size);
      return zip.readUInt16LE(at + 10) ? inflateRawSync(bytes) : bytes;
    }
    at += 46 + name + extra + comment;
  }
  throw new Error(`no ${wanted} in reference.npz`);
}

async function check(model) {
  const array = member(model.files.read("reference.npz"), "index.npy");
  const index = JSON.parse(array.toString("utf8", 10 + array.readUInt16LE(8)));
  let compared = 0;
  for (const { name, options, answers, scores, score_error, ends } of index.searches) {
    for (const [i, row] of index.sources.entries()) {
      const found = await model.answers(row, { ...model.files.manifest.generation, ...options });
      for (const [j, { tokens, score }] of found.entries()) {
        const wanted = [...answers[i][j], ...(ends[i][j] === null ? [] : [ends[i][j]])];
        const place = `${name}, answer ${j} of row ${i}`;
        if (tokens.join() !== wanted.join()) throw new Error(`${place}: ${tokens}, not ${wanted}`);
        const off = Math.abs(score - scores[i][j]);
        if (!(off <= Math.max(1e-5, ...[score_error].flat(2).map((each) => 10 * each))))
          throw new Error(`${place}: a score ${off} away`);
        compared++;
      }
    }
  }
  if (!compared) throw new Error("no search was recorded");
  console.log(`${compared} of ${compared} recorded answers equal`);
}

const [folder, option = "{}"] = process.argv.slice(2);
const model = await Model.open(folder);
if (option === "--check") await check(model);
else {
  const searches = [JSON.parse(option)].flat().map((own) => ({ ...model.files.manifest.generation, ...own }));
  const lines = readFileSync(0, "utf8").replace(/\n$/, "").split("\n");
  for (const [number, line] of lines.entries()) {
    for (const options of searches) {
      try {
        const ids = model.tokenizer.row(line);
        console.log(JSON.stringify({ ids, answers: await model.answers(ids, options, number) }));
      } catch (error) {
        console.log(JSON.stringify({ error: error.message }));
      }
    }
  }
}
