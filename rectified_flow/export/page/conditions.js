// The conditions of a model, as model.json lists them: their values as inputs of the program, the range of numbers, and texts,
// which are encoded as rectified_flow/text/encoders.py encodes them.

import { sampleLabel } from "./noise.js";

export const NONE = 1e30; // a number that stands for "none": graphics cards do not handle NaN reliably
const BINS = 40;
const NO_PICTURE = { source: 0, unknown: 1 };

/** The number that fills a row of the input `name` that has no condition. */
export const noneOf = (model, name) => Object.hasOwn(NO_PICTURE, name) // a condition may be called "constructor"
  ? NO_PICTURE[name]
  : model.conditions.find((each) => each.name === name).none ?? NONE;

/**
 * The values of each condition for the rows of a job, by name.
 *
 * `job.conditions` has a value for each: a label or a number, or the numbers of an encoded caption. A label of null is drawn as
 * sample.py draws it; another value of null is "none".
 */
export function conditionInputs(model, job) {
  const seed = job.mix > 0.5 ? job.to : job.from;
  const inputs = {};
  for (const { name, kind, names } of model.conditions) {
    const size = model.inputs[name].shape.slice(1).reduce((a, b) => a * b, 1);
    inputs[name] = new Float32Array(job.numbers.length * size).fill(NONE);
    job.numbers.forEach((number, row) => {
      const drawn = kind === "label" ? sampleLabel(seed, name, number, names.length) : NONE;
      const value = job.conditions[name] ?? drawn;
      inputs[name].set(typeof value === "number" ? [value] : value, row * size);
    });
  }
  return inputs;
}

/** The input of a program for one caption: the vector of its text, and the vectors of its first tokens with padding. */
export function captionInput({ size, tokens }, vector, sequence = new Float32Array()) {
  const values = new Float32Array((1 + tokens) * size).fill(NONE);
  values.set(vector);
  values.set(sequence.subarray(0, tokens * size), size);
  return values;
}

/** The range of a slider over the training data with quantiles: round numbers, and how many decimals they have. */
export function rangeOf(quantiles) {
  const [low, high] = [quantiles[0], quantiles[quantiles.length - 1]];
  const areWhole = quantiles.filter(Number.isInteger).length > quantiles.length / 2; // some lie between two numbers of the data
  const power = high > low ? Math.max(areWhole ? 0 : -Infinity, Math.floor(Math.log10((high - low) / 50))) : 0;
  const decimals = Math.max(0, -power);
  const step = 10 ** power;
  const rounded = (value) => Number(value.toFixed(decimals));
  const [min, max] = [rounded(Math.floor(low / step + 1e-6) * step), rounded(Math.ceil(high / step - 1e-6) * step)];
  const middle = quantiles[Math.floor(quantiles.length / 2)];
  const start = rounded(Math.round(middle / step) * step);
  return { min, max: Math.max(max, min), step: rounded(step), decimals, start };
}

/** The shares of the training data in `bins` equal parts of the range from `min` to `max`: constant between two quantiles. */
export function histogram(quantiles, min, max, bins = BINS) {
  const shares = new Array(bins).fill(0);
  const at = (value) => (max > min ? (bins * (value - min)) / (max - min) : 0);
  for (let i = 0; i + 1 < quantiles.length; i++) {
    const [low, high] = [at(quantiles[i]), at(quantiles[i + 1])];
    const part = 1 / (quantiles.length - 1);
    for (let bin = Math.min(bins - 1, Math.floor(low)); bin < bins && bin <= high; bin++) {
      const covered = high > low ? Math.max(0, Math.min(high, bin + 1) - Math.max(low, bin)) / (high - low) : 1;
      shares[bin] += part * covered;
      if (high === low) break;
    }
  }
  return shares;
}

/** Characters of scripts without spaces between words, as in rectified_flow/text/encoders.py. */
const UNSPACED =
  "\\u0e00-\\u0eff\\u1000-\\u109f\\u1780-\\u17ff\\u3005-\\u3007\\u3040-\\u30ff\\u31f0-\\u31ff\\u3400-\\u4dbf\\u4e00-\\u9fff" +
  "\\uf900-\\ufaff\\uff66-\\uff9f\\u{20000}-\\u{323af}";
const WORD = new RegExp(`(?=[\\p{L}\\p{N}])[${UNSPACED}]|(?:(?![${UNSPACED}])[\\p{L}\\p{N}])+`, "gu");

/** The words of a text in lower case, without punctuation; a character is one in scripts without spaces. */
export const wordsOf = (text) => text.toLowerCase().match(WORD) ?? [];

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
