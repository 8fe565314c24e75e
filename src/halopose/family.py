"""Names of the output distributions, and which one predictions have unless another is asked for."""

from __future__ import annotations

from typing import Literal

Family = Literal["gaussian", "student-t"]
FAMILIES: tuple[Family, ...] = ("gaussian", "student-t")
# Ellipses of the Student-t hold what they state; the covariance of a prediction is the same under either.
DEFAULT_FAMILY: Family = "student-t"
