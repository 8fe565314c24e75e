"""Unusable annotations: a few are left out with a warning, many refuse the whole file."""

from __future__ import annotations

import logging

from halopose.errors import HaloposeError

MANY = 0.1  # of the annotations of a file

log = logging.getLogger(__name__)


class Faults:
    """Counts the unusable annotations of one file.

    Args:
        source: Name of the file in messages.

    Example:
        >>> faults = Faults("data.yaml")
        >>> faults.seen(100)
        >>> for line in range(20):
        ...     faults.add("a box without width or height", f"labels/1.txt, line {line}")
        >>> faults.judge()
        Traceback (most recent call last):
            ...
        halopose.errors.HaloposeError: data.yaml: 20 of 100 objects have a box without width or height (first: \
labels/1.txt, line 0): correct them
    """

    def __init__(self, source: str) -> None:
        self._source, self._total = source, 0
        self._places: dict[str, list[str]] = {}

    def seen(self, count: int) -> None:
        """Count annotations that were checked."""
        self._total += count

    def add(self, reason: str, place: str) -> None:
        """Note an unusable annotation.

        Args:
            reason: What is wrong, such as "a box without width or height".
            place: Where it is.
        """
        self._places.setdefault(reason, []).append(place)

    def judge(self) -> None:
        """Warn about unusable annotations, or raise if they are more than `MANY` of all."""
        count = sum(map(len, self._places.values()))
        for reason, places in self._places.items():
            line = f"{self._source}: {len(places)} of {self._total} objects have {reason} (first: {places[0]})"
            if count > MANY * self._total:
                raise HaloposeError(f"{line}: correct them")
            log.warning("%s: left out", line)
