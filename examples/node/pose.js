// Poses with calibrated uncertainty from an end-to-end graph, in Node with onnxruntime-node.
//
//   halopose export --form end2end -o deployed
//   npm install --ignore-scripts        the package holds the CPU library; its script would fetch CUDA
//   node pose.js deployed/model.onnx photo.ppm [imgsz]      prints the JSON that predict.py prints
//
// Images are binary PPM files. For Ultralytics' models: the letterbox is centred, grey 114, RGB from 0 to 1.
import { readFileSync } from "node:fs";
import ort from "onnxruntime-node";

function readPpm(path) {
  const bytes = readFileSync(path);
  const header = /^P6\s+(\d+)\s+(\d+)\s+255\s/.exec(bytes.toString("latin1", 0, 64));
  if (!header) throw new Error(`cannot read ${path}: give a binary PPM image with 8 bits`);
  const [width, height] = [Number(header[1]), Number(header[2])];
  const rgb = bytes.subarray(header[0].length);
  if (rgb.length < 3 * width * height) throw new Error(`cannot read ${path}: it is truncated`);
  return { width, height, rgb };
}

// Half to even, as Python and OpenCV round.
function rounded(value) {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
}

// The two source pixels beside each target pixel and their 11-bit weights, as OpenCV rounds them. At the border of columns
// one pixel has the whole weight; of rows it is taken twice.
function neighbours(old, count, whole) {
  return Array.from({ length: count }, (_, target) => {
    const place = Math.fround((target + 0.5) * (old / count) - 0.5);
    const low = Math.floor(place);
    const share = whole && (low < 0 || low >= old - 1) ? 0 : Math.fround(place - low);
    const within = (index) => Math.min(Math.max(index, 0), old - 1);
    return [within(low), within(low + 1), rounded(Math.fround(1 - share) * 2048), rounded(share * 2048)];
  });
}

function resized(image, width, height) {
  if (width === image.width && height === image.height) return image.rgb;
  const across = neighbours(image.width, width, true);
  const down = neighbours(image.height, height, false);
  const rgb = new Uint8Array(3 * width * height);
  const mixed = (row, [left, right, a, b], channel) =>
    (image.rgb[3 * (image.width * row + left) + channel] * a + image.rgb[3 * (image.width * row + right) + channel] * b) >> 4;
  for (let row = 0; row < height; row++) {
    const [upper, lower, c, d] = down[row];
    for (let column = 0; column < width; column++)
      for (let channel = 0; channel < 3; channel++) {
        const sum = ((mixed(upper, across[column], channel) * c) >> 16) + ((mixed(lower, across[column], channel) * d) >> 16);
        rgb[3 * (width * row + column) + channel] = (sum + 2) >> 2;
      }
  }
  return rgb;
}

function letterboxed(image, height, width, trimmed) {
  const ratio = Math.min(height / image.height, width / image.width);
  const innerWidth = Math.max(rounded(image.width * ratio), 1);
  const innerHeight = Math.max(rounded(image.height * ratio), 1);
  let [spareX, spareY] = [width - innerWidth, height - innerHeight];
  if (trimmed) [spareX, spareY] = [spareX % 32, spareY % 32];
  const [left, top] = [rounded(spareX / 2 - 0.1), rounded(spareY / 2 - 0.1)];
  const [wide, tall] = [innerWidth + spareX, innerHeight + spareY];
  const inner = resized(image, innerWidth, innerHeight);
  const pixels = new Float32Array(3 * tall * wide).fill(Math.fround(114 / 255));
  for (let channel = 0; channel < 3; channel++)
    for (let row = 0; row < innerHeight; row++)
      for (let column = 0; column < innerWidth; column++)
        pixels[(channel * tall + top + row) * wide + left + column] = inner[3 * (innerWidth * row + column) + channel] / 255;
  const box = [innerWidth / image.width, innerHeight / image.height, left, top, image.width, image.height];
  return {
    images: new ort.Tensor("float32", pixels, [1, 3, tall, wide]),
    letterbox: new ort.Tensor("float32", Float32Array.from(box), [1, 6]),
  };
}

// Entries as predict.py writes them; `values` holds the outputs of the graph by name.
function entries(values) {
  const [count, keypoints] = values.keypoints.dims;
  const row = (name, n) => {
    const size = values[name].data.length / count;
    return Array.from(values[name].data.subarray(size * n, size * (n + 1)), Number);
  };
  const triples = (name, n) => Array.from({ length: keypoints }, (_, k) => row(name, n).slice(3 * k, 3 * k + 3));
  return Array.from({ length: count }, (_, n) => {
    const [x1, y1, x2, y2] = row("boxes", n);
    const points = row("keypoints", n);
    const seen = values.visibility ? row("visibility", n) : Array(keypoints).fill(1);
    const dof = row("dof", n);
    return {
      category_id: row("classes", n)[0],
      bbox: [x1, y1, x2 - x1, y2 - y1],
      score: row("scores", n)[0],
      keypoints: seen.flatMap((visibility, k) => [points[2 * k], points[2 * k + 1], visibility]),
      covariance: triples("covariance", n),
      keep: row("keep", n).map(Boolean),
      ...(Number.isFinite(dof[0]) ? { scale: triples("scale", n), dof } : {}),
      ...(values.novelty ? { novelty: row("novelty", n)[0] } : {}),
    };
  });
}

const [modelPath, imagePath, imgsz = "640"] = process.argv.slice(2);
if (!imagePath) {
  console.error("usage: node pose.js model.onnx photo.ppm [imgsz]");
  process.exit(2);
}
try {
  const session = await ort.InferenceSession.create(modelPath);
  const sides = session.inputMetadata?.[0]?.shape ?? [];
  const fixed = sides.length === 4 && typeof sides[2] === "number" && typeof sides[3] === "number";
  const size = Math.ceil(Number(imgsz) / 32) * 32;
  const given = letterboxed(readPpm(imagePath), fixed ? sides[2] : size, fixed ? sides[3] : size, !fixed);
  const values = await session.run({ [session.inputNames[0]]: given.images, letterbox: given.letterbox });
  console.log(JSON.stringify(entries(values)));
} catch (error) {
  console.error(`pose: ${error.message}`);
  process.exit(2);
}
