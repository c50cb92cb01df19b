// Beam search: the `beam` likeliest beginnings, step by step.

import { Best, logSumExp } from "./logits.js";
import { FAILED } from "./sampling.js";

/** Beam search; see search.js for the interface and docs/portability.md for its rules. */
export class BeamStrategy {
  /** See `SamplingStrategy`. */
  constructor(options, request, ends, stopped) {
    Object.assign(this, { options, limit: request.limit, ends, stopped });
    this.width = options.beam;
    this.count = (1 + ends.length) * options.beam;
    /** Beams: total as rules changed it, and how far the model's own lies above it. */
    this.beams = [{ tokens: [], total: 0, excess: 0 }];
    this.found = [];
    this.failed = false;
  }

  ranks = true;
  first = 1;

  /** See `SamplingStrategy`. */
  get rows() {
    return this.beams.map((beam) => beam.tokens);
  }

  /** See `SamplingStrategy`. */
  get best() {
    return this.beams[0]?.tokens ?? this.found[0]?.tokens ?? [];
  }

  get #worst() {
    return this.found.length === this.width ? this.found.at(-1).score : -Infinity;
  }

  /** See `SamplingStrategy`. */
  choose(steps) {
    const candidates = this.#candidates(steps);
    const length = this.beams[0].tokens.length + 1;
    const atLimit = length === this.limit;
    const goingOn = [];
    candidates.forEach((candidate, place) => {
      const end = this.ends.includes(candidate.token);
      const ended = end || this.stopped(candidate.tokens);
      if (place < this.width && (ended || atLimit)) this.#add(candidate, end, ended);
      if (!ended && goingOn.length < this.width) goingOn.push(candidate);
    });
    const done = this.failed || atLimit || this.#settled(goingOn, length);
    this.beams = done ? [] : goingOn;
    return {
      parents: this.beams.map((beam) => beam.parent),
      tokens: this.beams.map((beam) => beam.token),
    };
  }

  /** Returns the best candidates: by total, then the lower beam, then the lower token. */
  #candidates(steps) {
    const best = new Best(this.count);
    steps.forEach(({ logits, allowed, own }, row) => {
      const beam = this.beams[row];
      if (beam.total === -Infinity) return;
      const normaliser = logSumExp(logits);
      if (Number.isNaN(normaliser)) {
        this.failed = true;
        return;
      }
      // With `own`, `allowed` are log-probabilities that rules changed.
      const values = own ? allowed : logits;
      const offset = own ? beam.total : beam.total - normaliser;
      for (let token = 0; token < values.length; token++) {
        if (allowed[token] > -Infinity) best.add(values[token] + offset, row, token);
      }
    });
    return best.items.map(([total, parent, token]) => {
      const { tokens, excess } = this.beams[parent];
      const { allowed, own } = steps[parent];
      return {
        tokens: [...tokens, token],
        total,
        excess: own ? excess + own[token] - allowed[token] : excess,
        parent,
        token,
      };
    });
  }

  #add({ tokens, total, excess }, end, ended) {
    const score = total / tokens.length ** this.options.length_penalty;
    if (score <= this.#worst) return;
    this.found.push({
      tokens: end ? tokens.slice(0, -1) : tokens,
      logProbability: total + excess,
      score,
      reason: end ? "end" : ended ? "stop" : "length",
    });
    this.found.sort((one, other) => other.score - one.score);
    this.found.length = Math.min(this.found.length, this.width);
  }

  /** Whether no further hypothesis can matter. */
  #settled(goingOn, length) {
    const likeliest = goingOn.length ? Math.max(...goingOn.map((beam) => beam.total)) : -Infinity;
    if (likeliest === -Infinity) return true;
    const { early_stopping: early, length_penalty: penalty } = this.options;
    if (early === true) return this.#worst > -Infinity;
    const compared = early === "never" && penalty > 0 ? this.limit : length;
    return likeliest / compared ** penalty <= this.#worst;
  }

  /** Returns the best `n_best`. */
  hypotheses() {
    return this.failed || !this.found.length ? [FAILED] : this.found.slice(0, this.options.n_best);
  }
}
