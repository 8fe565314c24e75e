"""Write a flight as a Rerun file: camera images, corners with 95 % ellipses, and the track over the runway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation
from scipy.stats import chi2

from halopose.data.files import make_folder
from halopose.geometry.camera import camera_pose, rotation_from_angles
from halopose.landing.flight import Flight
from halopose.landing.recordings import need
from halopose.landing.recordings.position_log import Positions
from halopose.types import Array

_PLANE, _SPACE = (float(np.sqrt(chi2.ppf(0.95, dof))) for dof in (2, 3))
_TURN = np.linspace(0, 2 * np.pi, 33)
_BLUE, _ORANGE, _GREY = (40, 120, 220), (230, 130, 20), (140, 140, 140)


def write_rerun(flight: Flight, positions: Positions, path: Path) -> Path:
    """Write detections, vision fixes and the fused track on the timeline ``flight`` in seconds."""
    rr = need("rerun", "rerun")
    make_folder(path.parent)
    recording = rr.RecordingStream("halopose")
    recording.save(path)
    place = flight.scenario
    outline = np.concatenate([place.corners, place.corners[:1]])
    recording.log("runway", rr.ViewCoordinates.FLU, static=True)
    recording.log("runway/outline", rr.LineStrips3D([outline], colors=[_GREY]), static=True)
    camera = place.camera
    lens = rr.Pinhole(
        image_from_camera=camera.matrix,
        resolution=[camera.width, camera.height],
        camera_xyz=rr.ViewCoordinates.RDF,
    )
    recording.log("runway/camera", lens, static=True)
    if flight.has_truth:
        recording.log("runway/truth", rr.LineStrips3D([flight.reference], colors=[_GREY]), static=True)
    for n, time in enumerate(positions.times.tolist()):
        recording.set_time("flight", duration=time)
        _log_frame(recording, rr, flight, positions, n)
    recording.disconnect()
    return path


def _log_frame(recording: Any, rr: Any, flight: Flight, positions: Positions, n: int) -> None:
    if n in flight.frames_with_images:
        recording.log("runway/camera/image", rr.Image(flight.images[n], color_model="BGR").compress(jpeg_quality=80))
    _log_corners(recording, rr, flight, n)
    if np.isfinite(flight.attitude[n]).all():
        body = rotation_from_angles(*flight.attitude[n])
        rotation, eye = camera_pose(body, positions.position[n], flight.scenario.mount)
        recording.log("runway/camera", rr.Transform3D(translation=eye, mat3x3=rotation.T))
    recording.log("runway/track", rr.LineStrips3D([positions.position[: n + 1]], colors=[_BLUE]))
    half, axes = _ellipsoid(positions.covariance[n])
    shown = {"half_sizes": [half], "quaternions": [axes]}
    recording.log("runway/fused", rr.Ellipsoids3D(centers=[positions.position[n]], colors=[_BLUE], **shown))
    if flight.vision_fixes.solved[n]:
        half, axes = _ellipsoid(flight.vision_fixes.covariance[n])
        shown = {"half_sizes": [half], "quaternions": [axes]}
        recording.log(
            "runway/vision", rr.Ellipsoids3D(centers=[flight.vision_fixes.position[n]], colors=[_ORANGE], **shown)
        )
    else:
        recording.log("runway/vision", rr.Clear(recursive=False))
    for name, angle, sigma in zip(
        ("localizer", "glide_slope"), positions.deviations[n], positions.sigma[n], strict=True
    ):
        recording.log(f"deviation/{name}", rr.Scalars([np.degrees(angle)]))
        recording.log(f"deviation/{name}_sigma", rr.Scalars([np.degrees(sigma)]))


def _log_corners(recording: Any, rr: Any, flight: Flight, n: int) -> None:
    seen = np.isfinite(flight.corner_detections.pixels[n]).all(1)
    if not seen.any():
        recording.log("runway/camera/corners", rr.Clear(recursive=False))
        return
    pixels, spread = flight.corner_detections.pixels[n][seen], flight.corner_detections.covariance[n][seen]
    kept = np.asarray(flight.corner_detections.keep[n])[seen]
    strips = [ellipse(*each) for each in zip(pixels, spread, strict=True)]
    colours = [_ORANGE if keep else _GREY for keep in kept]
    recording.log("runway/camera/corners", rr.LineStrips2D(strips, colors=colours))


def ellipse(centre: Array, covariance: Array) -> Array:
    """Return the outline (33, 2) of the 95 % ellipse."""
    circle = np.stack([np.cos(_TURN), np.sin(_TURN)], axis=1)
    return np.asarray(centre + _PLANE * circle @ np.linalg.cholesky(covariance).T)


def _ellipsoid(covariance: Array) -> tuple[Array, Array]:
    """Return the half axes (3,) of the 95 % ellipsoid, and its rotation as a quaternion x, y, z, w."""
    values, axes = np.linalg.eigh(covariance)
    axes[:, 0] *= np.sign(np.linalg.det(axes))
    return _SPACE * np.sqrt(np.maximum(values, 0.0)), np.asarray(Rotation.from_matrix(axes).as_quat())
