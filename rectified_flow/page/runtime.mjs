// The network call of model.onnx: on the graphics card (WebGPU) where there is one, otherwise on the processor (WASM).

const RUNTIMES = {
  webgpu: { module: "./ort/ort.webgpu.bundle.min.mjs", program: "./ort/ort-wasm-simd-threaded.asyncify.wasm" },
  wasm: { module: "./ort/ort.wasm.bundle.min.mjs", program: "./ort/ort-wasm-simd-threaded.wasm" },
};

/**
 * A function of {x, t, r, labels, source, unknown}, of which t and r are single times, that evaluates the network.
 *
 * `wanted` is "webgpu", "wasm" or null. Where WebGPU fails, at the start or later, WASM takes its place. `tell(backend, reason)`
 * is called with what draws from now on, and why it is not WebGPU.
 */
export async function openNetwork(model, program, wanted, tell) {
  let network = null;

  async function start(backend, reason) {
    network = await load(backend, model, program);
    tell(backend, reason);
  }

  const reason = await whyNoWebGPU(wanted);
  try {
    await start(reason ? "wasm" : "webgpu", reason);
  } catch (error) {
    if (reason) throw error;
    await start("wasm", failure(error));
  }
  return async (inputs) => {
    if (network.backend === "wasm") return network.call(inputs);
    try {
      return checked(await network.call(inputs));
    } catch (error) {
      await start("wasm", failure(error));
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
  if (adapter.info?.isFallbackAdapter && wanted !== "webgpu") return "WebGPU finds no graphics card, only software";
  return "";
}

/** Some drivers fail without an error, and return nothing but zeros or what is no number. */
function checked(output) {
  if (!output.every(Number.isFinite) || !output.some((value) => value !== 0)) throw new Error("its output is not usable");
  return output;
}

async function load(backend, model, program) {
  const files = RUNTIMES[backend];
  const ort = await import(files.module);
  ort.env.wasm.numThreads = 1; // more need headers that static hosts do not send
  ort.env.wasm.wasmPaths = { wasm: new URL(files.program, import.meta.url).href };
  const session = await ort.InferenceSession.create(program, { executionProviders: [backend], logSeverityLevel: 3 });
  return { backend, call: (inputs) => evaluate(ort, session, model, inputs) };
}

async function evaluate(ort, session, model, { x, t, r, labels, ...pictures }) {
  const shape = model.inputs.x.shape.slice(1);
  const rows = x.length / shape.reduce((a, b) => a * b);
  const given = { x: new ort.Tensor("float32", x, [rows, ...shape]) };
  for (const [name, time] of Object.entries({ t, r })) {
    if (name in model.inputs) given[name] = new ort.Tensor("float32", new Float32Array(rows).fill(time), [rows]);
  }
  if ("labels" in model.inputs) given.labels = new ort.Tensor("int64", BigInt64Array.from(labels, BigInt), [rows]);
  for (const [name, values] of Object.entries(pictures)) {
    given[name] = new ort.Tensor("float32", values, [rows, ...model.inputs[name].shape.slice(1)]);
  }
  const outputs = await session.run(given);
  return outputs[session.outputNames[0]].data;
}
