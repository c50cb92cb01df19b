// Generation of one input, step by step.

import { BeamStrategy } from "./beam_search.js";
import { UsageError } from "../errors.js";
import { logSumExp } from "./logits.js";
import { processors } from "./processors.js";
import { SamplingStrategy } from "./sampling.js";

/**
 * Generates; yields after every step the tokens of the output that leads, and returns all
 * hypotheses, best first.
 *
 * @param {object} decoder see decoder.js
 * @param {object} options see options.js
 * @param {object} request source: token ids; limit: most tokens; row: number that seeds samples;
 *   bos: begin token; first: the token that outputs begin with, or null
 * @param {number[]} ends end tokens
 * @param {(tokens: number[]) => string} decode text of token ids, for stop strings
 */
export async function* search(decoder, options, request, ends, decode) {
  const { source, bos, first } = request;
  checkTokens(options, first, decoder.vocabulary, ends);
  const stopped = (tokens) => {
    if (!options.stop.length) return false;
    const text = decode(tokens);
    return options.stop.some((stop) => text.includes(stop));
  };
  const Strategy = options.beam > 1 ? BeamStrategy : SamplingStrategy;
  const strategy = new Strategy(options, request, ends, stopped);
  const start = decoder.hasEncoder ? bos : source.at(-1);
  const prompt = decoder.hasEncoder ? [start] : source;
  const promptLength = decoder.hasEncoder ? 0 : source.length;
  const rules = processors(options, { ...request, prompt, promptLength }, ends);
  let state = await decoder.start(source);
  let tokens = Array(strategy.first).fill(start);
  let parents = tokens.map(() => 0);
  for (;;) {
    state = decoder.select(state, parents);
    const output = await decoder.step(tokens, state);
    const steps = output.logits.map((logits, row) =>
      restricted(logits, strategy.rows[row], rules, strategy.ranks),
    );
    ({ parents, tokens } = strategy.choose(steps));
    if (!parents.length) return strategy.hypotheses();
    state = output.state;
    yield strategy.best;
  }
}

/** Returns the logits and their restriction by the rules, for beams of log-probabilities. */
function restricted(logits, output, rules, ranks) {
  const active = rules.filter((rule) => rule.active(output.length));
  if (!active.length) return { logits, allowed: logits };
  let own;
  if (ranks && active.some((rule) => rule.changes)) {
    const normaliser = logSumExp(logits);
    own = Float64Array.from(logits, (value) => value - normaliser);
  }
  const before = own ?? logits;
  const allowed = before.slice();
  for (const rule of active) rule.apply(allowed, output, before);
  return { logits, allowed, own };
}

function checkTokens(options, first, vocabulary, ends) {
  const lists = ["suppress", "suppress_begin", "forced_end", "prefix"];
  const all = lists.flatMap((name) => options[name]).concat(options.suppress_sequences.flat());
  const largest = Math.max(-1, first ?? -1, ...all);
  if (largest >= vocabulary) {
    throw new UsageError(
      `the options hold token ${largest}, expected tokens from 0 to ${vocabulary - 1}: give ids ` +
        "of the bundle's tokenizer",
    );
  }
  for (const token of [...options.prefix, ...(first === null ? [] : [first])]) {
    if (ends.includes(token)) {
      throw new UsageError(`the prefix holds the end token ${token}: leave special tokens out`);
    }
  }
}
