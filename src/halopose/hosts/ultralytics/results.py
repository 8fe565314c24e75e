"""Convert poses to Ultralytics' ``Results``, with covariances that follow indexing, ``.cpu()`` and ``.numpy()``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from halopose.errors import HaloposeError
from halopose.install_advice import install_command
from halopose.poses import PoseDistributions
from halopose.types import Array

try:
    from ultralytics.engine.results import Results
except ImportError as error:
    raise HaloposeError(
        f"this needs the ultralytics extra ({error.name or error}): {install_command('ultralytics')}"
    ) from None


class UncertainResults(Results):  # type: ignore[misc]
    """The framework's results with ``covariance``, ``scale``, ``dof``, ``keep`` and ``offset`` as arrays."""

    covariance: Array
    scale: Array
    dof: Array | None
    keep: Array
    offset: Array | None

    def _apply(self, fn: str, *args: Any, **kwargs: Any) -> UncertainResults:
        plain = super()._apply(fn, *args, **kwargs)
        made = UncertainResults(plain.orig_img, path=plain.path, names=plain.names, speed=plain.speed)
        for key in plain._keys:
            setattr(made, key, getattr(plain, key))
        index = _rows(args[0]) if fn == "__getitem__" else slice(None)
        made.covariance, made.scale = self.covariance[index], self.scale[index]
        made.dof, made.keep = None if self.dof is None else self.dof[index], self.keep[index]
        made.offset = None if self.offset is None else self.offset[index]
        return made


def _rows(index: Any) -> Any:
    """Convert an index of detections to numpy's form; a single detection keeps its axis, as in the framework."""
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    if isinstance(index, (bool, np.bool_)) or not isinstance(index, (int, np.integer)):
        return index
    return [int(index)]


def to_ultralytics(
    poses: PoseDistributions,
    image: Array | None = None,
    *,
    path: str = "",
    names: dict[int, str] | None = None,
) -> UncertainResults:
    """Return the framework's result object with additional attributes.

    Its methods that draw or normalise need the image; without one a black image of sufficient size is used.
    """
    if image is None:
        width, height = np.ceil(np.max(poses.boxes[:, 2:], axis=0, initial=1)).astype(int)
        image = np.zeros((height, width, 3), dtype=np.uint8)
    classes = np.zeros(len(poses)) if poses.class_ids is None else poses.class_ids - 1
    rows = np.concatenate([poses.boxes, poses.scores[:, None], classes[:, None]], axis=1)
    keypoints = poses.keypoints
    if poses.visibility is not None:
        keypoints = np.concatenate([keypoints, poses.visibility[..., None]], axis=2)
    results = UncertainResults(
        image,
        path=path,
        names=names or {0: "object"},
        boxes=torch.from_numpy(rows.astype(np.float32)),
        keypoints=torch.from_numpy(keypoints.astype(np.float32)),
    )
    results.covariance, results.scale = poses.covariance, poses.scale
    results.dof, results.keep, results.offset = poses.dof, np.asarray(poses.keep), poses.offset
    return results
