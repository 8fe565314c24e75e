"""Keypoint layout: names, OKS sigmas, area factor, mirrored order and limbs.

Data sets, feature caches, artifacts and ground truth contain a ``Keypoints`` each. Properties that the data do not
state come from the checkpoint, else from COCO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

COCO_NAMES = (
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
    "right_ankle",
)  # fmt: skip
COCO_SIGMAS = np.array([26, 25, 25, 35, 35, 79, 79, 72, 72, 62, 62, 107, 107, 87, 87, 89, 89], dtype=float) / 1000
COCO_LIMBS = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9),
    (8, 10), (0, 1), (0, 2), (1, 3), (2, 4),
)  # fmt: skip
PERSON_AREA_FACTOR = 0.53  # object area over box area, for COCO persons


@dataclass(frozen=True)
class Keypoints:
    """Layout of the K keypoints of an object class.

    Attributes:
        names: Names of the keypoints.
        sigmas: OKS tolerance of each keypoint as in COCO; kappa = 2 sigma.
        area_factor: Object area divided by box area, for objects without annotated area.
        mirror: Index of the keypoint that each one becomes in a mirrored image; None if unknown.
        limbs: Pairs of keypoints that drawings connect.

    Example:
        >>> Keypoints.of(2, names=("left_tip", "right_tip")).mirror
        (1, 0)
        >>> Keypoints.of(17).names[0]
        'nose'
    """

    names: tuple[str, ...]
    sigmas: tuple[float, ...]
    area_factor: float = 1.0
    mirror: tuple[int, ...] | None = None
    limbs: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def kappa(self) -> Array:
        """COCO's per-keypoint constants (K,), twice the sigmas."""
        return 2 * np.asarray(self.sigmas)

    @classmethod
    def of(
        cls,
        count: int,
        *,
        names: Sequence[str] | None = None,
        sigmas: Sequence[float] | Array | None = None,
        area_factor: float | None = None,
        mirror: Sequence[int] | None = None,
        limbs: Sequence[tuple[int, int]] | None = None,
        otherwise: Keypoints | None = None,
        coco: bool = True,
    ) -> Keypoints:
        """Make a layout from the given properties.

        Missing properties come from ``otherwise``; else 17 keypoints get those of COCO. Other layouts get numbered
        names, sigmas 1 / K and area factor 1.

        Args:
            count: Number of keypoints K.
            names: Names (K,).
            sigmas: OKS sigmas (K,).
            area_factor: Object area divided by box area.
            mirror: Mirrored order (K,); default: from "left" and "right" in the names.
            limbs: Pairs of keypoints that drawings connect.
            otherwise: Layout with default properties; ignored if it has another number of keypoints.
            coco: Use COCO's sigmas for 17 keypoints. Frameworks do not for keypoints without visibility.
        """
        person = count == len(COCO_NAMES)
        known = otherwise if otherwise is not None and len(otherwise) == count else None
        if names is None:
            names = known.names if known else COCO_NAMES if person else _numbered(count)
        if sigmas is None:
            sigmas = known.sigmas if known else COCO_SIGMAS if person and coco else np.full(count, 1 / count)
        if area_factor is None:
            area_factor = known.area_factor if known else PERSON_AREA_FACTOR if person else 1.0
        if mirror is None:
            mirror = mirrored_order(names)
        if limbs is None:
            limbs = known.limbs if known else COCO_LIMBS if person else ()
        return cls(
            names=tuple(str(name) for name in names),
            sigmas=_checked_sigmas(sigmas, count),
            area_factor=float(area_factor),
            mirror=None if mirror is None else tuple(int(k) for k in mirror),
            limbs=tuple((int(a), int(b)) for a, b in limbs),
        )

    def to_json(self) -> dict[str, Any]:
        """Layout as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Keypoints:
        """Layout from JSON values; the inverse of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: The content is not valid.
        """
        names = tuple(str(name) for name in content["names"])
        mirror = content["mirror"]
        if mirror is not None and sorted(mirror) != list(range(len(names))):
            raise ValueError("mirror is not a permutation")
        limbs = tuple((int(a), int(b)) for a, b in content["limbs"])
        if any(not 0 <= k < len(names) for limb in limbs for k in limb):
            raise ValueError("a limb refers to an unknown keypoint")
        factor = float(content["area_factor"])
        if not 0 < factor < math.inf:
            raise ValueError("the area factor is not positive")
        try:
            sigmas = _checked_sigmas(content["sigmas"], len(names))
        except HaloposeError as error:
            raise ValueError(str(error)) from None
        return cls(names, sigmas, factor, None if mirror is None else tuple(map(int, mirror)), limbs)


def _checked_sigmas(given: Sequence[float] | Array, count: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in given)
    if len(values) != count or not all(0 < value < math.inf for value in values):
        raise HaloposeError(f"give {count} positive keypoint sigmas, got {list(values)}")
    return values


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"keypoint_{k}" for k in range(count))


def mirrored_order(names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the mirrored order (K,) from "left" and "right" in the names; None if the names do not determine it."""
    lower = [name.lower() for name in names]
    swapped = [name.replace("left", "\0").replace("right", "left").replace("\0", "right") for name in lower]
    if swapped == lower or set(swapped) != set(lower) or len(set(lower)) < len(lower):
        return None
    return tuple(lower.index(name) for name in swapped)
