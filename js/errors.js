/** A file or a text that cannot be used. */
export class InputError extends Error {
  name = "InputError";
}

/** An option that does not exist, is out of range, or contradicts another. */
export class UsageError extends Error {
  name = "UsageError";
}

// Types of options that are no numbers or texts of their own range.
const functions = { what: "a function", holds: (value) => typeof value === "function" };
const TYPES = {
  ort: { what: "onnxruntime", holds: (value) => Boolean(value.InferenceSession) },
  session: { what: "an object", holds: isPlain },
  chatTemplateKwargs: { what: "an object", holds: isPlain },
  tokenizer: { what: "an object with encode and decode", holds: (value) => ["encode", "decode"].every((name) => functions.holds(value[name])) },
  signal: { what: "an AbortSignal", holds: (value) => functions.holds(value.throwIfAborted) },
  prompt: { what: "a name", holds: (value) => typeof value === "string" },
  progress: functions,
  sentences: functions,
  chat: functions,
};

/**
 * Refuses options that do not exist, and names the nearest one; and those of another type.
 *
 * @param {object} options
 * @param {string[]} known names
 * @throws {UsageError}
 */
export function checkNames(options, known) {
  if (!isPlain(options)) throw new UsageError(`options must be an object, found ${shown(options)}`);
  const unknown = Object.keys(options).find((name) => !known.includes(name));
  if (unknown === undefined) {
    for (const [name, { what, holds }] of Object.entries(TYPES)) {
      const value = known.includes(name) ? options[name] ?? null : null;
      if (value !== null && !holds(value)) throw new UsageError(`${name} must be ${what}, found ${shown(value)}`);
    }
    return;
  }
  const distances = known.map((name) => distance(unknown.toLowerCase(), name.toLowerCase()));
  const least = Math.min(...distances);
  const nearest = least < 4 ? `did you mean ${known[distances.indexOf(least)]}? ` : "";
  throw new UsageError(`there is no option ${unknown.slice(0, 40)}; ${nearest}there are ${known.join(", ")}`);
}

function isPlain(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value) && !(value instanceof Map || value instanceof Date);
}

/** Returns the least number of changed letters between two words (Levenshtein 1966). */
function distance(one, other) {
  let row = Array.from({ length: other.length + 1 }, (_, place) => place);
  for (const [place, letter] of [...one.slice(0, 40)].entries()) {
    const next = [place + 1];
    [...other].forEach((each, column) => {
      next.push(Math.min(next[column] + 1, row[column + 1] + 1, row[column] + Number(letter !== each)));
    });
    row = next;
  }
  return row.at(-1);
}

/** Throws UsageError for a part of a tokenizer that has no counterpart here. */
export function refuse(what) {
  throw new UsageError(
    `the bundle's tokenizer has ${what} which this package does not read; pass \`tokenizer\` with ` +
      "encode(text) and decode(ids), such as one of @huggingface/transformers",
  );
}

/** Returns a value for a message, however long it is. */
export function shown(value) {
  let text;
  try {
    text = JSON.stringify(value);
  } catch {
    // A BigInt, or an object that holds one or itself.
  }
  text ??= String(value);
  return text.length > 80 ? `${text.slice(0, 77)}...` : text;
}
