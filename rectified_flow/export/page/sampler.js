// Sampling as rectified_flow/flows does it: from noise at time 1 to data at time 0, a network call at a time.

import { conditionInputs, noneOf } from "./conditions.js";
import { sampleNoise, slerp } from "./noise.js";

const [RED, GREEN, BLUE] = [0.299, 0.587, 0.114]; // weights in the brightness of a pixel (ITU-R BT.601)

const [SIGMA_MIN, SIGMA_MAX, RHO] = [0.002, 80, 7];

/** `steps + 1` times from `start` down to 0, equal to those of time_grid in rectified_flow/flows/times.py. */
export function timeGrid(kind, steps, start = 1) {
  if (kind !== "edm") return Array.from({ length: steps + 1 }, (_, i) => start * (1 - i / steps));
  const highest = start < 1 ? Math.min(SIGMA_MAX, start / (1 - start)) : SIGMA_MAX;
  const [first, last] = [highest ** (1 / RHO), Math.min(SIGMA_MIN, highest / 2) ** (1 / RHO)];
  return Array.from({ length: steps + 1 }, (_, i) => {
    const sigma = (first + (i / steps) * (last - first)) ** RHO;
    return i === 0 ? start : i === steps ? 0 : sigma / (1 + sigma);
  });
}

/**
 * Where the sampling of a job starts, and the conditions of the network: {x, noise, conditions}.
 *
 * A job is {numbers, from, to, mix, conditions, steps, guidance, picture, level, unknown}: the noise lies at `mix` of the way
 * from that of the seed `from` to that of `to`. `conditions` are those of conditionInputs. `picture` is null, or values in
 * [-1, 1]: the source of a model that has sources; other models start from it, with noise up to `level`. `unknown` is null, or
 * has a 1 for each pixel that is to be generated, and a 0 for each that is kept; the level is then 1.
 */
export function begin(model, job) {
  const size = model.inputs.x.shape.slice(1).reduce((a, b) => a * b);
  const rows = job.numbers.length;
  const noise = new Float32Array(rows * size);
  job.numbers.forEach((number, row) => {
    const one = job.mix === 0 || job.from === job.to
      ? sampleNoise(job.from, number, size)
      : slerp(sampleNoise(job.from, number, size), sampleNoise(job.to, number, size), job.mix);
    noise.set(one, row * size);
  });
  const conditions = conditionInputs(model, job);
  if (model.source?.as === "condition") Object.assign(conditions, sourceInputs(model, job, rows));
  return { x: noise.map(startOf(model, job, size)), noise, conditions };
}

/** The source of each row: its pixels, 0 where they are unknown, and the map of the unknown ones. Without one, all are. */
function sourceInputs(model, { picture, unknown }, rows) {
  const [channels, height, width] = model.inputs.x.shape.slice(1);
  const [size, area] = [channels * height * width, height * width];
  const isUnknown = (i) => (picture ? unknown?.[i % area] ?? 0 : 1);
  return {
    source: new Float32Array(rows * size).map((_, i) => (isUnknown(i) ? 0 : picture[i % size])),
    unknown: new Float32Array(rows * area).map((_, i) => isUnknown(i)),
  };
}

/** The function from (noise, place) to the value that sampling starts from, as Flow.draw_start has it. */
function startOf(model, { picture, level, unknown }, size) {
  if (!picture || model.source?.as === "condition") return (value) => value;
  if (!model.source) return unknown ? (value) => value : (value, i) => picture[i % size] + level * (value - picture[i % size]);
  const { noise } = model.source;
  return (value, i) => (unknown?.[i % unknown.length] ? value : picture[i % size] + noise * value);
}

/**
 * The function that puts the known pixels back into `x` at time `t`, with the noise of the start.
 *
 * Without a source they are put on their path after each interval, as Flow.inpainting does. A model with a source has seen them,
 * and gets them back at the end, as in sample.py.
 */
export function inpainting(model, { picture, unknown }, noise) {
  if (!picture || !unknown) return (x) => x;
  const [size, area] = [picture.length, unknown.length];
  return (x, t) => model.source && t > 0
    ? x
    : x.map((value, i) => (unknown[i % area] ? value : picture[i % size] + t * (noise[i] - picture[i % size])));
}

/**
 * Sample, calling `watch(interval, x)` at the start and after each interval, until it returns false.
 *
 * `call(inputs)` evaluates the network: {x, t, r, ...conditions}, of which t and r are single times.
 */
export async function sample(model, job, call, watch) {
  let { x, noise, conditions } = begin(model, job);
  const varied = job.picture && !job.unknown && !model.source;
  const times = timeGrid(model.time_grid, job.steps, varied ? job.level : 1);
  const step = model.kind === "map" ? mapStep(call) : adamsBashforth(guided(model, job, call));
  const keep = inpainting(model, job, noise);
  if ((await watch(0, x)) === false) return null;
  for (let i = 0; i < job.steps; i++) {
    x = keep(await step(x, times[i], times[i + 1], conditions), times[i + 1]);
    if ((await watch(i + 1, x)) === false) return null;
  }
  return x;
}

const added = (x, factor, v) => x.map((value, i) => value + factor * v[i]);

