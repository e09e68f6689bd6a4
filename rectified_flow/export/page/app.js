// The page: controls make a job, the worker draws it, and its pictures are shown as they come.

import { showAbout } from "./about.js";
import { makeControls } from "./controls.js";
import { provenanceOf, withMetadata } from "./metadata.js";
import { Comparison, joined, paint, readPicture } from "./picture.js";
import { degraded, fromPixels, isGuidable } from "./sampler.js";

const GRID = 16;
const STOPS = 9;
const MOST_STEPS = { map: 8, rectified: 32 };
const TASKS = {
  Downsample: ["Details for small pictures", "Your picture is reduced to a low resolution, and the model adds the details."],
  Grey: ["Colours for a greyscale picture", "Your picture is converted to greyscale, and the model colours it."],
  Blur: ["Sharp pictures from blurred ones", "The model sharpens a blurred picture."],
  Mask: ["Paint over a picture", "Then paint over a part of it, and the model generates this part."],
  Edges: ["Pictures from drawings", "The model turns a drawing, dark lines on white, into a picture."],
};
const LARGE = 4; // pixels of a large download for each pixel, along a side
const OTHER_TASK = ["Image translation", "The model translates your picture."];
const LARGEST_SEED = 2 ** 32 - 1;
const QUIET = 1000; // delay [ms] before screen readers announce a message, since sliders change it often
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const at = (id) => document.getElementById(id);
const worker = new Worker(workerSource(), { type: "module" });

let begun; // to be called when there is a model
const beginning = new Promise((resolve) => { begun = resolve; });
let model = null;
let conditions = null; // the controls of the conditions
let shape = null; // [channels, height, width]
let newest = 0;
let latest = 0; // the job whose pictures are shown; of older ones nothing is shown any more
let taken = 0; // the newest of the given files
let comparison = null; // has the visitor's picture, if there is one
let chosen = 0; // the result that is compared with the picture
const held = { a: null, b: null };
let shown = null; // the last finished x
let saying = 0; // a timer
let revealing = false; // whether the big pictures are painted on their way, too: of sliders only the ends are

worker.onerror = (event) => fail(event.message || "The browser could not start the model.");
worker.onmessage = ({ data }) => {
  if (data.error) fail(data.error);
  else if (data.received) showLoading(data);
  else if (data.backend) nameBackend(data);
  else if (data.model) begin(data.model);
  else if (data.id === newest || (data.id > latest && data.interval === data.steps)) show(data);
};

function showLoading({ received, total }) {
  const megabytes = (bytes) => (bytes / 1e6).toFixed(1);
  at("loading").hidden = false;
  at("loaded").max = Math.max(total, received);
  at("loaded").value = received;
  at("loaded-size").textContent = `${megabytes(received)} of ${megabytes(at("loaded").max)} MB`;
  if (!at("said").textContent) at("said").textContent = "Loading the model";
  tell(received < total ? "" : "Starting the model …");
}

/** A worker that starts from a blob has this page's Content-Security-Policy; one that starts from a file has none. */
function workerSource() {
  const file = new URL(`worker.js${location.search}`, import.meta.url).href;
  return URL.createObjectURL(new Blob([`import ${JSON.stringify(file)};`], { type: "text/javascript" }));
}

function nameBackend({ backend, reason }) {
  const card = backend === "webgpu";
  at("loading").hidden = true;
  document.body.dataset.backend = backend;
  at("backend").textContent = card ? "Drawn by the graphics card (WebGPU)." : `Drawn by the processor (WASM): ${reason}.`;
  at("other").textContent = card ? "Draw by the processor" : "Try the graphics card";
  at("other").href = card ? "?backend=wasm" : "?";
  at("other").hidden = !card && !location.search;
  navigator.serviceWorker?.register(`offline.js?backend=${backend}`).catch(() => {}); // without it, the page needs a network
}

