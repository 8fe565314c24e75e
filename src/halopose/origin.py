"""Origin of poses: image, file, keypoint layout and speed of the prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.types import Array


@dataclass(frozen=True)
class Speed:
    """Duration of a prediction in milliseconds per image.

    Attributes:
        read: Reading and decoding of the image.
        model: The base model, with preprocessing and non-maximum suppression. An exported model includes the heads.
        uncertainty: Heads, calibration and out-of-distribution p-values.
        draw: Drawing and writing of the annotated picture.
    """

    read: float
    model: float
    uncertainty: float
    draw: float = 0.0

    def __str__(self) -> str:
        text = f"{self.read:.1f} ms read, {self.model:.1f} ms model, {self.uncertainty:.1f} ms uncertainty"
        return f"{text}, {self.draw:.1f} ms draw" if self.draw else text


@dataclass(frozen=True)
class Origin:
    """Origin of poses. Poses with different origins may be equal.

    Attributes:
        name: Name of the image, such as ``bus`` or ``clip_000012``.
        path: File of the image or film, if any.
        frame: Index of the frame in the film, from 0.
        read: Returns the image (h, w, 3) in BGR; None if there is none.
        layout: Keypoint layout, if it is known.
        speed: Duration of the prediction, if it was measured.
    """

    name: str = ""
    path: Path | None = None
    frame: int | None = None
    read: Callable[[], Array] | None = None
    layout: Keypoints | None = None
    speed: Speed | None = None

    def image(self) -> Array:
        """Read the image (h, w, 3) in BGR."""
        if self.read is None:
            raise HaloposeError("these poses have no image: pass one, for example poses.plot(image)")
        return self.read()


def of_one_layout(origins: list[Origin | None]) -> Origin | None:
    """Return the origin of concatenated poses: that of a single part, else only the layout that all parts share."""
    if len(origins) == 1:
        return origins[0]
    layouts = [None if origin is None else origin.layout for origin in origins]
    if layouts[0] is None or any(layout != layouts[0] for layout in layouts):
        return None
    return Origin(layout=layouts[0])
