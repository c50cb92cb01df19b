// Blanks at the ends of tokens, which post-processors take out of the tokens' places.

const BLANKS = (token) => /^[\u0120\p{White_Space}]*/u.exec(token)[0];

/** Returns tokens whose places hold no blanks at their ends (`process_offsets`). */
export function trimmed(tokens, processor) {
  if (processor?.type === "Sequence") return processor.processors.reduce(trimmed, tokens);
  if (!["ByteLevel", "RobertaProcessing"].includes(processor?.type) || processor.trim_offsets === false) {
    return tokens;
  }
  const { add_prefix_space: blank = true } = processor;
  return tokens.map((each, place) => {
    let { start, end } = each;
    let leading = [...BLANKS(each.token)].length;
    const trailing = [...BLANKS([...each.token].reverse().join(""))].length;
    // One alone was added; more were there before.
    if (leading === 1 && blank && (place === 0 || start === 0)) leading = 0;
    start = Math.min(start + leading, end);
    if (trailing && end >= trailing) end = Math.max(end - trailing, start);
    return { ...each, start, end };
  });
}
