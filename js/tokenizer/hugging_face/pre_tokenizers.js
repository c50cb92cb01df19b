// Pre-tokenizers of tokenizer.json: pieces of a text in, shorter pieces out.

import { bytesAsCharacters } from "./normalizers.js";
import { BEHAVIORS, expressionOf, literal } from "./piece.js";
import { translate } from "../pattern.js";
import { refuse } from "../../errors.js";

// The pattern of ByteLevel.
const GPT2 = translate(
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
  "oniguruma",
);
const WORD = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u200c\\u200d";
const WORDS = new RegExp(`[${WORD}]+|[^${WORD}\\p{White_Space}]+`, "gu");
const SPACE = /\p{White_Space}/gu;
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}]/gu;
const NUMBER = /\p{N}/gu;

const splitting = (expression, behavior, invert) => (piece) => piece.split(expression, behavior, invert);

const KINDS = {
  Sequence: ({ pretokenizers }) => {
    const steps = pretokenizers.map(preTokenizer);
    return (piece) =>
      steps.reduce((pieces, step) => pieces.flatMap(step).filter(({ text }) => text), [piece]);
  },
  ByteLevel: ({ add_prefix_space: blank, use_regex: splits = true }) => (piece) => {
    if (blank && !piece.text.startsWith(" ")) piece.prepend(" ");
    const pieces = splits ? piece.split(GPT2, "Isolated") : [piece];
    pieces.forEach(bytesAsCharacters);
    return pieces;
  },
  Metaspace: metaspace,
  Whitespace: () => splitting(WORDS, "Removed", true),
  WhitespaceSplit: () => splitting(SPACE, "Removed"),
  BertPreTokenizer: () => (piece) =>
    piece.split(SPACE, "Removed").flatMap((word) => word.split(PUNCTUATION, "Isolated")),
  CharDelimiterSplit: ({ delimiter }) => splitting(literal(delimiter), "Removed"),
  Punctuation: ({ behavior = "Isolated" }) => splitting(PUNCTUATION, known(behavior)),
  Digits: ({ individual_digits: single }) => splitting(NUMBER, single ? "Isolated" : "Contiguous"),
  Split: ({ pattern, behavior, invert = false }) =>
    splitting(expressionOf(pattern), known(behavior), invert),
};

/** Returns a function that splits a piece into pieces, as a pre-tokenizer of tokenizer.json. */
export function preTokenizer(settings) {
  if (!settings) return (piece) => [piece];
  if (!Object.hasOwn(KINDS, settings.type)) refuse(`pre-tokenizer ${settings.type}`);
  return KINDS[settings.type](settings);
}

function known(behavior) {
  if (!Object.hasOwn(BEHAVIORS, behavior)) refuse(`pre-tokenizer behavior ${behavior}`);
  return behavior;
}

/** Returns what Metaspace does with the beginning of a text: "always", "first" or "never". */
export function prependScheme({ prepend_scheme: scheme = "always", add_prefix_space: blank }) {
  return blank === false ? "never" : scheme;
}

function metaspace(settings) {
  const { replacement, split = true } = settings;
  const scheme = prependScheme(settings);
  const [blank, mark] = [literal(" "), literal(replacement)];
  return (piece) => {
    piece.replace(blank, replacement);
    const begins = scheme === "always" || (scheme === "first" && piece.shift === 0);
    if (begins && !piece.text.startsWith(replacement)) piece.prepend(replacement);
    return split ? piece.split(mark, "MergedWithNext") : [piece];
  };
}
