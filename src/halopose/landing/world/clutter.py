"""Objects around a runway apart from its own taxiways: roads, old pavement, buildings, rows of trees.

No object stands on a runway, before it, or where it could hide a corner.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from halopose.geometry.camera import Camera, project_points
from halopose.landing.world.runway_layout import Patch
from halopose.landing.world.scenes import Scene
from halopose.types import Array

_CLEAR = 110.0  # metres beside a centreline without objects
_PAINTS = np.array(
    [
        (0.55, 0.58, 0.6),
        (0.3, 0.33, 0.36),
        (0.12, 0.2, 0.32),
        (0.7, 0.7, 0.68),
        (0.25, 0.2, 0.16),
        (0.1, 0.12, 0.15),
    ]
)  # blue, green, red of walls and roofs
_TREES = np.array([(0.02, 0.06, 0.035), (0.03, 0.08, 0.05), (0.025, 0.045, 0.035)])


@dataclass(frozen=True)
class Boxes:
    """Boxes on the ground.

    Attributes:
        middle: centres (N, 2).
        half: half sizes (N, 2).
        height: heights (N,).
        turn: rotations (N,).
        colour: colours (N, 3).
    """

    middle: Array
    half: Array
    height: Array
    turn: Array
    colour: Array


def road_patches(scene: Scene) -> list[Patch]:
    """Return roads, paths and disused pavement in all directions, some along the extended centreline."""
    count = scene.footage.roads if scene.footage else 0
    rng = np.random.default_rng([scene.seed, 32])
    patches = []
    for _ in range(count):
        wide = float(np.exp(rng.uniform(np.log(2.0), np.log(40.0))))
        grey = float(rng.uniform(0.06, 0.45))
        warm = float(rng.uniform(-0.05, 0.12))
        colour = (grey * (1 - warm), grey, grey * (1 + warm))
        start, run = float(rng.uniform(-5000, scene.runway.length)), float(np.exp(rng.uniform(4.0, 8.0)))
        across = float(rng.normal(0, 500))
        slant = float(rng.choice([0.0, rng.normal(0, 0.3), rng.normal(0, 3.0)]))
        bar = wide / 2 * float(np.hypot(1, slant))
        opacity = float(rng.uniform(0.4, 1.0))
        patches.append(Patch((start, start + run), ((across - bar, across + bar),), colour, opacity, slant=slant))
    return patches


def sample_boxes(scene: Scene) -> Boxes:
    """Draw groups of buildings, hangars and rows of trees away from the runways."""
    rng = np.random.default_rng([scene.seed, 33])
    count = scene.footage.buildings if scene.footage else 0
    groups = max(count // 12, 1)
    centre = np.column_stack(
        [rng.uniform(-6000, scene.runway.length + 4000, groups), rng.normal(0, 900, groups)]
    )  # fmt: skip
    member = rng.integers(groups, size=count)
    row = rng.random(groups)[member] < 0.4  # of trees, in line
    place = centre[member] + rng.normal(0, 1, (count, 2)) * np.where(row[:, None], (300.0, 8.0), (160.0, 120.0))
    tree = row | (rng.random(count) < 0.2)
    half = np.exp(rng.normal(np.log(np.where(tree[:, None], (8.0, 6.0), (22.0, 14.0))), 0.5, (count, 2)))
    height = np.exp(rng.normal(np.log(np.where(tree, 7.0, 9.0)), 0.45))
    turn = np.where(rng.random(groups) < 0.5, 0.0, rng.uniform(-0.8, 0.8, groups))[member]
    trees, walls = _TREES[rng.integers(len(_TREES), size=count)], _PAINTS[rng.integers(len(_PAINTS), size=count)]
    colour = np.where(tree[:, None], trees, walls) * np.exp(rng.normal(0, 0.25, (count, 1)))
    reach = np.linalg.norm(half, axis=1)
    away = np.min([np.abs(place[:, 1] - runway.threshold[1]) for runway in scene.runways] or [place[:, 1]], axis=0)
    free = away - reach > _CLEAR
    return Boxes(place[free], half[free], height[free], turn[free], colour[free])


_CORNERS = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], dtype=float)
_WALLS = ((0, 1, 0, -1), (1, 2, 1, 0), (2, 3, 0, 1), (3, 0, -1, 0))  # two corners, and the outward normal


def draw_boxes(
    image: Array, camera: Camera, rotation: Array, eye: Array, scene: Scene, light: Array, horizon: Array
) -> None:
    """Draw boxes into planes (3, H, W), far ones first, under a light (3, 1, 1) and through the air's colour
    ``horizon``.
    """
    boxes = sample_boxes(scene)
    rng = np.random.default_rng([scene.seed, 34])
    shade = rng.uniform(0.35, 1.0, 5)  # four walls, and the roof
    distance = np.hypot(*(boxes.middle - eye[:2]).T)
    for number in np.argsort(-distance).tolist():
        turn = boxes.turn[number]
        spin = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        ground = boxes.middle[number] + (_CORNERS * boxes.half[number]) @ spin.T
        points = np.concatenate([np.column_stack([ground, np.full(4, z)]) for z in (0.0, boxes.height[number])])
        pixels = project_points(camera, rotation, eye, points)
        if not np.isfinite(pixels).all() or distance[number] < 60:
            continue
        faces = [([4, 5, 6, 7], 4)] if eye[2] > boxes.height[number] else []
        for side, (a, b, *normal) in enumerate(_WALLS):
            if (spin @ normal) @ (eye[:2] - ground[a]) > 0:
                faces.append(([a, b, b + 4, a + 4], side))
        clear = np.exp(-scene.extinction * distance[number])
        for corners, side in sorted(faces, key=lambda face: face[1] == 4):
            lit = boxes.colour[number].reshape(3, 1, 1) * light * shade[side]
            _fill(image, pixels[corners], (lit * clear + horizon * (1 - clear)).astype(np.float32))


def _fill(image: Array, polygon: Array, colour: Array) -> None:
    """Fill a convex polygon (4, 2) of pixels with a colour (3, 1, 1), with anti-aliased edges."""
    size = np.array([image.shape[2], image.shape[1]])
    low, high = np.floor(polygon.min(0)) - 1, np.ceil(polygon.max(0)) + 2
    first, last = np.maximum(low, 0).astype(int), np.minimum(high, size).astype(int)
    if (first >= last).any() or (high - low > 4 * size).any():
        return
    cover = np.zeros((last[1] - first[1], last[0] - first[0]), np.uint8)
    points = np.rint((polygon - first) * 16).astype(np.int32)
    cv2.fillConvexPoly(cover, points, 255, cv2.LINE_AA, 4)
    part = image[:, first[1] : last[1], first[0] : last[0]]
    part += (colour - part) * (cover.astype(np.float32) / 255)
