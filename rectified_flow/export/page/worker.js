// Draws pictures beside the page, so that the page never waits: the newest job replaces the one that is being drawn.

import { programEncoder, wordEncoder } from "./conditions.js";
import { chooseRuntime, openDecoder, openNetwork, openTextEncoder } from "./runtime.js";
import { sample } from "./sampler.js";

let newest = 0;
let queue = Promise.resolve();

const ready = load();
ready.then(({ model }) => postMessage({ model }), report);

async function load() {
  const wanted = new URL(import.meta.url).searchParams.get("backend");
  const model = await (await fetched("model.json")).json();
  const captions = model.conditions.filter(({ kind }) => kind === "caption");
  const texts = captions.find(({ encoder }) => encoder.kind === "program")?.encoder;
  const chosen = await chooseRuntime(wanted);
  const download = (names) => downloaded(names, model.sizes ?? {}); // earlier exports have no sizes
  const extra = [model.decoder?.file, texts?.file].filter(Boolean); // earlier exports have no decoder
  const [binary, program, ...more] = await download([chosen.file, model.file, ...extra]);
  let drawing;
  const call = await openNetwork(model, program, chosen, binary, download, (backend, reason) => {
    drawing = backend;
    postMessage({ backend, reason });
  });
  const decode = model.decoder ? await openDecoder(model, more.shift(), drawing) : (x) => x;
  const run = texts && await openTextEncoder(more.shift(), drawing);
  const tokenizer = texts && await openTokenizer(texts.tokenizer);
  const encodes = (caption) => caption.encoder.kind === "words" ? wordEncoder(caption) : programEncoder(caption, tokenizer, run);
  return { model, call, decode, encoders: captions.map((caption) => [caption.name, encodes(caption)]) };
}

async function openTokenizer(name) {
  const { Tokenizer } = await import("./tokenizers/tokenizers.min.js");
  return new Tokenizer(await (await fetched(name)).json(), {});
}

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name} is not in this folder (${answer.status})`);
  return answer;
}

/** The contents of files, which are loaded at once; `sizes` has their numbers of bytes, which a compressed answer does not tell. */
async function downloaded(names, sizes) {
  const answers = await Promise.all(names.map(fetched));
  const total = names.reduce((sum, name, i) => sum + (sizes[name] ?? Number(answers[i].headers.get("Content-Length"))), 0);
  let received = 0;
  const read = async (answer) => {
    const parts = [];
    for (const reader = answer.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
      parts.push(value);
      received += value.length;
      postMessage({ received, total });
    }
  };
  return Promise.all(answers.map(read));
}

onmessage = ({ data: job }) => {
  newest = job.id;
  queue = queue.then(() => draw(job)).catch(report);
};

async function draw(job) {
  const { model, call, decode, encoders } = await ready;
  if (job.id !== newest || !job.numbers.length) return; // a job of no pictures only ends the one before
  const began = performance.now();
  for (const [name, encode] of encoders) job.conditions[name] = await encode(job.conditions[name]);
  await sample(model, job, call, async (interval, latents) => {
    const x = await decode(interval < job.steps ? firstRow(model, latents) : latents);
    postMessage({ id: job.id, interval, steps: job.steps, x, milliseconds: performance.now() - began });
    await new Promise((resume) => setTimeout(resume)); // for a newer job to come in
    return job.id === newest;
  });
}

/** The first row of latents, for previews, because decoding all rows is slow; all rows of a model without a decoder. */
function firstRow(model, x) {
  return model.decoder ? x.subarray(0, model.inputs.x.shape.slice(1).reduce((a, b) => a * b)) : x;
}

function report(error) {
  postMessage({ error: String(error.message ?? error) });
}
