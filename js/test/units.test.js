import assert from "node:assert/strict";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { after } from "node:test";

import { Bundle, DEFAULTS, Engine, generationOptions, InputError, uniforms, UsageError } from "../node.js";
import { answered, encodeRow, prefixed, RowError, single, Vector } from "../rows.js";
import { Best, logSumExp } from "../decoding/logits.js";
import { graphemes } from "../tokenizer/hugging_face/normalizers.js";
import { translate } from "../tokenizer/pattern.js";
import { weights } from "../decoding/sampling.js";
import { encodeChat } from "../tokenizer/chat.js";
import { SpecialTokens } from "../tokenizer/text_tokenizer.js";
import { openTokenizer, tokenizerFiles } from "../tokenizer/tokenizer.js";

// Of a tokenizer's settings.
const SPECIAL = { pad_id: 0, bos_id: 1, eos_id: 2, before: [], after: [2], mask_id: null };
const settingsOf = (kind, special = SPECIAL) => ({ format_version: 1, kind, special, vocabulary_size: 9 });

test("random numbers are those of numpy.random.Philox", () => {
  // (Philox(counter=[0, 0, 0, 3], key=[7, 12]).random_raw(5) >> 11) * 2**-53
  const expected = [0.34886052, 0.58375366, 0.46571618, 0.58186168, 0.24432838];
  const random = uniforms(7, 12, 3);
  for (const value of expected) assert.ok(Math.abs(random.next().value - value) < 1e-8);
});

test("a float32 has the shortest text that gives it back", () => {
  // str of numpy.float32 of each
  for (const text of ["0.1", "1e-45", "3.4028235e+38", "-4.4697e-7", "3.5e-9", "16777216", "0.33333334", "0"]) {
    assert.equal(String(single(Math.fround(Number(text)))), String(Number(text)));
  }
});

test("a pattern of Rust splits as in Rust", () => {
  const split = (pattern, text) => Array.from(text.matchAll(translate(pattern)), ([word]) => word);
  assert.deepEqual(split("'(?i:[sdmt]|ll)|\\s++$|\\s+|[^\\s']++", "it'S 'ſ'LL\u0085 "), [
    ..."it|'S| |'ſ|'LL|\u0085 ".split("|"),
  ]);
  assert.deepEqual(split("a++a|a", "aaa"), ["a", "a", "a"]); // possessive: gives nothing back
  assert.deepEqual(split("\\s|\\S", "\ufeff"), ["\ufeff"]);
  assert.deepEqual(split("\\s", "\ufeff"), []); // white space in JavaScript alone
  for (const refused of ["a\\1", "(?<n>a)", "\\bx", "[a&&b]", "(?i:ü)"]) {
    assert.throws(() => translate(refused), InputError, refused);
  }
});

test("a pattern takes time by its size and that of the text", () => {
  const begun = performance.now();
  const runs = ["(a+)+b", "(a|a)*b", "a*a*a*a*a*b", "(?:a(?=a*b))*", "(?:(?>a|aa)+)+b", "((a{1,9}){1,9}){1,9}b", "(?:a?){99}a{99}b", "a++b", "(?:(?=a++)a)+b"];
  for (const pattern of runs) Array.from("a".repeat(3000).matchAll(translate(pattern)));
  assert.ok(performance.now() - begun < 10_000);
  for (const pattern of ["a".repeat(2e6), "(".repeat(9000), "((a{99}){99}){99}", "a{9,1}", "*a"]) {
    assert.throws(() => translate(pattern), (error) => error instanceof InputError || error instanceof RangeError);
  }
});

test("a pattern finds the matches of RegExp", () => {
  const patterns = ["a*?b", "(?<=a)b+|a", "(?<!a)b", "(?:ab?)*", "a{2,3}?|b", "(?=ab)a|b", "(a|ab)(c|bcd)*", "^a|b$", "[^b]{0,2}", "(?:a*)*b?", "[ab]+?$", "(?<=b[ac]*)d", "(?:[ab]{2}|c)+(?!d)", "[^d]+(?<!c)"];
  const letters = (code) => Array.from({ length: 7 }, (_, place) => "abcd"[(code >> (2 * place)) & 3]).join("");
  for (const pattern of patterns) {
    for (let code = 0; code < 4 ** 7; code += 31) {
      const text = letters(code);
      const found = (expression) => Array.from(text.matchAll(expression), (match) => [match.index, match[0]]);
      assert.deepEqual(found(translate(pattern)), found(new RegExp(pattern, "gu")), `${pattern} in ${text}`);
    }
  }
});

