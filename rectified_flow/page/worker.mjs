// Draws pictures beside the page, so that the page never waits: the newest job replaces the one that is being drawn.

import * as ort from "./ort/ort.wasm.bundle.min.mjs";
import { sample } from "./sampler.mjs";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = { wasm: new URL("./ort/ort-wasm-simd-threaded.wasm", import.meta.url).href };

let newest = 0;
let queue = Promise.resolve();

const ready = load();
ready.then(({ model }) => postMessage({ model }), report);

async function load() {
  const model = await (await fetched("model.json")).json();
  const program = await (await fetched(model.file)).arrayBuffer();
  return { model, session: await ort.InferenceSession.create(program, { executionProviders: ["wasm"] }) };
}

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name} is not in this folder (${answer.status})`);
  return answer;
}

onmessage = ({ data: job }) => {
  newest = job.id;
  queue = queue.then(() => draw(job)).catch(report);
};

async function draw(job) {
  const { model, session } = await ready;
  if (job.id !== newest) return;
  const began = performance.now();
  await sample(model, job, (inputs) => evaluate(model, session, inputs), async (interval, x) => {
    postMessage({ id: job.id, interval, steps: job.steps, x, milliseconds: performance.now() - began });
    await new Promise((resume) => setTimeout(resume)); // for a newer job to come in
    return job.id === newest;
  });
}

async function evaluate(model, session, { x, t, r, labels }) {
  const shape = model.inputs.x.shape.slice(1);
  const rows = x.length / shape.reduce((a, b) => a * b);
  const given = { x: new ort.Tensor("float32", x, [rows, ...shape]) };
  for (const [name, time] of Object.entries({ t, r })) {
    if (name in model.inputs) given[name] = new ort.Tensor("float32", new Float32Array(rows).fill(time), [rows]);
  }
  if ("labels" in model.inputs) given.labels = new ort.Tensor("int64", BigInt64Array.from(labels, BigInt), [rows]);
  const outputs = await session.run(given);
  return outputs[session.outputNames[0]].data;
}

function report(error) {
  postMessage({ error: String(error.message ?? error) });
}
