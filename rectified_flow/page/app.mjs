// The page: controls make a job, the worker draws it, and its pictures are shown as they come.

import { fromPixels, pixels } from "./sampler.mjs";

const GRID = 16;
const STOPS = 9;
const MOST_STEPS = { map: 8, rectified: 32 };
const LARGEST_SEED = 2 ** 32 - 1;
const at = (id) => document.getElementById(id);
const worker = new Worker(workerSource(), { type: "module" });

let model = null;
let shape = null; // [channels, height, width]
let newest = 0;
let latest = 0; // the job whose pictures are shown
let start = null; // a picture in [-1, 1], or null
const held = { a: null, b: null };
let shown = null; // the last finished x
let revealing = false; // whether the big pictures are painted on their way, too: of sliders only the ends are

worker.onerror = (event) => fail(event.message || "The browser could not start the model.");
worker.onmessage = ({ data }) => {
  if (data.error) fail(data.error);
  else if (data.progress) say(data.progress);
  else if (data.backend) nameBackend(data);
  else if (data.model) begin(data.model);
  else if (data.id === newest || (data.id > latest && data.interval === data.steps)) show(data);
};

/** A worker that starts from a blob has this page's Content-Security-Policy; one that starts from a file has none. */
function workerSource() {
  const file = new URL(`worker.mjs${location.search}`, import.meta.url).href;
  return URL.createObjectURL(new Blob([`import ${JSON.stringify(file)};`], { type: "text/javascript" }));
}

function nameBackend({ backend, reason }) {
  const card = backend === "webgpu";
  document.body.dataset.backend = backend;
  at("backend").textContent = card ? "Drawn by the graphics card (WebGPU)." : `Drawn by the processor (WASM): ${reason}.`;
  at("other").textContent = card ? "Draw by the processor" : "Try the graphics card";
  at("other").href = card ? "?backend=wasm" : "?";
  at("other").hidden = !card && !location.search;
}

function begin(description) {
  model = description;
  shape = model.inputs.x.shape.slice(1);
  const map = model.kind === "map";
  const side = `${shape[2]} × ${shape[1]} pixels`;
  const classes = model.classes.length ? `, ${model.classes.length} classes` : "";
  const way = `${map ? "flow map" : "rectified flow"}, from noise to picture in ${model.steps === 1 ? "one step" : `${model.steps} steps`}`;
  at("about").textContent = `A ${way}: ${side}${classes}.`;
  at("class").replaceChildren(new Option("drawn by the seed", ""), ...model.classes.map((name, i) => new Option(name, i)));
  at("class-row").hidden = !model.classes.length;
  at("guidance-row").hidden = map || !model.classes.length;
  at("walk-row").hidden = !map;
  at("way").hidden = map;
  at("steps").max = Math.max(model.steps, MOST_STEPS[model.kind]);
  at("steps").value = model.steps;
  at("pictures").className = map ? "grid" : "";
  at("pictures").replaceChildren(...Array.from({ length: map ? GRID : 1 }, (_, i) => canvas(`Picture ${i}`)));
  at("strip").replaceChildren(...Array.from({ length: STOPS }, () => canvas("On the way")));
  for (const each of document.querySelectorAll("form canvas")) fit(each);
  draw(true);
}

function canvas(label) {
  const made = document.createElement("canvas");
  made.role = "img";
  made.ariaLabel = label;
  return fit(made);
}

function fit(element) {
  [element.height, element.width] = shape.slice(1);
  element.style.aspectRatio = `${shape[2]} / ${shape[1]}`;
  return element;
}

function paint(element, x, row) {
  element.getContext("2d").putImageData(new ImageData(pixels(x, row, shape), shape[2], shape[1]), 0, 0);
}

const seed = () => Math.min(LARGEST_SEED, Math.max(0, Math.floor(Number(at("seed").value) || 0)));

/** The seeds between which the noise lies, and where. */
function place() {
  if (!at("mix").disabled && held.mixing) return { from: held.a, to: held.b, mix: Number(at("mix").value) };
  const walked = Number(at("walk").value);
  const from = Math.min(LARGEST_SEED, seed() + Math.floor(walked));
  return { from, to: Math.min(LARGEST_SEED, from + 1), mix: walked % 1 };
}

