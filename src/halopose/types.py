"""Names for types that the whole package shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halopose.family import Family as Family

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is, of how much
Counter = Callable[[int, int], None]  # the same without the name


def named(progress: Progress | None, name: str) -> Counter | None:
    """The counter of one named step, or None where nobody listens."""
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)


def prefixed(progress: Progress | None, prefix: str) -> Progress | None:
    """Progress whose names begin with a prefix, or None where nobody listens."""
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{prefix}: {what}", done, total)
