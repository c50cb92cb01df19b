/** A file or a text that cannot be used. */
export class InputError extends Error {}
/** An option that does not exist, is out of range, or contradicts another. */
export class UsageError extends Error {}

export const FORMAT: number;

/** Where the files of a bundle are; `progress` is called with the size of each part read. */
export interface Source {
  read(
    name: string,
    progress?: (bytes: number) => void,
    limits?: { most?: number; signal?: AbortSignal },
  ): Promise<Uint8Array>;
}

/** A tokenizer that replaces that of a bundle; ids without special tokens. */
export interface OtherTokenizer {
  encode(text: string): ArrayLike<number | bigint>;
  decode(ids: number[]): string;
}

export interface SpecialTokens {
  pad: number;
  bos: number;
  mask: number | null;
  before: number[];
  after: number[];
  between: number[];
  ends: number[];
  languages: Record<string, number>;
  beginsWithLanguage: boolean;
  ids: Set<number>;
  wrap(ids: number[]): number[];
}

/** Place of a token in a text, in code points, and whether it continues the word before. */
export interface Place {
  start: number;
  end: number;
  continues: boolean;
}

export interface Tokenizer {
  readonly special: SpecialTokens;
  readonly vocabularySize: number;
  /** Most characters of one id; null if unlimited. */
  readonly longestToken: number | null;
  /** Token ids of a text that the model reads, without special tokens. */
  encode(text: string): number[];
  /** Token ids of a text that the model writes. */
  encodeTarget(text: string): number[];
  decode(ids: number[]): string;
  decodePartial?(ids: number[]): string;
  places?(text: string): Place[];
}

/** Opens a tokenizer by its settings and the content of its files, without a bundle around it. */
export function openTokenizer(
  settings: object,
  contents: Record<string, Uint8Array>,
  other?: OtherTokenizer,
): Tokenizer;

export class Bundle {
  private constructor();
  /** Opens a folder (Node), a URL, or any source of files. */
  static open(
    place: string | URL | Source,
    options?: { tokenizer?: OtherTokenizer; signal?: AbortSignal },
  ): Promise<Bundle>;
  readonly source: Source;
  readonly manifest: Record<string, any>;
  readonly tokenizer: Tokenizer;
  /** Reads a file that the manifest lists, and checks its sha256. */
  read(
    name: string,
    progress?: (bytes: number) => void,
    options?: { signal?: AbortSignal },
  ): Promise<Uint8Array>;
}

/** The options of docs/generation.md, under the same names. */
export interface GenerationOptions {
  beam: number;
  n_best: number;
  max_length: number;
  max_total_length: number;
  min_length: number;
  min_total_length: number;
  length_penalty: number;
  early_stopping: boolean | "never";
  sample: boolean;
  temperature: number;
  top_k: number;
  top_p: number;
  min_p: number;
  typical_p: number;
  seed: number | bigint;
  repetition_penalty: number;
  no_repeat_ngram: number;
  prompt_ngrams: boolean;
  /** Token ids; text is allowed where a bundle is at hand. */
  suppress: (number | string)[];
  suppress_sequences: number[][];
  suppress_begin: number[];
  forced_begin: number | null;
  forced_end: number[];
  renormalise: boolean;
  prefix: number[];
  stop: string[];
  /** Answer line by line; null for encoder-decoders alone. */
  split_lines: boolean | null;
  scores: boolean;
}
export const DEFAULTS: Readonly<GenerationOptions>;
export function generationOptions(
  values: Partial<GenerationOptions>,
  base?: GenerationOptions,
  encode?: (text: string) => number[],
): GenerationOptions;

/** Returns the number whose text is the shortest that gives a float32 back. */
export function single(value: number): number;
/** Random numbers in [0, 1) of one sample, one for each step. */
export function uniforms(
  seed: number | bigint,
  row: number | bigint,
  sample: number,
): Generator<number, never>;

