// The pattern that splits text into words, parsed for matcher.js.
//
// The pattern is one of Rust's fancy-regex, or of Oniguruma (in Ruby's syntax) in a tokenizer.json.
// Sets of characters become those of JavaScript, where \s, \w, \d, "." and scripts are written
// otherwise, and flags of a part, (?i:...), are newer than the browsers in use: both cases are spelled
// out.

import { InputError } from "../errors.js";
import { Matcher } from "./matcher.js";

const LONGEST = 10_000;

const CLASSES = {
  s: "\\p{White_Space}",
  w: "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}",
  d: "\\p{Nd}",
};
// Letters of ASCII with a case beyond ASCII, by Unicode's simple case folding.
const FOLDED = { k: "\\u212a", s: "\\u017f" };
// Of \w besides: the joiners in Rust, numbers of Latin-1 in Oniguruma, there outside of sets alone.
const JOINERS = "\\u200c\\u200d";
const NUMBERS = "\xb2\xb3\xb9\xbc-\xbe";
// Letters that one character stands for, if case is ignored in Oniguruma.
const LIGATURES = /ss|ff|fi|fl|st/i;
const SYNTAX = /[\\^$.*+?()[\]{}|/-]/;

// Assertions at a place of a text, in fancy-regex and in each line of Ruby.
const ASSERTIONS = {
  "^": [(text, place) => place === 0, (text, place) => place === 0 || (text[place - 1] === "\n" && place < text.length)],
  $: [(text, place) => place === text.length, (text, place) => place === text.length || text[place] === "\n"],
};

/**
 * Reads a pattern.
 *
 * @param {string} pattern as in tokenizer.json
 * @param {"fancy-regex" | "oniguruma"} [engine] whose syntax it is
 * @returns {Matcher} for `text.matchAll`
 * @throws {InputError} for a construct that is not read here, and for a pattern that is too large
 */
export function translate(pattern, engine = "fancy-regex") {
  const translator = new Translator([...pattern.slice(0, LONGEST + 1)], engine === "oniguruma");
  if (pattern.length > LONGEST) translator.refuse();
  const node = translator.alternatives(false);
  if (translator.place < translator.characters.length) translator.refuse();
  try {
    return new Matcher(node);
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof RangeError)) throw error;
    translator.place = 0;
    return translator.refuse();
  }
}

class Translator {
  constructor(characters, ruby) {
    this.characters = characters;
    this.ruby = ruby;
    this.place = 0;
  }

  refuse() {
    const rest = this.characters.slice(this.place, this.place + 20).join("");
    throw new InputError(
      `the tokenizer's pattern cannot be translated to JavaScript from "${rest}" on; pass a ` +
        "`tokenizer` of your own",
    );
  }

  get next() {
    return this.characters[this.place];
  }

  takes(text) {
    const found = this.characters.slice(this.place, this.place + text.length).join("") === text;
    if (found) this.place += text.length;
    return found;
  }

  alternatives(folded) {
    const any = [[]];
    while (this.place < this.characters.length && this.next !== ")") {
      if (this.takes("|")) any.push([]);
      else any.at(-1).push(this.quantified(folded));
    }
    return { any: any.map((all) => ({ all })) };
  }

  quantified(folded) {
    const node = this.atom(folded);
    const [quantifier] = /^([*+?]|\{\d+(,\d*)?\})?/.exec(this.characters.slice(this.place, this.place + 24).join(""));
    this.place += quantifier.length;
    if (!quantifier) return node;
    const [, least = quantifier === "+" ? "1" : "0", rest] = /^\{(\d+)(,\d*)?\}/.exec(quantifier) ?? [];
    const most = { "*": Infinity, "+": Infinity, "?": 1 }[quantifier] ?? Number(rest ? rest.slice(1) || Infinity : least);
    if (Number(least) > most) this.refuse();
    // Ruby has no lazy {n} either: the ? after it makes it optional.
    if (this.ruby && /^\{\d+\}$/.test(quantifier) && this.takes("?")) {
      return { node: { node, least: Number(least), most }, least: 0, most: 1 };
    }
    const repeated = { node, least: Number(least), most, lazy: this.takes("?") };
    if (repeated.lazy || !this.takes("+")) return repeated;
    // Ruby has no possessive {n,m}: the + after it repeats the repetition.
    if (this.ruby && quantifier.startsWith("{")) return { node: repeated, least: 1, most: Infinity };
    return { atomic: repeated };
  }

