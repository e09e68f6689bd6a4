// What a downloaded picture says of itself, as rectified_flow/system/pictures.py has it: that a model generated it, and how.

import { sampleLabel } from "./noise.js";

const HEADER = 33; // bytes of a PNG file before its first chunk of metadata
const KEYWORD = "XML:com.adobe.xmp\0\0\0\0\0"; // not compressed, in no language

/** The settings of a picture with the seed `from` and a number, which is null for pictures that sample.py cannot draw again. */
export function provenanceOf(model, { from, number, steps, guidance, conditions, picture }) {
  return {
    model: model.hash,
    seed: from,
    number,
    steps,
    solver: model.solver,
    time_grid: model.time_grid,
    guidance_scale: guidance,
    conditions: writtenConditions(model, conditions, from, number),
    from_picture: Boolean(picture),
  };
}

/** The values of conditions as sample.py reads them: null for "none". Labels that are drawn for several pictures are left out. */
function writtenConditions(model, values, seed, number) {
  const written = model.conditions.map(({ name, kind, names, none }) => {
    if (kind !== "label") return [name, values[name] === null || values[name] === "" ? null : String(values[name])];
    const label = values[name] ?? (number === null ? -1 : sampleLabel(seed, name, number, names.length));
    return [name, label === none ? null : names[label]];
  });
  return Object.fromEntries(written.filter(([, value]) => value !== undefined));
}

/** A PNG file with the XMP packet `template` in which the settings are filled in. */
export function withMetadata(png, template, settings) {
  const escaped = JSON.stringify(settings).replace(/[&<>"']/g, (each) => `&#${each.charCodeAt()};`);
  const content = new TextEncoder().encode(`iTXt${KEYWORD}${template.split("SETTINGS").join(escaped)}`);
  const chunk = new DataView(new ArrayBuffer(content.length + 8));
  chunk.setUint32(0, content.length - 4); // without the four letters of its kind
  new Uint8Array(chunk.buffer).set(content, 4);
  chunk.setUint32(content.length + 4, crc32(content));
  return new Blob([png.slice(0, HEADER), chunk, png.slice(HEADER)], { type: png.type });
}

/** The checksum of a chunk (ISO 3309). */
export function crc32(bytes) {
  let crc = -1;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}
