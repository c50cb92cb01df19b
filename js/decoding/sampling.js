// Greedy search and sampling: each output takes a token a step by itself.

import { argmax, logSumExp } from "./logits.js";

/** Greedy search, or sampling of `n_best` outputs; see search.js for the interface. */
export class SamplingStrategy {
  /**
   * @param {object} options see options.js
   * @param {object} request row: number that seeds its samples; limit: most tokens
   * @param {number[]} ends end tokens
   * @param {(tokens: number[]) => boolean} stopped whether the text of tokens holds a stop string
   */
  constructor(options, request, ends, stopped) {
    Object.assign(this, { options, limit: request.limit, ends, stopped });
    this.outputs = Array.from({ length: options.n_best }, (_, sample) => ({
      tokens: [],
      total: options.scores ? 0 : NaN,
      random: options.sample ? uniforms(options.seed, request.row, sample) : null,
      hypothesis: null,
    }));
    this.live = [...this.outputs];
  }

  ranks = false;

  /** Rows of the first step, all of them the same. */
  get first() {
    return this.outputs.length;
  }

  /** Outputs of the rows that are stepped, in order. */
  get rows() {
    return this.live.map((output) => output.tokens);
  }

  /** Tokens of the output to show while it grows. */
  get best() {
    return this.outputs[0].hypothesis?.tokens ?? this.outputs[0].tokens;
  }

  /** Chooses; returns the rows that go on and the next token of each. */
  choose(steps) {
    const staying = [];
    this.live.forEach((output, row) => {
      this.#take(output, steps[row]);
      if (!output.hypothesis) staying.push(row);
    });
    this.live = staying.map((row) => this.live[row]);
    return { parents: staying, tokens: this.live.map((output) => output.tokens.at(-1)) };
  }

  #take(output, { logits, allowed }) {
    const { options } = this;
    const token = output.random
      ? draw(weights(allowed, options), output.random.next().value)
      : argmax(allowed);
    const gain = logits[token] - logSumExp(logits);
    if (!Number.isFinite(gain) || !Number.isFinite(allowed[token])) {
      output.hypothesis = FAILED;
      return;
    }
    if (options.scores) output.total += gain;
    const tokens = [...output.tokens, token];
    const finish = (reason, kept) => {
      const score = output.total / tokens.length ** options.length_penalty;
      output.hypothesis = { tokens: kept, logProbability: output.total, score, reason };
    };
    output.tokens.push(token);
    if (this.ends.includes(token)) finish("end", tokens.slice(0, -1));
    else if (this.stopped(tokens)) finish("stop", tokens);
    else if (tokens.length === this.limit) finish("length", tokens);
  }

  /** Returns all outputs, best first. */
  hypotheses() {
    return this.outputs
      .map((output) => output.hypothesis)
      .sort((one, other) => other.score - one.score || 0);
  }
}

export const FAILED = Object.freeze({
  tokens: [],
  logProbability: -Infinity,
  score: -Infinity,
  reason: "error",
});

/** Inverts the cumulative distribution in the order of token ids. */
function draw(found, random) {
  const cumulative = new Float64Array(found.length);
  let sum = 0;
  found.forEach((weight, token) => (cumulative[token] = sum += weight));
  const target = random * sum;
  const token = cumulative.findIndex((value) => value > target);
  return Math.max(token, 0);
}

/** Returns probabilities up to a factor, 0 where an option cuts a token off. */
export function weights(logits, options) {
  const { temperature, top_k, top_p, min_p, typical_p } = options;
  const largest = logits.reduce((most, value) => (value > most ? value : most), -Infinity);
  const found = Float64Array.from(logits, (value) => Math.exp((value - largest) / temperature));
  const keep = (holds) => found.forEach((value, token) => holds(value, token) || (found[token] = 0));
  const descending = () => Float64Array.from(found).sort().reverse();
  if (top_k > 0 && top_k < found.length) {
    const least = descending()[top_k - 1];
    keep((value) => value >= least);
  }
  if (top_p < 1) {
    const sorted = descending();
    const least = sorted[before(sorted, top_p)];
    keep((value) => value >= least);
  }
  if (min_p > 0) {
    const least = min_p * found.reduce((most, value) => Math.max(most, value), 0);
    keep((value) => value >= least);
  }
  if (typical_p < 1) {
    const distances = typicalDistances(found);
    const order = Array.from(distances.keys()).sort((one, other) => {
      const [a, b] = [distances[one], distances[other]];
      return a === b ? one - other : a - b;
    });
    const last = order[before(order.map((token) => found[token]), typical_p)];
    keep((_, token) => distances[token] <= distances[last]);
  }
  return found;
}

/** Returns how many values come before that with which their sum reaches a share of the whole. */
function before(values, share) {
  const cumulative = [];
  let sum = 0;
  for (const value of values) cumulative.push((sum += value));
  return cumulative.filter((value) => value < share * sum).length;
}

/** Distance of each token's information from the entropy (Meister et al. 2023, eq. 10), in nats. */
function typicalDistances(found) {
  const sum = found.reduce((total, value) => total + value, 0);
  const shares = found.map((value) => value / sum); // 0 for the least of weights too
  const information = shares.map((share) => -Math.log(share));
  const entropy = shares.reduce((total, share, token) => (share > 0 ? total + share * information[token] : total), 0);
  return information.map((value) => Math.abs(value - entropy));
}

// Random numbers: Philox4x64-10 (Salmon et al. 2011), as numpy.random.Philox.
const MASK = (1n << 64n) - 1n;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n];
const WEYL = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn];

function block(counter, key) {
  let [a, b, c, d] = counter;
  let [first, second] = key;
  for (let round = 0; round < 10; round++) {
    const left = MULTIPLIERS[0] * a;
    const right = MULTIPLIERS[1] * c;
    [a, b, c, d] = [(right >> 64n) ^ b ^ first, right & MASK, (left >> 64n) ^ d ^ second, left & MASK];
    first = (first + WEYL[0]) & MASK;
    second = (second + WEYL[1]) & MASK;
  }
  return [a, b, c, d];
}

/**
 * Yields random numbers in [0, 1): one for each step of one sample.
 *
 * @param {number | bigint} seed
 * @param {number | bigint} row number of the input row
 * @param {number} sample
 */
export function* uniforms(seed, row, sample) {
  const key = [BigInt(seed) & MASK, BigInt(row) & MASK];
  for (let count = 1n; ; count++) {
    // numpy counts up before the first block.
    for (const word of block([count, 0n, 0n, BigInt(sample)], key)) {
      yield Number(word >> 11n) * 2 ** -53;
    }
  }
}
