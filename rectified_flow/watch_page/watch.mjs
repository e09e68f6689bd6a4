// Runs while they train: asks the server every few seconds, and shows what it answers.

import { Chart } from "./chart.mjs";

const EVERY = 3000; // milliseconds
const COLOURS = 6;
const find = (id) => document.getElementById(id);
const isDistance = (name) => name.endsWith("frechet_distance") || name.endsWith("fid");
const CHARTS = [
  { title: "Training loss", file: "metrics", wanted: (name) => ["loss", "unweighted_loss"].includes(name), log: true },
  { title: "The same loss on held-out and training pictures", file: "heldout", wanted: (name) => ["heldout_loss", "seen_loss"].includes(name), log: true },
  { title: "Gap between the two", file: "heldout", wanted: (name) => name === "gap" },
  { title: "Distance of samples", file: "evaluations", wanted: isDistance, log: true },
  { title: "Share of copies, and by chance", file: "evaluations", wanted: (name) => name.startsWith("copies") },
  { title: "Images per second", file: "metrics", wanted: (name) => name === "images_per_second" },
  { title: "Learning rate", file: "metrics", wanted: (name) => name === "learning_rate" },
  { title: "Gradient norm", file: "metrics", wanted: (name) => name === "grad_norm", log: true },
];

let runs = [];
const hidden = new Set(); // numbers of the runs that are not drawn
const cards = new Map();
const charts = [];

export function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (minutes < 1) return "less than a minute";
  return minutes < 120 ? `${minutes} min` : `${(minutes / 60).toFixed(minutes < 600 ? 1 : 0)} h`;
}

function summary(run) {
  const total = run.total_steps === null ? "" : ` of ${run.total_steps}`;
  if (run.state === "waiting") return "has not begun";
  if (run.state === "died") return `its process is gone, at step ${run.step}${total}: the same command resumes it`;
  const left = run.seconds_left === null ? "" : `, ${duration(run.seconds_left)} left`;
  const silent = run.silent === null ? "" : `, not heard of for ${duration(run.silent)}`;
  return `${run.state}, step ${run.step}${total}${left}${silent}`;
}

function makeCard(run) {
  const card = document.createElement("article");
  card.className = `run colour-${run.id % COLOURS}`;
  card.innerHTML = `<h2><label><input type="checkbox" checked><span></span></label></h2>
    <p class="summary"></p><p class="bad" hidden></p>
    <div class="samples" hidden><img alt=""><label><span class="named">Samples <output></output></span><input type="range" min="0"></label>
    <a download>Download the samples as a film (GIF)</a></div>`;
  const [box, slider] = card.querySelectorAll("input");
  box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](run.id); drawCharts(); });
  slider.addEventListener("input", () => showSample(card));
  find("runs").append(card);
  return card;
}

function updateCard(card, run) {
  card.querySelector("h2 span").textContent = run.name;
  card.querySelector(".summary").textContent = summary(run);
  const bad = card.querySelector(".bad");
  const problems = [run.message, run.bad_steps ? `${run.bad_steps} bad step${run.bad_steps > 1 ? "s" : ""} skipped` : ""].filter(Boolean);
  bad.textContent = problems.join("; ");
  bad.hidden = problems.length === 0;
  const slider = card.querySelector("input[type=range]");
  const isAtEnd = !card.names || Number(slider.value) === card.names.length - 1;
  card.names = run.samples;
  card.run = run.id;
  card.querySelector(".samples").hidden = run.samples.length === 0;
  slider.max = run.samples.length - 1;
  slider.hidden = run.samples.length < 2;
  const film = card.querySelector("a");
  film.hidden = slider.hidden;
  film.href = `film/${run.id}/film.gif`;
  film.download = `${run.name.replaceAll("/", "-")}.gif`;
  if (isAtEnd) slider.value = run.samples.length - 1; // who looks at the newest goes on with it
  showSample(card);
}

function showSample(card) {
  const name = card.names[Number(card.querySelector("input[type=range]").value)];
  if (!name) return;
  const step = Number(name.match(/\d+/)[0]);
  const image = card.querySelector("img");
  const address = `samples/${card.run}/${name}`;
  if (image.getAttribute("src") !== address) image.setAttribute("src", address);
  image.alt = `Samples of step ${step}`;
  card.querySelector("output").textContent = `step ${step}`;
}

function seriesOf({ file, wanted }) {
  const drawn = runs.filter((run) => !hidden.has(run.id));
  return drawn.flatMap((run) =>
    Object.entries(run.curves[file])
      .filter(([name, points]) => wanted(name) && points.length > 0)
      .map(([name, points], index) => ({
        name: drawn.length > 1 ? `${run.name}: ${name}` : name,
        colour: run.id % COLOURS,
        second: index > 0,
        points,
      })),
  );
}

function makeChart({ title }, number) {
  const chart = new Chart(title);
  chart.figure.id = `chart-${number}`;
  find("charts").append(chart.figure);
  return chart;
}

function drawCharts() {
  const smoothing = Number(find("smoothing").value);
  CHARTS.forEach((kind, number) => {
    const series = seriesOf(kind);
    charts[number] ??= makeChart(kind, number);
    charts[number].figure.hidden = series.length === 0;
    if (series.length > 0) charts[number].draw({ series, log: kind.log && find("log").checked, smoothing });
  });
}

async function update() {
  try {
    const answer = await fetch("runs.json");
    if (!answer.ok) throw new Error(answer.statusText);
    runs = await answer.json();
    for (const run of runs) {
      if (!cards.has(run.id)) cards.set(run.id, makeCard(run));
      updateCard(cards.get(run.id), run);
    }
    drawCharts();
    find("status").textContent = runs.length ? "" : "No run has begun in these folders yet.";
    find("status").classList.remove("failed");
  } catch {
    find("status").textContent = "The program that serves this page does not answer: start it again.";
    find("status").classList.add("failed");
  }
  document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
  setTimeout(update, EVERY);
}

find("log").addEventListener("change", drawCharts);
find("smoothing").addEventListener("input", drawCharts);
addEventListener("resize", drawCharts);
update();
