// Byte-pair encoding by a list of merges, as `BPE` of Hugging Face's tokenizers.

import { InputError, refuse } from "../../errors.js";
import { Heap } from "../heap.js";
import { bytesIn, byteTokens } from "../utf8.js";
import { Vocabulary } from "./vocabulary.js";

const SHIFT = 2 ** 26; // above every id, so that a pair of ids is one number

/** BPE; see models.js for the interface. */
export class Merges extends Vocabulary {
  #ranks = new Map(); // of pairs of ids
  #merged = []; // id of each rank's token
  #settings;

  constructor(settings, entries) {
    super(entries);
    const { merges, dropout, continuing_subword_prefix: prefix } = settings;
    if (dropout) refuse("dropout of merges");
    this.#settings = settings;
    merges.forEach((merge, rank) => {
      const [left, right, more] = Array.isArray(merge) ? merge : merge.split(" ");
      const joined = this.ids.get(left + right?.slice(prefix?.length ?? 0));
      const pair = [this.ids.get(left), this.ids.get(right)];
      if (more !== undefined || joined === undefined || pair.includes(undefined)) {
        throw new InputError(
          `the tokenizer's merge ${rank} is of tokens that its vocabulary lacks; export the bundle again`,
        );
      }
      this.#ranks.set(pair[0] * SHIFT + pair[1], rank);
      this.#merged.push(joined);
    });
  }

  /** See models.js. */
  found(text) {
    const whole = this.#settings.ignore_merges ? this.ids.get(text) : undefined;
    if (whole !== undefined) return [{ id: whole, token: text, from: 0, to: bytesIn(text) }];
    let place = 0;
    return this.#merge(this.#symbols(text)).map(({ id, size }) => {
      const from = place;
      place += size;
      return { id, token: this.tokens.get(id), from, to: place };
    });
  }

  /** Returns ids of characters, and how many bytes each stands for. */
  #symbols(text) {
    const { unk_token: unknown, fuse_unk: fuses, byte_fallback: spells } = this.#settings;
    const { continuing_subword_prefix: prefix, end_of_word_suffix: suffix } = this.#settings;
    const symbols = [];
    let pending = null;
    const flush = () => {
      if (pending) symbols.push(pending);
      pending = null;
    };
    const characters = [...text];
    characters.forEach((character, place) => {
      const size = bytesIn(character);
      let token = place && prefix ? prefix + character : character;
      if (place === characters.length - 1 && suffix) token += suffix;
      const id = this.ids.get(token);
      if (id !== undefined) {
        flush();
        symbols.push({ id, size });
        return;
      }
      const bytes = spells ? byteTokens(token).map((byte) => this.ids.get(byte)) : [undefined];
      if (!bytes.includes(undefined)) {
        // Unknown characters before stay pending, as in the library.
        symbols.push(...bytes.map((byte) => ({ id: byte, size: 1 })));
        return;
      }
      if (unknown === null || unknown === undefined) return;
      if (pending && fuses) pending.size += size;
      else {
        flush();
        const own = this.ids.get(unknown);
        if (own === undefined) {
          throw new InputError(`the tokenizer's vocabulary has no ${unknown}; export the bundle again`);
        }
        pending = { id: own, size };
      }
    });
    flush();
    return symbols;
  }

  /** Merges the pair of the lowest rank, the leftmost of equals, until no pair has a rank. */
  #merge(symbols) {
    const before = symbols.map((_, place) => place - 1);
    const after = symbols.map((_, place) => place + 1);
    const waiting = new Heap();
    const rankAt = (place) => {
      const next = place < 0 ? undefined : symbols[after[place]];
      return next && this.#ranks.get(symbols[place].id * SHIFT + next.id);
    };
    const consider = (place) => {
      const rank = rankAt(place);
      if (rank !== undefined) waiting.push({ rank, place });
    };
    for (let place = 0; place < symbols.length - 1; place++) consider(place);
    for (let pair; (pair = waiting.pop()); ) {
      const { rank, place } = pair;
      // Merged meanwhile, with something else or from the left.
      if (!symbols[place] || this.#differs(rankAt(place), rank)) continue;
      const next = after[place];
      symbols[place] = { id: this.#merged[rank], size: symbols[place].size + symbols[next].size };
      symbols[next] = null;
      after[place] = after[next];
      if (after[place] < symbols.length) before[after[place]] = place;
      consider(before[place]);
      consider(place);
    }
    return symbols.filter(Boolean);
  }

  /** Whether a pair no longer gives the token that a candidate was for. */
  #differs(now, then) {
    return now === undefined || this.#merged[now] !== this.#merged[then];
  }
}
