// onnxruntime: its sessions by tensor role.

import { weightsOf } from "../bundle.js";
import { InputError, UsageError } from "../errors.js";

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

/** A tensor of onnxruntime. */
export function tensor(ort, type, values, shape) {
  if (type === "int64") values = BigInt64Array.from(values, BigInt);
  return new ort.Tensor(type, ARRAYS[type].from(values), shape);
}

/** A graph whose tensors are addressed by role, in the order of the manifest. */
export class Graph {
  #running = new Set();
  #closed = false;

  constructor(session, spec) {
    this.session = session;
    this.spec = spec;
  }

  /**
   * Opens a graph, after the hashes of its files were checked.
   *
   * @param {object} ort onnxruntime
   * @param {object} bundle see bundle.js
   * @param {object} spec of the manifest
   * @param {(name: string) => Promise<Uint8Array>} read reads a checked file
   * @param {object} options session options of onnxruntime
   */
  static async open(ort, bundle, spec, read, options) {
    for (const { type, name } of [...spec.inputs, ...spec.outputs]) {
      if (!Object.hasOwn(ARRAYS, type)) {
        throw new UsageError(`${spec.file} has ${name} of type ${type}; choose variant portable`);
      }
    }
    const graph = await read(spec.file);
    const weights = weightsOf(spec.file);
    const stored = Object.hasOwn(bundle.manifest.files, weights) ? await read(weights) : null;
    // Weights of 8 bits are converted once, not in every run.
    const session = { ...options.extra?.session, disable_quant_qdq: "1" };
    options = { ...options, extra: { ...options.extra, session } };
    const externalData = stored ? [{ path: "weights.bin", data: stored }] : [];
    const opened = await ort.InferenceSession.create(graph, { ...options, externalData }).catch((error) => {
      throw new InputError(`${spec.file} cannot be opened (${error.message}); copy the bundle again`, { cause: error });
    });
    if (!isDescribed(opened, spec)) {
      await opened.release();
      throw new InputError(`${spec.file}: the manifest describes other tensors than the graph has; export the bundle again`);
    }
    return new Graph(opened, spec);
  }

  /** Returns the specification of the first tensor of a role; undefined without one. */
  tensor(role) {
    return [...this.spec.inputs, ...this.spec.outputs].find((each) => each.role === role);
  }

  /** Returns the number of inputs of a role. */
  count(role) {
    return this.spec.inputs.filter((each) => each.role === role).length;
  }

  /**
   * Runs the graph.
   *
   * @param {Record<string, object[]>} inputs tensors by role
   * @param {...string} roles outputs to compute
   * @returns {Promise<object[][]>} the tensors of each role
   */
  async run(inputs, ...roles) {
    if (this.#closed) throw new UsageError("the engine is closed; load the bundle again");
    const places = {};
    const feeds = {};
    for (const { name, role } of this.spec.inputs) {
      places[role] = (places[role] ?? -1) + 1;
      feeds[name] = inputs[role][places[role]];
    }
    const names = roles.map((wanted) =>
      this.spec.outputs.filter(({ role }) => role === wanted).map(({ name }) => name),
    );
    const running = this.session.run(feeds, names.flat());
    this.#running.add(running);
    const results = await running
      .finally(() => this.#running.delete(running))
      .catch((error) => {
        throw new InputError(`${this.spec.file} cannot be run (${error.message}); export the bundle again`, { cause: error });
      });
    return names.map((each) => each.map((name) => results[name]));
  }

  /** Frees the memory, once no run is left. */
  async close() {
    this.#closed = true;
    await Promise.allSettled(this.#running);
    await this.session.release();
  }
}

/** Whether a graph has the tensors that the manifest describes. */
function isDescribed({ inputMetadata, outputMetadata }, { inputs, outputs }) {
  const fits = (spec, { name, type, shape } = {}) =>
    spec.name === name &&
    spec.type === type &&
    spec.shape.length === shape.length &&
    spec.shape.every((size, place) => [size, shape[place]].some((each) => typeof each === "string") || size === shape[place]);
  const same = (specs, found) => specs.length === found.length && specs.every((spec, place) => fits(spec, found[place]));
  return same(inputs, inputMetadata) && same(outputs, outputMetadata);
}

/**
 * The graph of an encoder-only model: token ids in, hidden states, logits or the head's scores out.
 *
 * Rows that are begun together are one batch.
 */
export class Encoder {
  #waiting = [];

  /**
   * @param {object} ort onnxruntime
   * @param {Record<string, object>} graphs open graphs by name, see `Graph`
   */
  constructor(ort, graphs) {
    Object.assign(this, { ort, graphs });
  }

  /**
   * Encodes one row.
   *
   * @param {number[]} ids special tokens included
   * @param {string} role output to compute: "hidden", "logits" or "head"
   * @returns {Promise<{data: Float32Array, dims: number[]}>} of a batch of one row
   */
  encode(ids, role) {
    if (!this.graphs.encoder?.tensor(role)) throw new UsageError(`the bundle's model gives no ${role}`);
    return new Promise((resolve, reject) => {
      this.#waiting.push({ ids, role, resolve, reject });
      if (this.#waiting.length === 1) queueMicrotask(() => this.#flush());
    });
  }

  #flush() {
    const byRole = new Map();
    for (const row of this.#waiting.splice(0)) byRole.set(row.role, [...(byRole.get(row.role) ?? []), row]);
    for (const [role, rows] of byRole) {
      this.#run(role, rows).catch((error) => rows.forEach(({ reject }) => reject(error)));
    }
  }

  async #run(role, rows) {
    const size = Math.max(...rows.map(({ ids }) => ids.length));
    const filled = (values, rest) => rows.flatMap(({ ids }) => [...values(ids), ...Array(size - ids.length).fill(rest)]);
    const shape = [rows.length, size];
    const inputs = {
      source: [tensor(this.ort, "int64", filled((ids) => ids, 0), shape)],
      source_mask: [tensor(this.ort, "bool", filled((ids) => ids.map(() => 1), 0), shape)],
    };
    const [[{ data, dims }]] = await this.graphs.encoder.run(inputs, role);
    const whole = data.length / rows.length;
    rows.forEach(({ ids, resolve }, row) => {
      const length = dims.length === 3 ? ids.length * dims[2] : whole;
      resolve({ data: data.subarray(row * whole, row * whole + length), dims: [1, ...(dims.length === 3 ? [ids.length] : []), dims.at(-1)] });
    });
  }
}
