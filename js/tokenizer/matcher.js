// Matching of a pattern in time that grows with the sizes of pattern and text, not with their power.
//
// RegExp takes exponential time for a pattern such as (a+)+b. Here a choice that failed at a place
// of the text is remembered and not made again (BitState of RE2; for lookarounds and atomic groups
// Davis, Servant and Lee 2021, "Using Selective Memoization to Defeat Regular Expression Denial of
// Service").

const [SET, FORK, INNER, ASSERT, MATCH, RUN] = [0, 1, 2, 3, 4, 5];
const MOST_STEPS = 20_000;
const MOST_STATES = 2 ** 31;

/**
 * A pattern, for `text.matchAll`.
 *
 * A node is one of { set: source of a RegExp of one character }, { all: nodes in order },
 * { any: alternatives }, { node, least, most, lazy } for repetitions, { atomic: node },
 * { look: node, behind, negated } and { assert: (text, place) => boolean }.
 */
export class Matcher {
  #count = 0;
  #forks = 0;
  #sets = new Map();
  #start;

  /**
   * @param {object} node
   * @throws {RangeError} its repetitions are too many
   */
  constructor(node) {
    this.#start = this.#compiled(node, this.#step(MATCH), false);
  }

  #step(op, next = null, other = null, extra = 0, most = 0) {
    if (++this.#count > MOST_STEPS) throw new RangeError("too many repetitions");
    return { op, next, other, extra, most };
  }

  #fork(next, other) {
    return this.#step(FORK, next, other, this.#forks++);
  }

  /** Returns the step that matches a node and goes on with `next`. */
  #compiled(node, next, behind) {
    const inner = (each, back) => this.#compiled(each, this.#step(MATCH), back);
    if (node.set) return this.#step(SET, next, this.#set(node.set), behind ? -1 : 1);
    if (node.assert) return this.#step(ASSERT, next, node.assert);
    if (node.atomic?.node?.set) return this.#repeated(node.atomic, next, behind, true);
    if (node.atomic) return this.#step(INNER, next, inner(node.atomic, behind), "atomic");
    if (node.look) return this.#step(INNER, next, inner(node.look, node.behind), node.negated ? "not" : "is");
    if (node.any) return node.any.map((each) => this.#compiled(each, next, behind)).reduceRight((rest, each) => this.#fork(each, rest));
    if (node.all) return (behind ? node.all : [...node.all].reverse()).reduce((rest, each) => this.#compiled(each, rest, behind), next);
    return this.#repeated(node, next, behind, next.op === MATCH);
  }

  /** Returns the step of a repetition; `keeps`: nothing after it can ask for another length. */
  #repeated({ node, least, most, lazy }, next, behind, keeps) {
    const body = (rest) => this.#compiled(node, rest, behind);
    let made = next;
    if (keeps && node.set) {
      if (!lazy) made = this.#step(RUN, next, this.#set(node.set), behind ? -1 : 1, most - least);
    } else if (most === Infinity) {
      made = this.#fork(next, next);
      made[lazy ? "other" : "next"] = body(made);
    } else {
      for (let count = least; count < most; count++) made = lazy ? this.#fork(next, body(made)) : this.#fork(body(made), next);
    }
    for (let count = 0; count < least; count++) made = body(made);
    return made;
  }

  /** Returns whether a character is in a set, by code point; those of 16 bits are remembered. */
  #set(source) {
    if (!this.#sets.has(source)) {
      const expression = new RegExp(`^${source}$`, "u");
      const seen = new Uint8Array(0x10000);
      const test = (code) => expression.test(String.fromCodePoint(code));
      this.#sets.set(source, (code) => {
        if (code > 0xffff) return test(code);
        if (!seen[code]) seen[code] = test(code) ? 2 : 1;
        return seen[code] === 2;
      });
    }
    return this.#sets.get(source);
  }

  /** Yields matches with `index`, as an expression with flags g and u. */
  *[Symbol.matchAll](text) {
    const states = this.#forks * (text.length + 1);
    if (states > MOST_STATES) throw new RangeError("the text is too long for the tokenizer's pattern");
    const search = new Search(text, states);
    for (let place = 0; place <= text.length; ) {
      const end = search.end(this.#start, place);
      if (end >= 0) yield Object.assign([text.slice(place, end)], { index: place });
      place = end > place ? end : place + widthAt(text, place);
    }
  }
}

function widthAt(text, place) {
  return text.codePointAt(place) > 0xffff ? 2 : 1;
}

/** What is known of the choices of a pattern in one text. */
class Search {
  #ends = new Map(); // of choices in lookarounds and atomic groups, by state

  constructor(text, states) {
    this.text = text;
    this.width = text.length + 1;
    this.runs = new Map();
    this.failed = new Uint8Array((states >> 3) + 1);
  }

  /** Returns where a match that begins at a place ends; -1 without one. */
  end(start, from, inner = false) {
    const { text, failed, width } = this;
    const choices = []; // other step, place, and how many states were passed before
    const passed = []; // states on the way, which have not failed
    let [step, place] = [start, from];
    const back = () => {
      if (!choices.length) return false;
      passed.length = choices.pop();
      place = choices.pop();
      step = choices.pop();
      return true;
    };
    for (;;) {
      let goes = true;
      if (step.op === SET) {
        const code = step.extra > 0 ? text.codePointAt(place) : before(text, place);
        goes = code !== undefined && step.other(code);
        place += step.extra * (code > 0xffff ? 2 : 1);
      } else if (step.op === RUN) place = this.#run(step, place);
      else if (step.op === FORK) {
        const state = step.extra * width + place;
        const known = inner ? this.#ends.get(state) : undefined;
        if (known !== undefined) return this.#found(passed, known, inner);
        goes = !(failed[state >> 3] & (1 << (state & 7)));
        if (goes) {
          failed[state >> 3] |= 1 << (state & 7);
          passed.push(state);
          choices.push(step.other, place, passed.length);
        }
      } else if (step.op === INNER) {
        const end = this.end(step.other, place, true);
        goes = step.extra === "not" ? end < 0 : end >= 0;
        if (step.extra === "atomic") place = end;
      } else if (step.op === ASSERT) goes = step.other(text, place);
      else return this.#found(passed, place, inner);
      if (goes) step = step.next;
      else if (!back()) return -1;
    }
  }

  /** Returns where a run of characters of a set ends; long runs are remembered. */
  #run(step, from) {
    const { text, runs } = this;
    const [begin, known] = runs.get(step) ?? [0, 0];
    if (begin <= from && from < known) return known;
    let place = from;
    for (let left = step.most; left > 0; left--) {
      const code = step.extra > 0 ? text.codePointAt(place) : before(text, place);
      if (code === undefined || !step.other(code)) break;
      place += step.extra * (code > 0xffff ? 2 : 1);
    }
    if (place - from > 64 && step.most === Infinity) runs.set(step, [from, place]);
    return place;
  }

  /** Notes that states lead to a match, and returns its end. */
  #found(passed, end, inner) {
    for (const state of passed) {
      this.failed[state >> 3] &= ~(1 << (state & 7));
      if (inner) this.#ends.set(state, end);
    }
    return end;
  }
}

/** Returns the code point before a place; undefined at the beginning. */
function before(text, place) {
  if (place < 1) return undefined;
  const whole = place > 1 ? text.codePointAt(place - 2) : 0;
  return whole > 0xffff ? whole : text.charCodeAt(place - 1);
}
