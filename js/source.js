// Where the files of a bundle are: a folder in Node, or a URL.

import { InputError } from "./errors.js";

/**
 * Files below a URL.
 */
export class UrlSource {
  /** @param {string | URL} base URL of the bundle's folder */
  constructor(base) {
    const href = new URL(base, globalThis.location?.href).href;
    this.base = href.endsWith("/") ? href : `${href}/`;
  }

  /**
   * Reads a file.
   *
   * @param {string} name path in the bundle
   * @param {(bytes: number) => void} [progress] called with the size of each part
   * @returns {Promise<Uint8Array>}
   */
  async read(name, progress = () => {}) {
    const url = new URL(name.split("/").map(encodeURIComponent).join("/"), this.base);
    const response = await fetch(url).catch((error) => {
      throw new InputError(`${url} cannot be fetched: ${error.message}`);
    });
    if (!response.ok) throw new InputError(`${url} cannot be fetched: status ${response.status}`);
    const parts = [];
    let size = 0;
    for (const reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      size += value.length;
      progress(value.length);
    }
    const content = new Uint8Array(size);
    let place = 0;
    for (const part of parts) {
      content.set(part, place);
      place += part.length;
    }
    return content;
  }
}

/** Files below a folder; in Node. */
export class FolderSource {
  /** @param {string} folder */
  constructor(folder) {
    this.folder = folder;
  }

  /** Reads a file; see `UrlSource.read`. */
  async read(name, progress = () => {}) {
    const [{ readFile }, { join }] = await Promise.all([
      import("node:fs/promises"),
      import("node:path"),
    ]);
    const path = join(this.folder, ...name.split("/"));
    const content = await readFile(path).catch((error) => {
      throw new InputError(`${path} cannot be read (${error.code}): export the bundle again`);
    });
    progress(content.length);
    return new Uint8Array(content.buffer, content.byteOffset, content.byteLength);
  }
}

/** Returns the source of a folder in Node, of a URL elsewhere or if it is one. */
export function sourceOf(place) {
  if (typeof place === "object" && typeof place?.read === "function") return place;
  const isUrl = place instanceof URL || /^[a-z][a-z0-9+.-]+:\/\//i.test(place);
  const inNode = typeof globalThis.process?.versions?.node === "string";
  return isUrl || !inNode ? new UrlSource(place) : new FolderSource(place);
}
