// onnxruntime for the tests: of this folder's node_modules, or of NODE_PATH.

import { createRequire } from "node:module";

const require = createRequire(import.meta.url);

/** Returns a package, or null if it is not installed. */
export function installed(name) {
  try {
    return require(name);
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
    return null;
  }
}