function draw(reveal = false) {
  revealing = reveal;
  for (const name of ["steps", "guidance", "level"]) at(`${name}-value`).textContent = at(name).value;
  at("walk-value").textContent = (seed() + Number(at("walk").value)).toFixed(2);
  if (!model) return;
  document.body.dataset.drawn = "";
  const map = model.kind === "map";
  newest += 1;
  worker.postMessage({
    id: newest,
    numbers: Array.from({ length: map ? GRID : 1 }, (_, i) => i),
    ...place(),
    label: at("class").value === "" ? null : Number(at("class").value),
    steps: Number(at("steps").value),
    guidance: map ? 1 : Number(at("guidance").value),
    start,
    level: Number(at("level").value),
  });
}

function show({ id, interval, steps, x, milliseconds }) {
  const finished = interval === steps;
  const pictures = [...at("pictures").children];
  if (finished || revealing) pictures.forEach((element, row) => paint(element, x, row));
  if (interval || revealing) at("progress").value = interval / steps;
  [...at("strip").children].forEach((element, stop) => {
    if (Math.round((stop * steps) / (STOPS - 1)) === interval) paint(element, x, 0);
  });
  const count = pictures.length > 1 ? `${pictures.length} pictures` : "Drawn";
  if (!finished && interval) say(`Step ${interval} of ${steps}`);
  if (!finished) return;
  say(`${count} in ${(milliseconds / 1000).toFixed(2)} s`);
  [shown, latest] = [x, id];
  document.body.dataset.seconds = milliseconds / 1000;
  document.body.dataset.drawn = id === newest ? id : "";
}

function say(text) {
  at("status").className = "";
  at("status").textContent = text;
}

function fail(message) {
  at("status").className = "failed";
  at("status").textContent = message;
}

function go(to, reveal = false) {
  at("seed").value = Math.min(LARGEST_SEED, Math.max(0, to));
  at("walk").value = 0;
  held.mixing = false;
  draw(reveal);
}

const renew = () => go(crypto.getRandomValues(new Uint32Array(1))[0] % 1_000_000, true);

function hold(name) {
  if (!shown) return;
  const { from, to, mix } = place();
  held[name] = mix > 0.5 ? to : from;
  paint(at(`hold-${name}`).querySelector("canvas"), shown, 0);
  at(`hold-${name}`).querySelector("span").textContent = `${name.toUpperCase()}: ${held[name]}`;
  at("mix").disabled = held.a === null || held.b === null;
}

async function startFrom(file) {
  try {
    const picture = await createImageBitmap(file);
    const side = Math.min(picture.width / shape[2], picture.height / shape[1]);
    const [width, height] = [side * shape[2], side * shape[1]];
    const surface = new OffscreenCanvas(shape[2], shape[1]).getContext("2d");
    surface.imageSmoothingQuality = "high";
    surface.fillStyle = "white"; // behind what is transparent, as in sample.py
    surface.fillRect(0, 0, shape[2], shape[1]);
    const [left, top] = [(picture.width - width) / 2, (picture.height - height) / 2];
    surface.drawImage(picture, left, top, width, height, 0, 0, shape[2], shape[1]);
    const given = surface.getImageData(0, 0, shape[2], shape[1]);
    at("given").getContext("2d").putImageData(given, 0, 0);
    start = fromPixels(given.data, shape[0]);
  } catch {
    return fail(`${file.name} is not a picture that this browser can read. Choose a PNG, JPEG or WebP file.`);
  }
  showStart();
}

function forget() {
  start = null;
  at("file").value = "";
  showStart();
}

function showStart() {
  for (const name of ["given", "level-row", "forget"]) at(name).hidden = !start;
  draw();
}

at("controls").onsubmit = (event) => event.preventDefault();
for (const id of ["class", "steps", "guidance", "level"]) at(id).oninput = () => draw();
at("seed").oninput = () => go(seed());
at("walk").oninput = () => { held.mixing = false; draw(); };
at("mix").oninput = () => { held.mixing = true; draw(); };
at("new").onclick = renew;
at("hold-a").onclick = () => hold("a");
at("hold-b").onclick = () => hold("b");
at("forget").onclick = forget;
at("file").onchange = () => at("file").files.length && startFrom(at("file").files[0]);

const KEYS = {
  n: renew,
  a: () => hold("a"),
  b: () => hold("b"),
  ArrowLeft: () => go(seed() - 1),
  ArrowRight: () => go(seed() + 1),
  Escape: forget,
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const action = model && KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
addEventListener("dragleave", () => document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  if (!model) return;
  if (event.dataTransfer.files.length) startFrom(event.dataTransfer.files[0]);
  else fail("What was dropped is not a file. Choose a PNG, JPEG or WebP file.");
});
