export { Bundle, FORMAT } from "./bundle.js";
export { Engine } from "./engine.js";
export { InputError, UsageError } from "./errors.js";
export { DEFAULTS, generationOptions } from "./options.js";
export { uniforms } from "./philox.js";
export { BytePairTokenizer } from "./byte_pair.js";
