// Texts as values of captions, as rectified_flow/networks/captions.py encodes them.

import { captionInput } from "./conditions.mjs";

/** The words of a text in lower case, without punctuation. */
export const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];

/** The words of a text that an encoder knows, and those that it does not; an encoder without a list of words knows all. */
export function sorted(encoder, text) {
  const words = [...new Set(wordsOf(text))];
  if (encoder.kind !== "words") return { known: words, unknown: [] };
  const list = new Set(encoder.words);
  return { known: words.filter((word) => list.has(word)), unknown: words.filter((word) => !list.has(word)) };
}

/** A function from a text to the value of a caption whose encoder counts words; null if it knows none of them. */
export function wordEncoder(caption) {
  const numbers = new Map(caption.encoder.words.map((word, number) => [word, number]));
  return (text) => {
    const counts = new Float32Array(caption.size);
    for (const word of wordsOf(text)) if (numbers.has(word)) counts[numbers.get(word)] += 1;
    const length = Math.hypot(...counts);
    return length ? captionInput(caption, counts.map((count) => count / length)) : null;
  };
}

/**
 * A function from a text to the value of a caption whose encoder is a program; null for an empty text.
 *
 * `run(ids)` returns the vector of the text and those of its tokens. The result for the latest text is cached, since changes of other controls reuse it.
 */
export function programEncoder(caption, tokenizer, run) {
  const latest = { text: "", value: null };
  return async (text) => {
    if (text.trim() && text !== latest.text) {
      const value = captionInput(caption, ...(await run(idsOf(tokenizer, text, caption.encoder.most_tokens))));
      Object.assign(latest, { text, value });
    }
    return text.trim() ? latest.value : null;
  };
}

/** The ids of the tokens of a text, at most `most`: the end of a longer text is left out, but no special token. */
export function idsOf(tokenizer, text, most) {
  const { ids } = tokenizer.encode(text);
  if (ids.length <= most) return ids;
  const plain = tokenizer.encode(text, { add_special_tokens: false }).ids;
  const special = ids.length - plain.length;
  const before = ids.findIndex((_, start) => plain.every((id, i) => id === ids[start + i]));
  return [...ids.slice(0, before), ...plain.slice(0, most - special), ...ids.slice(before + plain.length)];
}
