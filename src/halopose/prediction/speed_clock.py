"""Time that prediction spends on reading, the model, the uncertainty and drawing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from halopose.origin import Speed
from halopose.poses import PoseDistributions

Item = TypeVar("Item")


class SpeedClock:
    """Time spent on each part of the work. Parts run at the same time, so their sum may exceed the duration."""

    def __init__(self) -> None:
        self.images = 0
        self._read = self._model = self._uncertainty = self._draw = 0.0

    @property
    def speed(self) -> Speed | None:
        """Mean milliseconds per image; None without images."""
        parts = (1000 * self._read, self._model, self._uncertainty, 1000 * self._draw)
        return Speed(*(part / self.images for part in parts)) if self.images else None

    def add(self, poses: PoseDistributions) -> None:
        """Count an image that the model has predicted."""
        self.images += 1
        if poses.speed is not None:
            self._model += poses.speed.model
            self._uncertainty += poses.speed.uncertainty

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time inside as reading."""
        began = time.perf_counter()
        yield
        self._read += time.perf_counter() - began

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """Pass items on and count the time that each takes as reading."""
        while True:
            with self.reading():
                item = next(items, None)
            if item is None:
                return
            yield item

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Count the time inside as drawing and writing."""
        began = time.perf_counter()
        yield
        self._draw += time.perf_counter() - began
