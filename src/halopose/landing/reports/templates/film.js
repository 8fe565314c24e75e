"use strict";
// Plays the frames of a film; without scripts the first frame is shown.
(() => {
  const film = JSON.parse(document.getElementById("stills").textContent);
  const stills = film.stills.map((source) => Object.assign(new Image(), { src: source }));
  const layers = [...document.querySelectorAll(".film img")].map((image) => {
    const canvas = Object.assign(document.createElement("canvas"), { className: image.className });
    canvas.width = image.getAttribute("width"); canvas.height = image.getAttribute("height");
    return { image, canvas, context: canvas.getContext("2d") };
  });
  const play = document.getElementById("play"), slider = document.getElementById("frame");
  const time = document.getElementById("time");
  let at = 0, asked = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, before = 0;

  async function show(number) {
    const turn = asked += 1;
    await stills[number].decode();
    if (turn !== asked) return;  // a later frame was requested meanwhile
    for (const { image, canvas, context } of layers) {
      context.drawImage(stills[number], 0, 0, canvas.width, canvas.height);
      if (image.isConnected) image.replaceWith(canvas);
    }
    at = number; slider.value = number;
    time.textContent = `frame ${number + 1} of ${stills.length}`;
  }
  function run(now) {
    if (!playing) return;
    if (now - before >= 1000 / film.rate) { before = now; show((at + 1) % stills.length); }
    requestAnimationFrame(run);
  }
  function set(on) {
    playing = on; play.textContent = on ? "Pause" : "Play";
    if (on) requestAnimationFrame(run);
  }
  play.addEventListener("click", () => set(!playing));
  slider.addEventListener("input", () => { set(false); show(Number(slider.value)); });
  document.getElementById("player").hidden = false;
  show(0);
  set(playing);
})();
