// What the page says about the model: a line under the title, a panel at the end, and what the colours of measurements mean.

const COPIES = "A copy is a generated picture that is much nearer to a training picture than training pictures are to each other: "
  + "the model has memorised that picture.";
const at = (id) => document.getElementById(id);
const counted = (number) => number.toLocaleString("en");

/** Describe a model, of which there is the model.json. */
export function showAbout(model) {
  const [, , height, width] = model.inputs.x.shape;
  const classes = model.classes.length ? `, ${model.classes.length} classes` : "";
  const ends = `from ${model.source?.as === "start" ? "picture" : "noise"} to picture`;
  const kind = model.kind === "map" ? "flow map" : "rectified flow";
  const way = `${kind}, ${ends} in ${model.steps === 1 ? "one step" : `${model.steps} steps`}`;
  at("about").textContent = `A ${way}: ${width}\u00a0×\u00a0${height} pixels${classes}.`;
  if (model.fields?.ends) showLegend(model.fields);
  const facts = factsOf(model.about);
  at("facts").replaceChildren(...facts.flatMap(([term, text]) => [made("dt", term), made("dd", text)]));
  at("copies").textContent = COPIES;
  at("copies").hidden = typeof model.about.evaluation?.copies !== "number";
  at("card").hidden = false;
}

/** A text element; names of classes and data are only ever texts, never HTML. */
function made(tag, textContent) {
  return Object.assign(document.createElement(tag), { textContent });
}

/** Pairs of a term and a text, without those that are not known. */
function factsOf({ dataset, taught, items, held_out: heldOut, size, parameters, steps, images_seen: seen, evaluation, ...rest }) {
  const { copies, distance, num_samples: count, steps: used } = evaluation ?? {};
  const from = `of ${counted(count ?? 0)} generated pictures in ${used === 1 ? "one step" : `${used} steps`}`;
  return [
    ["Training data", dataset],
    ["Trained on", items && `${counted(items)} ${taught ? "results of another model, which was trained on these data" : "pictures"}`],
    ["Held out of the training", heldOut && `${counted(heldOut)} pictures`],
    ["Size", size && `${size.join("\u00a0×\u00a0")} pixels`],
    ["Network", `${parameters < 1e5 ? counted(parameters) : `${(parameters / 1e6).toFixed(1)} million`} parameters`],
    ["Training", steps && `${counted(steps)} steps, in which it saw ${counted(seen)} pictures`],
    ["Copies", typeof copies === "number" && `${Number((100 * copies).toFixed(2))}% ${from}`],
    ["Distance to the data", distance && `${Number(distance.value.toPrecision(4))} (${nameOf(distance)}) ${from}`],
    ["Licence", rest.license],
    ["Exported by", rest.version && `rectified-flow-trainer ${rest.version}`],
  ].filter(([, text]) => text);
}

/** The name of a distance as people write it. */
const nameOf = ({ name }) => (name === "fid" ? "FID" : name.replaceAll("_", " ").replace("frechet", "Fréchet"));

/** Show what the colours of measurements mean. */
function showLegend({ colours, ends, shown }) {
  at("legend").hidden = false;
  at("legend").title = `Channel ${shown[0] + 1}`;
  const stops = colours.filter((_, i) => i % 15 === 0).map((rgb) => `rgb(${rgb})`);
  at("bar").style.background = `linear-gradient(to right, ${stops})`;
  [at("least").textContent, at("greatest").textContent] = ends;
}
