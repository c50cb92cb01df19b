// The likeliest pieces of a text by a unigram language model (Kudo 2018).

/**
 * Returns pieces with their ids, in order.
 *
 * @param {string} text
 * @param {number} longest code units of the longest piece
 * @param {(piece: string) => number | undefined} idOf
 * @param {(piece: string, id: number) => number} scoreOf
 * @param {() => [number, number]} unknown score and id of a character that is no piece
 * @param {(sum: number) => number} [round] of sums of scores
 */
export function likeliest(text, longest, idOf, scoreOf, unknown, round = (sum) => sum) {
  const size = text.length;
  const [scores, starts, ids] = [new Float64Array(size + 1), new Int32Array(size + 1).fill(-1), []];
  const consider = (start, end, score, id) => {
    const sum = round(score + scores[start]);
    if (starts[end] >= 0 && !(sum > scores[end])) return;
    [scores[end], starts[end], ids[end]] = [sum, start, id];
  };
  for (let start = 0; start < size; ) {
    const one = text.codePointAt(start) > 0xffff ? 2 : 1;
    let single = false;
    const most = Math.min(size, start + longest);
    for (let end = start + 1; end <= most; end++) {
      const piece = text.slice(start, end);
      const id = idOf(piece);
      if (id === undefined) continue;
      consider(start, end, scoreOf(piece, id), id);
      single ||= end - start === one;
    }
    if (!single) consider(start, start + one, ...unknown());
    start += one;
  }
  const pieces = [];
  for (let end = size; end > 0; end = starts[end]) pieces.push([text.slice(starts[end], end), ids[end]]);
  return pieces.reverse();
}
