// Draws pictures beside the page, so that the page never waits: the newest job replaces the one that is being drawn.

import { openNetwork } from "./runtime.mjs";
import { sample } from "./sampler.mjs";

let newest = 0;
let queue = Promise.resolve();

const ready = load();
ready.then(({ model }) => postMessage({ model }), report);

async function load() {
  const wanted = new URL(import.meta.url).searchParams.get("backend");
  const model = await (await fetched("model.json")).json();
  const program = await download(await fetched(model.file));
  postMessage({ progress: "Starting the model …" });
  const call = await openNetwork(model, program, wanted, (backend, reason) => postMessage({ backend, reason }));
  return { model, call };
}

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name} is not in this folder (${answer.status})`);
  return answer;
}

async function download(answer) {
  const total = Number(answer.headers.get("Content-Length"));
  const parts = [];
  let received = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    parts.push(value);
    received += value.length;
    const share = total >= received ? ` ${Math.floor((100 * received) / total)}%` : ""; // of what the host has compressed
    postMessage({ progress: `Loading the model …${share}` });
  }
}

onmessage = ({ data: job }) => {
  newest = job.id;
  queue = queue.then(() => draw(job)).catch(report);
};

async function draw(job) {
  const { model, call } = await ready;
  if (job.id !== newest || !job.numbers.length) return; // a job of no pictures only ends the one before
  const began = performance.now();
  await sample(model, job, call, async (interval, x) => {
    postMessage({ id: job.id, interval, steps: job.steps, x, milliseconds: performance.now() - began });
    await new Promise((resume) => setTimeout(resume)); // for a newer job to come in
    return job.id === newest;
  });
}

function report(error) {
  postMessage({ error: String(error.message ?? error) });
}
