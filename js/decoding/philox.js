// Random numbers of sampling: Philox4x64-10 (Salmon et al. 2011), as numpy.random.Philox.

const MASK = (1n << 64n) - 1n;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n];
const WEYL = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn];

function block(counter, key) {
  let [a, b, c, d] = counter;
  let [first, second] = key;
  for (let round = 0; round < 10; round++) {
    const left = MULTIPLIERS[0] * a;
    const right = MULTIPLIERS[1] * c;
    [a, b, c, d] = [(right >> 64n) ^ b ^ first, right & MASK, (left >> 64n) ^ d ^ second, left & MASK];
    first = (first + WEYL[0]) & MASK;
    second = (second + WEYL[1]) & MASK;
  }
  return [a, b, c, d];
}

/**
 * Yields random numbers in [0, 1): one for each step of one sample.
 *
 * @param {number | bigint} seed
 * @param {number | bigint} row number of the input row
 * @param {number} sample
 */
export function* uniforms(seed, row, sample) {
  const key = [BigInt(seed) & MASK, BigInt(row) & MASK];
  for (let count = 1n; ; count++) {
    // numpy counts up before the first block.
    for (const word of block([count, 0n, 0n, BigInt(sample)], key)) {
      yield Number(word >> 11n) * 2 ** -53;
    }
  }
}
