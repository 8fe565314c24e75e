// Preprocessing and postprocessing of predict.py for the browser: pure functions without DOM access.
// Pixels are RGBA; poses are in pixels of the image.

// Preprocessing

export function prepare(pixels, width, height, facts, imgsz) {
  const largest = Math.max(facts.strides[facts.strides.length - 1], 32);
  const size = Math.ceil(imgsz / largest) * largest;
  const nas = facts.layout === "yolonas";
  const box = nas ? placeCorner(width, height, size) : placeMiddle(width, height, size, largest);
  const resized = resize(pixels, width, height, box.inner[0], box.inner[1], nas);
  const plane = box.size[0] * box.size[1];
  const data = new Float32Array(3 * plane).fill((nas ? 127 : 114) / 255);
  const [left, top] = box.pad;
  for (let y = 0, from = 0; y < box.inner[1]; y++) {
    let to = (y + top) * box.size[0] + left;
    for (let x = 0; x < box.inner[0]; x++, to++, from += 3) {
      for (let c = 0; c < 3; c++) data[(nas ? 2 - c : c) * plane + to] = resized[from + c] / 255;
    }
  }
  return { data, dims: [1, 3, box.size[1], box.size[0]], box };
}

// Centred, padded to multiples of the coarsest stride.
function placeMiddle(width, height, size, largest) {
  const ratio = Math.min(size / height, size / width);
  const inner = [Math.max(even(width * ratio), 1), Math.max(even(height * ratio), 1)];
  const spare = inner.map((side) => (size - side) % largest);
  return {
    shape: [width, height], inner, gain: [inner[0] / width, inner[1] / height],
    pad: spare.map((space) => Math.round(space / 2 - 0.1)), size: [inner[0] + spare[0], inner[1] + spare[1]],
  };
}

// In the upper left corner of a square, at most 640 pixels large.
function placeCorner(width, height, size) {
  const ratio = Math.min(Math.min(size, 640) / height, Math.min(size, 640) / width);
  const inner = [Math.max(even(width * ratio), 1), Math.max(even(height * ratio), 1)];
  return { shape: [width, height], inner, gain: [ratio, ratio], pad: [0, 0], size: [size, size] };
}

// Round halves to even, as Python does.
function even(value) {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
}

// Resize RGBA to RGB with the integer arithmetic of OpenCV, or of PIL with antialiasing. The browser's own resizing
// differs from the one that the model was calibrated with.
function resize(pixels, width, height, newWidth, newHeight, antialias) {
  const across = antialias ? taps(width, newWidth) : neighbours(width, newWidth);
  const down = antialias ? taps(height, newHeight) : neighbours(height, newHeight);
  const round = (sum) => Math.floor((sum + 2 ** 21) / 2 ** 22);
  const rows = new Int32Array(height * newWidth * 3);
  for (let x = 0; x < newWidth; x++) {
    const { first, weights } = across[x];
    for (let y = 0; y < height; y++) {
      let r = 0, g = 0, b = 0;
      for (let t = 0, from = (y * width + first) * 4; t < weights.length; t++, from += 4) {
        r += weights[t] * pixels[from]; g += weights[t] * pixels[from + 1]; b += weights[t] * pixels[from + 2];
      }
      const to = (y * newWidth + x) * 3;
      rows[to] = antialias ? round(r) : r >> 4;
      rows[to + 1] = antialias ? round(g) : g >> 4;
      rows[to + 2] = antialias ? round(b) : b >> 4;
    }
  }
  const result = new Uint8ClampedArray(newHeight * newWidth * 3), line = newWidth * 3;
  for (let y = 0; y < newHeight; y++) {
    const { first, weights } = down[y];
    for (let x = 0; x < line; x++) {
      let sum = 0;
      for (let t = 0, from = first * line + x; t < weights.length; t++, from += line) {
        sum += antialias ? weights[t] * rows[from] : (weights[t] * rows[from]) >> 16;
      }
      result[y * line + x] = antialias ? round(sum) : (sum + 2) >> 2;
    }
  }
  return result;
}

