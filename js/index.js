export { Bundle, FORMAT } from "./bundle.js";
export { Engine, pipeline } from "./engine.js";
export { single } from "./rows.js";
export { InputError, UsageError } from "./errors.js";
export { DEFAULTS, generationOptions } from "./decoding/options.js";
export { uniforms } from "./decoding/sampling.js";
export { openTokenizer } from "./tokenizer/tokenizer.js";
