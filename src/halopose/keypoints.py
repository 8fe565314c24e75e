"""Which keypoints these are: names, sigmas, area factor, partners in the mirror, limbs.

Data sets, match stores, artifacts and ground truth carry one ``Keypoints`` each, so that whoever gets one of them
needs nothing else. What the data do not state comes from the checkpoint, and else from COCO.
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
    """K keypoints of one kind of object.

    sigmas: COCO's tolerance of each, kappa = 2 sigma. area_factor: object area over box area, where the area is
    not annotated. mirror: which keypoint each becomes in the mirror, None if that is unknown. limbs: pairs of
    keypoints to be joined in pictures.

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
        """What is stated; else what ``otherwise`` says; else COCO's if there are 17, and numbers, 1 / K, 1 if not.

        coco: whether 17 keypoints may have COCO's sigmas; frameworks deny it to those without visibility.
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
        """Plain json content."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Keypoints:
        """The inverse of ``to_json``; a ValueError, KeyError or TypeError if the content is not that."""
        names = tuple(str(name) for name in content["names"])
        mirror = content["mirror"]
        if mirror is not None and sorted(mirror) != list(range(len(names))):
            raise ValueError("mirror is not a permutation")
        limbs = tuple((int(a), int(b)) for a, b in content["limbs"])
        if any(not 0 <= k < len(names) for limb in limbs for k in limb):
            raise ValueError("a limb of no keypoint")
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
    """Which keypoint each becomes in the mirror, from "left" and "right" in the names; None if neither tells."""
    lower = [name.lower() for name in names]
    swapped = [name.replace("left", "\0").replace("right", "left").replace("\0", "right") for name in lower]
    if swapped == lower or set(swapped) != set(lower) or len(set(lower)) < len(lower):
        return None
    return tuple(lower.index(name) for name in swapped)