test("options are checked, and defaults give way", () => {
  const bundled = generationOptions({ beam: 4, n_best: 2, min_length: 5 });
  assert.equal(generationOptions({ beam: 1 }, bundled).n_best, 1);
  assert.equal(generationOptions({ sample: true }, bundled).beam, 1);
  assert.equal(generationOptions({ max_length: 3 }, bundled).min_length, 3);
  assert.equal(generationOptions({ beam: undefined }, bundled).beam, 4);
  const refused = [{ beams: 4 }, { beam: 0 }, { beam: "4" }, { top_k: 5 }, { n_best: 2 }, { stop: [""] }];
  for (const values of [...refused, { sample: true, beam: 2 }, { temperature: NaN }, { seed: -1 }]) {
    assert.throws(() => generationOptions(values), UsageError, JSON.stringify(values));
  }
  assert.equal(generationOptions({ seed: 2n ** 64n - 1n, sample: true }).seed, 2n ** 64n - 1n);
});

test("text to suppress is forbidden as it stands and after a blank", () => {
  const encode = (text) => [...text].map((character) => character.charCodeAt(0));
  const options = generationOptions({ suppress: ["a", 7] }, DEFAULTS, encode);
  assert.deepEqual(options.suppress, [7, 97]);
  assert.deepEqual(options.suppress_sequences, [[32, 97]]);
  for (const suppress_sequences of [5, "", [[]], null]) {
    assert.throws(() => generationOptions({ suppress: ["a"], suppress_sequences }, DEFAULTS, encode), UsageError);
  }
});

test("graphemes are those of the whole text, in time that grows with it", () => {
  const segmenter = new Intl.Segmenter(undefined, { granularity: "grapheme" });
  const pieces = ["a", "\r", "\n", "\u0301", "\u{1f1e9}", "\u{1f468}\u200d", "\u{1d165}", "\ud83d", "\u0e33", "\u1112\u1161", "\u{1f3fd}", "\u0915\u094d"];
  for (let seed = 1; seed < 60; seed++) {
    let [state, text] = [seed, ""];
    // Runs of one piece, longer than what is segmented at once.
    for (let count = 0; count < 20; count++) {
      state = (state * 48271) % 2147483647;
      text += pieces[state % pieces.length].repeat((state >> 8) % 19 ? 1 + ((state >> 4) % 9) : 700);
    }
    const whole = Array.from(segmenter.segment(text), ({ segment }) => segment);
    assert.deepEqual([...graphemes(text)], whole, `seed ${seed}`);
  }
  const begun = performance.now();
  let count = 0;
  for (const each of graphemes("a".repeat(4e5))) count += each.length;
  assert.equal(count, 4e5);
  assert.ok(performance.now() - begun < 10_000);
});

test("equal values keep their order", () => {
  const best = new Best(2);
  for (const [value, token] of [[1, 0], [2, 1], [2, 2], [1, 3], [NaN, 4]]) best.add(value, token);
  assert.deepEqual(best.items, [[2, 1], [2, 2]]);
});

test("unusable logits have no log-sum-exp", () => {
  for (const row of [[NaN, 1], [Infinity, 0], [-Infinity, -Infinity]]) assert.ok(Number.isNaN(logSumExp(row)));
  assert.equal(logSumExp([1000, -Infinity]), 1000);
});

test("tokens that tie with the last one admitted are admitted", () => {
  const cut = (values) => [...weights(Float32Array.from([1, 1, 0]), { ...DEFAULTS, ...values })];
  assert.equal(cut({ top_k: 1 }).filter(Boolean).length, 2);
  assert.equal(cut({ top_p: 0.1 }).filter(Boolean).length, 2);
  assert.equal(cut({ typical_p: 0.1 }).filter(Boolean).length, 2);
  // exp(-745) is above 0, its share of the sum is not.
  assert.deepEqual([...weights([0, 0, -745], { ...DEFAULTS, typical_p: 0.9 })], [1, 1, 0]);
});

