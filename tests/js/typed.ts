// Every name of the package, used as its types say; wrong uses that must not compile.
import * as all from "transferry";
import { Bundle, DEFAULTS, Engine, FORMAT, generationOptions, InputError, openTokenizer, pipeline, single, uniforms, UsageError } from "transferry";
import type { GenerationOptions, LoadOptions, Message, Place, Source, Tag, Task, Tokenizer } from "transferry";

const format: number = FORMAT;
const exported: string[] = [...Object.keys(all), `${format} ${single(0.1)} ${uniforms(1, 2n, 3).next().value}`];
const errors: Error[] = [new InputError("x"), new UsageError("x")];
const encode = (text: string) => [text.length];
const chosen: GenerationOptions = generationOptions({ beam: 2, seed: 3n, suppress: ["a", 5] }, DEFAULTS, encode);
const { signal } = new AbortController();
const source: Source = {
  read: async (name, progress, limits) => (progress?.(1), limits?.signal?.throwIfAborted(), new Uint8Array(name.length)),
};
const load: LoadOptions = {
  variant: "portable",
  device: "wasm",
  session: {},
  progress: (read, whole, { file, loaded, total }) => console.log(read, whole, file, loaded, total),
  specialTokens: "as-tokens",
  sentences: (text) => [text],
  chat: (template, variables) => template + Object.keys(variables).length,
  tokenizer: { encode: (text) => BigInt64Array.from([BigInt(text.length)]), decode: (ids) => ids.join() },
  signal,
};
const bundle = await Bundle.open(source, { signal });
const content: Uint8Array = await bundle.read("x", (bytes) => console.log(bytes), { signal });
const tokenizer: Tokenizer = openTokenizer({}, { x: content }, { encode, decode: () => "" });
const places: Place[] | undefined = bundle.tokenizer.places?.(tokenizer.decode([1]));
await Engine.load(new URL("./bundle", import.meta.url), { device: "webgpu" });
const engine: Engine = await Engine.load(bundle, load);
const tasks: Task[] = engine.tasks;

async function* rows() {
  yield "a";
}
const chat: Message[] = [
  { role: "user", content: [{ type: "text", text: "a" }, "b"] },
  { role: "assistant", tool_calls: [{}] },
  { role: "x", content: null, thinking: "y" },
];
const how = { batch: 2, firstRow: 3, sourceLanguage: "x", targetLanguage: "y", signal };
for await (const { text } of engine.generate(rows(), { beam: 2 }, { longRows: "truncate" })) text.trim();
for await (const { n_best } of engine.generate(["a", chat, [1, 2]], { n_best: 2 }, how)) n_best?.[0].score?.toFixed();
const grows = engine.stream("a", {}, { row: 1, longRows: "split", chatTemplateKwargs: { enable_thinking: false } });
let step = await grows.next();
for (; !step.done; step = await grows.next()) step.value.text.trim();
step.value.source_tokens.toFixed();
for await (const { total } of engine.score(["a", ["a", "b"], ["a", null]], { batch: 1 })) total?.toFixed();
for await (const { scores } of engine.classify(["a", ["a", "b"], ["a", null]])) scores?.map(({ label }) => label.trim());
for await (const { score } of engine.rank([["a", "b"]])) score?.toFixed();
for await (const { tags } of engine.tag(["a"], { aggregation: "max" })) tags?.map(({ start }: Tag) => start.toFixed());
for await (const { masks } of engine.fillMask(["a"], { mask: "x", top: 3 })) masks?.[0][0].log_probability.toFixed();
for await (const { vector } of engine.embed(["a"], { pooling: "first", normalise: true, prompt: "q" })) vector?.toJSON();
await engine[Symbol.asyncDispose]();

const embed = await pipeline("embed", "bundle");
const numbers: number[] | undefined = (await embed("a", { batch: 8 })).vector?.toJSON();
const several: string[] = (await embed(["a"])).map(({ source }) => source);
const classify = await pipeline("classify", "bundle");
const labels: (string | undefined)[] = (await classify(["a", "b"])).map(({ label }) => label);
const label: string | undefined = (await classify([["a", "b"]]))[0].label;
const rank = await pipeline("rank", "bundle");
const ranked: number | undefined = (await rank(["a", "b"], { batch: 2 })).score;
const score = await pipeline("score", "bundle");
const scored: number | undefined = (await score("a")).total;
const pairs: (string | undefined)[] = (await score([["a", "b"]])).map(({ target }) => target);
const generate = await pipeline("generate", "bundle");
const answers: string[] = [(await generate(chat)).text, (await generate([1, 2])).text, (await generate(["a"]))[0].text];
await generate.close();
console.log(exported, errors, chosen, places, tasks, numbers, several, labels, label, ranked, scored, pairs, answers);

// @ts-expect-error a single text
engine.generate("a");
// @ts-expect-error an option that does not exist
engine.generate(["a"], { beams: 2 });
// @ts-expect-error another value
engine.generate(["a"], { early_stopping: "always" });
// @ts-expect-error another type
engine.generate(["a"], { temperature: "1" });
// @ts-expect-error texts, not ids
engine.generate(["a"], { prefix: ["a"] });
// @ts-expect-error a treatment that does not exist
engine.generate(["a"], {}, { longRows: "cut" });
// @ts-expect-error no object
engine.generate(["a"], {}, { chatTemplateKwargs: 5 });
// @ts-expect-error no role
engine.generate([[{ content: "a" }]]);
// @ts-expect-error several texts
engine.stream(["a"]);
// @ts-expect-error of generate
engine.stream("a", {}, { firstRow: 2 });
// @ts-expect-error three texts
engine.score([["a", "b", "c"]]);
// @ts-expect-error a pair, or two texts
const whole: number | undefined = (await score(["a", "b"])).total;
// @ts-expect-error a pair
engine.embed([["a", "b"]]);
// @ts-expect-error of generate
engine.embed(["a"], { longRows: "split" });
// @ts-expect-error misspelt
engine.embed(["a"], { longrows: "error" });
// @ts-expect-error a pooling that does not exist
engine.embed(["a"], { pooling: "max" });
// @ts-expect-error no pair
engine.rank(["a"]);
// @ts-expect-error no second text
engine.rank([["a", null]]);
// @ts-expect-error an aggregation that does not exist
engine.tag(["a"], { aggregation: "last" });
// @ts-expect-error another type
engine.fillMask(["a"], { top: "3" });
// @ts-expect-error a task of Python
engine.answer();
// @ts-expect-error read only
engine.tasks = [];
// @ts-expect-error no place
Engine.load(5);
// @ts-expect-error a device of Python
Engine.load("x", { device: "cuda" });
// @ts-expect-error of Engine.load
Bundle.open("x", { variant: "portable" });
// @ts-expect-error Bundle.open
new Bundle();
// @ts-expect-error Engine.load
new Engine();
// @ts-expect-error a task that does not exist
pipeline("translate", "x");
// @ts-expect-error a list
generationOptions({ stop: "a" });
