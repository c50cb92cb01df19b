// Options of generation: the fields of docs/generation.md under their names, checked together.

import { checkNames, UsageError, shown } from "../errors.js";

const MOST = 2 ** 31 - 1;
const whole = (least, most = MOST) => ({
  what: `a whole number from ${least} to ${most}`,
  holds: (value) => Number.isSafeInteger(value) && value >= least && value <= most,
});
const number = (least, most, what = `a number from ${least} to ${most}`) => ({
  what,
  holds: (value) => typeof value === "number" && value >= least && value <= most,
});
const share = {
  what: "a number above 0 and at most 1",
  holds: (value) => typeof value === "number" && value > 0 && value <= 1,
};
const flag = { what: "true or false", holds: (value) => typeof value === "boolean" };
const token = whole(0);
const listOf = (item, what) => ({
  what: `a list of ${what}`,
  holds: (value) => Array.isArray(value) && value.every((each) => item.holds(each)),
});
const tokens = listOf(token, "token ids");
const filled = { holds: (value) => tokens.holds(value) && value.length > 0 };
const text = { holds: (value) => typeof value === "string" && value.length > 0 };
const seed = {
  what: "a whole number from 0 to 2**64 - 1 (a BigInt beyond 2**53)",
  holds: (value) =>
    (Number.isSafeInteger(value) && value >= 0) || (typeof value === "bigint" && value >= 0n && value < 1n << 64n),
};

const FIELDS = {
  beam: [1, whole(1, 10_000)],
  n_best: [1, whole(1, 10_000)],
  max_length: [256, whole(1, 1_000_000)],
  max_total_length: [0, whole(0, 1_000_000)],
  min_length: [0, whole(0, 1_000_000)],
  min_total_length: [0, whole(0, 1_000_000)],
  length_penalty: [1, number(-10, 10)],
  early_stopping: [
    true,
    { what: 'true, false or "never"', holds: (value) => flag.holds(value) || value === "never" },
  ],
  sample: [false, flag],
  temperature: [1, number(1e-6, 1e6)],
  top_k: [0, token],
  top_p: [1, share],
  min_p: [0, number(0, 1)],
  typical_p: [1, share],
  seed: [0, seed],
  repetition_penalty: [1, number(1e-3, 1e3)],
  no_repeat_ngram: [0, whole(0, 1_000_000)],
  prompt_ngrams: [false, flag],
  suppress: [[], tokens],
  suppress_sequences: [[], listOf(filled, "lists of token ids, none of them empty")],
  suppress_begin: [[], tokens],
  forced_begin: [null, { what: "a token id or null", holds: (id) => id === null || token.holds(id) }],
  forced_end: [[], tokens],
  renormalise: [false, flag],
  prefix: [[], tokens],
  stop: [[], listOf(text, "strings, none of them empty")],
  split_lines: [null, { what: "true, false or null", holds: (value) => value === null || flag.holds(value) }],
  scores: [true, flag],
};

/** Defaults of the options, overridden by a bundle's. */
export const DEFAULTS = Object.freeze(
  Object.fromEntries(Object.entries(FIELDS).map(([name, [value]]) => [name, value])),
);
const OF_SAMPLING = ["temperature", "top_k", "top_p", "min_p", "typical_p"];
const LENGTHS = [
  ["min_length", "max_length"],
  ["min_total_length", "max_total_length"],
];

/**
 * Returns options with these fields; fields of `base` that they rule out give way.
 *
 * @param {object} values fields; `suppress` may hold text if there is `encode`
 * @param {object} [base] the other fields; default: DEFAULTS
 * @param {(text: string) => number[]} [encode] token ids of a text
 * @returns {object} all fields
 * @throws {UsageError} for an unknown field, a value out of range, or fields that conflict
 */
export function generationOptions(values, base = DEFAULTS, encode) {
  checkNames(values, Object.keys(FIELDS));
  values = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
  if (values.suppress && encode) values = suppressing(values, base, encode);
  checkFields(values);
  const ruledOut = {};
  const sample = values.sample ?? (base.sample && (values.beam ?? 1) === 1);
  if (!sample) {
    ruledOut.sample = false;
    for (const name of OF_SAMPLING) ruledOut[name] = DEFAULTS[name];
    ruledOut.n_best = Math.min(base.n_best, values.beam ?? base.beam);
  } else if (base.beam > 1) ruledOut.beam = 1;
  for (const [least, most] of LENGTHS) {
    if (values[most]) ruledOut[least] = Math.min(base[least], values[most]);
  }
  const options = { ...base, ...ruledOut, ...values };
  check(options);
  return options;
}

function checkFields(options) {
  for (const [name, value] of Object.entries(options)) {
    const [, kind] = FIELDS[name];
    if (!kind.holds(value)) throw new UsageError(`${name} must be ${kind.what}, found ${shown(value)}`);
  }
}

function check(options) {
  checkFields(options);
  const refuse = (message) => {
    throw new UsageError(message);
  };
  if (options.sample && options.beam > 1) {
    refuse(`sample and beam=${options.beam} exclude each other: choose beam=1, or turn sample off`);
  }
  const ranks = options.beam > 1 ? "beam" : options.sample ? "sample" : "";
  if (!options.scores && ranks) {
    refuse(
      `scores=false and ${ranks}=${options[ranks]} exclude each other: only greedy search works without scores; ` +
        `turn scores on, or leave ${ranks} out`,
    );
  }
  if (!options.sample) {
    for (const name of OF_SAMPLING) {
      if (options[name] !== DEFAULTS[name]) {
        refuse(`${name}=${options[name]} has no effect without sample: turn it on, or leave ${name} out`);
      }
    }
    if (options.n_best > options.beam) {
      const { n_best: best, beam } = options;
      refuse(`n_best=${best} is more than beam=${beam} can give: set beam to at least ${best}, or n_best to at most ${beam}`);
    }
  }
  for (const [least, most] of LENGTHS) {
    if (options[least] > options[most] && (options[most] || most === "max_length")) {
      refuse(`${least}=${options[least]} is more than ${most}=${options[most]}: lower the first or raise the second`);
    }
  }
  const forced = options.prefix.length + (options.forced_begin === null ? 0 : 1);
  if (forced > options.max_length) {
    const name = options.forced_begin === null ? "prefix" : "prefix with forced_begin";
    refuse(`${name} has ${forced} tokens, more than max_length=${options.max_length}: shorten the first or raise the second`);
  }
}

/** Forbids texts by their tokens, as they stand and after a blank; see docs/generation.md. */
function suppressing(values, base, encode) {
  if (!Array.isArray(values.suppress)) return values;
  const sequences = new Map();
  for (const each of values.suppress) {
    if (typeof each !== "string") continue;
    if (!each.trim()) throw new UsageError(`suppress holds ${shown(each)}, which has no tokens; leave it out`);
    for (const form of [each, ` ${each}`]) {
      const ids = encode(form);
      sequences.set(ids.join(), ids);
    }
  }
  const found = [...sequences.values()];
  const { suppress_sequences: given = base.suppress_sequences } = values;
  checkFields({ suppress_sequences: given });
  return {
    ...values,
    suppress: [
      ...base.suppress,
      ...values.suppress.filter((each) => typeof each !== "string"),
      ...found.filter((ids) => ids.length === 1).flat(),
    ],
    suppress_sequences: [
      ...given,
      ...found.filter((ids) => ids.length > 1),
    ],
  };
}

/** Returns the limit on the tokens of an answer to a prompt of this length. */
export function room(options, prompt) {
  if (!options.max_total_length) return options.max_length;
  return Math.min(options.max_length, options.max_total_length - prompt);
}
