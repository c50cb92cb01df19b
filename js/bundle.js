// The bundle: its manifest, its files checked against their hashes, and its tokenizer.

import { InputError, UsageError } from "./errors.js";
import { sourceOf } from "./source.js";
import { openTokenizer, tokenizerFiles } from "./tokenizer/tokenizer.js";

export const FORMAT = 9;
// Rows are taken in ort/decoder.js, and "generate" is a search of its own.
const UNUSED = ["select", "generate"];
const NAME = /^[A-Za-z0-9_+-][A-Za-z0-9._+-]*$/;

/** A bundle: only bytes that match the manifest are ever used. */
export class Bundle {
  /**
   * @param {object} source where the files are, see source.js
   * @param {object} manifest content of manifest.json
   * @param {object} tokenizer see tokenizer/tokenizer.js
   */
  constructor(source, manifest, tokenizer) {
    this.source = source;
    this.manifest = manifest;
    this.tokenizer = tokenizer;
  }

  /**
   * Opens a bundle: reads its manifest and its tokenizer. Graphs are read when an engine opens.
   *
   * @param {string | URL | object} place folder (Node), URL, or any object with `read(name)`
   * @param {{tokenizer?: object}} [options] `tokenizer` replaces that of the bundle, see README.md
   * @returns {Promise<Bundle>}
   */
  static async open(place, { tokenizer } = {}) {
    const source = sourceOf(place);
    const manifest = parse(await source.read("manifest.json"), "manifest.json");
    if (manifest.format !== FORMAT) {
      throw new InputError(
        `manifest.json has bundle format ${manifest.format}, but this package reads format ` +
          `${FORMAT}; export the bundle again, or install the version that wrote it`,
      );
    }
    const bundle = new Bundle(source, manifest, tokenizer);
    const settings = parse(await bundle.read("tokenizer.json"), "tokenizer.json");
    const contents = {};
    if (!tokenizer) {
      for (const name of tokenizerFiles(settings)) contents[name] = await bundle.read(name);
    }
    bundle.tokenizer = openTokenizer(settings, contents, tokenizer);
    const size = manifest.model.vocabulary_size;
    if (bundle.tokenizer.vocabularySize !== size) {
      throw new InputError(
        `expected a tokenizer of ${size} ids as in manifest.json, found ` +
          `${bundle.tokenizer.vocabularySize}; export the bundle again`,
      );
    }
    return bundle;
  }

  /**
   * Reads a file that the manifest lists, and checks its size and sha256.
   *
   * @param {string} name path in the bundle
   * @param {(bytes: number) => void} [progress]
   * @returns {Promise<Uint8Array>}
   */
  async read(name, progress) {
    const record = Object.hasOwn(this.manifest.files, name) ? this.manifest.files[name] : null;
    if (!record || !name.split("/").every((part) => NAME.test(part))) {
      throw new InputError(`manifest.json does not list ${name}; export the bundle again`);
    }
    const content = await this.source.read(name, progress);
    const found = await sha256(content);
    if (found !== record.sha256) {
      throw new InputError(
        `${name} is not the file that was exported: expected ${record.size} bytes of sha256 ` +
          `${record.sha256.slice(0, 16)}, found ${content.length} of ${found.slice(0, 16)}; copy ` +
          "the bundle again",
      );
    }
    return content;
  }

  /**
   * Returns a variant whose graphs any runtime can run.
   *
   * @param {string} name
   */
  variant(name) {
    const { variants } = this.manifest;
    if (!Object.hasOwn(variants, name)) {
      throw new UsageError(
        `the bundle has no variant ${name}; it has ${Object.keys(variants).join(", ")}`,
      );
    }
    if (variants[name].cache?.in_place) {
      throw new UsageError(
        `variant ${name} keeps its cache in place, which this package does not run; choose portable`,
      );
    }
    return variants[name];
  }

  /** Returns names and specifications of the graphs that a search here drives. */
  steps(variant) {
    return Object.entries(variant.graphs).filter(([name]) => !UNUSED.includes(name));
  }

  /** Returns the names of the files that graphs of a variant need: graphs and weights. */
  graphFiles(variant) {
    const files = this.steps(variant).map(([, graph]) => graph.file);
    const weights = new Set(files.map((file) => weightsOf(file)));
    return [...files, ...weights].filter((file) => Object.hasOwn(this.manifest.files, file));
  }
}

/** Returns the path of the weights beside a graph. */
export function weightsOf(file) {
  return file.replace(/[^/]*$/, "weights.bin");
}

async function sha256(content) {
  if (!globalThis.crypto?.subtle) {
    throw new UsageError(
      "hashes cannot be checked here: browsers have WebCrypto on https and localhost only",
    );
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function parse(content, name) {
  try {
    const value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content));
    if (value === null || typeof value !== "object") throw new TypeError("no object");
    return value;
  } catch (error) {
    throw new InputError(`${name} is not JSON (${error.message}); export the bundle again`);
  }
}
