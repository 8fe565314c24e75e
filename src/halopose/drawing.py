"""Draw poses with probability ellipses on BGR images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch

from halopose.errors import HaloposeError
from halopose.types import Array

if TYPE_CHECKING:
    from halopose.poses import PoseDistributions

_SHIFT = 4  # sub-pixel bits of OpenCV's drawing functions
_SIDES = {"left": (80, 200, 90), "right": (60, 140, 245), "middle": (235, 180, 60)}  # BGR
_LIMB = (225, 225, 225)
_RESIDUAL = (190, 60, 170)
_PRUNED = (140, 140, 140)
_ALARM = (70, 70, 245)


@dataclass(frozen=True)
class Truth:
    """Annotations of the drawn detections.

    Attributes:
        keypoints: Annotated keypoints (N, K, 2).
        labelled: Whether a keypoint is labelled (N, K).
    """

    keypoints: Array
    labelled: Array


def draw_poses(
    image: Array,
    poses: PoseDistributions,
    *,
    probability: float = 0.95,
    truth: Truth | None = None,
    show_pruned: bool = True,
    limbs: tuple[tuple[int, int], ...] | None = None,
    names: tuple[str, ...] | None = None,
    boxes: bool = False,
    legend: bool = False,
    labels: Sequence[str] | None = None,
    alarm: float | None = None,
) -> Array:
    """Draw limbs and probability ellipses on a copy of the image.

    Args:
        image: BGR image (h, w, 3).
        poses: Poses to draw.
        probability: Probability that an ellipse contains the keypoint.
        truth: Annotations; residuals with their NLL are drawn.
        show_pruned: Whether to draw pruned keypoints (thin, grey and faint).
        limbs: Pairs of keypoints to connect; default: those of the layout.
        names: Keypoint names, which select the colours of left and right; default: those of the layout.
        boxes: Whether to draw boxes with scores.
        legend: Whether to draw a legend.
        labels: Text above the box of each detection.
        alarm: Rate at which out-of-distribution detections and images are marked.

    Raises:
        HaloposeError: The probability does not lie between 0 and 1.
    """
    if not 0 < probability < 1:
        raise HaloposeError(f"probability must lie between 0 and 1, got {probability}")
    canvas = np.ascontiguousarray(image).copy()
    if not len(poses):
        if alarm is not None:
            _draw_alarms(canvas, poses, alarm)
        return canvas
    assert poses.keep is not None
    limbs = poses.layout.limbs if limbs is None else limbs
    names = poses.names if names is None else names
    width = max(1, round(max(image.shape[:2]) / 640))
    axes, angles = poses.ellipse(probability)
    _draw_limbs(canvas, poses, limbs, width)
    _fill_ellipses(canvas, poses, axes, angles, names)
    if show_pruned:
        _draw_pruned(canvas, poses, axes, angles)
    for n, k in np.argwhere(poses.keep):
        colour = _colour(names[k])
        _outline(canvas, poses.mean[n, k], axes[n, k], angles[n, k], colour, width)
    if truth is not None:
        _draw_residuals(canvas, poses, truth, width, show_pruned)
    if boxes:
        _draw_boxes(canvas, poses, width)
    for box, label in zip(poses.boxes, labels or (), strict=False):
        x, y = np.clip(box[:2], 0, 2**20)
        _write(canvas, label, (round(float(x)), max(12 * width, round(float(y)) - 4 * width)), _LIMB, width)
    if legend:
        _draw_legend(canvas, poses, probability, names, width)
    if alarm is not None:
        _draw_alarms(canvas, poses, alarm)
    return canvas


def _draw_pruned(canvas: Array, poses: PoseDistributions, axes: Array, angles: Array) -> None:
    """Draw pruned keypoints half transparent."""
    layer = canvas.copy()
    for n, k in np.argwhere(~np.asarray(poses.keep)):
        _outline(layer, poses.mean[n, k], axes[n, k], angles[n, k], _PRUNED, 1)
    cv2.addWeighted(layer, 0.5, canvas, 0.5, 0, dst=canvas)


def _draw_boxes(canvas: Array, poses: PoseDistributions, width: int) -> None:
    for box, score in zip(poses.boxes, poses.scores, strict=True):
        cv2.rectangle(canvas, _point(box[:2]), _point(box[2:]), _LIMB, width, cv2.LINE_AA, _SHIFT)
        corner = np.clip(box[:2], 0, 2**20)
        _write(canvas, f"{score:.2f}", (round(corner[0]) + 3 * width, round(corner[1]) + 14 * width), _LIMB, width)


def _draw_alarms(canvas: Array, poses: PoseDistributions, alarm: float) -> None:
    """Draw red frames around out-of-distribution detections and images."""
    width = max(1, round(max(canvas.shape[:2]) / 640))
    for n in np.flatnonzero(~poses.in_distribution(alarm)):
        box = poses.boxes[n]
        cv2.rectangle(canvas, _point(box[:2]), _point(box[2:]), _ALARM, 2 * width, cv2.LINE_AA, _SHIFT)
        place = (
            round(float(np.clip(box[0], 0, 2**20))) + 4 * width,
            round(float(np.clip(box[3], 0, 2**20))) - 5 * width,
        )
        assert poses.novelty is not None
        _write(canvas, f"out of distribution, p = {poses.novelty[n]:.3f}", place, _LIMB, width)
    image = poses.image_novelty
    if image is not None and len(image) == 1 and image[0] <= alarm:
        high, wide = canvas.shape[:2]
        cv2.rectangle(canvas, (0, 0), (wide - 1, high - 1), _ALARM, 4 * width)
        text = f"image out of distribution, p = {image[0]:.3f}"
        _write(canvas, text, (8 * width, high - 10 * width), _LIMB, width)


def _draw_legend(
    canvas: Array, poses: PoseDistributions, probability: float, names: tuple[str, ...], width: int
) -> None:
    """Draw the legend at the top left: colours, and probability of the ellipses."""
    used = {_colour(name) for name in names}
    rows = [(side, colour) for side, colour in _SIDES.items() if colour in used]
    rows += [("pruned", _PRUNED), (f"ellipses hold {100 * probability:g} %", _LIMB)]
    high, wide = min(canvas.shape[0], (18 * len(rows) + 10) * width), min(canvas.shape[1], 190 * width)
    canvas[:high, :wide] = (0.45 * canvas[:high, :wide]).astype(canvas.dtype)  # keeps the text readable
    for number, (text, colour) in enumerate(rows):
        height = round((number + 1) * 18 * width)
        cv2.circle(canvas, (9 * width, height - 4 * width), 4 * width, colour, cv2.FILLED, cv2.LINE_AA)
        _write(canvas, text, (18 * width, height), colour, width)


def _write(canvas: Array, text: str, place: tuple[int, int], colour: tuple[int, int, int], width: int) -> None:
    """Draw text with a dark edge."""
    _edged(canvas, text, place, 0.42 * max(1.0, width * 0.9), colour, (30, 30, 30), width)


def _edged(
    canvas: Array,
    text: str,
    place: tuple[int, int],
    size: float,
    colour: tuple[int, int, int],
    edge: tuple[int, int, int],
    width: int,
) -> None:
    """Draw text over shifted copies of itself: newer releases of OpenCV space thick strokes differently."""
    around = [(x, y, edge) for x in (-1, 0, 1) for y in (-1, 0, 1) if x or y]
    for x, y, shade in (*around, (0, 0, colour)):
        spot = (place[0] + x * width, place[1] + y * width)
        cv2.putText(canvas, text, spot, cv2.FONT_HERSHEY_SIMPLEX, size, shade, max(1, width), cv2.LINE_AA)


def _colour(name: str) -> tuple[int, int, int]:
    return _SIDES[next((side for side in ("left", "right") if side in name.lower()), "middle")]


def _point(place: Array) -> tuple[int, int]:
    limited = np.clip(place, -(2**20), 2**20)
    return round(float(limited[0]) * 2**_SHIFT), round(float(limited[1]) * 2**_SHIFT)


def _draw_limbs(canvas: Array, poses: PoseDistributions, limbs: tuple[tuple[int, int], ...], width: int) -> None:
    assert poses.keep is not None
    for n in range(len(poses)):
        for a, b in limbs:
            if poses.keep[n, a] and poses.keep[n, b]:
                ends = _point(poses.keypoints[n, a]), _point(poses.keypoints[n, b])
                cv2.line(canvas, *ends, _LIMB, width, cv2.LINE_AA, _SHIFT)


def _fill_ellipses(canvas: Array, poses: PoseDistributions, axes: Array, angles: Array, names: tuple[str, ...]) -> None:
    """Fill ellipses; one blending step keeps overlapping ellipses translucent."""
    assert poses.keep is not None
    layer = canvas.copy()
    for n, k in np.argwhere(poses.keep):
        colour = _colour(names[k])
        _ellipse(layer, poses.mean[n, k], axes[n, k], angles[n, k], colour, cv2.FILLED)
    cv2.addWeighted(layer, 0.3, canvas, 0.7, 0, dst=canvas)


def _outline(canvas: Array, centre: Array, axes: Array, angle: float, colour: tuple[int, int, int], width: int) -> None:
    _ellipse(canvas, centre, axes, angle, colour, width)
    cv2.circle(canvas, _point(centre), round(1.6 * width * 2**_SHIFT), colour, cv2.FILLED, cv2.LINE_AA, _SHIFT)


def _ellipse(
    canvas: Array, centre: Array, axes: Array, angle: float, colour: tuple[int, int, int], thickness: int
) -> None:
    size = tuple(max(1, round(min(float(axis), 1e4) * 2**_SHIFT)) for axis in axes)
    degrees = float(np.degrees(angle))
    cv2.ellipse(canvas, _point(centre), size, degrees, 0, 360, colour, thickness, cv2.LINE_AA, _SHIFT)


def _draw_residuals(canvas: Array, poses: PoseDistributions, truth: Truth, width: int, show_pruned: bool) -> None:
    """Draw lines from prediction to truth, with the NLL in nats."""
    assert poses.keep is not None
    residual = truth.keypoints - poses.mean
    nll = -poses.distribution.log_prob(torch.from_numpy(residual)).numpy()
    size = 0.32 * max(1.0, width * 0.8)
    for n, k in np.argwhere(truth.labelled & (poses.keep | show_pruned)):
        start, end = poses.mean[n, k], truth.keypoints[n, k]
        cv2.line(canvas, _point(start), _point(end), _RESIDUAL, width, cv2.LINE_AA, _SHIFT)
        corner = np.clip(end, -(2**20), 2**20)
        place = (round(float(corner[0])) + 2 * width, round(float(corner[1])) - 2 * width)
        label = f"{nll[n, k]:.1f}"
        _edged(canvas, label, place, size, _RESIDUAL, (255, 255, 255), width)