const mapStep = (call) => async (x, t, r, conditions) => added(x, r - t, await call({ x, t, r, ...conditions }));

/** Second-order Adams-Bashforth steps, with an Euler step first, like the solver `ab2`. */
function adamsBashforth(velocity) {
  let before = null;
  return async (x, t, next, conditions) => {
    const v = await velocity({ x, t, ...conditions });
    const last = before ?? { t: Infinity, v };
    before = { t, v };
    const ratio = (next - t) / (t - last.t) / 2;
    return added(x, next - t, v.map((value, i) => value + ratio * (value - last.v[i])));
  };
}

/** The velocity under classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598), in one call on twice the rows. */
function guided(model, job, call) {
  if (job.guidance === 1 || !isGuidable(model)) return call;
  return async ({ x, t, ...conditions }) => {
    const both = { x: joined(x, x), t };
    for (const [name, values] of Object.entries(conditions)) {
      both[name] = joined(values, new Float32Array(values.length).fill(noneOf(model, name)));
    }
    const v = await call(both);
    const unconditional = v.subarray(x.length);
    return x.map((_, i) => unconditional[i] + job.guidance * (v[i] - unconditional[i]));
  };
}

/** Whether the network has a condition that guidance can use. */
export const isGuidable = (model) => model.conditions.length > 0 || model.source?.as === "condition";

function joined(a, b) {
  const both = new Float32Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

/** A picture in [-1, 1] as the source of a model: degraded where a second degradation changes nothing. */
export function degraded(model, x) {
  const { kind, factor } = model.source?.degradation ?? {};
  const [channels, height, width] = model.inputs.x.shape.slice(1);
  if (kind === "Downsample") return blockMeans(x, factor, [channels, height, width]);
  if (kind !== "Grey" || channels < 3) return x;
  const area = height * width;
  return x.map((_, i) => RED * x[i % area] + GREEN * x[area + (i % area)] + BLUE * x[2 * area + (i % area)]);
}

function blockMeans(x, factor, [channels, height, width]) {
  const means = new Float32Array(x.length);
  for (let channel = 0; channel < channels; channel++) {
    for (let top = 0; top < height; top += factor) {
      for (let left = 0; left < width; left += factor) {
        const block = [];
        for (let row = top; row < Math.min(top + factor, height); row++) {
          for (let column = left; column < Math.min(left + factor, width); column++) block.push((channel * height + row) * width + column);
        }
        const mean = block.reduce((sum, place) => sum + x[place], 0) / block.length;
        for (const place of block) means[place] = mean;
      }
    }
  }
  return means;
}

/** Set the pixels of `unknown` within `radius` of the way from one point to another, [x, y] in pixels, to 1. */
export function stroke(unknown, [width, height], from, to, radius) {
  const way = [to[0] - from[0], to[1] - from[1]];
  const square = way[0] ** 2 + way[1] ** 2;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const point = [x + 0.5 - from[0], y + 0.5 - from[1]]; // of the middle of a pixel
      const along = square ? Math.min(1, Math.max(0, (point[0] * way[0] + point[1] * way[1]) / square)) : 0;
      if (Math.hypot(point[0] - along * way[0], point[1] - along * way[1]) <= radius) unknown[y * width + x] = 1;
    }
  }
}

const OUTSIDE = 0.02; // of a range from -1 to 1, by which a value is outside of it before it is marked
const [BELOW, ABOVE] = [[0, 160, 255], [255, 0, 0]];

/** Pixels RGBA of row `row` of `x`, [c, h, w] in [-1, 1]; a single channel is grey, or in the colours of `fields`. */
export function pixels(x, row, [channels, height, width], fields = null) {
  const area = height * width;
  const rgba = new Uint8ClampedArray(4 * area).fill(255);
  const shown = fields?.shown ?? (channels === 1 ? [0] : [0, 1, 2]);
  if (fields?.colours) {
    const plane = (row * channels + shown[0]) * area;
    for (let i = 0; i < area; i++) {
      const value = x[plane + i];
      const level = Math.round(Math.min(1, Math.max(0, (value + 1) / 2)) * (fields.colours.length - 1));
      const colour = value < -1 - OUTSIDE ? BELOW : value > 1 + OUTSIDE ? ABOVE : fields.colours[level];
      rgba.set(colour, 4 * i);
    }
    return rgba;
  }
  for (let channel = 0; channel < 3; channel++) {
    const plane = (row * channels + (shown[channel] ?? shown[0])) * area;
    for (let i = 0; i < area; i++) rgba[4 * i + channel] = 127.5 * (x[plane + i] + 1); // it clamps and rounds
  }
  return rgba;
}

/** Pixels RGBA as `picture` of a job. */
export function fromPixels(rgba, channels) {
  const area = rgba.length / 4;
  const x = new Float32Array(channels * area);
  for (let i = 0; i < area; i++) {
    const rgb = rgba.subarray(4 * i, 4 * i + 3);
    if (channels === 1) x[i] = (RED * rgb[0] + GREEN * rgb[1] + BLUE * rgb[2]) / 127.5 - 1;
    else for (let channel = 0; channel < 3; channel++) x[channel * area + i] = rgb[channel] / 127.5 - 1;
  }
  return x;
}
