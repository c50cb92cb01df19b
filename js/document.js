// Documents of a bundle: JSON of the types that Python declares, see schema.js.

import { InputError, shown } from "./errors.js";
import { SCHEMAS } from "./schema.js";

const REMEDY = "export the bundle again";
const TYPES = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  integer: Number.isSafeInteger,
  number: (value) => typeof value === "number",
  string: (value) => typeof value === "string",
  array: Array.isArray,
  object: (value) => typeOf(value) === "object",
};

/**
 * Parses JSON without duplicate keys, infinity or lone surrogates.
 *
 * @param {Uint8Array} content
 * @param {string} name of the file, for errors
 * @returns {object}
 */
export function parse(content, name) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content);
    const value = JSON.parse(text);
    if (!TYPES.object(value)) throw new TypeError(`expected an object, found ${typeOf(value)}`);
    const colons = text.replace(/\\./g, "").split('"').filter((_, place) => place % 2 === 0).join("").split(":").length - 1;
    if (keys(value) !== colons) throw new TypeError("a key occurs twice");
    return value;
  } catch (error) {
    throw new InputError(`${name} is not JSON (${error.message}); ${REMEDY}`);
  }
}

/** Returns the number of keys of all objects in a value; throws for infinity and lone surrogates. */
function keys(value) {
  let count = 0;
  for (const waiting = [value]; waiting.length; ) {
    const each = waiting.pop();
    const names = TYPES.object(each) ? Object.keys(each) : [];
    count += names.length;
    if ([each, ...names].some((text) => typeof text === "string" && !text.isWellFormed())) throw new TypeError("a lone surrogate");
    if ([Infinity, -Infinity].includes(each)) throw new TypeError("a number is out of range");
    if (each !== null && typeof each === "object") for (const item of Object.values(each)) waiting.push(item);
  }
  return count;
}

/**
 * Checks a value against a type, and fills in defaults.
 *
 * @param {unknown} value
 * @param {string} kind name in schema.js
 * @param {string} origin the file, for errors
 * @throws {InputError} names the field
 */
export function check(value, kind, origin) {
  const problem = defect(value, SCHEMAS[kind], "");
  if (problem) throw new InputError(`${origin}: ${problem}; ${REMEDY}`);
}

/** Returns the first defect of a value; "" without one. */
function defect(value, schema, where) {
  if (schema.$ref) return defect(value, SCHEMAS[schema.$ref], where);
  const expected = (what) => `expected ${what} at ${where || "the top"}, found ${shown(value)}`;
  if (schema.anyOf) {
    const each = schema.anyOf.find((one) => TYPES[one.type ?? SCHEMAS[one.$ref].type](value));
    const names = schema.anyOf.map(({ type, $ref }) => type ?? SCHEMAS[$ref].type);
    return each ? defect(value, each, where) : expected(names.join(" or "));
  }
  if (schema.enum) return schema.enum.includes(value) ? "" : expected(schema.enum.join(", "));
  if (!TYPES[schema.type](value)) return expected(schema.type);
  if (typeof value === "number" && (value < schema.minimum || value > schema.maximum)) {
    return expected(`${schema.minimum} to ${schema.maximum ?? "more"}`);
  }
  const size = value?.length;
  if (size < (schema.minItems ?? schema.minLength ?? 0) || size > (schema.maxItems ?? schema.maxLength ?? Infinity)) {
    return `expected another length at ${where}, found ${size}`;
  }
  if (schema.pattern && !new RegExp(schema.pattern).test(value)) return expected(schema.pattern);
  if (schema.type === "array") return first(value, (each, place) => defect(each, schema.items ?? {}, `${where}[${place}]`));
  return schema.type === "object" ? members(value, schema, where) : "";
}

/** Returns the first defect of an object's fields. */
function members(value, { properties = {}, required = [], minProperties = 0, ...other }, where) {
  const at = (name) => (where ? `${where}.${name}` : name);
  const names = Object.keys(value);
  if (names.length < minProperties) return `expected at least ${minProperties} in ${where}, found none`;
  const missing = required.find((name) => !Object.hasOwn(value, name));
  if (missing) return `there is no ${at(missing)}`;
  for (const [name, { default: usual }] of Object.entries(properties)) {
    if (!Object.hasOwn(value, name) && usual !== undefined) value[name] = structuredClone(usual);
  }
  return first(names, (name) => {
    if (other.propertyNames && !new RegExp(other.propertyNames.pattern).test(name)) {
      return `expected plain names in ${where}, found ${shown(name)}`;
    }
    const schema = Object.hasOwn(properties, name) ? properties[name] : other.additionalProperties;
    return schema ? defect(value[name], schema, at(name.slice(0, 40))) : "";
  });
}

function first(items, problem) {
  for (const [place, item] of items.entries()) {
    const found = problem(item, place);
    if (found) return found;
  }
  return "";
}

function typeOf(value) {
  return value === null ? "null" : Array.isArray(value) ? "array" : typeof value;
}
