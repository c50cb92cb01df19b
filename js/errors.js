/** A file or a text that cannot be used. */
export class InputError extends Error {
  name = "InputError";
}

/** An option that does not exist, is out of range, or contradicts another. */
export class UsageError extends Error {
  name = "UsageError";
}
