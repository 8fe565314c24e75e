// Runs the model in a worker, so that the page stays responsive. Uses WebGPU if available, otherwise WASM.

import { prepare, select } from "./pose.js";

let session = null, facts = null, Tensor = null;

async function start() {
  facts = await (await fetch("facts.json")).json();
  const model = new Uint8Array(await (await fetch("model.onnx")).arrayBuffer());
  if (self.navigator.gpu && (await self.navigator.gpu.requestAdapter().catch(() => null))) {
    try {
      await open("./ort/ort.webgpu.min.mjs", model, "webgpu");
      return "WebGPU";
    } catch (error) {
      session = null; // the driver does not support the model: use WASM
    }
  }
  await open("./ort/ort.wasm.min.mjs", model, "wasm");
  return "WASM";
}

async function open(library, model, provider) {
  const ort = await import(library);
  ort.env.wasm.wasmPaths = new URL("./ort/", self.location.href).href;
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(self.navigator.hardwareConcurrency || 1, 4) : 1;
  ort.env.logLevel = "error";
  session = await ort.InferenceSession.create(model, { executionProviders: [provider] });
  Tensor = ort.Tensor;
  await run(prepare(new Uint8ClampedArray(4 * 64 * 64), 64, 64, facts, 320)); // warm-up: the first run is slow
}

function run({ data, dims, box }) {
  const feeds = { images: new Tensor("float32", data, dims) };
  if (facts.novelty) { // edges of the image in the input
    const [left, top] = box.pad;
    feeds.area = new Tensor("float32", [left, top, left + box.inner[0], top + box.inner[1]], [1, 4]);
  }
  return session.run(feeds);
}

self.onmessage = async ({ data: { number, pixels, width, height, imgsz, conf, iou } }) => {
  try {
    const begin = performance.now();
    const input = prepare(new Uint8ClampedArray(pixels), width, height, facts, imgsz);
    const found = select(facts, await run(input), input.box, conf, iou);
    self.postMessage({ kind: "poses", number, found, milliseconds: performance.now() - begin });
  } catch (error) {
    self.postMessage({ kind: "problem", text: `Cannot run the model: ${error.message}` });
  }
};

start().then(
  (runtime) => self.postMessage({ kind: "ready", facts, runtime }),
  (error) => self.postMessage({ kind: "problem", text: `Cannot load the model: ${error.message}` }),
);
