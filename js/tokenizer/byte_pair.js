// Byte-level byte-pair encoding by ranks, as tiktoken does it.

import { InputError } from "../errors.js";
import { Heap } from "./heap.js";
import { translate } from "./pattern.js";
import { TextTokenizer } from "./text_tokenizer.js";

const MOST_CHARACTERS_AT_ONCE = 500_000;
const RANKS = "ranks.tiktoken";

/** Text to token ids and back; see docs/portability.md. */
export class BytePairTokenizer extends TextTokenizer {
  #encoder = new TextEncoder();
  #pattern;
  #ranks = new Map(); // of tokens as strings with one character a byte
  #tokens = [];
  #kept;
  #ids = new Map();

  /**
   * @param {object} settings content of tokenizer.json
   * @param {Uint8Array[]} files ranks.tiktoken
   * @param {object} special see text_tokenizer.js
   */
  constructor(settings, [content], special) {
    super();
    this.special = special;
    this.first = settings.first_ordinary_id ?? Math.max(...special.ids) + 1;
    this.#pattern = translate(settings.pattern);
    for (const [number, line] of lines(content)) this.#add(line, number);
    this.#kept = settings.kept_ranks ?? this.#tokens.map((_, rank) => rank);
    this.#kept.forEach((rank, place) => {
      if (!(rank in this.#tokens)) {
        throw new InputError(`${RANKS} has no rank ${rank}; export the bundle again`);
      }
      if (place && rank <= this.#kept[place - 1]) {
        throw new InputError("tokenizer.json: expected the kept ranks in ascending order; export the bundle again");
      }
      this.#ids.set(rank, this.first + place);
    });
    const end = this.first + this.#kept.length;
    const taken = [...special.ids].find((id) => this.first <= id && id < end);
    if (taken !== undefined) {
      throw new InputError(`tokenizer.json: expected special ids outside of ${this.first} to ${end - 1}, found ${taken}; export the bundle again`);
    }
    const least = Math.max(end, ...[...special.ids, ...special.ends].map((id) => id + 1));
    this.vocabularySize = settings.vocabulary_size ?? least;
    if (this.vocabularySize < least) {
      throw new InputError(`tokenizer.json: expected a vocabulary of at least ${least} ids, found ${this.vocabularySize}; export the bundle again`);
    }
    /** Bytes of the longest token, which bounds its characters. */
    this.longestToken = this.#kept.reduce((most, rank) => Math.max(most, this.#tokens[rank].length), 0);
    for (let byte = 0; byte < 256; byte++) {
      if (!this.#ids.has(this.#ranks.get(String.fromCharCode(byte)))) {
        throw new InputError(`${RANKS} has no token for byte ${byte}; export the bundle again`);
      }
    }
  }

  #add(line, number) {
    const [encoded, rank, more] = line.split(" ");
    let token;
    try {
      token = atob(encoded);
    } catch {
      token = "";
    }
    if (!token || more !== undefined || Number(rank) !== this.#tokens.length || this.#ranks.has(token)) {
      throw new InputError(
        `${RANKS}, line ${number}: expected a base64 token and rank ${this.#tokens.length}, found ` +
          `"${line.slice(0, 80)}"; export the bundle again`,
      );
    }
    this.#ranks.set(token, this.#tokens.length);
    this.#tokens.push(token);
  }

  /** Returns the token ids of a text, without special tokens. */
  encodePlain(text) {
    const ids = [];
    for (const part of parts(text.toWellFormed())) {
      for (const [word] of part.matchAll(this.#pattern)) {
        for (const rank of this.#merge(bytesOf(this.#encoder.encode(word)))) this.#push(ids, rank);
      }
    }
    return ids;
  }

  #push(ids, rank) {
    const id = this.#ids.get(rank);
    if (id !== undefined) ids.push(id);
    else for (const byte of this.#tokens[rank]) ids.push(this.#ids.get(this.#ranks.get(byte)));
  }

  /** Merges the pair of the lowest rank, the leftmost of equals, until no pair has a rank. */
  #merge(word) {
    const whole = this.#ranks.get(word);
    if (whole !== undefined) return [whole];
    const size = word.length;
    const end = Int32Array.from({ length: size }, (_, place) => place + 1); // of the part begun here
    const before = Int32Array.from({ length: size }, (_, place) => place - 1);
    const waiting = new Heap();
    const consider = (place) => {
      if (place < 0 || end[place] >= size) return;
      const until = end[end[place]];
      const rank = this.#ranks.get(word.slice(place, until));
      if (rank !== undefined) waiting.push({ rank, place, until });
    };
    for (let place = 0; place < size - 1; place++) consider(place);
    for (let pair; (pair = waiting.pop()); ) {
      const { place, until } = pair;
      const middle = end[place];
      // Merged meanwhile, with something else or from the left.
      if (middle <= place || middle >= size || end[middle] !== until) continue;
      end[place] = until;
      end[middle] = -1;
      if (until < size) before[until] = place;
      consider(before[place]);
      consider(place);
    }
    const ranks = [];
    for (let place = 0; place < size; place = end[place]) {
      ranks.push(this.#ranks.get(word.slice(place, end[place])));
    }
    return ranks;
  }

  /** Returns the text of token ids; ids without text are skipped. */
  decode(ids) {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.#bytes(ids));
  }

  /** Returns the text of the first tokens of an answer, without a character that is not whole. */
  decodePartial(ids) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return decoder.decode(this.#bytes(ids), { stream: true });
  }

  #bytes(ids) {
    let joined = "";
    for (const id of ids) {
      const rank = this.#kept[id - this.first];
      if (rank !== undefined) joined += this.#tokens[rank];
    }
    return Uint8Array.from(joined, (character) => character.charCodeAt(0));
  }
}

function bytesOf(array) {
  let text = "";
  for (let start = 0; start < array.length; start += 4096) {
    text += String.fromCharCode(...array.subarray(start, start + 4096));
  }
  return text;
}

/** Yields a text in parts of so many code points: each part is split into words by itself. */
function* parts(text) {
  let start = 0;
  let count = 0;
  if (text.length > MOST_CHARACTERS_AT_ONCE) {
    for (let place = 0; place < text.length; ) {
      place += text.codePointAt(place) > 0xffff ? 2 : 1;
      if (++count === MOST_CHARACTERS_AT_ONCE) {
        yield text.slice(start, place);
        [start, count] = [place, 0];
      }
    }
  }
  if (start < text.length) yield text.slice(start);
}

function* lines(content) {
  const text = bytesOf(content);
  let number = 0;
  for (const line of text.split("\n")) {
    number += 1;
    if (line) yield [number, line];
  }
}