export interface RowError {
  kind: "lines" | "prompt" | "no-text" | "empty" | "tokenizer" | "too-long" | "too-short" | "no-mask" | "not-finite";
  message: string;
}
/** What records of all tasks have. */
export interface RowRecord {
  source: string;
  error?: RowError;
  truncated?: true;
}
export interface Answer {
  text: string;
  score: number | null;
  finish_reason: "end" | "stop" | "length" | "error";
}
/** A line of the output of `transferry run`. */
export interface GenerationRecord extends RowRecord, Omit<Answer, "score"> {
  score?: number | null;
  target_tokens?: number;
  source_tokens: number;
  n_best?: Answer[];
}
export interface FilledMaskRecord extends RowRecord {
  text: string;
  masks?: { text: string; log_probability: number }[][];
}
export interface EmbeddingRecord extends RowRecord {
  /** In JSON a list of numbers. */
  vector?: Float32Array & { toJSON(): number[] };
}
export interface ScoreRecord extends RowRecord {
  target?: string;
  total?: number;
  tokens?: number[];
  log_probabilities?: number[];
}
export interface ClassifiedRecord extends RowRecord {
  label?: string;
  scores?: { label: string; score: number }[];
}
export interface RankedRecord extends RowRecord {
  score?: number;
}
export interface Tag {
  text: string;
  start: number;
  end: number;
  label: string;
  score: number;
}
export interface TaggedRecord extends RowRecord {
  tags?: Tag[];
}
export interface RowOptions {
  /** Treatment of a text longer than the model's positions. */
  longRows?: "error" | "truncate";
  signal?: AbortSignal;
}
export interface GenerationRowOptions extends Languages {
  /** "split" answers a text of an encoder-decoder in pieces; see `sentences` of LoadOptions. */
  longRows?: RowOptions["longRows"] | "split";
  /** Further variables of the chat template, such as { enable_thinking: false }. */
  chatTemplateKwargs?: Record<string, unknown>;
  signal?: AbortSignal;
}
export interface Message {
  role: string;
  /** A text, or its parts: texts, and objects such as { type: "text", text: "..." }. */
  content?: string | (string | object)[] | null;
  tool_calls?: object[];
  [key: string]: unknown;
}
export interface Languages {
  sourceLanguage?: string;
  targetLanguage?: string;
}
export interface Batches {
  /** Rows that the model computes together. Default: 1. */
  batch?: number;
}
/** Rows: a list, a generator, lines of `readline`, a stream. */
export type Several<T> = (Iterable<T> & object) | AsyncIterable<T>;
/** A text, or a pair of texts; null for no second text. */
export type TextOrPair = string | [string, string | null];
export type Task = "generate" | "score" | "embed" | "fill-mask" | "classify" | "rank" | "tag";

export interface LoadOptions {
  /** "portable" (the default) or "portable-int8". */
  variant?: string;
  /** Default: "cpu" in Node, where "wasm" is another choice, and "wasm" elsewhere. */
  device?: "cpu" | "wasm" | "webgpu";
  /** onnxruntime, in place of that of the device. */
  ort?: object;
  /** Session options of onnxruntime. */
  session?: object;
  /** Called with bytes read and bytes in all, and the same of the file that is read. */
  progress?: (
    read: number,
    all: number,
    file: { file: string; loaded: number; total: number },
  ) => void;
  tokenizer?: OtherTokenizer;
  /** Meaning of text that looks like a special token. Default: "as-text". */
  specialTokens?: "as-text" | "as-tokens";
  /** Splits a text into sentences that are the text together. */
  sentences?: (text: string) => string[];
  /** Renders a chat template with its variables, for messages in place of a text. */
  chat?: (template: string, variables: Record<string, unknown>) => string;
  signal?: AbortSignal;
}

