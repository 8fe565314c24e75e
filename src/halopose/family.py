"""Names of the output distributions and the default of predictions."""

from __future__ import annotations

from typing import Literal

Family = Literal["gaussian", "student-t"]
FAMILIES: tuple[Family, ...] = ("gaussian", "student-t")
# Ellipses of the Student-t have the stated coverage; the covariance is the same for both distributions.
DEFAULT_FAMILY: Family = "student-t"
