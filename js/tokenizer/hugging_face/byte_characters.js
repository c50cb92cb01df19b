// The characters that stand for bytes in GPT-2's vocabulary (`bytes_to_unicode`).

const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte < 256 && byte !== 173);
let next = 256;

/** Character of each byte: itself if it is printable in Latin-1, the next one from U+0100 otherwise. */
export const BYTE_CHARACTERS = Array.from({ length: 256 }, (_, byte) =>
  String.fromCharCode(printable(byte) ? byte : next++),
);

/** Byte of each of these characters. */
export const BYTES = new Map(BYTE_CHARACTERS.map((character, byte) => [character, byte]));