export class Engine {
  private constructor();
  static load(place: string | URL | Source | Bundle, options?: LoadOptions): Promise<Engine>;
  readonly bundle: Bundle;
  readonly tasks: Task[];
  options(values?: Partial<GenerationOptions>): GenerationOptions;
  generate(
    texts: Several<string | Message[] | number[]>,
    options?: Partial<GenerationOptions>,
    how?: GenerationRowOptions & Batches & { firstRow?: number },
  ): AsyncGenerator<GenerationRecord, void>;
  /** Yields the text as it grows; returns the record. */
  stream(
    text: string | Message[] | number[],
    options?: Partial<GenerationOptions>,
    how?: GenerationRowOptions & { row?: number },
  ): AsyncGenerator<{ text: string; tokens: number[] }, GenerationRecord>;
  score(
    rows: Several<TextOrPair>,
    options?: RowOptions & Languages & Batches,
  ): AsyncGenerator<ScoreRecord, void>;
  classify(
    rows: Several<TextOrPair>,
    options?: RowOptions & Batches,
  ): AsyncGenerator<ClassifiedRecord, void>;
  rank(
    pairs: Several<[string, string]>,
    options?: RowOptions & Batches,
  ): AsyncGenerator<RankedRecord, void>;
  tag(
    texts: Several<string>,
    options?: RowOptions &
      Batches & { aggregation?: "none" | "simple" | "first" | "average" | "max" },
  ): AsyncGenerator<TaggedRecord, void>;
  fillMask(
    texts: Several<string>,
    options?: RowOptions & Batches & { mask?: string; top?: number },
  ): AsyncGenerator<FilledMaskRecord, void>;
  embed(
    texts: Several<string>,
    options?: RowOptions &
      Batches & { pooling?: "mean" | "first" | "last"; normalise?: boolean; prompt?: string },
  ): AsyncGenerator<EmbeddingRecord, void>;
  /** Frees the memory of the graphs, once what runs on them has ended. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

interface OfEngine {
  engine: Engine;
  close(): Promise<void>;
}
/** Answers one row with a record, a list of rows with a list of records. */
export interface Answers<Row, Result, Options extends unknown[]> extends OfEngine {
  (row: Row, ...options: Options): Promise<Result>;
  (rows: Row[], ...options: Options): Promise<Result[]>;
}
type Of<Method extends (...values: any) => AsyncGenerator<any, void>> =
  Parameters<Method> extends [Several<infer Row>, ...infer Options]
    ? Answers<Row, ReturnType<Method> extends AsyncGenerator<infer Result, void> ? Result : never, Options>
    : never;
type How<Method extends (...values: any) => unknown> =
  Parameters<Method> extends [unknown, ...infer Options] ? Options : never;
/** Answers where two texts in a list are two rows. */
export interface TextAnswers<Row, Result, Options extends unknown[]> extends OfEngine {
  (row: string, ...options: Options): Promise<Result>;
  (rows: Row[], ...options: Options): Promise<Result[]>;
}
/** Answers where two texts in a list are a pair for an encoder-decoder, two rows for other models. */
export interface ScoreAnswers extends OfEngine {
  (row: string, ...options: How<Engine["score"]>): Promise<ScoreRecord>;
  (row: [string, string], ...options: How<Engine["score"]>): Promise<ScoreRecord | ScoreRecord[]>;
  (rows: TextOrPair[], ...options: How<Engine["score"]>): Promise<ScoreRecord[]>;
}
export interface Tasks {
  generate: Of<Engine["generate"]>;
  score: ScoreAnswers;
  embed: Of<Engine["embed"]>;
  "fill-mask": Of<Engine["fillMask"]>;
  classify: TextAnswers<TextOrPair, ClassifiedRecord, How<Engine["classify"]>>;
  rank: Of<Engine["rank"]>;
  tag: Of<Engine["tag"]>;
}
/** Opens a bundle for one task. */
export function pipeline<Name extends Task>(
  task: Name,
  place: string | URL | Source | Bundle,
  options?: LoadOptions,
): Promise<Tasks[Name]>;
