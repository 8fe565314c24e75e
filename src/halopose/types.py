"""Type aliases of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halopose.family import Family as Family

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Progress = Callable[[str, int, int], None]  # name of the step, finished amount, total amount
Counter = Callable[[int, int], None]  # finished amount, total amount


def named(progress: Progress | None, name: str) -> Counter | None:
    """Return the counter of a named step; None without progress."""
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)


def prefixed(progress: Progress | None, prefix: str) -> Progress | None:
    """Return progress whose step names begin with a prefix; None without progress."""
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{prefix}: {what}", done, total)
