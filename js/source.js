// Where the files of a bundle are: below a URL here, in a folder too in Node (node.js).

import { InputError, UsageError } from "./errors.js";

/** Parts of a file, up to a size in bytes, so that a stranger's file cannot fill the memory. */
export class Parts {
  #parts = [];
  #size = 0;

  /**
   * @param {string} name of the file, for errors
   * @param {number} most bytes
   * @param {(bytes: number) => void} [progress] called with the size of each part
   */
  constructor(name, most, progress = () => {}) {
    Object.assign(this, { name, most, progress });
  }

  /** Adds a part. */
  add(part) {
    this.#size += part.length;
    if (this.#size > this.most) {
      throw new InputError(`${this.name} is not the file that was exported: it has more than ${this.most} bytes; copy the bundle again`);
    }
    this.#parts.push(part);
    this.progress(part.length);
  }

  /** Returns all parts as one. */
  whole() {
    const content = new Uint8Array(this.#size);
    let place = 0;
    for (let part; (part = this.#parts.shift()); place += part.length) content.set(part, place);
    return content;
  }
}

/** Files below a URL. */
export class UrlSource {
  /** @param {string | URL} base URL of the bundle's folder */
  constructor(base) {
    if (!URL.canParse(base, globalThis.location?.href)) {
      throw new UsageError(`expected the URL of a bundle's folder, found ${String(base).slice(0, 80)}`);
    }
    const { href } = new URL(base, globalThis.location?.href);
    this.base = href.endsWith("/") ? href : `${href}/`;
  }

  /**
   * Reads a file.
   *
   * @param {string} name path in the bundle
   * @param {(bytes: number) => void} [progress] called with the size of each part
   * @param {{most?: number, signal?: AbortSignal}} [limits] most: bytes
   * @returns {Promise<Uint8Array>}
   */
  async read(name, progress, { most = Infinity, signal } = {}) {
    const url = new URL(name.split("/").map(encodeURIComponent).join("/"), this.base);
    const failed = (error) => {
      if (signal?.aborted) throw signal.reason;
      throw new InputError(`${url} cannot be fetched: ${error.message}`, { cause: error });
    };
    const response = await fetch(url, { signal }).catch(failed);
    if (!response.ok) throw new InputError(`${url} cannot be fetched: status ${response.status}`);
    const parts = new Parts(name, most, progress);
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read().catch(failed);
      if (done) return parts.whole();
      try {
        parts.add(value);
      } catch (error) {
        reader.cancel().catch(() => {});
        throw error;
      }
    }
  }
}

/** Opens places that are no source; node.js adds folders. */
export const sources = { of: (place) => new UrlSource(place) };

/** Returns the source of a folder in Node, of a URL elsewhere or if it is one. */
export function sourceOf(place) {
  return typeof place?.read === "function" ? place : sources.of(place);
}
