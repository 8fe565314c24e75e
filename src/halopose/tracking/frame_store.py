"""Poses of the frames of a film in a temporary file, so that memory does not grow with the length of the film."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions

_FIELDS = ("boxes", "scores", "keypoints", "covariance", "scale", "dof", "visibility", "keep", "class_ids", "offset")
_EMPTY = -1


class FrameStore(Sequence[PoseDistributions]):
    """Sequence of the poses of each frame; it keeps only what tracking needs.

    Example:
    >>> import numpy as np
    >>> spread = np.tile(np.eye(2), (1, 3, 1, 1))
    >>> store = FrameStore()
    >>> for _ in range(2):
    ...     store.append(PoseDistributions(np.zeros((1, 4)), np.ones(1), np.zeros((1, 3, 2)), spread, spread))
    >>> len(store), store[1].keypoints.shape
    (2, (1, 3, 2))
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by the finalizer
        weakref.finalize(self, self._file.close)
        self._places = array("q")
        self._empty: PoseDistributions | None = None

    def append(self, poses: PoseDistributions) -> None:
        """Store the poses of the next frame."""
        if not len(poses):
            self._empty = self._empty or PoseDistributions(**_needed(poses))
            self._places.append(_EMPTY)
            return
        try:
            place = self._file.seek(0, 2)
            pickle.dump(_needed(poses), self._file, protocol=pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            raise HaloposeError(
                f"cannot store poses in {tempfile.gettempdir()} ({error.strerror or error}): set TMPDIR"
            ) from None
        self._places.append(place)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> PoseDistributions:  # type: ignore[override]
        """Poses of one frame; slices are not supported."""
        place = self._places[index]
        if place == _EMPTY and self._empty is not None:
            return self._empty
        self._file.seek(place)
        return PoseDistributions(**pickle.load(self._file))  # written by this object


def _needed(poses: PoseDistributions) -> dict[str, Any]:
    return {name: getattr(poses, name) for name in _FIELDS}
