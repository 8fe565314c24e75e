// Web page: draws an image, a film or the camera with probability ellipses.

import { describe, ellipse } from "./pose.js";

const LIMBS = [
  [15, 13], [13, 11], [16, 14], [14, 12], [11, 12], [5, 11], [6, 12], [5, 6], [5, 7], [6, 8], [7, 9], [8, 10],
  [0, 1], [0, 2], [1, 3], [2, 4],
];
const COLOURS = { left: "#5ac850", right: "#f58c3c", middle: "#3cb4eb", pruned: "#a0a0a0" };
const IOU = 0.7;

const at = (id) => document.getElementById(id);
const view = at("view"), pen = view.getContext("2d"), grab = document.createElement("canvas");
const worker = new Worker("worker.js", { type: "module" });

let facts = null;
let source = null; // image or video element
let stream = null; // camera stream
let frame = null; // frame of the poses; it is drawn with them, so that poses never lag behind
let found = [];
let waiting = false, number = 0;
const arrivals = [];

// Values for scripts and tests.
window.halopose = { poses: [], frames: 0, rate: 0, ready: null, first: null };

worker.onmessage = ({ data }) => {
  if (data.kind === "problem") return say(data.text, true);
  if (data.kind === "ready") return ready(data);
  waiting = false;
  if (data.number === number) { // otherwise the source has changed
    found = data.found;
    swap();
    count(data.milliseconds);
    draw();
  }
  next();
};

function ready(data) {
  facts = data.facts;
  at("camera").disabled = at("file").disabled = false;
  const sizes = [...new Set([320, 480, facts.imgsz])].filter((size) => size <= facts.imgsz).sort((a, b) => a - b);
  at("sizes").innerHTML = sizes.map((size) => `<label><input type="radio" name="size" value="${size}"><span>${size}</span></label>`).join("");
  setSize(facts.imgsz);
  at("sizes").addEventListener("change", again);
  say(`Ready (${data.runtime}). No data leave this computer.`);
  window.halopose.ready = performance.now();
  const wanted = new URLSearchParams(location.search);
  if (wanted.has("size")) setSize(Number(wanted.get("size")));
  if (wanted.has("camera")) startCamera();
  if (wanted.has("picture")) openAddress(wanted.get("picture"));
}

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;

function setSize(size) {
  const radio = document.querySelector(`input[name="size"][value="${size}"]`);
  if (radio) radio.checked = true;
}

// Sources

async function startCamera() {
  if (stream) return stop();
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 640 }, facingMode: "user" }, audio: false });
  } catch (error) {
    return say(`Cannot open the camera: ${error.message}`, true);
  }
  const video = newVideo();
  video.srcObject = stream;
  at("camera").textContent = "Stop";
  if (!new URLSearchParams(location.search).has("size")) setSize(320);
  await video.play();
  use(video);
}

function stop() {
  stream?.getTracks().forEach((track) => track.stop());
  stream = null;
  source?.pause?.();
  source = null;
  at("camera").textContent = "Camera";
}

function newVideo() {
  return Object.assign(document.createElement("video"), { muted: true, playsInline: true, loop: true });
}

async function openFile(file) {
  if (!file) return;
  await openAddress(URL.createObjectURL(file), file.type.startsWith("video/"), file.name);
}

async function openAddress(address, film = false, name = address) {
  stop();
  const element = film ? newVideo() : new Image();
  element.src = address;
  try {
    await (film ? element.play() : element.decode());
  } catch {
    return say(`This browser cannot read ${name} as an image or a video.`, true);
  }
  if (film) setSize(320);
  use(element);
}

function use(element) {
  source = element;
  number += 1;
  found = [];
  arrivals.length = 0;
  view.hidden = at("figures").hidden = false;
  at("empty").hidden = true;
  next();
}

// Frames are sent to the worker one at a time; there is no queue.

function next() {
  if (waiting || !source || !facts) return;
  const width = source.videoWidth || source.naturalWidth, height = source.videoHeight || source.naturalHeight;
  if (!width) return requestAnimationFrame(next);
  const moving = source instanceof HTMLVideoElement;
  if (!moving && frame?.of === key()) return;
  grab.width = width;
  grab.height = height;
  const brush = grab.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
  brush.drawImage(source, 0, 0);
  const { data } = brush.getImageData(0, 0, width, height);
  frame = { of: key(), width, height };
  waiting = true;
  worker.postMessage(
    { number, pixels: data.buffer, width, height, imgsz: Number(chosen("size")), conf: Number(at("conf").value) / 100, iou: IOU },
    [data.buffer],
  );
}

