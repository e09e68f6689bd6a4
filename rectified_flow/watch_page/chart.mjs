// A line chart as SVG: curves over steps, with axes, and a read-out at the pointer or by the arrow keys.

import { logTicks, nearest, range, shown, smooth, ticks } from "./scale.mjs";

const HEIGHT = 240; // pixels, as all lengths here
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;
const NARROWEST = 200;

const element = (name, attributes = {}, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};

const classOf = (kind, { colour, second }) => `${kind} colour-${colour}${second ? " second" : ""}`;

export class Chart {
  constructor(title) {
    this.title = title;
    this.reading = null; // the step that is read off, if any
    this.figure = document.createElement("figure");
    this.figure.className = "chart";
    this.caption = document.createElement("figcaption");
    this.svg = element("svg", { tabindex: 0, role: "slider", "aria-label": title, "aria-valuemin": 0 });
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    this.figure.append(this.caption, this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => this.readAt(event.clientX));
    this.svg.addEventListener("keydown", (event) => this.readByKey(event));
    for (const end of ["pointerleave", "blur"]) this.svg.addEventListener(end, () => this.read(null));
  }

  // series: [{name, colour, second, points: [[step, value], ...]}], of which none is empty.
  draw({ series, log, smoothing }) {
    this.curves = series.map((each) => ({ ...each, points: smooth(each.points, smoothing) }));
    this.steps = [...new Set(this.curves.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => a - b);
    this.last = Math.max(1, this.steps.at(-1));
    this.width = Math.max(NARROWEST, this.svg.clientWidth); // drawn anew at each width, so that the text keeps its size
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("aria-valuemax", this.last);
    this.pointer = element("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM });
    const isLog = log && this.curves.every(({ points }) => points.every(([, value]) => value > 0));
    this.svg.replaceChildren(...this.drawn(isLog), this.pointer);
    this.entries = this.curves.map((curve) => {
      const entry = document.createElement("li");
      entry.className = classOf("entry", curve);
      return entry;
    });
    this.legend.replaceChildren(...this.entries);
    this.read(this.reading);
  }

  x(step) {
    return LEFT + ((this.width - LEFT - RIGHT) * step) / this.last;
  }

  drawn(isLog) {
    const scaled = isLog ? Math.log10 : (value) => value;
    const [low, high] = range(this.curves.flatMap(({ points }) => points.map(([, value]) => scaled(value))));
    const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - value)) / (high - low);
    const rules = (isLog ? logTicks(low, high) : ticks(low, high, 5)).flatMap((value) => [
      element("line", { class: "rule", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }),
      element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, shown(isLog ? 10 ** value : value)),
    ]);
    const steps = ticks(0, this.last, Math.min(6, this.width / 60)).map((step) =>
      element("text", { x: this.x(step), y: HEIGHT - 6, "text-anchor": this.x(step) > this.width - 24 ? "end" : "middle" }, shown(step)));
    const curves = this.curves.flatMap((curve) => {
      const at = curve.points.map(([step, value]) => [this.x(step).toFixed(1), y(scaled(value)).toFixed(1)]);
      const [cx, cy] = at.at(-1);
      return [
        element("path", { class: classOf("curve", curve), d: `M${at.map((each) => each.join(" ")).join("L")}` }),
        element("circle", { class: classOf("dot", curve), cx, cy, r: 2.5 }),
      ];
    });
    return [...rules, ...steps, ...curves];
  }

  // The values at the logged step that is nearest to this one; of null, the newest values.
  read(step) {
    this.reading = step === null ? null : nearest(this.steps.map((each) => [each]), step)[0];
    const found = this.curves.map(({ points }) => (step === null ? points.at(-1) : nearest(points, this.reading)));
    const texts = this.curves.map(({ name }, index) => {
      const [at, value] = found[index];
      return `${name} ${shown(value)}${step === null || at === this.reading ? "" : ` at ${at}`}`;
    });
    this.entries.forEach((entry, index) => { entry.textContent = texts[index]; });
    this.caption.textContent = step === null ? this.title : `${this.title}, step ${this.reading}`;
    this.pointer.setAttribute("visibility", step === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) this.pointer.setAttribute(end, this.x(this.reading ?? 0));
    this.svg.setAttribute("aria-valuenow", this.reading ?? this.last);
    this.svg.setAttribute("aria-valuetext", `step ${this.reading ?? this.last}: ${texts.join(", ")}`);
  }

  readAt(clientX) {
    const box = this.svg.getBoundingClientRect();
    const across = ((clientX - box.left) * this.width) / box.width;
    this.read(((across - LEFT) * this.last) / (this.width - LEFT - RIGHT));
  }

  readByKey(event) {
    const index = this.reading === null ? this.steps.length - 1 : this.steps.indexOf(this.reading);
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: this.steps.length - 1 }[event.key];
    if (event.key === "Escape") this.read(null);
    if (to === undefined) return;
    event.preventDefault(); // the page would scroll
    this.read(this.steps[Math.min(this.steps.length - 1, Math.max(0, to))]);
  }
}
