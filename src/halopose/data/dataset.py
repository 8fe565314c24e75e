"""Annotated images in a fixed order. Images and objects are read when they are needed and never augmented."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Objects:
    """Annotated objects of one image, in original pixels.

    Attributes:
        boxes: Boxes (M, 4) xyxy.
        class_ids: Classes (M,).
        keypoints: Keypoints (M, K, 2).
        labelled: Whether each keypoint is labelled (M, K).
        area: Object areas (M,).
        crowd: Whether each object is a crowd (M,).
        occluded: Labelled keypoints (M, K) annotated as occluded, COCO's v = 1; None if the labels do not tell.
    """

    boxes: Array
    class_ids: Array
    keypoints: Array
    labelled: Array
    area: Array
    crowd: Array
    occluded: Array | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def select(self, index: Array | slice) -> Objects:
        """Return the objects of an index or mask. A slice shares memory."""
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        chosen: dict[str, Any] = {name: None if column is None else column[index] for name, column in columns.items()}
        return Objects(**chosen)


@dataclass(frozen=True)
class Record:
    """One annotated image.

    Attributes:
        path: Where the image is.
        image_id: Its id.
        objects: Its objects.
        relative: Whether boxes and keypoints are fractions of the image's sides.
        area_factor: Factor from box area to object area for relative objects.
    """

    path: Stored
    image_id: int
    objects: Objects
    relative: bool
    area_factor: float

    def state(self, encoded: bytes | None = None) -> list[Any]:
        """Return the state by which a later run detects changed labels or pixels.

        Args:
            encoded: Content of the image file, if it was read already.
        """
        try:
            stamp = self._stamp()
            pixels = hashlib.sha256(read_encoded(self.path) if encoded is None else encoded).hexdigest()
        except (OSError, ValueError):
            return [self.image_id, self._labels(), 0, 0, ""]
        return [self.image_id, self._labels(), *stamp, pixels]

    def _stamp(self) -> tuple[int, int]:
        """Return the size of the image file and a number that changes when it is written again."""
        if not isinstance(self.path, Path):
            return self.path.stamp()
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def _labels(self) -> str:
        digest = hashlib.sha256(f"{self.relative} {self.area_factor}".encode())
        for column in fields(self.objects):
            if column.name == "occluded":
                continue  # older feature caches do not contain it
            digest.update(np.ascontiguousarray(getattr(self.objects, column.name)).tobytes())
        return digest.hexdigest()

    def is_as_it_was(self, state: Any) -> bool:
        """Return whether labels and pixels are those of an earlier `state`. A missing file counts as unchanged.

        A file is read only if its size or time differs.
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
        """Read the image (h, w, 3) and its objects in pixels. `encoded` as for `state`."""
        image = self.pixels(encoded)
        return image, self.objects_in(image.shape)

    def pixels(self, encoded: bytes | None = None) -> Array:
        """Read the image (h, w, 3)."""
        return decode_image(read_encoded(self.path) if encoded is None else encoded, self.path)

    def objects_in(self, shape: tuple[int, ...]) -> Objects:
        """Return the objects in pixels of an image of ``shape`` (h, w, ...)."""
        if not self.relative:
            return self.objects
        size = np.array([shape[1], shape[0]], dtype=float)
        boxes = self.objects.boxes * np.tile(size, 2)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1) * self.area_factor
        return replace(self.objects, boxes=boxes, keypoints=self.objects.keypoints * size, area=np.maximum(area, 1.0))


@dataclass(frozen=True)
class Dataset:
    """Annotated images and their keypoints.

    Attributes:
        records: Images in a fixed order.
        layout: The annotated keypoints.
        area: Source of the object areas, in words.
    """

    records: tuple[Record, ...]
    layout: Keypoints
    area: str

    def __len__(self) -> int:
        return len(self.records)

    def subset(self, image_ids: Array) -> Dataset:
        """Return the dataset of the given images."""
        wanted = set(image_ids.tolist())
        return replace(self, records=tuple(r for r in self.records if r.image_id in wanted))

    @property
    def image_ids(self) -> Array:
        return np.array([record.image_id for record in self.records], dtype=np.int64)

    @classmethod
    def join(cls, parts: Sequence[Dataset]) -> Dataset:
        """Join datasets with the same keypoints. Each image may appear once."""
        if any(len(part.layout) != len(parts[0].layout) for part in parts):
            raise HaloposeError("the splits have different numbers of keypoints")
        joined = replace(parts[0], records=tuple(record for part in parts for record in part.records))
        if len(set(joined.image_ids.tolist())) < len(joined):
            raise HaloposeError("an image is in two of the splits or archives: their file names must differ")
        return joined


def image_id(name: Path | str) -> int:
    """Return the image id of a file name.

    Args:
        name: File name, or a path if files in several folders have the same name. Paths are always hashed.

    Returns:
        The number if the name is one, as in COCO (12 for ``000012.jpg``), else a hash of the name.
    """
    file = Path(name)
    if file.parent == Path() and file.stem.isascii() and file.stem.isdigit() and len(file.stem) <= 15:
        return int(file.stem)
    return _hashed(file)


def image_ids(names: Sequence[str]) -> list[int]:
    """Return distinct image ids of distinct file names.

    Names that have the same number, such as ``1.jpg``, ``01.jpg`` and ``1.png``, are hashed.
    """
    ids = [image_id(name) for name in names]
    counts = Counter(ids)
    shared = [name for name, identity in zip(names, ids, strict=True) if counts[identity] > 1]
    if shared:
        log.warning(
            "%d file names have the same number as another, such as %s: their image ids are hashes",
            len(shared),
            shared[0],
        )
    return [_hashed(Path(n)) if counts[identity] > 1 else identity for n, identity in zip(names, ids, strict=True)]


def _hashed(name: Path) -> int:
    return int(hashlib.sha256(name.as_posix().encode("utf-8", "surrogatepass")).hexdigest()[:12], 16)
