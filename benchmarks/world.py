"""Images/s of rendering the synthetic world at 640 x 384 on one core, by weather and with encoding.

    python -m benchmarks.world

Measures processor time, which does not depend on other work on the machine. Textures are made once per process and
measured separately.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import cv2

from halopose.landing.world.landscape import LANDSCAPES, landscape
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import WEATHERS, Scene, sample_scene


def seconds_per_image(scenes: Sequence[Scene], rounds: int = 3) -> float:
    """Least processor time per image over rounds; the textures exist before."""
    for scene in scenes:
        render_scene(scene)
    return min(_round(scenes) for _ in range(rounds)) / len(scenes)


def images_a_second() -> float:
    """Images/s over all weathers on one core."""
    cv2.setNumThreads(1)
    return 1 / seconds_per_image([sample_scene(seed, weather) for weather in WEATHERS for seed in range(8)])


def _round(scenes: Sequence[Scene]) -> float:
    start = time.process_time()
    for scene in scenes:
        render_scene(scene)
    return time.process_time() - start


def main() -> None:
    cv2.setNumThreads(1)
    start = time.process_time()
    for number in range(LANDSCAPES):
        landscape(number)
    print(f"{LANDSCAPES} landscapes, once per process: {time.process_time() - start:.1f} s")
    for weather in WEATHERS:
        cost = seconds_per_image([sample_scene(seed, weather) for seed in range(24)])
        print(f"{weather:6} {cost * 1e3:5.1f} ms  {1 / cost:5.1f} images/s")
    image = render_scene(sample_scene(0))
    start = time.process_time()
    for _ in range(50):
        cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95])
    print(f"JPEG   {(time.process_time() - start) * 20:5.1f} ms more")


if __name__ == "__main__":
    main()
