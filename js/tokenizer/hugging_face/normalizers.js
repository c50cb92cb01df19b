// Normalizers of tokenizer.json, on pieces of a text.

import { Charsmap } from "../charsmap.js";
import { expressionOf, withoutBlanks } from "./piece.js";
import { refuse } from "../../errors.js";

// Characters that stand for bytes in GPT-2's vocabulary (`bytes_to_unicode`).
const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte < 256 && byte !== 173);
let next = 256;

/** Character of each byte: itself if it is printable in Latin-1, the next one from U+0100 otherwise. */
const BYTE_CHARACTERS = Array.from({ length: 256 }, (_, byte) =>
  String.fromCharCode(printable(byte) ? byte : next++),
);

/** Byte of each of these characters. */
export const BYTES = new Map(BYTE_CHARACTERS.map((character, byte) => [character, byte]));

const SPACE = /^\p{White_Space}$/u;
const CONTROL = /^[\p{Cc}\p{Cf}\p{Co}]$/u;
const ACCENT = /^\p{Mn}$/u;
const MARK = /^\p{M}$/u;
// As is_chinese_char of tokenizers, which leaves out part of extension E.
const CHINESE = /^[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]$/u;
// As Nmt of tokenizers: control characters, and characters that count as blanks.
const NMT_DROPPED = /^[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]$/;
const NMT_BLANK = /^[\t\n\f\r\u1680\u200b-\u200f\u2028\u2029\u2581\ufeff\ufffd]$/;

const lowercase = (piece) => piece.map((character) => character.toLowerCase());
const dropping = (kind) => (piece) => piece.map((character) => (kind.test(character) ? null : character));
const form = (name) => () => (piece) => piece.normalise(name);

const KINDS = {
  Sequence: ({ normalizers }) => {
    const steps = normalizers.map(normalizer);
    return (piece) => steps.forEach((step) => step(piece));
  },
  NFC: form("NFC"),
  NFD: form("NFD"),
  NFKC: form("NFKC"),
  NFKD: form("NFKD"),
  Lowercase: () => lowercase,
  StripAccents: () => dropping(MARK),
  Nmt: () => (piece) => {
    dropping(NMT_DROPPED)(piece);
    piece.map((character) => (NMT_BLANK.test(character) ? " " : character));
  },
  Strip: ({ strip_left: left, strip_right: right }) => (piece) => {
    const from = left ? /^\p{White_Space}*/u.exec(piece.text)[0].length : 0;
    const to = right ? withoutBlanks(piece.text, piece.text.length) : piece.text.length;
    const kept = piece.slice(from, Math.max(from, to));
    Object.assign(piece, { text: kept.text, starts: kept.starts, ends: kept.ends });
  },
  Prepend: ({ prepend }) => (piece) => piece.prepend(prepend),
  Replace: ({ pattern, content }) => {
    const expression = expressionOf(pattern);
    return (piece) => piece.replace(expression, content);
  },
  ByteLevel: () => bytesAsCharacters,
  BertNormalizer: bert,
  Precompiled: precompiled,
};

/** Returns a function that normalises a piece in place, as a normalizer of tokenizer.json. */
export function normalizer(settings) {
  if (!settings) return () => {};
  if (!Object.hasOwn(KINDS, settings.type)) refuse(`normalizer ${settings.type}`);
  return KINDS[settings.type](settings);
}

/** Replaces each byte of a piece by the character that stands for it in GPT-2's vocabulary. */
export function bytesAsCharacters(piece) {
  const encoder = new TextEncoder();
  piece.map((character) => Array.from(encoder.encode(character), (byte) => BYTE_CHARACTERS[byte]));
}

function bert({ clean_text: cleans, handle_chinese_chars: chinese, strip_accents: strips, lowercase: lowers }) {
  return (piece) => {
    if (cleans) {
      piece.map((character) => {
        if ("\t\n\r".includes(character)) return " ";
        if (character === "\0" || character === "\ufffd" || CONTROL.test(character)) return null;
        return SPACE.test(character) ? " " : character;
      });
    }
    if (chinese) {
      piece.map((character) => (CHINESE.test(character) ? [" ", character, " "] : [character]));
    }
    if (strips ?? lowers) {
      piece.normalise("NFD");
      dropping(ACCENT)(piece);
    }
    if (lowers) lowercase(piece);
  };
}

const AT_ONCE = 256; // characters: V8 takes time with the whole text for each grapheme in it

/** Yields the graphemes (extended clusters) of a text, in time that grows with it. */
export function* graphemes(text) {
  const segmenter = new Intl.Segmenter(undefined, { granularity: "grapheme" });
  for (let [start, size] = [0, AT_ONCE]; start < text.length; ) {
    let end = start + size;
    if (text.codePointAt(end - 1) > 0xffff) end += 1; // not within a character
    const segments = Array.from(segmenter.segment(text.slice(start, end)), ({ segment }) => segment);
    // The last one may go on behind the part; a part may hold no whole one.
    if (end < text.length) segments.pop();
    size = segments.length ? AT_ONCE : 2 * size;
    for (const segment of segments) start += segment.length;
    yield* segments;
  }
}

/** SentencePiece's compiled normalisation, as Hugging Face's library applies it. */
function precompiled({ precompiled_charsmap: encoded }) {
  if (typeof Intl.Segmenter !== "function") {
    refuse("compiled normalisation without Intl.Segmenter, which newer browsers have,");
  }
  const charsmap = new Charsmap(Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0)));
  const encoder = new TextEncoder();
  return (piece) => {
    const changes = [];
    let modified = false;
    const replace = (part) => {
      const made = charsmap.replaced(part);
      if (made === null) return false;
      modified = true;
      const characters = [...made];
      const more = characters.length - [...part].length;
      characters.forEach((character, place) => {
        changes.push([character, place >= characters.length - more ? 1 : 0]);
      });
      if (more < 0 && changes.length) changes.at(-1)[1] += more;
      return true;
    };
    for (const segment of graphemes(piece.text)) {
      // A whole grapheme, if it is short, is replaced for its first bytes.
      if (encoder.encode(segment).length < 6 && replace(segment)) continue;
      for (const character of segment) if (!replace(character)) changes.push([character, 0]);
    }
    if (modified) piece.transform(changes);
  };
}
