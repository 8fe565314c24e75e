"""Values that may be absent, where a test knows that they are there."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import cv2

from halopose.types import Array

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value, which is not None."""
    assert value is not None
    return value


def read_picture(path: Path | str) -> Array:
    """The pixels of an image file that is there."""
    return present(cv2.imread(str(path)))
