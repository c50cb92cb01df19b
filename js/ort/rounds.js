// Several searches at once: in each round every search makes one step, equal ones in one run.

/** A decoder for a number of searches that run side by side; see decoder.js for its interface. */
export class Rounds {
  #waiting = [];

  /**
   * @param {object} decoder see decoder.js
   * @param {number} searches how many there are; each calls `leave` at its end
   */
  constructor(decoder, searches) {
    this.decoder = decoder;
    this.searches = searches;
    this.positions = decoder.positions;
    this.vocabulary = decoder.vocabulary;
    this.hasEncoder = decoder.hasEncoder;
  }

  /** See decoder.js; sources that are read in one round get the size of the longest. */
  start(ids) {
    return this.#next("start", ids);
  }

  /** See decoder.js. */
  step(tokens, state) {
    return this.#next(`step ${state.size} ${state.own} ${tokens.length / state.rows}`, { tokens, state });
  }

  /** See decoder.js. */
  begin() {
    return this.decoder.begin();
  }

  /** See decoder.js. */
  read(tokens, state) {
    return this.#next(`read ${state.size}`, { tokens, state });
  }

  /** See decoder.js. */
  select(state, rows) {
    return this.decoder.select(state, rows);
  }

  /** Ends the part of one search. */
  leave() {
    this.searches -= 1;
    this.#run();
  }

  #next(kind, input) {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ kind, input, resolve, reject });
      this.#run();
    });
  }

  /** Makes a round once every search waits for it. */
  async #run() {
    if (!this.searches || this.#waiting.length < this.searches) return;
    const kinds = new Map();
    for (const each of this.#waiting.splice(0)) kinds.set(each.kind, [...(kinds.get(each.kind) ?? []), each]);
    for (const [kind, all] of kinds) {
      const inputs = all.map(({ input }) => input);
      try {
        const made = kind === "start" ? await this.decoder.startAll(inputs) : await this.decoder.stepAll(inputs);
        all.forEach(({ resolve }, place) => resolve(kind.startsWith("read") ? made[place].logits : made[place]));
      } catch (error) {
        for (const { reject } of all) reject(error);
      }
    }
  }
}