const FILES = { "tokenizer.json": { sha256: "0".repeat(64), size: 2 } };
const GRAPH = { file: "tokenizer.json", inputs: [], outputs: [] };
const MANIFEST = {
  format: 9,
  architecture: "encoder-only",
  model: { vocabulary_size: 9, max_positions: 8, d_model: 4 },
  generation: {},
  variants: { portable: { name: "portable", precision: "float32", providers: ["cpu"], opset: 20, graphs: { encoder: GRAPH }, reference: "tokenizer.json" } },
  files: FILES,
  versions: {},
};

async function folderWith(files) {
  const folder = await mkdtemp(join(tmpdir(), "bundle"));
  after(() => rm(folder, { recursive: true }));
  for (const [name, content] of Object.entries(files)) await writeFile(join(folder, name), content);
  return folder;
}

test("what is no bundle, or another one than was exported, is refused", async () => {
  const found = { "manifest.json": JSON.stringify(MANIFEST), "tokenizer.json": "{}" };
  await assert.rejects(Bundle.open(await folderWith({})), /manifest.json cannot be read/);
  await assert.rejects(Bundle.open(await folderWith({ "manifest.json": "{" })), /is not JSON/);
  await assert.rejects(Bundle.open(await folderWith({ "manifest.json": '{"format": 7}' })), /has bundle format 7/);
  await assert.rejects(Bundle.open(await folderWith(found)), /tokenizer.json is not the file that was exported/);
  await assert.rejects(Bundle.open(await folderWith({ ...found, "tokenizer.json": "{   }" })), /more than 2 bytes/);
  const bundle = new Bundle({}, { files: FILES });
  await assert.rejects(bundle.read("../x"), /does not list/);
});

// A field, a value that it must not have, and what the error names.
const WRONG = [
  ...["architecture", "model", "generation", "variants", "files", "versions"].flatMap((name) => [
    [[name], undefined, name],
    [[name], null, name],
    [[name], 3, name],
    [[name], [], name],
  ]),
  [["architecture"], "decoder", "architecture"],
  [["variants"], {}, "variants"],
  [["variants", "a/b"], {}, "plain names in variants"],
  [["files", "../x"], FILES["tokenizer.json"], "plain names in files"],
  [["files", "x"], { sha256: "0", size: 1 }, "files.x.sha256"],
  [["files", "tokenizer.json", "size"], -1, "size"],
  [["model", "max_positions"], 1e9, "model: expected 1 to"],
  [["model", "vocabulary_size"], "9", "vocabulary_size"],
  [["generation", "beam"], 0, "generation: beam"],
  [["generation", "beams"], 2, "did you mean beam?"],
  [["head"], { task: "draw" }, "head.task"],
  [["head"], { toString: 1 }, "head.task"],
  [["variants", "portable", "opset"], 0.5, "variants.portable.opset"],
  [["variants", "portable", "graphs", "encoder"], null, "graphs.encoder"],
  [["variants", "portable", "graphs", "encoder", "inputs"], [{ name: "a", role: "b", type: "int64", shape: [] }], "inputs[0].role"],
  [["variants", "portable", "graphs", "encoder", "inputs"], [{ name: "a", role: "past", type: "int64", shape: [0] }], "shape[0]"],
];

test("a manifest of another form is refused by its field", async () => {
  for (const [path, value, named] of WRONG) {
    const manifest = structuredClone(MANIFEST);
    const owner = path.slice(0, -1).reduce((each, name) => each[name], manifest);
    owner[path.at(-1)] = value;
    const folder = await folderWith({ "manifest.json": JSON.stringify(manifest), "tokenizer.json": "{}" });
    await assert.rejects(Bundle.open(folder), (error) => {
      assert.ok(error instanceof InputError, `${path}: ${error}`);
      assert.ok(error.message.includes(named), `${path} = ${JSON.stringify(value)}: ${error.message}`);
      return true;
    });
  }
  for (const text of ['{"format": 9, "format": 9}', "[".repeat(1e5), "null", "[]"]) {
    await assert.rejects(Bundle.open(await folderWith({ "manifest.json": text })), InputError, text.slice(0, 30));
  }
});

