// Sampling as rectified_flow/flows does it: from noise at time 1 to data at time 0, a network call at a time.

import { sampleLabel, sampleNoise, slerp } from "./noise.mjs";

/** `steps + 1` times from `start` down to 0. */
export const timeGrid = (steps, start = 1) => Array.from({ length: steps + 1 }, (_, i) => start * (1 - i / steps));

/**
 * Where the sampling of a job starts: noise of each number, and its label.
 *
 * A job is {numbers, from, to, mix, label, steps, guidance, start, level}: the noise lies at `mix` of the way from that
 * of the seed `from` to that of `to`. A label of null is drawn as sample.py draws it. `start`, if not null, is a picture in
 * [-1, 1], taken to the noise level `level` first.
 */
export function begin(model, job) {
  const size = model.inputs.x.shape.slice(1).reduce((a, b) => a * b);
  const x = new Float32Array(job.numbers.length * size);
  job.numbers.forEach((number, row) => {
    const noise = job.mix === 0 || job.from === job.to
      ? sampleNoise(job.from, number, size)
      : slerp(sampleNoise(job.from, number, size), sampleNoise(job.to, number, size), job.mix);
    const { start, level } = job;
    x.set(start ? noise.map((value, i) => start[i] + level * (value - start[i])) : noise, row * size);
  });
  const classes = model.classes.length;
  const labels = classes
    ? job.numbers.map((number) => job.label ?? sampleLabel(job.mix > 0.5 ? job.to : job.from, number, classes))
    : null;
  return { x, labels };
}

/**
 * Sample, calling `watch(interval, x)` at the start and after each interval, until it returns false.
 *
 * `call(inputs)` evaluates the network: {x, t, r, labels}, of which t and r are single times.
 */
export async function sample(model, job, call, watch) {
  let { x, labels } = begin(model, job);
  const times = timeGrid(job.steps, job.start ? job.level : 1);
  const step = model.kind === "map" ? mapStep : midpointStep;
  const field = model.kind === "map" ? call : guided(model, job, call);
  if ((await watch(0, x)) === false) return null;
  for (let i = 0; i < job.steps; i++) {
    x = await step(field, x, times[i], times[i + 1], labels);
    if ((await watch(i + 1, x)) === false) return null;
  }
  return x;
}

const added = (x, factor, v) => x.map((value, i) => value + factor * v[i]);

async function mapStep(call, x, t, r, labels) {
  return added(x, r - t, await call({ x, t, r, labels }));
}

async function midpointStep(field, x, t, next, labels) {
  const dt = next - t;
  const middle = added(x, dt / 2, await field({ x, t, labels }));
  return added(x, dt, await field({ x: middle, t: t + dt / 2, labels }));
}

/** The velocity under classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598), in one call on twice the rows. */
function guided(model, job, call) {
  if (job.guidance === 1 || !model.classes.length) return call;
  return async ({ x, t, labels }) => {
    const both = new Float32Array(2 * x.length);
    both.set(x);
    both.set(x, x.length);
    const none = labels.map(() => model.no_label);
    const v = await call({ x: both, t, labels: [...labels, ...none] });
    const unconditional = v.subarray(x.length);
    return x.map((_, i) => unconditional[i] + job.guidance * (v[i] - unconditional[i]));
  };
}

/** Pixels RGBA of row `row` of `x`, [c, h, w] in [-1, 1]; a single channel is grey. */
export function pixels(x, row, [channels, height, width]) {
  const area = height * width;
  const rgba = new Uint8ClampedArray(4 * area).fill(255);
  for (let channel = 0; channel < 3; channel++) {
    const plane = (row * channels + (channels === 1 ? 0 : channel)) * area;
    for (let i = 0; i < area; i++) rgba[4 * i + channel] = 127.5 * (x[plane + i] + 1); // it clamps and rounds
  }
  return rgba;
}

/** Pixels RGBA as `start` of a job. */
export function fromPixels(rgba, channels) {
  const area = rgba.length / 4;
  const x = new Float32Array(channels * area);
  for (let i = 0; i < area; i++) {
    const rgb = rgba.subarray(4 * i, 4 * i + 3);
    if (channels === 1) x[i] = (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) / 127.5 - 1;
    else for (let channel = 0; channel < 3; channel++) x[channel * area + i] = rgb[channel] / 127.5 - 1;
  }
  return x;
}