function begin(description) {
  model = description;
  shape = model.decoder?.shape ?? model.inputs.x.shape.slice(1);
  const map = model.kind === "map";
  showAbout(model);
  conditions = makeControls(model.conditions, at("texts"), at("conditions"), () => draw());
  at("conditions").hidden = !at("conditions").children.length;
  if (at("texts").children.length) document.title = at("title").textContent = "Pictures from a text";
  at("guidance-row").hidden = map || !isGuidable(model);
  for (const name of ["seed-row", "seeds", "seed-keys"]) at(name).hidden = !isRandom() && !drawsLabels();
  at("walk-row").hidden = !map || at("seed-row").hidden;
  at("way").hidden = map;
  at("drop").hidden = !takesPicture();
  at("steps").max = Math.max(model.steps, MOST_STEPS[model.kind]);
  at("steps").value = model.steps;
  at("guidance").value = model.guidance ?? 1; // earlier exports have no default
  at("strip").replaceChildren(...Array.from({ length: STOPS }, () => canvas("On the way")));
  for (const each of document.querySelectorAll("form canvas, .frame canvas")) fit(each);
  for (const frame of document.querySelectorAll(".frame")) frame.style.aspectRatio = `${shape[2]} / ${shape[1]}`;
  if (model.source) beginWithSource();
  comparison = new Comparison(shape, !model.source || isMask(), supersede, arrange);
  restore();
  arrange(true);
  begun();
}

function beginWithSource() {
  const [title, hint] = TASKS[isMask() ? "Mask" : model.source.degradation?.kind] ?? OTHER_TASK;
  document.title = at("title").textContent = title;
  at("call-hint").textContent = hint;
  at("way-title").textContent = model.source.as === "start" ? "The way from the picture" : "The way from noise";
  at("drop-title").textContent = "Your picture";
  const focused = document.activeElement;
  at("controls").prepend(at("drop"));
  refocus(focused);
}

/** Whether the source is a picture with a part painted over; earlier exports do not say so for masks of other names. */
const isMask = () => model.source?.paints ?? model.source?.degradation?.kind === "Mask";

/** Whether labels are drawn by the seed. */
const drawsLabels = () => model.conditions.some(({ kind }) => kind === "label");

/** Whether results differ between seeds. */
const isRandom = () => !model.source || model.source.as === "condition" || model.source.noise > 0 || isMask();

/** Whether the visitor has to do something before there is anything to draw. */
const isWaiting = () => Boolean(model.source) && (!comparison.picture || (isMask() && !comparison.unknown));

/** Show the controls of the current state: no picture, a given picture, or a painted mask. */
function arrange(reveal = false) {
  const { picture, unknown, canPaint } = comparison;
  const calling = Boolean(model.source && !picture);
  const focused = document.activeElement;
  document.body.classList.toggle("calling", calling);
  document.body.classList.toggle("waiting", isWaiting());
  document.body.classList.toggle("comparing", Boolean(picture));
  at("call").hidden = !calling;
  at("texts").hidden = calling || !at("texts").children.length;
  at("controls").hidden = calling;
  const place = at(calling ? "call-choice" : "drop-choice");
  if (at("choice").parentElement !== place) place.append(at("choice"));
  at("choose").textContent = picture ? "Another picture" : calling ? "Choose a picture" : "Choose or drop a picture";
  for (const name of ["views", "forget"]) at(name).hidden = !picture;
  for (const name of ["level-row", "level-hint"]) at(name).hidden = Boolean(!picture || unknown || model.source);
  at("brush-row").hidden = !picture || !canPaint;
  at("clear").disabled = !unknown;
  at("link").hidden = Boolean(picture); // a link cannot contain the picture
  const count = model.kind === "map" && isRandom() ? GRID : 1;
  const kind = count === 1 ? "single" : picture ? "variants" : "grid";
  at("pictures").hidden = calling || Boolean(picture && count === 1);
  if (at("pictures").className !== kind) {
    at("pictures").className = kind;
    const make = kind === "variants" ? variant : (i) => canvas(`Picture ${i}`);
    at("pictures").replaceChildren(...Array.from({ length: count }, (_, i) => make(i)));
    choose(0);
  }
  refocus(focused);
  supersede();
  draw(reveal);
}

/** Give the focus back to what was moved; what was hidden or disabled passes it on. */
function refocus(focused) {
  const usable = (each) => each.offsetParent && !each.disabled;
  if (focused !== document.body) [focused, at("brush"), at("file")].find(usable).focus({ preventScroll: true });
}

/** Show no result of the jobs so far: they are of another picture, or of another part of it. */
function supersede() {
  latest = ++newest;
  document.body.dataset.drawn = "";
}