test("graphs of another form are refused when they are chosen", () => {
  const spec = (role, type = "int64", shape = ["batch", "source"]) => ({ name: role, role, type, shape });
  for (const [graphs, message] of [
    [{ encoder: GRAPH }, /lacks inputs source/],
    [{ encoder: { ...GRAPH, inputs: [spec("source"), spec("source_mask"), spec("past")] } }, /past of role past/],
    [{ encoder: { ...GRAPH, inputs: [spec("source", "int64", []), spec("source_mask")] } }, /source has 0 dimensions/],
    [
      {
        encoder: { ...GRAPH, inputs: [spec("source"), spec("source_mask")], outputs: [spec("logits", "float32", [1, 1, "v"])] },
      },
      /size of "v"/,
    ],
  ]) {
    const bundle = new Bundle({}, { ...MANIFEST, variants: { portable: { graphs } } });
    assert.throws(() => bundle.variant("portable"), message);
  }
  for (const [more, message] of [
    [{ cache: { in_place: true } }, /keeps its cache in place/],
    [{ precision: "int8-kernels" }, /has operators of transferry-kernels/],
  ]) {
    const bundle = new Bundle({}, { ...MANIFEST, variants: { other: { graphs: {}, ...more } } });
    assert.throws(() => bundle.variant("other"), message);
  }
});

test("options that do not exist are refused with the nearest one", async () => {
  await assert.rejects(Engine.load("x", { varient: "portable" }), /did you mean variant\?/);
  await assert.rejects(Bundle.open("file://host/x"), UsageError);
  await assert.rejects(Bundle.open("x", { Tokenizer: {} }), /did you mean tokenizer\?/);
  await assert.rejects(Engine.load("x", { device: "cpu", ort: { InferenceSession: class {} } }), /device has no effect with ort/);
  await assert.rejects(Engine.load(await folderWith({}), { signal: AbortSignal.abort() }), { name: "AbortError" });
  assert.throws(() => generationOptions({ beams: 4 }), /did you mean beam\?/);
});

// Values that no option has, and that JavaScript turns into numbers or texts.
const ODD = [-1, 1.5, NaN, 1e300, "4", "", {}, [], [1.5], [[]], true, 10n, Symbol("x"), () => 1, new Map([[1, 2]]), new Date(0)];

test("options of another type are refused by name", async () => {
  for (const value of ODD) {
    const named = (name) => (error) => {
      assert.equal(error.name, "UsageError", `${name}: ${error}`);
      assert.ok(error.message.includes(name), `${name}: ${error.message}`);
      return true;
    };
    for (const name of ["ort", "session", "progress", "tokenizer", "sentences", "chat", "signal", "specialTokens"]) {
      const fits = typeof value === "function" ? ["progress", "sentences", "chat"] : Object.is(Object(value)?.constructor, Object) ? ["session"] : [];
      if (!fits.includes(name)) await assert.rejects(Engine.load("x", { [name]: value }), named(name));
    }
    for (const name of Object.keys(DEFAULTS)) {
      let made;
      try {
        made = generationOptions({ [name]: value });
      } catch (error) {
        named(name)(error);
      }
      if (made) assert.deepEqual(made[name], value);
    }
    if (Object(value)?.constructor === Object) continue;
    await assert.rejects(Engine.load("x", value), { name: "UsageError" });
    assert.throws(() => generationOptions(value), { name: "UsageError" });
  }
});

test("a vector is a list in JSON", () => {
  assert.equal(JSON.stringify({ vector: Vector.from([0.1, 1e-45]) }), '{"vector":[0.1,1e-45]}');
});

test("a tokenizer of a kind that is not known needs one that is passed", () => {
  const settings = settingsOf("other");
  assert.throws(() => tokenizerFiles(settings), /is of kind other.*pass `tokenizer`/);
  const other = { encode: (text) => [...text].map(Number), decode: (ids) => ids.join("") };
  const opened = openTokenizer(settings, {}, other);
  assert.equal(opened.decode([5, 2, 6]), "56");
  assert.deepEqual(opened.special.wrap(opened.encode("34")), [3, 4, 2]);
});

