// Messages to token ids through a bundle's chat template, as in Python.

import { shown, UsageError } from "../errors.js";
import { RowError } from "../rows.js";
import { REASONING, RESERVED, ROLES } from "../schema.js";
import { anyOf, encodeBetween } from "./text_tokenizer.js";

const ROLE = /^[A-Za-z0-9_-]{1,64}$/;
const SAMPLE = "Hello,\nworld";

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
 * @param {object} [more] further variables of the template, such as enable_thinking
 * @throws {RowError} of kind prompt
 */
export function encodeChat(messages, chat, tokenizer, more = {}) {
  const { control } = chat;
  const pattern = anyOf(control);
  const plain = messages.map(checked);
  if (!plain.length) throw refused("expected at least one message, found none");
  const held = strings([plain, more]).flatMap((text) => text.match(pattern) ?? []);
  if (held.length) throw refused(`a message or variable holds ${held[0]}, which only the Python engine reads as text`);
  for (const message of plain) {
    if (Array.isArray(message.content)) message.content = contentOf(message.content, chat);
  }
  const text = rendered(chat, plain, more);
  const written = (found) => String(found.match(pattern) ?? []);
  // A text may not complete a token of the template either.
  if (written(text) !== written(rendered(chat, plain.map(blunt), more))) {
    throw refused("a message completes a special token of the template, which only the Python engine reads as text");
  }
  return encodeBetween(text, control, (piece) => (tokenizer.readsSpecial ? tokenizer.encodePlain(piece) : tokenizer.encode(piece)));
}

/** Throws UsageError for variables of a template that the chat decides. */
export function checkVariables(more) {
  const taken = RESERVED.find((name) => Object.hasOwn(more, name));
  if (taken) throw new UsageError(`chatTemplateKwargs cannot set ${taken}, which the chat decides; leave it out`);
}

function rendered({ source, named, render }, messages, more) {
  const variables = { ...named, ...more, messages, tools: null, documents: null, add_generation_prompt: true };
  try {
    // Without today's date, the same messages give the same prompt.
    return render(source.replaceAll("strftime_now", "undefined_strftime_now"), variables);
  } catch (error) {
    throw refused(`the chat template raised ${error.name}: ${error.message}`);
  }
}

/** Returns the parts of a message; joined as in Python if the template takes only text. */
function contentOf(parts, chat) {
  const found = parts.map((part) => (typeof part === "string" ? { type: "text", text: part } : part));
  chat.takesParts ??= takesParts(chat);
  if (chat.takesParts) return found;
  const other = found.find((part) => !(part?.type === "text" && typeof part.text === "string"));
  if (other !== undefined) throw refused(`the chat template takes only text, found ${shown(other)}`);
  return found.map(({ text }) => text).join("\n");
}

/** Whether a list of one text is rendered as the text; others lose it, or write an object. */
function takesParts(chat) {
  const sample = (content) => rendered(chat, [{ role: "user", content }], {});
  try {
    return sample([{ type: "text", text: SAMPLE }]) === sample(SAMPLE);
  } catch {
    return false;
  }
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
  if (content !== null && typeof content !== "string" && !Array.isArray(content)) {
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
  const blunted = (text) => (typeof text === "string" ? text.replace(/^(\s*)\S|\S(?=\s*$)/gu, "$1\u0445") : text);
  const made = { ...message };
  for (const name of ["content", ...REASONING]) if (Object.hasOwn(made, name)) made[name] = blunted(made[name]);
  if (Array.isArray(made.content)) {
    made.content = made.content.map((part) => (typeof part?.text === "string" ? { ...part, text: blunted(part.text) } : part));
  }
  if (!ROLES.includes(made.role)) made.role = blunted(made.role);
  return made;
}