const key = () => `${number} ${chosen("size")} ${at("conf").value}`;

function again() {
  next();
  draw();
}

function swap() {
  if (view.width !== frame.width || view.height !== frame.height) Object.assign(view, { width: frame.width, height: frame.height });
  const kept = document.createElement("canvas");
  Object.assign(kept, { width: frame.width, height: frame.height });
  kept.getContext("2d").drawImage(grab, 0, 0);
  frame.picture = kept;
}

function count(milliseconds) {
  const now = performance.now();
  arrivals.push(now);
  while (arrivals.length > 20) arrivals.shift();
  const moving = source instanceof HTMLVideoElement && arrivals.length > 1;
  window.halopose.rate = moving ? (1000 * (arrivals.length - 1)) / (now - arrivals[0]) : 0;
  window.halopose.frames += 1;
  at("rate").textContent = moving ? window.halopose.rate.toFixed(1) : Math.round(milliseconds);
  at("unit").textContent = moving ? "frames per second" : "milliseconds";
}

// Drawing

function draw() {
  if (!frame?.picture) return;
  const family = chosen("family"), probability = Number(at("probability").value) / 100, all = chosen("pruned") === "show";
  const poses = found.map((one) => describe(facts, one, family));
  pen.drawImage(frame.picture, 0, 0);
  const unit = Math.max(frame.width, frame.height) / 640;
  for (const pose of poses) drawPose(pose, family, probability, all, unit);
  const kept = poses.reduce((sum, pose) => sum + pose.keep.filter(Boolean).length, 0);
  at("found").textContent = poses.length;
  at("kept").textContent = `${kept} of ${poses.length * facts.keypoint_names.length}`;
  window.halopose.poses = poses;
  if (poses.length && window.halopose.first === null) window.halopose.first = performance.now();
}

function drawPose(pose, family, probability, all, unit) {
  pen.lineCap = "round";
  pen.lineWidth = 1.5 * unit;
  pen.strokeStyle = "rgba(235, 235, 235, 0.85)";
  for (const [a, b] of facts.keypoint_names.length === 17 ? LIMBS : []) {
    if (!pose.keep[a] || !pose.keep[b]) continue;
    pen.beginPath();
    pen.moveTo(...pose.keypoints[a]);
    pen.lineTo(...pose.keypoints[b]);
    pen.stroke();
  }
  const size = Math.sqrt(Math.max((pose.box[2] - pose.box[0]) * (pose.box[3] - pose.box[1]), 1));
  pose.keypoints.forEach(([x, y], k) => {
    if (!pose.keep[k] && !all) return;
    const [right, down] = facts.offset ? facts.offset[k] : [0, 0]; // offset of the mean in units of the square root of the box area
    const { major, minor, angle } = ellipse(pose.scale[k], pose.dof[k], probability);
    const colour = pose.keep[k] ? COLOURS[side(facts.keypoint_names[k])] : COLOURS.pruned;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = (pose.keep[k] ? 1.6 : 0.8) * unit;
    pen.beginPath();
    pen.ellipse(x + right * size, y + down * size, major, minor, angle, 0, 2 * Math.PI);
    pen.globalAlpha = pose.keep[k] ? 0.28 : 0;
    pen.fill();
    pen.globalAlpha = pose.keep[k] ? 1 : 0.6;
    pen.stroke();
    pen.beginPath();
    pen.arc(x, y, 1.8 * unit, 0, 2 * Math.PI);
    pen.fill();
    pen.globalAlpha = 1;
  });
}

const side = (name) => (/left/i.test(name) ? "left" : /right/i.test(name) ? "right" : "middle");

// Controls

at("camera").addEventListener("click", startCamera);
at("file").addEventListener("change", (event) => openFile(event.target.files[0]));
at("open").addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") at("file").click(); });
at("controls").addEventListener("input", () => {
  at("shown").textContent = `${at("probability").value} %`;
  at("least").textContent = (at("conf").value / 100).toFixed(2);
  draw();
});
at("conf").addEventListener("change", again);
for (const kind of ["dragenter", "dragover"]) {
  at("stage").addEventListener(kind, (event) => { event.preventDefault(); at("stage").classList.add("over"); });
}
for (const kind of ["dragleave", "drop"]) at("stage").addEventListener(kind, () => at("stage").classList.remove("over"));
at("stage").addEventListener("drop", (event) => { event.preventDefault(); openFile(event.dataTransfer.files[0]); });