test("a text of any length has ids, beside special tokens too", () => {
  const settings = settingsOf("other", { ...SPECIAL, texts: { "</s>": 2 } });
  const opened = openTokenizer(settings, {}, { encode: (text) => Array(text.length).fill(5), decode: () => "" });
  opened.readSpecialTokens();
  assert.equal(opened.encode(`${"a".repeat(3e5)}</s>b`).length, 3e5 + 2);
  const chat = { source: "", named: {}, control: { "</s>": 2 }, render: (_, { messages: [{ content }] }) => `${content}</s>` };
  assert.equal(encodeChat([{ role: "user", content: "a".repeat(3e5) }], chat, opened).length, 3e5 + 1);
});

test("a text that a tokenizer cannot encode is an error of its row", () => {
  const record = { model: { type: "WordLevel", vocab: { a: 3 }, unk_token: "[UNK]" }, added_tokens: [] };
  const settings = settingsOf("tokenizers");
  const content = new TextEncoder().encode(JSON.stringify(record));
  const opened = openTokenizer(settings, { "huggingface.json": content });
  assert.deepEqual(encodeRow("a", opened, { positions: 8 }).ids, [3, 2]);
  assert.throws(() => encodeRow("b", opened, { positions: 8 }), { kind: "tokenizer" });
});

test("a tokenizer of another form is refused", () => {
  const settings = settingsOf("tokenizers");
  const model = { type: "WordLevel", vocab: { a: 3 }, unk_token: "a" };
  for (const wrong of [
    { model: null },
    { model: { ...model, vocab: null } },
    { model: { ...model, vocab: { a: "b" } } },
    { model: { ...model, type: "Unigram", vocab: [[5, 0]], unk_id: 0 } },
    { model, post_processor: { type: "Sequence" } },
    { model, normalizer: { type: "Precompiled", precompiled_charsmap: "?" } },
    { model, pre_tokenizer: { type: "Split", pattern: { Regex: "(a" }, behavior: "Isolated" } },
    { model, decoder: [] },
  ]) {
    const content = new TextEncoder().encode(JSON.stringify(wrong));
    const refused = (error) => error instanceof InputError || error instanceof UsageError;
    assert.throws(() => openTokenizer(settings, { "huggingface.json": content }), refused, JSON.stringify(wrong));
  }
  assert.throws(() => openTokenizer({ ...settings, special: { ...SPECIAL, after: [-1] } }, {}), /special.after\[0\]/);
});

test("a truncated text keeps its end where its tokenizer says so", () => {
  const fields = { pad_id: 0, bos_id: 1, eos_id: 2, before: [1], after: [2] };
  const encode = (text) => [...text].map((each) => each.charCodeAt(0));
  const kept = (more) => {
    const tokenizer = { special: new SpecialTokens({ ...fields, ...more }), longestToken: 1, encode };
    return encodeRow("abcdefgh", tokenizer, { positions: 6, longRows: "truncate" }).ids;
  };
  assert.deepEqual(kept({}), [1, 97, 98, 99, 100, 2]);
  assert.deepEqual(kept({ keeps_end: true }), [1, 101, 102, 103, 104, 2]);
  assert.deepEqual(kept({ keeps_end: true, longest: 4 }), [1, 103, 104, 2]);
});

test("a message neither holds nor completes a token of the template", () => {
  const chat = { source: "", named: {}, control: { "<|end|>": 9 }, render: (_, { messages: [{ content }] }) => `<|${content}|>` };
  const encode = (content) => encodeChat([{ role: "user", content }], chat, { encode: (text) => [text] });
  assert.deepEqual(encode("a"), ["<|a|>"]);
  for (const content of ["end", "x <|end|> y", 1]) assert.throws(() => encode(content), { kind: "prompt" });
});

test("a row that is no text is an error with an empty source, and gets no prompt", async () => {
  for (const blank of ["", " \x1c", null, 5]) assert.equal(prefixed("q: ", blank), blank);
  assert.equal(prefixed("q: ", "\ufeff"), "q: \ufeff");
  const failing = () => Promise.reject(new RowError("no-text", "expected text"));
  for (const row of [null, 5, ["a"]]) assert.equal((await answered(row, {}, failing)).source, "");
});
