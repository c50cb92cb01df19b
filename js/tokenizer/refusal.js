// Refusal of parts of a tokenizer.json that are not supported.

import { UsageError } from "../errors.js";

/** Throws UsageError for a part of a tokenizer that has no counterpart here. */
export function refuse(what) {
  throw new UsageError(
    `the bundle's tokenizer has ${what} which this package does not read; pass \`tokenizer\` with ` +
      "encode(text) and decode(ids), such as one of @huggingface/transformers",
  );
}
