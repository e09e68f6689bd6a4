// The visitor's picture: read from a file, painted over, and compared with the result.

import { pixels, stroke } from "./sampler.js";

const TINT = [226, 54, 112]; // of the pixels that are painted over
const TINT_SHARE = 0.7;
const STRIDE = 0.05; // of the brush at each press of an arrow key, as a share of a side
const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const at = (id) => document.getElementById(id);

/** The pixels RGBA of a file, resized to `shape` and cropped or padded with white, as the framing of model.json says. */
export async function readPicture(file, [, height, width], { pad, resize }) {
  const picture = await createImageBitmap(file);
  try {
    const side = (pad ? Math.max : Math.min)(picture.width / width, picture.height / height);
    const [wide, high] = [side * width, side * height];
    const surface = new OffscreenCanvas(width, height).getContext("2d");
    surface.imageSmoothingEnabled = resize !== "nearest";
    surface.imageSmoothingQuality = "high";
    surface.fillStyle = "white"; // behind what is transparent and in margins, as in sample.py
    surface.fillRect(0, 0, width, height);
    const [left, top] = [(picture.width - wide) / 2, (picture.height - high) / 2];
    surface.drawImage(picture, left, top, wide, high, 0, 0, width, height);
    return surface.getImageData(0, 0, width, height).data;
  } finally {
    picture.close(); // else a photo keeps its memory until it is collected
  }
}

/** Paint row `row` of `x`; `fields` describes measurements, as model.json does. */
export function paint(element, x, row, shape, fields = null) {
  paintPixels(element, pixels(x, row, shape, fields), shape);
}

function paintPixels(element, rgba, [, height, width]) {
  element.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
}

/** A PNG file of canvases side by side in a square grid, in which each pixel is a square of `scale` pixels. */
export function joined(canvases, [, height, width], scale) {
  const columns = Math.ceil(Math.sqrt(canvases.length));
  const [wide, high] = [scale * width, scale * height];
  const surface = new OffscreenCanvas(columns * wide, Math.ceil(canvases.length / columns) * high);
  const context = surface.getContext("2d");
  context.imageSmoothingEnabled = false;
  canvases.forEach((each, i) => context.drawImage(each, (i % columns) * wide, Math.floor(i / columns) * high, wide, high));
  return surface.convertToBlob();
}

/** The given picture, and the same picture with a result over it from a line that the visitor slides. */
export class Comparison {
  #shape;
  #pending = true; // whether there is no result yet
  #last = null; // where the brush was, in pixels
  #aim = [0.5, 0.5]; // where the keyboard paints, as shares of the sides

  /** `changing()` and `changed()` are called before and after a stroke of the brush, where `canPaint` allows it. */
  constructor(shape, canPaint, changing, changed) {
    this.#shape = shape;
    this.canPaint = canPaint;
    this.changing = changing;
    this.changed = changed;
    this.picture = null; // values in [-1, 1]
    this.unknown = null; // a 1 for each pixel that is painted over
    document.body.classList.toggle("paints", canPaint);
    at("split").value = canPaint ? 0 : 50;
    at("split").oninput = () => this.#slide();
    for (const name of ["given", "compare"]) this.#listen(at(name).querySelector(".frame"));
    this.#listenToKeys(at("paint-here"));
  }

  /** Take a picture, or null for none. */
  give(picture) {
    this.picture = picture;
    this.clear();
  }

  clear() {
    this.unknown = null;
    this.#last = null;
    this.#show();
  }

  /** Show a result: row `row` of `x`. */
  showResult(x, row) {
    paint(at("after"), x, row, this.#shape);
    this.#pending = false;
    this.#slide();
  }

  #show() {
    this.#pending = true;
    this.#slide();
    if (!this.picture) return;
    const rgba = pixels(this.picture, 0, this.#shape);
    this.unknown?.forEach((painted, i) => {
      for (let channel = 0; painted && channel < 3; channel++) {
        rgba[4 * i + channel] += TINT_SHARE * (TINT[channel] - rgba[4 * i + channel]);
      }
    });
    for (const name of ["before", "under"]) paintPixels(at(name), rgba, this.#shape);
  }

  #slide() {
    const share = this.#pending ? 100 : Number(at("split").value);
    at("compare").style.setProperty("--split", `${share}%`);
    at("compare").classList.toggle("whole", share % 100 === 0);
  }

  /** Drag in a frame: paint, or slide the line where the given picture beside it can be painted. */
  #listen(frame) {
    const beside = () => at("given").offsetParent !== null;
    const slides = () => frame.parentElement === at("compare") && (!this.canPaint || beside());
    const move = (event) => {
      if (!event.isPrimary) return; // a second finger, to which a line would lead
      if (slides()) {
        at("split").value = 100 * this.#place(event, frame)[0];
        this.#slide();
      } else if (this.canPaint) this.#paintTo(this.#place(event, frame));
    };
    frame.onpointerdown = (event) => {
      if (event.button || !event.isPrimary) return;
      event.preventDefault();
      frame.setPointerCapture(event.pointerId);
      frame.onpointermove = move;
      move(event);
    };
    frame.onpointerup = frame.onpointercancel = (event) => {
      if (!event.isPrimary) return;
      frame.onpointermove = null;
      if (this.#last) this.changed();
      this.#last = null;
    };
  }

  /** While `button` has the focus, arrow keys move the brush, whose place is shown; the button paints there. */
  #listenToKeys(button) {
    const aim = () => {
      const [, height, width] = this.#shape;
      const size = (Number(at("brush").value) * Math.min(width, height)) / width;
      const [across, down] = this.#aim.map((share) => 100 * share);
      for (const [name, value] of Object.entries({ across, down, size })) at("views").style.setProperty(`--${name}`, `${value}%`);
    };
    button.onfocus = () => { aim(); at("views").classList.add("aiming"); };
    button.onblur = () => at("views").classList.remove("aiming");
    button.onkeydown = (event) => {
      if (!(event.key in WAYS)) return;
      event.preventDefault();
      event.stopPropagation(); // arrow keys elsewhere change the seed
      this.#aim = this.#aim.map((share, side) => Math.min(1, Math.max(0, share + STRIDE * WAYS[event.key][side])));
      aim();
    };
    button.onclick = () => {
      this.#paintTo(this.#aim);
      this.#last = null;
      this.changed();
    };
  }

  /** The place of a pointer, as shares of the sides of a frame. */
  #place(event, frame) {
    const { left, top, width, height } = frame.getBoundingClientRect();
    return [(event.clientX - left) / width, (event.clientY - top) / height];
  }

  #paintTo([across, down]) {
    if (!this.picture) return; // it was removed during the stroke
    if (!this.#last) this.changing();
    const [, height, width] = this.#shape;
    const point = [across * width, down * height];
    const radius = Math.max(0.71, (Number(at("brush").value) / 200) * Math.min(width, height)); // a pixel at least
    this.unknown ??= new Uint8Array(width * height);
    stroke(this.unknown, [width, height], this.#last ?? point, point, radius);
    this.#last = point;
    this.#show();
  }
}
