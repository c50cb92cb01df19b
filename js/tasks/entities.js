// Entities of a text: tokens joined by their labels, as transformers joins them
// (TokenClassificationPipeline, `aggregate`).

const OUTSIDE = "O"; // the label of tokens outside of entities

/**
 * Returns the tokens of a text with their likeliest labels, or its entities.
 *
 * @param {string} text
 * @param {{start: number, end: number, continues: boolean}[]} places of its tokens, in code points;
 *   a text that was cut has more places than rows
 * @param {number[][]} rows probabilities of each label for each of the first tokens
 * @param {string[]} labels
 * @param {string} aggregation "none" for every token; "simple" to join neighbours of one entity;
 *   "first", "average" and "max" give all tokens of a word one label before
 */
export function entities(text, places, rows, labels, aggregation) {
  const characters = [...text];
  const tokens = rows.map((row, place) => ({ ...places[place], row }));
  const whole = !["none", "simple"].includes(aggregation);
  const groups = whole ? words(tokens) : tokens.map((token) => [token]);
  const cut = (start, end) => characters.slice(start, end).join("");
  const tags = groups.map((group) => {
    const chosen = chosenRow(group, aggregation);
    const best = chosen.indexOf(Math.max(...chosen));
    const [{ start }, { end }] = [group[0], group.at(-1)];
    return { text: cut(start, end), start, end, label: labels[best], score: chosen[best] };
  });
  return aggregation === "none" ? tags : joined(tags, cut);
}

function words(tokens) {
  const found = [];
  for (const token of tokens) {
    if (found.length && token.continues) found.at(-1).push(token);
    else found.push([token]);
  }
  return found;
}

function chosenRow(group, aggregation) {
  const rows = group.map(({ row }) => row);
  if (aggregation === "average") {
    return rows[0].map((_, label) => rows.reduce((sum, row) => sum + row[label], 0) / rows.length);
  }
  if (aggregation !== "max") return rows[0];
  const most = rows.map((row) => Math.max(...row));
  return rows[most.indexOf(Math.max(...most))];
}

/** Joins neighbours of one entity, which B- begins; those outside are left out. */
function joined(tags, cut) {
  const groups = [];
  for (const each of tags) {
    const last = groups.at(-1)?.at(-1);
    if (last && !each.label.startsWith("B-") && kindOf(each.label) === kindOf(last.label)) {
      groups.at(-1).push(each);
    } else groups.push([each]);
  }
  return groups.flatMap((group) => {
    const [, label] = /^(?:[^-]*-)?(.*)$/s.exec(group[0].label);
    if (label === OUTSIDE) return [];
    const [{ start }, { end }] = [group[0], group.at(-1)];
    const score = group.reduce((sum, each) => sum + each.score, 0) / group.length;
    return [{ text: cut(start, end), start, end, label, score }];
  });
}

function kindOf(label) {
  return /^[BI]-/.test(label) ? label.slice(2) : label;
}
