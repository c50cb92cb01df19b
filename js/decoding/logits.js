// Arithmetic on the logits of one row.

/** Returns the log-sum-exp; NaN where a logit is NaN or plus infinity, or all are minus infinity. */
export function logSumExp(logits) {
  let largest = -Infinity;
  for (const value of logits) if (!(value <= largest)) largest = value;
  if (!Number.isFinite(largest)) return NaN;
  let sum = 0;
  for (const value of logits) sum += Math.exp(value - largest);
  return largest + Math.log(sum);
}

/** Returns the token of the largest logit, the lowest of equals; the first NaN if there is one. */
export function argmax(logits) {
  let best = 0;
  for (let token = 0; token < logits.length; token++) {
    if (Number.isNaN(logits[token])) return token;
    if (logits[token] > logits[best]) best = token;
  }
  return best;
}

/** The best `size` of the values it is given, the first of equals first. */
export class Best {
  items = [];

  constructor(size) {
    this.size = size;
  }

  /** Adds `[value, ...rest]`, if it belongs to the best. */
  add(value, ...rest) {
    const { items, size } = this;
    if (items.length === size && !(value > items[size - 1][0])) return;
    let place = items.length;
    while (place > 0 && value > items[place - 1][0]) place -= 1;
    items.splice(place, 0, [value, ...rest]);
    if (items.length > size) items.pop();
  }
}