// The two source pixels next to each target pixel, with 11-bit weights.
function neighbours(old, count) {
  return Array.from({ length: count }, (_, place) => {
    const centre = Math.fround((place + 0.5) * (old / count) - 0.5);
    const first = Math.min(Math.max(Math.floor(centre), 0), old - 1);
    if (first === old - 1) return { first, weights: [2048] };
    const share = Math.fround(Math.max(centre - first, 0));
    return { first, weights: [even(Math.fround(1 - share) * 2048), even(share * 2048)] };
  });
}

// The source pixels under a triangle filter as wide as a target pixel, with 22-bit weights.
function taps(old, count) {
  const scale = old / count, reach = Math.max(scale, 1);
  return Array.from({ length: count }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - reach + 0.5), 0), last = Math.min(Math.trunc(centre + reach + 0.5), old);
    const weights = [];
    for (let t = first; t < last; t++) weights.push(Math.max(1 - Math.abs(t - centre + 0.5) / reach, 0));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    return { first, weights: weights.map((weight) => Math.floor((weight / total) * 2 ** 22 + 0.5)) };
  });
}

// Postprocessing

// Detections kept by the framework: {box, score, keypoints [[x, y]], visibility, factors [[l11, l21, l22]]}.
export function select(facts, outputs, box, conf, iou) {
  const found = facts.layout === "yolonas" ? candidatesNAS(facts, outputs, box, conf)
    : facts.layout === "ultralytics-end2end" ? rowsEndToEnd(facts, outputs, conf)
    : candidates(facts, outputs, conf);
  const kept = facts.layout === "ultralytics-end2end" ? found : suppress(found, iou);
  const rows = new Map();
  if (outputs.cells) outputs.cells.data.forEach((cell, row) => { if (Number(cell) >= 0) rows.set(Number(cell), row); });
  const result = [];
  for (const one of kept.slice(0, 300)) {
    const row = outputs.cells ? rows.get(one.cell) : one.cell;
    if (row === undefined) continue; // this cell has no factors
    result.push(inPicture(facts, outputs.factors.data, row, one, box));
  }
  return result;
}

function candidates(facts, outputs, conf) {
  const { data, dims: [, channels, count] } = outputs.output0;
  const classes = facts.class_names.length, found = [];
  for (let cell = 0; cell < count; cell++) {
    let best = 0, score = -1;
    for (let c = 0; c < classes; c++) {
      const value = data[(4 + c) * count + cell];
      if (value > score) { score = value; best = c; }
    }
    if (!(score > conf)) continue;
    const at = (channel) => data[channel * count + cell];
    const corners = [at(0) - at(2) / 2, at(1) - at(3) / 2, at(0) + at(2) / 2, at(1) + at(3) / 2];
    const values = Array.from({ length: channels - 4 - classes }, (_, place) => at(4 + classes + place));
    found.push({ cell, class: best, score, corners, ...keypointsOf(facts, values) });
  }
  return found;
}

function rowsEndToEnd(facts, outputs, conf) {
  const { data, dims: [, count, channels] } = outputs.output0;
  const found = [];
  for (let row = 0; row < count; row++) {
    const values = data.subarray(row * channels, (row + 1) * channels);
    if (!(values[4] > conf)) continue;
    found.push({
      cell: Number(outputs.rows.data[row]), class: values[5], score: values[4], corners: Array.from(values.subarray(0, 4)),
      ...keypointsOf(facts, Array.from(values.subarray(6))),
    });
  }
  return found;
}

// Clips to the image before suppression, as LibreYOLO does.
function candidatesNAS(facts, outputs, box, conf) {
  const count = outputs.scores.dims[1], classes = outputs.scores.dims[2], keypoints = facts.keypoint_names.length;
  const found = [];
  for (let cell = 0; cell < count; cell++) {
    const scores = outputs.scores.data.subarray(cell * classes, (cell + 1) * classes);
    const score = Math.max(...scores);
    if (!(score >= conf)) continue;
    const corners = Array.from(outputs.boxes.data.subarray(cell * 4, cell * 4 + 4)).map((value, place) =>
      Math.min(Math.max(value, 0), box.shape[place % 2] * box.gain[0]));
    if (corners[2] <= corners[0] || corners[3] <= corners[1]) continue;
    const places = [], visibility = [];
    for (let k = 0; k < keypoints; k++) {
      const from = cell * keypoints + k;
      places.push([outputs.keypoints_xy.data[2 * from], outputs.keypoints_xy.data[2 * from + 1]]);
      visibility.push(outputs.keypoints_conf.data[from]);
    }
    found.push({ cell, class: scores.indexOf(score), score, corners, places, visibility });
  }
  return found.sort((a, b) => b.score - a.score).slice(0, 1000);
}

