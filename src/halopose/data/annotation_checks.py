"""Annotations that cannot be what they should: a few are left out and named, many refuse the whole file.

In: a line for each, with its reason. Out: a warning, or one line that says what to do.
"""

from __future__ import annotations

import logging

from halopose.errors import HaloposeError

MANY = 0.1  # of the annotations of a file

log = logging.getLogger(__name__)


class Faults:
    """Counts the faults of one source.

    >>> faults = Faults("data.yaml")
    >>> faults.seen(100)
    >>> for line in range(20):
    ...     faults.add("a box without width or height", f"labels/1.txt, line {line}")
    >>> faults.judge()
    Traceback (most recent call last):
        ...
    halopose.errors.HaloposeError: data.yaml: 20 of 100 objects have a box without width or height (first: \
labels/1.txt, line 0): mend them
    """

    def __init__(self, source: str) -> None:
        self._source, self._total = source, 0
        self._places: dict[str, list[str]] = {}

    def seen(self, count: int) -> None:
        """So many more annotations were looked at."""
        self._total += count

    def add(self, reason: str, place: str) -> None:
        """One annotation is unusable, for this reason."""
        self._places.setdefault(reason, []).append(place)

    def judge(self) -> None:
        """Warn of the few that are left out, or refuse the many."""
        count = sum(map(len, self._places.values()))
        for reason, places in self._places.items():
            line = f"{self._source}: {len(places)} of {self._total} objects have {reason} (first: {places[0]})"
            if count > MANY * self._total:
                raise HaloposeError(f"{line}: mend them")
            log.warning("%s: left out", line)
