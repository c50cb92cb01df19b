// A heap of candidates for a merge.

/** A heap of items by rank, then by place; the lowest first. */
export class Heap {
  #items = [];

  push(item) {
    const items = this.#items;
    let place = items.push(item) - 1;
    while (place > 0) {
      const parent = (place - 1) >> 1;
      if (!precedes(item, items[parent])) break;
      items[place] = items[parent];
      place = parent;
    }
    items[place] = item;
  }

  pop() {
    const items = this.#items;
    const first = items[0];
    const last = items.pop();
    if (!items.length) return first;
    let place = 0;
    for (let child; (child = 2 * place + 1) < items.length; place = child) {
      if (child + 1 < items.length && precedes(items[child + 1], items[child])) child += 1;
      if (!precedes(items[child], last)) break;
      items[place] = items[child];
    }
    items[place] = last;
    return first;
  }
}

function precedes(one, other) {
  return one.rank < other.rank || (one.rank === other.rank && one.place < other.place);
}
