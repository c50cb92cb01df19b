// Texts as bytes of UTF-8.

/** Returns the size of a text in UTF-8. */
export function bytesIn(text) {
  let size = 0;
  for (const character of text) {
    const code = character.codePointAt(0);
    size += code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  }
  return size;
}

/** Returns the tokens that spell a text by its bytes. */
export function byteTokens(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => {
    return `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;
  });
}

/** Returns the code unit of the character that each byte of a text belongs to. */
export function unitsOfBytes(text) {
  const units = [];
  let place = 0;
  for (const character of text) {
    for (let left = bytesIn(character); left > 0; left--) units.push(place);
    place += character.length;
  }
  return units;
}
