// The description of the model on the page: a line under the title, and a legend of colours.

const at = (id) => document.getElementById(id);

/** Describe a model, of which there is the model.json. */
export function showAbout(model) {
  const [height, width] = (model.decoder ?? model.inputs.x).shape.slice(-2);
  const labels = model.conditions.find((each) => each.name === "labels");
  const classes = labels ? `, ${labels.names.length} classes` : "";
  const ends = `from ${model.source?.as === "start" ? "picture" : "noise"} to picture`;
  const kind = model.kind === "map" ? "flow map" : "rectified flow";
  const way = `${kind}, ${ends} in ${model.steps === 1 ? "one step" : `${model.steps} steps`}`;
  at("about").textContent = `A ${way}: ${width}\u00a0×\u00a0${height} pixels${classes}.`;
  if (model.fields?.ends) showLegend(model.fields);
}

/** Show what the colours of measurements mean. */
function showLegend({ colours, ends, shown }) {
  at("legend").hidden = false;
  at("legend").title = `Channel ${shown[0] + 1}`;
  const stops = colours.filter((_, i) => i % 15 === 0).map((rgb) => `rgb(${rgb})`);
  at("bar").style.background = `linear-gradient(to right, ${stops})`;
  [at("least").textContent, at("greatest").textContent] = ends;
}
