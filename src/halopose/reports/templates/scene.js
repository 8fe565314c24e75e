"use strict";
// Orthographic view of a scene, in which a covariance projects to an ellipse exactly.
(() => {
  const scene = JSON.parse(document.getElementById("scene").textContent);
  const canvas = document.getElementById("stage"), context = canvas.getContext("2d");
  const slider = document.getElementById("frame"), play = document.getElementById("play");
  const ellipses = document.getElementById("ellipses"), time = document.getElementById("time");
  const HOLDS_95 = Math.sqrt(5.991);
  const view = { yaw: -0.7, pitch: 0.25, zoom: 1 };
  let playing = false, last = 0, at = 0;
  slider.max = Math.max(scene.frames.length - 1, 0);

  const axes = () => {
    const cy = Math.cos(view.yaw), sy = Math.sin(view.yaw), cp = Math.cos(view.pitch), sp = Math.sin(view.pitch);
    return [[-sy, cy, 0], [-cy * sp, -sy * sp, cp], [cy * cp, sy * cp, sp]];  // right, up, towards the eye
  };
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
  let palette = {};  // for one drawing; the theme may change before the next
  const colour = (name) => palette[name] ??= (canvas.style.color = `var(${name})`, getComputedStyle(canvas).color);
  const side = (name) => name.includes("left") ? "--student_t" : name.includes("right") ? "--uncalibrated" : "--gaussian";

  function draw() {
    palette = {};
    const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
    if (canvas.width !== Math.round(wide * ratio)) canvas.width = Math.round(wide * ratio);
    if (canvas.height !== Math.round(high * ratio)) canvas.height = Math.round(high * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    const [right, up] = axes(), scale = view.zoom * Math.min(wide, high) / 2.6;
    const put = (p) => {
      const d = p.map((value, i) => value - scene.centre[i]);
      return [wide / 2 + scale * dot(right, d), high / 2 - scale * dot(up, d)];
    };
    floor(put);
    for (const camera of scene.cameras) frustum(camera, put);
    for (const person of scene.persons) {
      const points = person.frames[scene.frames[at]];
      if (points) figure(person.id, points, put, right, up, scale);
    }
    time.textContent = `${(at / scene.rate).toFixed(2)} s, frame ${scene.frames[at] ?? 0}`;
  }
  function floor(put) {
    context.strokeStyle = colour("--grid"); context.lineWidth = 1;
    const [x, y] = scene.centre.map(Math.round);
    for (let i = -3; i <= 3; i++) {
      line([put([x + i, y - 3, 0]), put([x + i, y + 3, 0])]);
      line([put([x - 3, y + i, 0]), put([x + 3, y + i, 0])]);
    }
  }
  function line(points) {
    context.beginPath();
    points.forEach((p, i) => i ? context.lineTo(...p) : context.moveTo(...p));
    context.stroke();
  }
  function frustum(camera, put) {
    const [r, d, f] = camera.axes;
    const corner = (u, v) => put(camera.at.map((value, i) => value + 0.4 * f[i] + u * 0.13 * r[i] + v * 0.22 * d[i]));
    const ring = [corner(-1, -1), corner(1, -1), corner(1, 1), corner(-1, 1)], eye = put(camera.at);
    context.strokeStyle = colour("--muted"); context.lineWidth = 1;
    line([...ring, ring[0]]);
    for (const c of ring) line([eye, c]);
    context.fillStyle = colour("--muted"); context.font = "12px system-ui, sans-serif";
    context.fillText(camera.name, eye[0] + 6, eye[1] - 6);
  }
  function figure(id, points, put, right, up, scale) {
    const places = points.map((p) => p && put([p[0] / 1000, p[1] / 1000, p[2] / 1000]));
    context.strokeStyle = colour("--ink"); context.lineWidth = 2; context.globalAlpha = 0.75;
    for (const [a, b] of scene.limbs) if (places[a] && places[b]) line([places[a], places[b]]);
    points.forEach((p, k) => {
      if (!p) return;
      const shade = colour(side(scene.names[k])), [x, y] = places[k];
      context.fillStyle = shade; context.strokeStyle = shade; context.lineWidth = 1.3;
      if (ellipses.checked) {
        const c = [[p[3], p[4], p[5]], [p[4], p[6], p[7]], [p[5], p[7], p[8]]];
        const of = (a, b) => dot(a, c.map((row) => dot(row, b))) / 1e6;
        const xx = of(right, right), yy = of(up, up), xy = -of(right, up);
        const half = Math.hypot((xx - yy) / 2, xy), mean = (xx + yy) / 2;
        const radii = [mean + half, Math.max(mean - half, 0)].map((v) => HOLDS_95 * Math.sqrt(v) * scale);
        context.beginPath();
        context.ellipse(x, y, radii[0], radii[1], Math.atan2(2 * xy, xx - yy) / 2, 0, 2 * Math.PI);
        context.globalAlpha = 0.18; context.fill(); context.globalAlpha = 0.8; context.stroke();
      }
      context.globalAlpha = 1; context.beginPath(); context.arc(x, y, 3, 0, 2 * Math.PI); context.fill();
    });
    const top = places.filter(Boolean).reduce((a, b) => b[1] < a[1] ? b : a, [0, Infinity]);
    context.fillStyle = colour("--ink"); context.font = "600 13px system-ui, sans-serif";
    if (top[1] < Infinity) context.fillText(`#${id}`, top[0] + 8, top[1] - 14);
  }
  function tick(now) {
    if (!playing) return;
    if (now - last > 1000 / scene.rate) { at = (at + 1) % scene.frames.length; slider.value = at; last = now; draw(); }
    requestAnimationFrame(tick);
  }
  play.addEventListener("click", () => {
    playing = !playing; play.textContent = playing ? "Pause" : "Play";
    if (playing) requestAnimationFrame(tick);
  });
  slider.addEventListener("input", () => { at = Number(slider.value); draw(); });
  ellipses.addEventListener("change", draw);
  const held = new Map();
  canvas.addEventListener("pointerdown", (event) => { held.set(event.pointerId, event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return;
    if (held.size === 1) {
      view.yaw -= (event.clientX - before.clientX) / 150;
      view.pitch = Math.max(-1.5, Math.min(1.5, view.pitch + (event.clientY - before.clientY) / 150));
    } else {
      const other = [...held.values()].find((e) => e.pointerId !== event.pointerId);
      const size = (e) => Math.hypot(e.clientX - other.clientX, e.clientY - other.clientY);
      zoom(size(event) / Math.max(size(before), 1));
    }
    held.set(event.pointerId, event); draw();
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => held.delete(event.pointerId));
  const zoom = (factor) => { view.zoom = Math.max(0.2, Math.min(8, view.zoom * factor)); };
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(Math.exp(-event.deltaY / 600)); draw(); }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const turn = { ArrowLeft: [0.1, 0], ArrowRight: [-0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
    if (!turn) return;
    event.preventDefault(); view.yaw += turn[0]; view.pitch += turn[1]; draw();
  });
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.getElementById("swap").addEventListener("change", draw);
  draw();
})();