  atom(folded) {
    if (this.takes("(")) return this.group(folded);
    if (this.takes("[")) return { set: this.set(folded) };
    if (this.takes(".")) return { set: "[^\\n]" };
    for (const [sign, kinds] of Object.entries(ASSERTIONS)) {
      if (this.takes(sign)) return { assert: kinds[Number(this.ruby)] };
    }
    if ("*+?{".includes(this.next)) this.refuse();
    if (this.takes("\\")) {
      const [inSet, negated] = this.escape(folded);
      return { set: negated ? `[^${inSet}]` : `[${inSet}]` };
    }
    return { set: `[${this.literal(folded)}]` };
  }

  group(folded) {
    const begin = this.place;
    const kinds = ["?:", "?i:", "?=", "?!", "?<=", "?<!", "?>", ""];
    const kind = kinds.find((each) => this.takes(each));
    if (this.next === "?") this.refuse();
    const inner = this.alternatives(folded || kind === "?i:");
    const own = this.characters.slice(begin, this.place).join("");
    if (!this.takes(")")) this.refuse();
    if (this.ruby && (folded || kind === "?i:") && LIGATURES.test(own)) {
      this.place = begin;
      this.refuse();
    }
    if (kind === "?>") return { atomic: inner };
    const looks = /^\?(<?)([=!])$/.exec(kind);
    return looks ? { look: inner, behind: looks[1] === "<", negated: looks[2] === "!" } : inner;
  }

  set(folded) {
    const negated = this.takes("^");
    let content = "";
    while (!this.takes("]")) {
      if (this.place >= this.characters.length || this.takes("&&")) this.refuse();
      if (this.next === "[") {
        content += this.nested(folded);
        continue;
      }
      if (this.takes("\\")) {
        const [inSet, isNegated] = this.escape(folded, true);
        if (isNegated && inSet !== CLASSES.s && !/^\\p\{[^}]*\}$/.test(inSet)) this.refuse();
        content += isNegated ? inSet.replace("\\p", "\\P") : inSet;
      } else if (this.next === "-" && this.characters[this.place + 1] !== "]" && content) {
        this.place += 1; // a range; its end follows
        if (folded) this.refuse();
        content += "-";
      } else content += this.literal(folded);
    }
    return `[${negated ? "^" : ""}${content}]`;
  }

  /** Returns the content of a set within a set, which adds to it. */
  nested(folded) {
    const [ahead] = /^\[(\^|:)?/.exec(this.characters.slice(this.place, this.place + 2).join(""));
    if (ahead.length > 1) this.refuse();
    this.place += 1;
    return this.set(folded).slice(1, -1);
  }

  /** Returns an escape as the content of a set, and whether the set is negated. */
  escape(folded, isInSet = false) {
    const kind = this.characters[this.place++];
    if (kind === undefined) this.refuse();
    if (Object.hasOwn(CLASSES, kind.toLowerCase())) {
      const name = kind.toLowerCase();
      if (name !== "w") return [CLASSES[name], kind !== name];
      return [CLASSES.w + (!this.ruby ? JOINERS : isInSet ? "" : NUMBERS), kind !== name];
    }
    const isProperty = kind.toLowerCase() === "p";
    if (isProperty && this.ruby && this.next !== "{") return [kind, false];
    if (isProperty) {
      const rest = this.characters.slice(this.place, this.place + 80).join("");
      const [found, name] = /^\{([A-Za-z_=]+)\}/.exec(rest) ?? /^([A-Z])/.exec(rest) ?? this.refuse();
      const property = propertyOf(name) ?? this.refuse();
      this.place += found.length;
      return [property, kind === "P"];
    }
    if ("nrtfv".includes(kind)) return [`\\${kind}`, false];
    if (kind === "x" || kind === "u") {
      const rest = this.characters.slice(this.place, this.place + 12).join("");
      const size = kind === "x" ? 2 : 4;
      const match = /^\{([0-9A-Fa-f]+)\}/.exec(rest) ?? new RegExp(`^([0-9A-Fa-f]{${size}})`).exec(rest);
      if (!match) this.refuse();
      this.place += match[0].length;
      return [`\\u{${match[1]}}`, false];
    }
    if (/[A-Za-z0-9]/.test(kind)) this.refuse();
    this.place -= 1;
    return [this.literal(folded), false];
  }

  /** Returns a character as the content of a set, in both cases if they are the same here. */
  literal(folded) {
    const character = this.characters[this.place++];
    if (folded && /[A-Za-z]/.test(character)) {
      const lower = character.toLowerCase();
      return lower + character.toUpperCase() + (FOLDED[lower] ?? "");
    }
    if (folded && character.codePointAt(0) > 127) this.refuse();
    return SYNTAX.test(character) ? `\\${character}` : character;
  }
}

/** Returns a property of characters, which may be a script; null if JavaScript has none. */
function propertyOf(name) {
  for (const each of [name, `Script=${name}`]) {
    try {
      new RegExp(`\\p{${each}}`, "u");
      return `\\p{${each}}`;
    } catch {
      // The next one.
    }
  }
  return null;
}
