// One function for one task of a bundle.

import { Engine } from "./engine.js";
import { UsageError } from "./errors.js";

/**
 * Opens a bundle for a task.
 *
 * @param {string} task "generate", "score", "embed", "fill-mask", "classify", "rank" or "tag"
 * @param {string | URL | object} place see `Bundle.open`
 * @param {object} [options] see `Engine.load`
 * @returns {Promise<Function>} answers one row with a record, a list of rows with a list of records,
 *   given the options of the task; it has `engine` and `close()`
 */
export async function pipeline(task, place, options) {
  const engine = await Engine.load(place, options);
  if (!engine.tasks.includes(task)) {
    await engine.close();
    throw new UsageError(`the bundle has no task ${task}; its tasks: ${engine.tasks.join(", ")}`);
  }
  const method = task.replace(/-./, (found) => found[1].toUpperCase());
  const pairs = task === "rank" || (task === "score" && engine.decoder.hasEncoder);
  const answer = async (rows, ...rest) => {
    // One row may be a list itself: token ids, messages, or a pair of texts.
    const first = rows?.[0];
    const isRow = typeof first === "number" || (pairs && typeof first === "string") || (first && "role" in Object(first));
    const several = Array.isArray(rows) && !isRow;
    const records = [];
    for await (const record of engine[method](several ? rows : [rows], ...rest)) records.push(record);
    return several ? records : records[0];
  };
  return Object.assign(answer, { engine, close: () => engine.close() });
}
