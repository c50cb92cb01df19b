// The same records and ids as Python's, which wrote them into the file TRANSFERRY_CASES.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { Bundle, Engine } from "../node.js";
import { parseManifest } from "../manifest.js";
import { parse } from "../document.js";
import { encodeChat } from "../tokenizer/chat.js";
import { openTokenizer, tokenizerFiles } from "../tokenizer/tokenizer.js";
import { installed } from "./onnxruntime.js";

const path = process.env.TRANSFERRY_CASES;
const cases = path ? JSON.parse(readFileSync(path, "utf8")) : { answers: [], ids: [], refused: [], chats: [], manifests: [], settings: [] };
// Of a text, its sentences as Python's sentencex finds them.
const sentences = await sentencex();
const chat = await jinja();
const NONE = path ? false : "TRANSFERRY_CASES names no file; tests/js writes one";

async function sentencex() {
  try {
    const { initSync, segment } = await import("sentencex-wasm");
    initSync({ module: readFileSync(new URL("sentencex_wasm_bg.wasm", import.meta.resolve("sentencex-wasm"))) });
    return (text) => segment("en", text);
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND") throw error;
    return undefined;
  }
}

async function jinja() {
  try {
    const { Template } = await import("@huggingface/jinja");
    return (template, variables) => new Template(template).render(variables);
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND") throw error;
    return undefined;
  }
}

/** Asserts that two records are the same, numbers up to the rounding of sums. */
function same(found, expected, where) {
  if (typeof expected === "number" && !Number.isInteger(expected)) {
    assert.ok(Math.abs(found - expected) <= Math.max(1e-5, 1e-6 * Math.abs(expected)), `${where}: ${found}, expected ${expected}`);
  } else if (expected !== null && typeof expected === "object") {
    assert.deepEqual(Object.keys(found), Object.keys(expected), where);
    for (const key of Object.keys(expected)) same(found[key], expected[key], `${where}.${key}`);
  } else assert.equal(found, expected, where);
}

for (const name of ["onnxruntime-node", "onnxruntime-web"]) {
  const ort = installed(name);
  const skip = NONE || (ort ? false : `${name} is not installed: make js`);
  test(`${name} gives the records of Python`, { skip }, async (context) => {
    const session = name.endsWith("web") ? { executionProviders: ["wasm"] } : {};
    const engines = new Map();
    for (const { bundle, variant, special: specialTokens, task, method, options, texts, records, refused } of cases.answers) {
      const { longRows, sourceLanguage, targetLanguage, firstRow, chatTemplateKwargs, ...values } = options;
      const rest = { longRows, sourceLanguage, targetLanguage, firstRow, chatTemplateKwargs };
      const [given, how] = task === "generate" ? [[values], rest] : [[], options];
      await context.test(`${task} ${JSON.stringify(options)}, ${variant}`, async () => {
        const key = `${bundle} ${variant} ${specialTokens}`;
        if (!engines.has(key)) engines.set(key, await Engine.load(bundle, { ort, session, variant, specialTokens, sentences, chat }));
        if (!records) {
          await assert.rejects(engines.get(key)[method](texts, ...given, how).next(), ({ name, message }) => {
            assert.equal(name, "UsageError");
            // Ranges, types and tokens are told in other words.
            if (/exclude each other|no effect|is more than/.test(refused)) assert.equal(message, refused);
            return true;
          });
          return;
        }
        const found = [];
        for await (const record of engines.get(key)[method](texts, ...given, how)) found.push(record);
        assert.equal(found.length, records.length);
        records.forEach((record, row) => {
          same(JSON.parse(JSON.stringify(found[row])), record, `row ${row}`);
        });
        const batched = [];
        const stream = ReadableStream.from(texts);
        for await (const record of engines.get(key)[method](stream, ...given, { ...how, batch: 4 })) batched.push(record);
        assert.equal(batched.length, records.length);
        batched.forEach((record, row) => same(JSON.parse(JSON.stringify(record)), records[row], `batched row ${row}`));
      });
    }
    for (const engine of engines.values()) {
      await refuses(engine);
      await ends(engine);
    }
  });
}

const itself = {};
itself.itself = itself;
// Rows and options that are refused, or answered as rows without text.
const ODD = [null, -1, NaN, "", [], ["a"], ["a", "b", "c"], [1, , 2], {}, { role: "user" }, true, 10n, Symbol("x"), () => 1, new Map(), { n: 10n }, itself];

