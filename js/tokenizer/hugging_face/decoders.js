// Decoders of tokenizer.json: tokens in, parts of a text out.

import { BYTES } from "./normalizers.js";
import { expressionOf, matches } from "./piece.js";
import { prependScheme } from "./pre_tokenizers.js";
import { refuse } from "../../errors.js";

const CLEANED = [
  ...[".", "?", "!", ","].map((mark) => [` ${mark}`, mark]),
  [" ' ", "'"],
  [" n't", "n't"],
  [" 'm", "'m"],
  [" do not", " don't"],
  ...["'s", "'ve", "'re"].map((end) => [` ${end}`, end]),
];
const BYTE = /^<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>$/;
const utf8 = (bytes, fatal = false) =>
  new TextDecoder("utf-8", { ignoreBOM: true, fatal }).decode(Uint8Array.from(bytes));

const KINDS = {
  Sequence: ({ decoders }) => {
    const steps = decoders.map(decoder);
    return (tokens) => steps.reduce((parts, step) => step(parts), tokens);
  },
  ByteLevel: () => (tokens) => {
    const encoder = new TextEncoder();
    const bytes = tokens.flatMap((token) => {
      const own = Array.from(token, (character) => BYTES.get(character));
      return own.includes(undefined) ? [...encoder.encode(token)] : own;
    });
    return [utf8(bytes)];
  },
  WordPiece: ({ prefix, cleanup }) => (tokens) =>
    tokens.map((token, place) => {
      let text = token;
      if (place) text = token.startsWith(prefix) ? token.slice(prefix.length) : ` ${token}`;
      if (cleanup) for (const [found, content] of CLEANED) text = text.replaceAll(found, content);
      return text;
    }),
  Metaspace: (settings) => (tokens) => {
    const drops = prependScheme(settings) !== "never";
    return tokens.map((token, place) =>
      token.replaceAll(settings.replacement, place === 0 && drops ? "" : " "),
    );
  },
  ByteFallback: () => byteFallback,
  Fuse: () => (tokens) => [tokens.join("")],
  Strip: ({ content, start, stop }) => (tokens) =>
    tokens.map((token) => {
      let characters = [...token];
      let count = 0;
      while (count < start && characters[count] === content) count += 1;
      characters = characters.slice(count);
      for (count = 0; count < stop && characters.at(-1) === content; count++) characters.pop();
      return characters.join("");
    }),
  Replace: ({ pattern, content }) => {
    const expression = expressionOf(pattern);
    return (tokens) =>
      tokens.map((token) =>
        matches(expression, token)
          .map(([from, to, isMatch]) => (isMatch ? content : token.slice(from, to)))
          .join(""),
      );
  },
  BPEDecoder: ({ suffix }) => (tokens) =>
    tokens.map((token, place) => token.replaceAll(suffix, place === tokens.length - 1 ? "" : " ")),
};

/** Returns a function that makes parts of a text of tokens, as a decoder of tokenizer.json. */
export function decoder(settings) {
  if (!settings) return (tokens) => [tokens.join(" ")];
  if (!Object.hasOwn(KINDS, settings.type)) refuse(`decoder ${settings.type}`);
  return KINDS[settings.type](settings);
}

function byteFallback(tokens) {
  const parts = [];
  let bytes = [];
  const flush = () => {
    if (!bytes.length) return;
    try {
      parts.push(utf8(bytes, true));
    } catch {
      parts.push(...bytes.map(() => "\ufffd")); // one for each, not for each invalid part
    }
    bytes = [];
  };
  for (const token of tokens) {
    const [, digits] = BYTE.exec(token) ?? [];
    if (digits) bytes.push(parseInt(digits, 16));
    else {
      flush();
      parts.push(token);
    }
  }
  flush();
  return parts;
}