/** A button that compares result `i` with the picture. */
function variant(i) {
  const button = document.createElement("button");
  button.type = "button";
  button.ariaLabel = `Compare result ${i}`;
  button.append(canvas(`Result ${i}`));
  button.onclick = () => {
    choose(i);
    if (document.body.dataset.drawn) comparison.showResult(shown, i);
  };
  return button;
}

function choose(i) {
  chosen = i;
  at("pictures").querySelectorAll("button").forEach((button, other) => { button.ariaPressed = other === i; });
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

/** The nearest seed to a number or its text; 0 for other texts. */
const inRange = (number) => Math.min(LARGEST_SEED, Math.max(0, Math.floor(Number(number) || 0)));

const seed = () => inRange(at("seed").value);

/** The seeds between which the noise lies, and where. */
function place() {
  if (!at("mix").disabled && held.mixing) return { from: held.a, to: held.b, mix: Number(at("mix").value) };
  const walked = Number(at("walk").value);
  const from = Math.min(LARGEST_SEED, seed() + Math.floor(walked));
  return { from, to: Math.min(LARGEST_SEED, from + 1), mix: walked % 1 };
}

function draw(reveal = false) {
  revealing = reveal && !STILL.matches;
  for (const name of ["steps", "guidance", "level", "brush"]) at(`${name}-value`).textContent = at(name).value;
  at("walk-value").textContent = (seed() + Number(at("walk").value)).toFixed(2);
  if (!model) return;
  document.body.dataset.drawn = "";
  newest += 1;
  const waiting = isWaiting();
  if (waiting) say("The model is ready.");
  worker.postMessage({ id: newest, numbers: waiting ? [] : [...at("pictures").children].map((_, i) => i), ...settingsNow() });
}

function settingsNow() {
  return {
    ...place(),
    conditions: conditions.values(),
    steps: Number(at("steps").value),
    guidance: model.kind === "map" ? 1 : Number(at("guidance").value),
    picture: comparison.picture,
    unknown: comparison.unknown,
    level: Number(at("level").value),
  };
}

function show({ id, interval, steps, x, milliseconds }) {
  const finished = interval === steps;
  const pictures = at("pictures").querySelectorAll("canvas");
  if (finished || (revealing && !model.decoder)) {
    pictures.forEach((element, row) => paint(element, x, row, shape, model.fields));
    if (comparison.picture) comparison.showResult(x, chosen);
  }
  if (interval || revealing) at("progress").value = interval / steps;
  [...at("strip").children].forEach((element, stop) => {
    if (Math.round((stop * steps) / (STOPS - 1)) === interval) paint(element, x, 0, shape, model.fields);
  });
  const count = pictures.length > 1 ? `${pictures.length} pictures` : "Drawn";
  if (!finished && interval) tell(`Step ${interval} of ${steps}`);
  if (!finished) return;
  say(`${count} in ${(milliseconds / 1000).toFixed(2)} s`);
  at("keep").hidden = false;
  [shown, latest] = [x, id];
  document.body.dataset.seconds = milliseconds / 1000;
  document.body.dataset.drawn = id === newest ? id : "";
}

/** Show a text, which screen readers do not say. */
function tell(text, state = "") {
  at("status").className = state;
  at("status").textContent = text;
  clearTimeout(saying);
}

/** Show a text, and announce it to screen readers unless another text follows within QUIET. */
function say(text, state = "") {
  tell(text, state);
  saying = setTimeout(() => { at("said").textContent = text; }, QUIET);
}

function fail(message) {
  at("loading").hidden = true;
  say(message, "failed");
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
  paint(at(`hold-${name}`).querySelector("canvas"), shown, chosen, shape, model.fields);
  setHeld(name, mix > 0.5 ? to : from);
}

function setHeld(name, number) {
  held[name] = number;
  at(`hold-${name}`).querySelector("span").textContent = `${name.toUpperCase()}: ${number}`;
  at("mix").disabled = held.a === null || held.b === null;
}

/** Save the shown pictures as one file: the compared result, or all in their grid. */
async function download(scale) {
  if (!document.body.dataset.drawn) return say("The picture is not finished yet.");
  const { from, to, mix, ...settings } = settingsNow();
  const pictures = comparison.picture ? [at("after")] : [...at("pictures").querySelectorAll("canvas")];
  const number = pictures.length > 1 || mix ? null : 0;
  let file = await joined(pictures, shape, scale);
  if (model.metadata) file = withMetadata(file, model.metadata, provenanceOf(model, { from, number, ...settings }));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `seed-${from}${mix ? `-to-${to}-at-${mix}` : ""}${scale > 1 ? `-${scale}x` : ""}.png`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Write the settings of the pictures into the address, and copy it. */
async function copyLink() {
  const settings = { seed: seed(), ...conditions.settings() };
  for (const id of ["steps", "guidance", "walk"]) settings[id] = at(id).value;
  if (held.mixing) Object.assign(settings, { a: held.a, b: held.b, mix: at("mix").value });
  history.replaceState(null, "", `#${new URLSearchParams(settings)}`);
  const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  say(copied ? "Link copied." : "The link could not be copied: copy it from the address bar.");
}

/** Apply the settings in the address. Missing settings keep their values; controls ignore invalid values. */
function restore() {
  const settings = new URLSearchParams(location.hash.slice(1));
  for (const id of ["seed", "steps", "guidance", "walk"]) if (settings.has(id)) at(id).value = settings.get(id);
  held.mixing = ["a", "b", "mix"].every((name) => settings.has(name));
  if (held.mixing) {
    for (const name of ["a", "b"]) setHeld(name, inRange(settings.get(name)));
    at("mix").value = settings.get("mix");
  }
  conditions.restore(settings);
}

/** Whether the page can encode a picture for the model, which it cannot for latents and for measurements. */
const takesPicture = () => !model.decoder && !model.fields;

/** Give the picture in a file, once there is a model, unless another one is given or removed in the meantime. */
async function take(file) {
  const mine = ++taken;
  await beginning;
  if (!takesPicture()) return fail("This model generates pictures from noise alone.");
  const rgba = await readPicture(file, shape, model.framing).catch(() => null);
  if (mine !== taken) return;
  if (rgba) give(degraded(model, fromPixels(rgba, shape[0])));
  else fail(`${file.name} is not a picture that this browser can read, or is too large. Choose a PNG, JPEG or WebP file.`);
}

function give(picture) {
  shown = null;
  comparison.give(picture);
  arrange(true);
}

function clear() {
  comparison.clear();
  arrange();
}

function forget() {
  taken += 1;
  give(null);
}

at("controls").onsubmit = (event) => event.preventDefault();
for (const id of ["steps", "guidance", "level"]) at(id).oninput = () => draw();
at("seed").oninput = () => go(seed());
at("walk").oninput = () => { held.mixing = false; draw(); };
at("mix").oninput = () => { held.mixing = true; draw(); };
at("new").onclick = renew;
at("hold-a").onclick = () => hold("a");
at("hold-b").onclick = () => hold("b");
at("download").onclick = () => download(1);
at("download-large").onclick = () => download(LARGE);
at("link").onclick = copyLink;
at("forget").onclick = forget;
at("clear").onclick = clear;
at("brush").oninput = () => { at("brush-value").textContent = at("brush").value; };
for (const id of ["file", "camera"]) {
  at(id).onchange = () => {
    if (at(id).files.length) take(at(id).files[0]);
    at(id).value = ""; // so that the same file can be chosen again
  };
}

const KEYS = { // actions, and the controls that are visible where they have a use
  n: [renew, "new"],
  a: [() => hold("a"), "hold-a"],
  b: [() => hold("b"), "hold-b"],
  ArrowLeft: [() => go(seed() - 1), "seed"],
  ArrowRight: [() => go(seed() + 1), "seed"],
  Escape: [forget],
};
addEventListener("keydown", (event) => {
  const taking = event.key === "Escape" ? "select" : "input, select"; // what has a use for the key itself
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches(taking)) return;
  if (event.key !== "Escape" && !at("keys").checked) return; // speech input types single letters
  const [action, control] = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key] ?? [];
  if (!model || !action || (control && !at(control).offsetParent)) return;
  event.preventDefault();
  action();
});

addEventListener("hashchange", () => {
  if (!model) return;
  restore();
  draw(true);
});

addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
addEventListener("dragleave", () => document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  else fail("What was dropped is not a file. Choose a PNG, JPEG or WebP file.");
});

addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) take(event.clipboardData.files[0]);
});
