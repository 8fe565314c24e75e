"""Narrow optional values that are known to be present."""

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
    """Pixels of an existing image file."""
    return present(cv2.imread(str(path)))
