"""Keypoint covariances of RF-DETR in pixels.

RF-DETR learns Cholesky factors L of precisions in coordinates relative to the image. The loss is
0.5 * m / area - log det L. Here m is the squared Mahalanobis distance under L L', and area is the share of the image
that the object's box covers. The loss is minimal if area * (L L')^-1 is the covariance of the residuals. RF-DETR's
conversion to pixels uses (L L')^-1, so its standard deviations are the true ones divided by the root of the area. The
factor depends on the object, so a temperature cannot correct it.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np

from halopose.boxes import box_area
from halopose.errors import HaloposeError
from halopose.types import Array

PRECISION_KEY, SHAPE_KEY = "keypoint_precision_cholesky", "source_shape"
LAST_CHECKED = (1, 11)  # major and minor of the last release whose source was read; it lacks the area
_SMALLEST_SHARE = 1e-6


def from_rfdetr_data(data: dict[str, Any]) -> bool:
    """Whether the data of key points or a detection of a file come from RF-DETR."""
    return data.get(PRECISION_KEY) is not None and data.get(SHAPE_KEY) is not None


def lacks_area(version: str | None = None) -> bool:
    """Whether this version of rfdetr leaves the area out of its pixel covariances.

    Args:
        version: Version that predicted; default: the installed one.

    Raises:
        HaloposeError: The version is not known, or later than the last one that was checked.
    """
    if version is None:
        try:
            version = metadata.version("rfdetr")
        except metadata.PackageNotFoundError:
            raise HaloposeError(
                "the covariances come from an unknown version of rfdetr: state version, or times_area=True or False"
            ) from None
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise HaloposeError(f"{version!r} is not a version of rfdetr: write it as 1.11.2") from None
    if (major, minor) > LAST_CHECKED:
        raise HaloposeError(
            f"rfdetr {version} is later than any version checked: pass times_area=True if its covariances still lack "
            "the box area, else times_area=False"
        )
    return True


def pixel_covariance(precision: Array, source_shape: Array) -> Array:
    """Return the covariances (N, K, 2, 2) of RF-DETR's own conversion to pixels.

    Args:
        precision: Entries log l11, l21, log l22 of the Cholesky factors (N, K, 3).
        source_shape: Height and width of the images (N, 2).
    """
    l11, l21, l22 = np.exp(precision[..., 0]), precision[..., 1], np.exp(precision[..., 2])
    inverse = np.zeros((*precision.shape[:-1], 2, 2))
    inverse[..., 0, 0], inverse[..., 1, 1] = 1 / l11, 1 / l22
    inverse[..., 1, 0] = -l21 / (l11 * l22)
    scaled = inverse * source_shape[:, None, None, ::-1]  # columns are x and y
    return np.asarray(np.swapaxes(scaled, -1, -2) @ scaled)


def area_share(boxes: Array, source_shape: Array) -> Array:
    """Return the share (N,) of the image that each box covers.

    Args:
        boxes: Boxes (N, 4) xyxy in pixels.
        source_shape: Height and width of the images (N, 2).
    """
    return np.maximum(box_area(boxes) / np.asarray(source_shape, dtype=float).prod(1), _SMALLEST_SHARE)
