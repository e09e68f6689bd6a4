// The network call of model.onnx: on the graphics card (WebGPU) where there is one, otherwise on the processor (WASM).

const RUNTIMES = {
  webgpu: { module: "./ort/ort.webgpu.bundle.min.js", program: "ort/ort-wasm-simd-threaded.asyncify.wasm" },
  wasm: { module: "./ort/ort.wasm.bundle.min.js", program: "ort/ort-wasm-simd-threaded.wasm" },
};

/** What draws, why it is not WebGPU, and the file of its runtime; `wanted` is "webgpu", "wasm" or null. */
export async function chooseRuntime(wanted) {
  const reason = await whyNoWebGPU(wanted);
  const backend = reason ? "wasm" : "webgpu";
  return { backend, reason, file: RUNTIMES[backend].program };
}

/**
 * A function of {x, t, r, ...conditions}, of which t and r are single times, that evaluates the network.
 *
 * `chosen` is a runtime of `chooseRuntime`, whose file has the contents `binary`. Where WebGPU fails, at the start or later, WASM
 * takes its place, whose runtime `download(files)` returns. `tell(backend, reason)` is called with what draws from now on, and why
 * it is not WebGPU.
 */
export async function openNetwork(model, program, chosen, binary, download, tell) {
  let network = null;

  async function open(backend, reason, contents) {
    network = await load(backend, contents, model, program);
    tell(backend, reason);
  }

  async function replace(error) {
    const [contents] = await download([RUNTIMES.wasm.program]);
    await open("wasm", failure(error), contents);
  }

  try {
    await open(chosen.backend, chosen.reason, binary);
  } catch (error) {
    if (chosen.backend === "wasm") throw error;
    await replace(error);
  }
  return async (inputs) => {
    if (network.backend === "wasm") return network.call(inputs);
    try {
      return checked(await network.call(inputs));
    } catch (error) {
      await replace(error);
      return network.call(inputs);
    }
  };
}

const failure = (error) => `WebGPU failed: ${String(error.message ?? error).split("\n")[0]}`;

/** An empty text where WebGPU can be used. Software that stands in for a graphics card is slower than WASM. */
async function whyNoWebGPU(wanted) {
  if (wanted === "wasm") return "as the address asks";
  if (!navigator.gpu) return "this browser has no WebGPU";
  const adapter = await navigator.gpu.requestAdapter().catch(() => null);
  if (!adapter) return "WebGPU finds no graphics card";
  const isSoftware = adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter; // the latter in earlier browsers
  if (isSoftware && wanted !== "webgpu") return "WebGPU finds no graphics card, only software";
  return "";
}

/** Some drivers fail without an error, and return nothing but zeros or what is no number. */
function checked(output) {
  if (!output.every(Number.isFinite) || !output.some((value) => value !== 0)) throw new Error("its output is not usable");
  return output;
}

async function load(backend, binary, model, program) {
  const ort = await runtime(backend);
  ort.env.wasm.wasmBinary = binary;
  const session = await start(ort, program, backend);
  return { backend, call: (inputs) => evaluate(ort, session, model, inputs) };
}

async function runtime(backend) {
  const ort = await import(RUNTIMES[backend].module);
  ort.env.wasm.numThreads = 1; // more need headers that static hosts do not send
  return ort;
}

const start = (ort, program, backend) =>
  ort.InferenceSession.create(program, { executionProviders: [backend], logSeverityLevel: 3 });

/**
 * A function from the ids of tokens to the outputs of a text encoder. A text is short, so that the processor encodes it; the
 * runtime is that of `backend`, which is loaded already.
 */
export async function openTextEncoder(program, backend) {
  const ort = await runtime(backend);
  const session = await start(ort, program, "wasm");
  return async (ids) => {
    const row = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
    const outputs = await session.run({ input_ids: row(ids), attention_mask: row(ids.map(() => 1)) });
    return session.outputNames.map((name) => outputs[name].data);
  };
}

/** A function from latents to the pixels of their pictures, on the processor. */
export async function openDecoder(model, program, backend) {
  const ort = await runtime(backend);
  const session = await start(ort, program, "wasm");
  const shape = model.inputs.x.shape.slice(1);
  return async (x) => {
    const rows = x.length / shape.reduce((a, b) => a * b);
    const outputs = await session.run({ x: new ort.Tensor("float32", x, [rows, ...shape]) });
    return outputs[session.outputNames[0]].data;
  };
}

async function evaluate(ort, session, model, { x, t, r, ...conditions }) {
  const shape = model.inputs.x.shape.slice(1);
  const rows = x.length / shape.reduce((a, b) => a * b);
  const given = { x: new ort.Tensor("float32", x, [rows, ...shape]) };
  for (const [name, time] of Object.entries({ t, r })) {
    if (name in model.inputs) given[name] = new ort.Tensor("float32", new Float32Array(rows).fill(time), [rows]);
  }
  for (const [name, values] of Object.entries(conditions)) {
    const { type, shape: [, ...sides] } = model.inputs[name];
    given[name] = new ort.Tensor(type, type === "int64" ? BigInt64Array.from(values, BigInt) : values, [rows, ...sides]);
  }
  const outputs = await session.run(given);
  return outputs[session.outputNames[0]].data;
}
