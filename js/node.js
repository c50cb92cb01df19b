// The package in Node, Deno and Bun: bundles in folders, and onnxruntime-node.

import { constants } from "node:fs";
import { open } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";

import { devices } from "./devices.js";
import { InputError, UsageError } from "./errors.js";
import { Parts, sources, UrlSource } from "./source.js";

// Off: the telemetry of onnxruntime-node, which starts with its first session.
process.env.ORT_DISABLE_TELEMETRY ??= "1";

const PART = 1 << 24; // bytes

/** Files below a folder. */
class FolderSource {
  /** @param {string} folder */
  constructor(folder) {
    this.folder = folder;
  }

  /** Reads a regular file; see `UrlSource.read`. */
  async read(name, progress, { most = Infinity, signal } = {}) {
    const path = join(this.folder, ...name.split("/"));
    let file;
    signal?.throwIfAborted();
    try {
      // A pipe is refused, not waited for.
      file = await open(path, constants.O_RDONLY | (constants.O_NONBLOCK ?? 0));
      if (!(await file.stat()).isFile()) throw new InputError(`${path} is not a regular file; copy the bundle again`);
      const parts = new Parts(name, most, progress);
      for (;;) {
        signal?.throwIfAborted();
        const { bytesRead, buffer } = await file.read(new Uint8Array(PART), 0, PART);
        if (!bytesRead) return parts.whole();
        parts.add(buffer.slice(0, bytesRead));
      }
    } catch (error) {
      if (error instanceof InputError || error === signal?.reason) throw error;
      throw new InputError(`${path} cannot be read (${error.code}): export the bundle again`, { cause: error });
    } finally {
      await file?.close();
    }
  }
}

sources.of = (place) => {
  const url = place instanceof URL ? place.href : String(place);
  if (/^file:\/\//i.test(url)) {
    try {
      return new FolderSource(fileURLToPath(url));
    } catch (error) {
      throw new UsageError(`expected the URL of a bundle's folder, found ${url.slice(0, 80)} (${error.message})`);
    }
  }
  return /^[a-z][a-z0-9+.-]+:\/\//i.test(url) ? new UrlSource(url) : new FolderSource(url);
};

const native = (...providers) => ({ name: "onnxruntime-node", providers, load: () => import("onnxruntime-node") });
const { wasm } = devices;
for (const name of Object.keys(devices)) delete devices[name];
Object.assign(devices, {
  cpu: native("cpu"),
  webgpu: native("webgpu", "cpu"),
  wasm: { ...wasm, load: () => import("onnxruntime-web") },
});

export * from "./index.js";
