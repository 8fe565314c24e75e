"""Self-contained html page of a reconstructed scene: persons with the ellipsoids of their keypoints, and cameras."""

from __future__ import annotations

from typing import Any

import numpy as np

from halopose.multiview.scene import ReconstructedScene
from halopose.reports.html import asset, embedded, page
from halopose.types import Array

_MAX_FRAMES = 600  # frames on a page; longer scenes are subsampled


def render_reconstruction(scene: ReconstructedScene, title: str = "Scene") -> str:
    """The page (html) of a scene."""
    step = max(1, -(-scene.frames // _MAX_FRAMES))
    known = [person.place[np.isfinite(person.place).all(-1)] for person in scene.persons]
    points = np.concatenate(known) if known else np.zeros((1, 3))
    content = {
        "persons": [_person(person.identity, person.frames, person, step) for person in scene.persons],
        "cameras": [_camera(view.name, view.position, view.rotation) for view in scene.views],
        "limbs": scene.layout.limbs,
        "names": scene.layout.names,
        "frames": list(range(0, scene.frames, step)),
        "rate": scene.rate / step,
        "centre": np.median(points, axis=0).round(3).tolist(),
    }
    count = len(scene.persons)
    summary = (
        f"{count} {'person' if count == 1 else 'persons'} in {scene.frames} frames by {len(scene.views)} cameras. "
        "Each ellipse contains its keypoint with 95 % probability, in the current view."
    )
    return page("scene.html", title=title, summary=summary, data=embedded(content), script=asset("scene.js"))


def _person(identity: int, frames: Array, person: Any, step: int) -> dict[str, Any]:
    """Keypoints and covariances in millimetres by frame; null if unknown."""
    rows = {}
    for n, frame in enumerate(frames.astype(int).tolist()):
        if frame % step:
            continue
        entries: list[list[int] | None] = []
        for place, covariance in zip(person.place[n], person.covariance[n], strict=True):
            if not np.isfinite(place).all() or not np.isfinite(covariance).all():
                entries.append(None)
                continue
            spread = (1e6 * covariance[np.triu_indices(3)]).round().astype(int).tolist()
            entries.append([*(1000 * place).round().astype(int).tolist(), *spread])
        rows[frame] = entries
    return {"id": identity, "frames": rows}


def _camera(name: str, position: Array, rotation: Array) -> dict[str, Any]:
    return {"name": name, "at": position.round(3).tolist(), "axes": rotation.round(3).tolist()}
