// A line chart as SVG: curves over steps, with axes and a read-out at the pointer.

const WIDTH = 480, HEIGHT = 240;
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;
const TICKS = 5;

const element = (name, attributes = {}, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};

export const shown = (value) =>
  value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));

// An exponential mean, corrected for its start as Adam's are.
export function smooth(points, share) {
  let mean = 0, weight = 0;
  return points.map(([step, value]) => {
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return [step, mean / weight];
  });
}

// Round numbers between two others: 1, 2 or 5 times a power of ten apart.
export function ticks(low, high, count = TICKS) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let number = Math.ceil(low / size); number * size <= high * (1 + 1e-9); number++) found.push(number * size);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const digit of [1, 2, 5]) {
      const value = power + Math.log10(digit);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 3);
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

// series: [{name, colour, second, points: [[step, value], ...]}], of which none is empty.
export function drawChart(figure, { title, series, log, smoothing }) {
  const isLog = log && series.every(({ points }) => points.every(([, value]) => value > 0));
  const scaled = isLog ? Math.log10 : (value) => value;
  const curves = series.map((each) => ({ ...each, points: smooth(each.points, smoothing) }));
  const all = curves.flatMap(({ points }) => points);
  const [low, high] = range(all.map(([, value]) => scaled(value)));
  const last = Math.max(1, ...all.map(([step]) => step));
  const x = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * step) / last;
  const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - value)) / (high - low);

  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const value of isLog ? logTicks(low, high) : ticks(low, high)) {
    svg.append(element("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, shown(isLog ? 10 ** value : value)));
  }
  for (const step of ticks(0, last)) {
    svg.append(element("text", { x: x(step), y: HEIGHT - 6, "text-anchor": step / last > 0.97 ? "end" : "middle" }, shown(step)));
  }
  for (const { points, colour, second } of curves) {
    const path = points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(scaled(value)).toFixed(1)}`);
    svg.append(element("path", { class: `curve colour-${colour}${second ? " second" : ""}`, d: path.join("") }));
    const [step, value] = points.at(-1);
    svg.append(element("circle", { class: `dot colour-${colour}`, cx: x(step), cy: y(scaled(value)), r: 2.5 }));
  }
  const pointer = element("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(pointer);

  const caption = document.createElement("figcaption");
  const legend = document.createElement("ul");
  legend.className = "legend";
  const entries = curves.map(({ name, colour, second }) => {
    const entry = document.createElement("li");
    entry.className = `colour-${colour}${second ? " second" : ""}`;
    legend.append(entry);
    return [entry, name];
  });
  const readOut = (step) => {
    const near = curves.map(({ points }) => points.reduce((best, each) => (Math.abs(each[0] - step) < Math.abs(best[0] - step) ? each : best)));
    entries.forEach(([entry, name], index) => { entry.textContent = `${name} ${shown(near[index][1])}`; });
    caption.textContent = step === Infinity ? title : `${title}, step ${near[0][0]}`;
  };
  const leave = () => {
    pointer.setAttribute("visibility", "hidden");
    entries.forEach(([entry, name], index) => { entry.textContent = `${name} ${shown(curves[index].points.at(-1)[1])}`; });
    caption.textContent = title;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = (((event.clientX - box.left) * WIDTH) / box.width - LEFT) * (last / (WIDTH - LEFT - RIGHT));
    const within = Math.min(last, Math.max(0, step));
    pointer.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) pointer.setAttribute(end, x(within));
    readOut(within);
  });
  svg.addEventListener("pointerleave", leave);
  leave();
  figure.replaceChildren(caption, svg, legend);
}