function keypointsOf(facts, values) {
  const width = facts.visibility ? 3 : 2, places = [], visibility = [];
  for (let k = 0; k < values.length; k += width) {
    places.push([values[k], values[k + 1]]);
    visibility.push(facts.visibility ? values[k + 2] : 1);
  }
  return { places, visibility };
}

export function suppress(found, iou) {
  const kept = [];
  for (const one of [...found].sort((a, b) => b.score - a.score)) {
    if (!kept.some((other) => other.class === one.class && overlap(other.corners, one.corners) > iou)) kept.push(one);
  }
  return kept;
}

function overlap(a, b) {
  const width = Math.min(a[2], b[2]) - Math.max(a[0], b[0]), height = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
  if (width <= 0 || height <= 0) return 0;
  const shared = width * height;
  return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared);
}

function inPicture(facts, factors, row, one, box) {
  const clip = facts.layout !== "yolonas"; // LibreYOLO does not clip keypoints
  const place = (value, axis) => {
    const original = (value - box.pad[axis]) / box.gain[axis];
    return clip ? Math.min(Math.max(original, 0), box.shape[axis]) : original;
  };
  const [gx, gy] = box.gain;
  return {
    box: one.corners.map((value, side) => Math.min(Math.max((value - box.pad[side % 2]) / box.gain[side % 2], 0), box.shape[side % 2])),
    score: one.score,
    class: one.class,
    keypoints: one.places.map(([x, y]) => [place(x, 0), place(y, 1)]),
    visibility: one.visibility,
    factors: one.places.map((_, k) => {
      const from = (row * one.places.length + k) * 3;
      return [factors[from] / gx, factors[from + 1] / gy, factors[from + 2] / gy];
    }),
  };
}

// Output distribution

// Covariance and scale of each keypoint as [xx, xy, yy], degrees of freedom of the Student-t, and which to keep.
export function describe(facts, found, family) {
  const area = Math.max((found.box[2] - found.box[0]) * (found.box[3] - found.box[1]), 1) * facts.area_factor;
  const threshold = facts.threshold === null ? -Infinity : facts.threshold;
  const visible = (k) => facts.visibility_threshold === null || found.visibility === null
    || found.visibility[k] >= facts.visibility_threshold;
  const covariance = [], scale = [], dof = [], keep = [];
  found.factors.forEach(([a, b, c], k) => {
    const gaussian = [a * a, a * b, b * b + c * c];
    keep.push(-(gaussian[0] + gaussian[2]) / (area * (2 * facts.sigmas[k]) ** 2) >= threshold && visible(k));
    const own = keep[k] || facts.pruned_dof === null; // pruned keypoints may have another distribution
    const wide = family === "student-t" ? (own ? facts.student_scale[k] : facts.pruned_scale[k]) ** 2 : 1;
    dof.push(family === "student-t" ? (own ? facts.student_dof[k] : facts.pruned_dof[k]) : null);
    const moment = facts.student_moment === null ? (wide * dof[k]) / (dof[k] - 2) : facts.student_moment[k] ** 2;
    scale.push(gaussian.map((value) => value * wide));
    covariance.push(gaussian.map((value) => value * (family === "student-t" ? moment : 1)));
  });
  return { ...found, covariance, scale, dof, keep };
}

// Ellipse that contains the keypoint with a probability: semi-axes, longer first, and angle of the longer one.
export function ellipse([xx, xy, yy], dof, probability) {
  const log = Math.log1p(-probability);
  const radius = dof === null ? -2 * log : dof * Math.expm1((-2 / dof) * log);
  const major = (xx + yy) / 2 + Math.hypot((xx - yy) / 2, xy);
  const minor = (xx * yy - xy * xy) / major;
  return { major: Math.sqrt(major * radius), minor: Math.sqrt(minor * radius), angle: Math.atan2(2 * xy, xx - yy) / 2 };
}
