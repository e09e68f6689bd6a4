// The controls of the conditions: a text box for a caption, a slider for a number, and a menu for labels.

import { histogram, rangeOf, sorted } from "./conditions.js";

const PAUSE = 250; // after which a text counts as typed [ms]
const NAMED = 8; // of unknown words
const SVG = "http://www.w3.org/2000/svg";

/**
 * Build the controls, texts into one element and the others into another.
 *
 * `values()` returns the values of the conditions. `settings()` returns texts by the ids of the controls, and `restore(settings)`
 * takes them again, as an URLSearchParams, in which some may be missing or have no meaning.
 */
export function makeControls(conditions, texts, others, changed) {
  const make = { caption, number, label };
  const controls = conditions.map((condition) => make[condition.kind](condition, changed));
  const ofKind = (isCaption) => controls.filter((_, i) => (conditions[i].kind === "caption") === isCaption);
  texts.replaceChildren(...ofKind(true).map(({ element }) => element));
  others.replaceChildren(...ofKind(false).map(({ element }) => element));
  return {
    values: () => Object.fromEntries(controls.map(({ value }, i) => [conditions[i].name, value()])),
    settings: () => Object.fromEntries(controls.map(({ setting }, i) => [idOf(conditions[i]), setting()])),
    restore: (settings) => conditions.forEach((condition, i) => {
      if (settings.has(idOf(condition))) controls[i].restore(settings.get(idOf(condition)));
    }),
  };
}

/** An element with properties and children. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const idOf = ({ name }) => `condition-${name}`;
const titleOf = ({ name }) => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

function label(condition, changed) {
  const drawn = new Option("drawn by the seed", "");
  const options = condition.names.map((name, i) => new Option(name, i));
  const menu = element("select", { id: idOf(condition), oninput: changed }, drawn, new Option("any", condition.none), ...options);
  const title = condition.name === "labels" ? "Class" : titleOf(condition);
  return {
    element: element("label", { htmlFor: menu.id }, title, menu),
    value: () => (menu.value === "" ? null : Number(menu.value)),
    setting: () => menu.value,
    restore: (text) => { if ([...menu.options].some(({ value }) => value === text)) menu.value = text; },
  };
}

function number(condition, changed) {
  const { min, max, step, decimals, start } = rangeOf(condition.quantiles);
  const slider = element("input", { id: idOf(condition), type: "range", min, max, step, value: start });
  const any = element("input", { id: `${slider.id}-any`, type: "checkbox", ariaLabel: `Any ${titleOf(condition)}` });
  const output = element("output", { htmlFor: slider.id, ariaLive: "off" });
  const bars = chart(histogram(condition.quantiles, min, max));
  const show = () => {
    const at = Math.floor((bars.children.length * (slider.value - min)) / (max - min || 1));
    output.value = any.checked ? "" : Number(slider.value).toFixed(decimals);
    made.classList.toggle("any", any.checked);
    [...bars.children].forEach((bar, i, { length }) => bar.classList.toggle("at", i === Math.min(at, length - 1)));
  };
  const title = element("label", { htmlFor: slider.id }, titleOf(condition));
  const made = element("div", { className: "number" }, title, output, element("label", { htmlFor: any.id }, any, "Any"), bars, slider);
  slider.oninput = () => { any.checked = false; show(); changed(); };
  any.oninput = () => { show(); changed(); };
  show();
  return {
    element: made,
    value: () => (any.checked ? null : Number(slider.value)),
    setting: () => (any.checked ? "any" : slider.value),
    restore: (text) => {
      any.checked = text === "any";
      if (!any.checked) slider.value = text;
      show();
    },
  };
}

/** Bars of the given heights, which only say what the slider's place says, too. */
function chart(heights) {
  const made = document.createElementNS(SVG, "svg");
  const highest = Math.max(...heights);
  made.setAttribute("viewBox", `0 0 ${heights.length} 1`);
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("aria-hidden", "true");
  heights.forEach((height, i) => {
    const bar = document.createElementNS(SVG, "rect");
    const sides = { x: i + 0.05, width: 0.9, y: 1 - height / highest, height: height / highest };
    for (const [name, value] of Object.entries(sides)) bar.setAttribute(name, value);
    made.append(bar);
  });
  return made;
}

function caption(condition, changed) {
  const { encoder, examples } = condition;
  let usable = examples[0] ?? ""; // the latest text of which the model knows a word
  let typing = 0;
  let example = 0;
  const texts = { value: usable, placeholder: usable };
  const box = element("input", { id: idOf(condition), type: "text", autocomplete: "off", enterKeyHint: "go", ...texts });
  const note = element("p", { id: `${box.id}-note`, role: "status", className: "note" });
  const another = element("button", { type: "button", title: "Show another training caption" }, "Example");
  another.hidden = examples.length < 2;
  const take = () => {
    clearTimeout(typing);
    const text = box.value.trim();
    const { known, unknown } = sorted(encoder, text);
    const isUsable = !text || encoder.kind !== "words" || known.length > 0;
    note.textContent = noteOf(encoder, text, unknown, isUsable ? null : usable);
    note.classList.toggle("failed", !isUsable);
    if (!isUsable || text === usable) return;
    usable = text;
    changed();
  };
  box.setAttribute("aria-describedby", note.id);
  box.oninput = () => { clearTimeout(typing); typing = setTimeout(take, PAUSE); };
  box.onchange = take;
  another.onclick = () => {
    example = (example + 1) % examples.length;
    box.value = examples[example];
    take();
  };
  const row = element("div", { className: "pair" }, box, another);
  return {
    element: element("div", { className: "caption" }, element("label", { htmlFor: box.id }, titleOf(condition)), row, note),
    value: () => usable,
    setting: () => usable,
    restore: (text) => { box.value = text; take(); },
  };
}

/** The note below a text box. `kept` is the previous text if the picture still shows it, or null. */
function noteOf(encoder, text, unknown, kept) {
  const listed = unknown.slice(0, NAMED).join(", ") + (unknown.length > NAMED ? ", …" : "");
  if (!text) return "Without a text, the model draws any picture.";
  if (kept !== null) {
    const words = encoder.words.slice(0, 5).join(", ");
    return `The model knows no word of this text. It knows words such as ${words}. The picture still shows “${kept}”.`;
  }
  return unknown.length ? `Ignored, because the training captions do not contain them: ${listed}.` : "";
}
