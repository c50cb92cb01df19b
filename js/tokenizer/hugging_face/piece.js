// A piece of a text while it is normalised and split, with the place of each character in the text.
//
// As NormalizedString of Hugging Face's tokenizers: places are those of the text's code points.

import { translate } from "../pattern.js";

/** A piece of a text. */
export class Piece {
  /**
   * @param {string} text
   * @param {number[]} starts for each code unit of `text`, where its character begins in the whole
   *   text, in code points
   * @param {number[]} ends where it ends
   * @param {number} shift where the piece began before it was normalised
   */
  constructor(text, starts, ends, shift = 0) {
    Object.assign(this, { text, starts, ends, shift });
  }

  /** Returns a whole text as one piece. */
  static of(text) {
    const starts = [];
    const ends = [];
    let count = 0;
    for (const character of text) {
      for (let unit = 0; unit < character.length; unit++) {
        starts.push(count);
        ends.push(count + 1);
      }
      count += 1;
    }
    return new Piece(text, starts, ends);
  }

  /** Returns the part between two code units. */
  slice(from, to) {
    const shift = from < to ? this.starts[from] : this.shift;
    return new Piece(this.text.slice(from, to), this.starts.slice(from, to), this.ends.slice(from, to), shift);
  }

  /**
   * Replaces the text (`NormalizedString::transform`).
   *
   * @param {[string, number][]} changes new characters; 1 means that a character is added to those
   *   before, 0 that it replaces the next one, -n that n more after that are dropped
   * @param {number} dropped characters dropped at the beginning
   */
  transform(changes, dropped = 0) {
    const sizes = Array.from(this.text, (character) => character.length);
    let [place, character] = [0, 0];
    const skip = (count) => {
      for (; count > 0 && character < sizes.length; count--) place += sizes[character++];
    };
    skip(dropped);
    this.#become((add) => {
      for (const [made, change] of changes) {
        add(made, change > 0 ? place - 1 : Math.min(place, this.text.length - 1));
        if (change <= 0) skip(1 - change);
      }
    });
  }

  /** Replaces the text by the parts that are added, with the code unit whose place each has; -1 is the beginning. */
  #become(fill) {
    const [starts, ends] = [[], []];
    let text = "";
    fill((made, from) => {
      text += made;
      for (let unit = 0; unit < made.length; unit++) {
        starts.push(from < 0 ? this.shift : this.starts[from]);
        ends.push(from < 0 ? this.shift : this.ends[from]);
      }
    });
    Object.assign(this, { text, starts, ends });
  }

  /** Drops characters, and replaces those that stay one by one. */
  map(replaced) {
    this.#become((add) => {
      let place = 0;
      for (const character of this.text) {
        for (const made of replaced(character) ?? []) add(made, place);
        place += character.length;
      }
    });
  }

  /** Puts text before the piece, unless it is empty. */
  prepend(text) {
    if (!this.text) return;
    this.starts = [...Array(text.length).fill(this.starts[0]), ...this.starts];
    this.ends = [...Array(text.length).fill(this.ends[0]), ...this.ends];
    this.text = text + this.text;
  }

  /** Replaces matches of an expression; the new text comes from the character before their end. */
  replace(expression, content) {
    this.#become((add) => {
      for (const [from, to, isMatch] of matches(expression, this.text)) {
        if (isMatch) add(content, to - 1);
        else for (let place = from; place < to; place++) add(this.text[place], place);
      }
    });
  }

  /** Normalises to a Unicode form: NFC, NFD, NFKC or NFKD. */
  normalise(form) {
    const text = this.text.normalize(form);
    if (text === this.text) return;
    const apart = form.replace("C", "D");
    const from = []; // the code unit that each character of the decomposed text comes from
    let place = 0;
    for (const character of this.text) {
      for (let left = [...character.normalize(apart)].length; left > 0; left--) from.push(place);
      place += character.length;
    }
    this.#become((add) => {
      let next = 0;
      for (const character of text) {
        add(character, from[Math.min(next, from.length - 1)]);
        next += form === apart ? 1 : [...character.normalize(apart)].length;
      }
    });
  }

  /**
   * Splits at matches of an expression.
   *
   * @param {RegExp} expression
   * @param {string} behavior treatment of a match, as tokenizer.json names it
   * @param {boolean} invert whether the text between matches counts as a match
   */
  split(expression, behavior, invert = false) {
    const found = matches(expression, this.text).map(([from, to, is]) => [from, to, is !== invert]);
    return BEHAVIORS[behavior](found).map(([from, to]) => this.slice(from, to));
  }
}

/** Returns start, end and whether it is a match for each match and each text between, in order. */
export function matches(expression, text) {
  const found = [];
  let last = 0;
  for (const match of text ? text.matchAll(expression) : []) {
    const end = match.index + match[0].length;
    // As in Rust, an empty match does not count right behind another one.
    if (end === last && found.length) continue;
    if (last !== match.index) found.push([last, match.index, false]);
    found.push([match.index, end, true]);
    last = end;
  }
  if (last !== text.length || !text) found.push([last, text.length, false]);
  return found;
}

const joinedWhere = (joins) => (found) => {
  const made = [];
  let before = false;
  for (const [from, to, is] of found) {
    if (joins(is, before) && made.length) made.at(-1)[1] = to;
    else made.push([from, to]);
    before = is;
  }
  return made;
};

/** Treatments of matches that split a text. */
export const BEHAVIORS = {
  Removed: (found) => found.filter(([, , is]) => !is),
  Isolated: (found) => found,
  Contiguous: joinedWhere((is, before) => is === before),
  MergedWithPrevious: joinedWhere((is, before) => is && !before),
  MergedWithNext: (found) => {
    const made = [];
    let after = false;
    for (const [from, to, is] of [...found].reverse()) {
      if (is && !after && made.length) made.at(-1)[0] = from;
      else made.push([from, to]);
      after = is;
    }
    return made.reverse();
  },
};

/** Returns the expression of a pattern of tokenizer.json: a text, or a regular expression. */
export function expressionOf(pattern) {
  const { String: text, Regex: source } = typeof pattern === "string" ? { String: pattern } : pattern;
  if (source !== undefined) return translate(source, "oniguruma");
  return literal(text);
}

/** Returns an expression that matches any of these texts, the longest first. */
export function literal(...texts) {
  const longest = [...texts].sort((one, other) => other.length - one.length);
  return new RegExp(longest.map((text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("|"), "gu");
}

/** Returns the end of a text's beginning without the white space at its end. */
export function withoutBlanks(text, end) {
  let place = end;
  while (place > 0 && /\p{White_Space}/u.test(text[place - 1])) place -= 1;
  return place;
}