/** Asserts that odd rows and options end in UsageError, or in a record. */
async function refuses(engine) {
  const names = ["batch", "firstRow", "longRows", "sourceLanguage", "mask", "top", "pooling", "normalise", "prompt", "aggregation", "signal"];
  const rows = (value) => engine.decoder?.hasEncoder ? [["a", value]] : [value];
  for (const task of engine.tasks) {
    const answers = async (texts, ...rest) => {
      const found = [];
      const method = task.replace(/-./, (letter) => letter[1].toUpperCase());
      try {
        for await (const record of engine[method](texts, ...rest)) found.push(record);
      } catch (error) {
        assert.equal(error.name, "UsageError", `${task}: ${error.stack}`);
        return null;
      }
      return found;
    };
    const given = task === "generate" ? [{ max_length: 1 }] : [];
    const good = task === "rank" ? [["a", "b"]] : task === "score" ? rows("b c") : ["a"];
    for (const value of ODD) {
      await answers([value], ...given);
      await answers(value, ...given);
      await answers(good, ...given, value);
      for (const name of names) await answers(good, ...given, { [name]: value });
    }
    if (task === "rank") for (const row of ["a", ["a"], ["a", "b", "c"]]) assert.equal(await answers([row]), null);
    if (task === "classify") assert.equal((await answers([["a", "b", "c"]]))[0].error.kind, "no-text");
  }
}

/** Asserts that a signal ends generation, and that an engine closes once, after what runs on it. */
async function ends(engine) {
  if (engine.decoder) {
    const abort = new AbortController();
    const steps = engine.stream("a cat", { min_length: 4, max_length: 8 }, { signal: abort.signal });
    await steps.next();
    abort.abort();
    await assert.rejects(steps.next(), { name: "AbortError" });
  }
  const method = engine.decoder ? "generate" : "embed";
  const last = engine[method](["a cat"]).next();
  await Promise.all([engine.close(), engine[Symbol.asyncDispose]()]);
  await last.catch((error) => assert.match(error.message, /the engine is closed/));
  await assert.rejects(engine[method](["a cat"]).next(), { name: "UsageError", message: /the engine is closed/ });
}

test("texts have the ids of Python", { skip: NONE }, async (context) => {
  for (const { bundle, texts, ids, decoded, targets, answers, places, ...read } of cases.ids) {
    const { tokenizer } = await Bundle.open(bundle);
    await context.test(`${texts.length} texts, ${bundle}`, () => {
      texts.forEach((text, row) => {
        const found = tokenizer.encode(text);
        assert.deepEqual(found, ids[row], JSON.stringify(text));
        assert.equal(tokenizer.decode(found), decoded[row], JSON.stringify(text));
        if (!places) return;
        const spots = tokenizer.places(text).map(({ start, end, continues }) => [start, end, continues]);
        assert.deepEqual(spots, places[row], JSON.stringify(text));
      });
      targets.forEach((target, row) => assert.deepEqual(tokenizer.encodeTarget(texts[row]), target));
      for (const [answer, text] of answers) assert.equal(tokenizer.decode(answer), text, `${answer}`);
      if (!read.special) return;
      tokenizer.special.mask = read.mask;
      read.masked.forEach((found, row) => {
        const pieces = `${texts[row]} [MASK]  [MASK]\t${texts[row]}`.split("[MASK]");
        assert.deepEqual(tokenizer.encodeMasked(pieces), found, JSON.stringify(pieces));
      });
      tokenizer.readSpecialTokens();
      read.written.forEach((text, row) => assert.deepEqual(tokenizer.encode(text), read.special[row], text));
    });
  }
});

test("chats have the ids of Python", { skip: NONE || !cases.chats.length }, async (context) => {
  for (const { bundle, chats } of cases.chats) {
    const opened = await Bundle.open(bundle);
    const own = await opened.chat(chat);
    await context.test(bundle, () => {
      for (const [messages, ids, variables] of chats) {
        const encode = () => encodeChat(messages, own, opened.tokenizer, variables);
        const told = JSON.stringify([messages, variables]);
        if (ids) assert.deepEqual(encode(), ids, told);
        else assert.throws(encode, { kind: "prompt" }, told);
      }
    });
  }
});

test("what cannot be read is refused", { skip: NONE }, async () => {
  for (const { bundle, message } of cases.refused) {
    await assert.rejects(Engine.load(bundle), (error) => error.message.includes(message) || assert.fail(error.message));
  }
});

test("manifests are refused as in Python", { skip: NONE }, () => {
  for (const [text, message] of cases.manifests) {
    let found = null;
    try {
      parseManifest(new TextEncoder().encode(text));
    } catch (error) {
      assert.equal(error.name, "InputError", error.stack);
      found = error.message;
    }
    assert.equal(found === null, message === null, `${found}, expected ${message}: ${text}`);
    if (message?.startsWith("manifest.json: ")) assert.equal(found, message, text);
  }
});

test("settings of tokenizers are refused as in Python", { skip: NONE }, () => {
  for (const { bundle, text, sample, ids, refused } of cases.settings) {
    const encode = () => {
      const settings = parse(new TextEncoder().encode(text), "tokenizer.json");
      const files = tokenizerFiles(settings).map((name) => [name, new Uint8Array(readFileSync(`${bundle}/${name}`))]);
      const tokenizer = openTokenizer(settings, Object.fromEntries(files));
      return tokenizer.special.wrap(tokenizer.encode(sample));
    };
    if (ids) assert.deepEqual(encode(), ids, text);
    else assert.throws(encode, ({ name }) => ["InputError", "UsageError"].includes(name), `${refused}: ${text}`);
  }
});
