// Devices that graphs run on, and onnxruntime for each.

import { shown, UsageError } from "./errors.js";

/** Devices by name, the default first; node.js has others. Bundlers see the imports. */
export const devices = {
  wasm: { name: "onnxruntime-web", providers: ["wasm"], load: () => import("onnxruntime-web/wasm") },
  webgpu: {
    name: "onnxruntime-web",
    providers: ["webgpu", "wasm"],
    load: () => import("onnxruntime-web/webgpu"),
  },
};

/**
 * Returns onnxruntime and its session options for a device.
 *
 * @param {string} [device] "wasm" or "webgpu"; in Node also "cpu", the default there
 * @throws {UsageError} the device is unknown, or onnxruntime cannot be loaded
 */
export async function loadOnnxRuntime(device) {
  if (device !== undefined && !Object.hasOwn(devices, device)) {
    throw new UsageError(`device must be ${Object.keys(devices).join(" or ")}, found ${shown(device)}`);
  }
  const { name, providers, load } = devices[device ?? Object.keys(devices)[0]];
  try {
    const module = await load();
    return { ort: module.InferenceSession ? module : module.default, session: { executionProviders: providers } };
  } catch (error) {
    throw new UsageError(`${name} cannot be loaded (${error.message}): npm install ${name}, or pass \`ort\``, {
      cause: error,
    });
  }
}
