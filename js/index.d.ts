/** A file or a text that cannot be used. */
export class InputError extends Error {}
/** An option that does not exist, is out of range, or contradicts another. */
export class UsageError extends Error {}

export const FORMAT: number;

/** Where the files of a bundle are; `progress` is called with the size of each part read. */
export interface Source {
  read(name: string, progress?: (bytes: number) => void): Promise<Uint8Array>;
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
  /** Opens a folder (Node), a URL, or any source of files. */
  static open(
    place: string | URL | Source,
    options?: { tokenizer?: OtherTokenizer },
  ): Promise<Bundle>;
  readonly source: Source;
  readonly manifest: Record<string, any>;
  readonly tokenizer: Tokenizer;
  /** Reads a file that the manifest lists, and checks its sha256. */
  read(name: string, progress?: (bytes: number) => void): Promise<Uint8Array>;
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

/** Random numbers in [0, 1) of one sample, one for each step. */
/** Returns the number whose text is the shortest that gives a float32 back. */
export function single(value: number): number;
export function uniforms(
  seed: number | bigint,
  row: number | bigint,
  sample: number,
): Generator<number, never>;

export interface RowError {
  kind: "lines" | "empty" | "tokenizer" | "too-long" | "too-short" | "no-mask" | "not-finite";
  message: string;
}
export interface Answer {
  text: string;
  score: number | null;
  finish_reason: "end" | "stop" | "length" | "error";
}
/** A line of the output of `transferry run`. */
export interface GenerationRecord extends Omit<Answer, "score"> {
  source: string;
  score?: number | null;
  target_tokens?: number;
  error?: RowError;
  source_tokens: number;
  n_best?: Answer[];
  truncated?: true;
}
export interface FilledMaskRecord {
  source: string;
  text: string;
  masks?: { text: string; log_probability: number }[][];
  error?: RowError;
  truncated?: true;
}
export interface EmbeddingRecord {
  source: string;
  /** For JSON: `Array.from(vector, single)`. */
  vector?: Float32Array;
  error?: RowError;
  truncated?: true;
}
export interface ScoreRecord {
  source: string;
  target?: string;
  total?: number;
  tokens?: number[];
  log_probabilities?: number[];
  error?: RowError;
  truncated?: true;
}
export interface ClassifiedRecord {
  source: string;
  label?: string;
  scores?: { label: string; score: number }[];
  error?: RowError;
  truncated?: true;
}
export interface RankedRecord {
  source: string;
  score?: number;
  error?: RowError;
  truncated?: true;
}
export interface Tag {
  text: string;
  start: number;
  end: number;
  label: string;
  score: number;
}
export interface TaggedRecord {
  source: string;
  tags?: Tag[];
  error?: RowError;
  truncated?: true;
}
export interface RowOptions {
  longRows?: "error" | "truncate";
  sourceLanguage?: string;
  targetLanguage?: string;
}

export class Engine {
  static load(
    place: string | URL | Source | Bundle,
    options?: {
      variant?: string;
      /** onnxruntime-web or onnxruntime-node. Default: what is installed. */
      ort?: object;
      /** Session options of onnxruntime. */
      session?: object;
      progress?: (read: number, all: number) => void;
      tokenizer?: OtherTokenizer;
      /** Meaning of text that looks like a special token. Default: "as-text". */
      specialTokens?: "as-text" | "as-tokens";
    },
  ): Promise<Engine>;
  readonly bundle: Bundle;
  readonly tasks: (
    "generate" | "score" | "embed" | "fill-mask" | "classify" | "rank" | "tag"
  )[];
  options(values?: Partial<GenerationOptions>): GenerationOptions;
  generate(
    texts: Iterable<string | number[]>,
    options?: Partial<GenerationOptions>,
    how?: RowOptions & { firstRow?: number },
  ): AsyncGenerator<GenerationRecord, void>;
  /** Yields the text as it grows; returns the record. */
  stream(
    text: string | number[],
    options?: Partial<GenerationOptions>,
    how?: RowOptions & { row?: number },
  ): AsyncGenerator<{ text: string; tokens: number[] }, GenerationRecord>;
  score(
    rows: Iterable<string | [string, string]>,
    options?: RowOptions,
  ): AsyncGenerator<ScoreRecord, void>;
  classify(
    rows: Iterable<string | [string, string]>,
    options?: { longRows?: "error" | "truncate" },
  ): AsyncGenerator<ClassifiedRecord, void>;
  rank(
    pairs: Iterable<[string, string]>,
    options?: { longRows?: "error" | "truncate" },
  ): AsyncGenerator<RankedRecord, void>;
  tag(
    texts: Iterable<string>,
    options?: {
      aggregation?: "none" | "simple" | "first" | "average" | "max";
      longRows?: "error" | "truncate";
    },
  ): AsyncGenerator<TaggedRecord, void>;
  fillMask(
    texts: Iterable<string>,
    options?: { mask?: string; top?: number; longRows?: "error" | "truncate" },
  ): AsyncGenerator<FilledMaskRecord, void>;
  embed(
    texts: Iterable<string>,
    options?: {
      pooling?: "mean" | "first" | "last";
      normalise?: boolean;
      prompt?: string;
      longRows?: "error" | "truncate";
    },
  ): AsyncGenerator<EmbeddingRecord, void>;
  close(): Promise<void>;
}
