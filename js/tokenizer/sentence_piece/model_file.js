// A SentencePiece model: the fields of sentencepiece_model.proto that decide ids and texts.

import { InputError } from "../../errors.js";

const TYPES = { normal: 1, unknown: 2, control: 3, userDefined: 4, unused: 5, byte: 6 };
export { TYPES };

/**
 * Reads a model.
 *
 * @param {Uint8Array} content
 * @returns {object} pieces: { piece, score, type } by id; unigram: whether it is of type unigram, else
 *   BPE; byteFallback; suffix: whether blanks belong to the word before; unknownSurface; charsmap;
 *   addsBlank; removesBlanks; escapesBlanks; denormalises
 */
export function readModel(content) {
  try {
    return parsed(content);
  } catch (error) {
    if (!(error instanceof RangeError || error instanceof TypeError)) throw error;
    throw new InputError(`the SentencePiece model is damaged (${error.message}); export the bundle again`);
  }
}

function parsed(content) {
  const fields = fieldsOf(content);
  const pieces = (fields[1] ?? []).map((each) => {
    const { 1: piece, 2: score, 3: type } = fieldsOf(each);
    return {
      piece: utf8(piece?.at(-1)),
      score: score ? new DataView(Uint32Array.of(score.at(-1)).buffer).getFloat32(0, true) : 0,
      type: type ? Number(type.at(-1)) : TYPES.normal,
    };
  });
  const merged = (messages = []) => fieldsOf(joined(messages));
  const [trainer, normaliser, denormaliser] = [merged(fields[2]), merged(fields[3]), merged(fields[5])];
  const flag = (message, field, usual) => (message[field] ? message[field].at(-1) !== 0n : usual);
  const type = Number(trainer[3]?.at(-1) ?? 1n);
  if (![1, 2].includes(type) || !pieces.length) {
    throw new InputError(
      "the SentencePiece model is of a type that is not read, expected unigram or BPE; pass a " +
        "`tokenizer` of your own",
    );
  }
  return {
    pieces,
    unigram: type === 1,
    byteFallback: flag(trainer, 35, false),
    suffix: flag(trainer, 24, false),
    unknownSurface: trainer[44] ? utf8(trainer[44].at(-1)) : " \u2047 ",
    charsmap: normaliser[2]?.at(-1) ?? new Uint8Array(),
    addsBlank: flag(normaliser, 3, true),
    removesBlanks: flag(normaliser, 4, true),
    escapesBlanks: flag(normaliser, 5, true),
    denormalises: Boolean(denormaliser[2]?.at(-1).length),
  };
}

/** Returns values of a message by field: numbers of 4 bytes, BigInts of varints, bytes of others. */
function fieldsOf(content) {
  const fields = {};
  let place = 0;
  const varint = () => {
    for (let [value, shift] = [0n, 0n]; ; shift += 7n) {
      const byte = content[place++];
      if (byte === undefined || shift > 63n) throw new RangeError("it ends within a number");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (place < content.length) {
    const tag = Number(varint());
    const [field, kind] = [tag >>> 3, tag & 7];
    let value;
    if (kind === 0) value = varint();
    else if (kind === 1 || kind === 5 || kind === 2) {
      const size = kind === 2 ? Number(varint()) : kind === 1 ? 8 : 4;
      if (place + size > content.length) throw new RangeError("it ends within a field");
      value = content.subarray(place, place + size);
      if (kind === 5) value = new DataView(value.buffer, value.byteOffset, 4).getUint32(0, true);
      place += size;
    } else throw new RangeError("it is no protocol buffer");
    (fields[field] ??= []).push(value);
  }
  return fields;
}

function joined(messages) {
  return Uint8Array.from(messages.flatMap((message) => [...message]));
}

function utf8(bytes) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}
