export { Bundle, FORMAT } from "./bundle.js";
export { Engine } from "./engine.js";
export { pipeline } from "./pipeline.js";
export { single } from "./rows.js";
export { InputError, UsageError } from "./errors.js";
export { DEFAULTS, generationOptions } from "./decoding/options.js";
export { uniforms } from "./decoding/philox.js";
export { openTokenizer } from "./tokenizer/tokenizer.js";
