"""A contact sheet of the synthetic world: weathers down, distances across, corners optional.

python -m research.world_gallery -o world.png --seed 0 --corners
python -m research.world_gallery -o footage.jpg --footage    # as real cameras record them
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np

from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import (
    WEATHERS,
    SceneSettings,
    Weather,
    corners_in_image,
    labelled_runways,
    sample_scene,
)
from halopose.types import Array

DISTANCES = ((300.0, 400.0), (700.0, 1000.0), (1500.0, 2200.0), (3500.0, 6000.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("world.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corners", action="store_true")
    parser.add_argument("--footage", action="store_true")
    options = parser.parse_args()
    if options.footage:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(options.output), footage(options.seed), [cv2.IMWRITE_JPEG_QUALITY, 85])
        print(f"Open {options.output}")
        return
    rows = [
        np.hstack([picture(options.seed + 10 * row + column, weather, range_, options.corners)
                   for column, range_ in enumerate(DISTANCES)])
        for row, weather in enumerate(WEATHERS)
    ]  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(options.output), np.vstack(rows))
    print(f"Open {options.output}")


def picture(seed: int, weather: Weather, distance: tuple[float, float], corners: bool) -> Array:
    """One frame with its weather and distance written on it."""
    scene = sample_scene(seed, weather, SceneSettings(distance=distance))
    image = render_scene(scene)
    text = f"{weather}, {-scene.position[0]:.0f} m, visibility {scene.visibility / 1e3:.1f} km"
    cv2.putText(image, text, (8, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (255, 255, 255), 1, cv2.LINE_AA)
    for runway in labelled_runways(scene) if corners else ():
        for (u, v), seen in zip(*corners_in_image(scene, runway), strict=True):
            centre = (round(float(u) * 16), round(float(v) * 16))
            cv2.circle(image, centre, 5 * 16, (0, 255, 255) if seen else (0, 0, 255), 1, cv2.LINE_AA, shift=4)
    return image


def footage(seed: int) -> Array:
    """Twelve scenes of footage, all at one size."""
    kinds: tuple[Weather, ...] = ("clear", "haze", "clear", "dusk", "clear", "night")
    frames = [
        cv2.resize(
            render_scene(sample_scene(seed + n, kinds[n % 6], SceneSettings(footage=True, paved=0.35))), (320, 192)
        )
        for n in range(12)
    ]
    return np.vstack([np.hstack(frames[row : row + 4]) for row in (0, 4, 8)])


if __name__ == "__main__":
    main()
