// Messages to token ids through a bundle's chat template, as in Python.

import { RowError } from "../rows.js";
import { literal } from "./hugging_face/piece.js";

const ROLE = /^[A-Za-z0-9_-]{1,64}$/;
// Keys of a message that hold the model's thoughts; transformers fills in the missing keys.
const REASONING = ["reasoning_content", "thinking", "reasoning"];

/**
 * Returns the token ids of messages and of the beginning of an answer.
 *
 * Special tokens count where the template writes them. Python reads one in a message as text; here
 * such a message is refused, since the text of another template engine does not tell who wrote it.
 *
 * @param {object[]} messages
 * @param {object} chat source: the template; named, control: of tokenizer.json; render: a function
 *   from the template and its variables to text
 * @param {object} tokenizer see tokenizer.js
 * @throws {RowError} of kind prompt
 */
export function encodeChat(messages, { source, named, control, render }, tokenizer) {
  const tokens = Object.keys(control);
  const pattern = tokens.length ? literal(...tokens) : /(?!)/gu;
  const plain = messages.map(checked);
  if (!plain.length) throw refused("expected at least one message, found none");
  const held = strings(plain).flatMap((text) => text.match(pattern) ?? []);
  if (held.length) throw refused(`a message holds ${held[0]}, which only the Python engine reads as text`);
  const rendered = (given) => {
    const variables = { messages: given, tools: null, documents: null, add_generation_prompt: true };
    try {
      // Without today's date, the same messages give the same prompt.
      return render(source.replaceAll("strftime_now", "undefined_strftime_now"), { ...named, ...variables });
    } catch (error) {
      throw refused(`the chat template raised ${error.name}: ${error.message}`);
    }
  };
  const text = rendered(plain);
  const written = (found) => String(found.match(pattern) ?? []);
  // A text may not complete a token of the template either.
  if (written(text) !== written(rendered(plain.map(blunt)))) {
    throw refused("a message completes a special token of the template, which only the Python engine reads as text");
  }
  const parts = [];
  let last = 0;
  const encode = (piece) => (piece ? (tokenizer.readsSpecial ? tokenizer.encodePlain(piece) : tokenizer.encode(piece)) : []);
  for (const { 0: token, index } of text.matchAll(pattern)) {
    parts.push(encode(text.slice(last, index)), [control[token]]);
    last = index + token.length;
  }
  parts.push(encode(text.slice(last)));
  return parts.flat();
}

/** Returns JSON as Python writes it. */
export function pythonJson(value) {
  return JSON.stringify(value, null, 1).replace(/,\n\s*/g, ", ").replace(/\n\s*/g, "");
}

function refused(message) {
  return new RowError("prompt", message);
}

/** Returns a message without null values, as transformers does. */
function checked(message) {
  if (!("role" in message && ("content" in message || "tool_calls" in message))) {
    throw refused(`expected messages with role and content, found ${pythonJson(message).slice(0, 80)}`);
  }
  const { role, content = null } = message;
  if (typeof role !== "string" || !ROLE.test(role)) throw refused(`expected a role such as user, found '${String(role).slice(0, 80)}'`);
  // Template engines differ in what they make of a list in the place of a text.
  if (content !== null && typeof content !== "string") {
    throw refused(`expected text as the content of a message, found ${pythonJson(content).slice(0, 80)}`);
  }
  const kept = Object.fromEntries(Object.entries(message).filter(([, value]) => value !== null && value !== undefined));
  const thought = REASONING.map((name) => kept[name]).find((value) => value !== undefined);
  return thought === undefined ? kept : { thinking: thought, ...kept, reasoning_content: thought };
}

/** Returns all texts and keys of JSON values. */
function strings(value) {
  if (typeof value === "string") return [value];
  if (Array.isArray(value)) return value.flatMap(strings);
  if (value === null || typeof value !== "object") return [];
  return Object.entries(value).flatMap(([key, each]) => [key, ...strings(each)]);
}

/** Returns a message whose texts begin and end with a letter that completes no token. */
function blunt(message) {
  const blunted = (text) => text.replace(/^(\s*)\S|\S(?=\s*$)/gu, "$1\u0445");
  const texts = ["content", ...REASONING].filter((name) => typeof message[name] === "string");
  return { ...message, ...Object.fromEntries(texts.map((name) => [name, blunted(message[name])])) };
}
