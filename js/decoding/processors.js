// Logits processors: rules that forbid or rate tokens, each on one row.
//
// A rule is { changes, active(length), apply(logits, output, own) }: whether it changes logits of
// tokens that stay allowed, whether it may do something after so many tokens, and its effect on the
// logits in place, given the output so far and the logits before all rules.

import { logSumExp } from "./logits.js";

const always = () => true;

/**
 * Returns the rules that the options ask for, in the order in which they apply.
 *
 * @param {object} options see options.js
 * @param {object} request prompt: tokens that the decoder read before the output (the begin token of an
 *   encoder-decoder); promptLength: its tokens as lengths count them; first: the token that outputs
 *   begin with or null; limit: most tokens of the output
 * @param {number[]} ends end tokens
 */
export function processors(options, { prompt, promptLength, first, limit }, ends) {
  const beginning = [...(first === null ? [] : [first]), ...options.prefix];
  const least = Math.max(options.min_length, options.min_total_length - promptLength);
  const rules = [];
  if (options.repetition_penalty !== 1) rules.push(repetition(options.repetition_penalty, prompt));
  if (options.no_repeat_ngram) {
    rules.push(noRepeat(options.no_repeat_ngram, options.prompt_ngrams ? prompt : []));
  }
  if (least > 0) rules.push(forbid(ends, (length) => length < least));
  if (options.suppress.length) rules.push(forbid(options.suppress, always));
  if (options.suppress_sequences.length) {
    rules.push(suppressSequences(options.suppress_sequences, prompt));
  }
  if (options.suppress_begin.length) {
    rules.push(forbid(options.suppress_begin, (length) => length === beginning.length));
  }
  if (options.forced_end.length) {
    rules.push(allowOnly(() => options.forced_end, (length) => length + 1 === limit));
  }
  if (beginning.length) rules.push(forcedPrefix(beginning));
  if (first !== null) rules.push(allowOnly(() => [first], (length) => length === 0));
  if (options.renormalise && options.beam > 1 && rules.length) rules.push(renormalise());
  return rules;
}

function forbid(tokens, active) {
  return {
    active,
    apply: (logits) => tokens.forEach((token) => (logits[token] = -Infinity)),
  };
}

function allowOnly(tokens, active) {
  return {
    changes: true,
    active,
    apply: (logits) => {
      logits.fill(-Infinity);
      for (const token of tokens()) logits[token] = 0;
    },
  };
}

function repetition(penalty, prompt) {
  return {
    changes: true,
    active: always,
    apply: (logits, output) => {
      // In the precision of the logits, as numpy multiplies them.
      const factor = logits instanceof Float32Array ? Math.fround(penalty) : penalty;
      for (const token of new Set([...prompt, ...output])) {
        logits[token] = logits[token] < 0 ? logits[token] * factor : logits[token] / factor;
      }
    },
  };
}

function noRepeat(size, prompt) {
  return {
    active: always,
    apply: (logits, output) => {
      const seen = [...prompt, ...output];
      const last = seen.length - size + 1;
      for (let place = 0; place < last; place++) {
        let same = 0;
        while (same < size - 1 && seen[place + same] === seen[last + same]) same += 1;
        if (same === size - 1) logits[seen[place + same]] = -Infinity;
      }
    },
  };
}

function suppressSequences(sequences, prompt) {
  return {
    active: always,
    apply: (logits, output) => {
      const seen = [...prompt, ...output];
      for (const sequence of sequences) {
        const first = seen.length - sequence.length + 1;
        const begun = sequence.slice(0, -1);
        if (first >= 0 && begun.every((token, place) => seen[first + place] === token)) {
          logits[sequence.at(-1)] = -Infinity;
        }
      }
    },
  };
}

function forcedPrefix(beginning) {
  return {
    active: (length) => length < beginning.length,
    apply: (logits, output, own) => {
      const token = beginning[output.length];
      logits.fill(-Infinity);
      logits[token] = own[token];
    },
  };
}

function renormalise() {
  return {
    changes: true,
    active: always,
    apply: (logits) => {
      const normaliser = logSumExp(logits);
      if (!Number.isFinite(normaliser)) return;
      for (let token = 0; token < logits.length; token++) logits[token] -= normaliser;
    },
  };
}
