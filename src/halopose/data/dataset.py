"""Annotated images: records in a fixed order, whose image and objects are read when asked for.

Nothing is ever augmented.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.images import decode_image, read_encoded
from halopose.data.storage.archive import Stored
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.types import Array


@dataclass(frozen=True)
class Objects:
    """Annotated objects of one image in original pixels: boxes (M, 4) xyxy, area (M,), as in GroundTruth."""

    boxes: Array
    class_ids: Array
    keypoints: Array
    labelled: Array
    area: Array
    crowd: Array

    def __len__(self) -> int:
        return len(self.boxes)

    def select(self, index: Array | slice) -> Objects:
        """The objects of an index or mask; a slice shares their memory."""
        return Objects(*(getattr(self, column.name)[index] for column in fields(self)))


@dataclass(frozen=True)
class Record:
    """One image: where it is, its id, and its objects, normalised by the image's size if ``relative``."""

    path: Stored
    image_id: int
    objects: Objects
    relative: bool
    area_factor: float

    def state(self, encoded: bytes | None = None) -> list[Any]:
        """What a later run compares to see whether labels or pixels have changed.

        encoded: the bytes of the image's file, where they have been read already.
        """
        try:
            stamp = self._stamp()
            pixels = hashlib.sha256(self.path.read_bytes() if encoded is None else encoded).hexdigest()
        except (OSError, ValueError):
            return [self.image_id, self._labels(), 0, 0, ""]
        return [self.image_id, self._labels(), *stamp, pixels]

    def _stamp(self) -> tuple[int, int]:
        """Size of the image's file, and a number that changes when it is written again."""
        if not isinstance(self.path, Path):
            return self.path.stamp()
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def _labels(self) -> str:
        digest = hashlib.sha256(f"{self.relative} {self.area_factor}".encode())
        for column in fields(self.objects):
            digest.update(np.ascontiguousarray(getattr(self.objects, column.name)).tobytes())
        return digest.hexdigest()

    def is_as_it_was(self, state: Any) -> bool:
        """Whether labels and pixels are those of an earlier ``state``; a file that is gone cannot have changed.

        Only a file whose size or time differs is read.
        """
        if not isinstance(state, list) or len(state) != 5:
            return False
        try:
            stamp = self._stamp()
        except (OSError, ValueError):
            return [self.image_id, self._labels()] == state[:2]
        if list(stamp) == state[2:4]:
            return self._labels() == state[1] and self.image_id == state[0]
        now = self.state()
        return [now[0], now[1], now[4]] == [state[0], state[1], state[4]]

    def read(self, encoded: bytes | None = None) -> tuple[Array, Objects]:
        """The image (h, w, 3) and its objects in pixels; ``encoded`` as for ``state``."""
        image = self.pixels(encoded)
        return image, self.objects_in(image.shape)

    def pixels(self, encoded: bytes | None = None) -> Array:
        """The image (h, w, 3)."""
        return decode_image(read_encoded(self.path) if encoded is None else encoded, self.path)

    def objects_in(self, shape: tuple[int, ...]) -> Objects:
        """Its objects in pixels of an image of ``shape`` (h, w, ...)."""
        if not self.relative:
            return self.objects
        size = np.array([shape[1], shape[0]], dtype=float)
        boxes = self.objects.boxes * np.tile(size, 2)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1) * self.area_factor
        return replace(self.objects, boxes=boxes, keypoints=self.objects.keypoints * size, area=np.maximum(area, 1.0))


@dataclass(frozen=True)
class Dataset:
    """Records in a fixed order, and the keypoints they are annotated with.

    area: how the objects' areas are known, in words.
    """

    records: tuple[Record, ...]
    layout: Keypoints
    area: str

    def __len__(self) -> int:
        return len(self.records)

    def subset(self, image_ids: Array) -> Dataset:
        """Only the given images."""
        wanted = set(image_ids.tolist())
        return replace(self, records=tuple(r for r in self.records if r.image_id in wanted))

    @property
    def image_ids(self) -> Array:
        return np.array([record.image_id for record in self.records], dtype=np.int64)

    @classmethod
    def join(cls, parts: Sequence[Dataset]) -> Dataset:
        """Several data sets of the same keypoints as one; an image may appear once."""
        if any(len(part.layout) != len(parts[0].layout) for part in parts):
            raise HaloposeError("the splits have different numbers of keypoints")
        joined = replace(parts[0], records=tuple(record for part in parts for record in part.records))
        if len(set(joined.image_ids.tolist())) < len(joined):
            raise HaloposeError("an image is in two of the splits or archives: their file names must differ")
        return joined


def image_id(name: Path | str) -> int:
    """COCO's number if a file's name is one, else a hash of the name: the same for the same name everywhere.

    A name may begin with folders, where files of one name must be told apart; it is then always hashed.
    """
    file = Path(name)
    if file.parent == Path() and file.stem.isascii() and file.stem.isdigit() and len(file.stem) <= 15:
        return int(file.stem)
    return int(hashlib.sha256(file.as_posix().encode("utf-8", "surrogatepass")).hexdigest()[:12], 16)
