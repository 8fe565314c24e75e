"""Reading images from wherever they come: paths, globs, folders, arrays, PIL images, videos, streams; writing one.

In: a source. Out: BGR uint8 arrays (h, w, 3) with a name, one at a time. Grey, 16-bit, transparent and
EXIF-rotated files all become that.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from halopose.data.files import check_regular, write_bytes
from halopose.data.storage.archive import Stored
from halopose.errors import HaloposeError
from halopose.types import Array

log = logging.getLogger(__name__)

WHOLE_FILM = 0.95  # containers state the number of frames roughly
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2", ".ppm", ".pgm"}
VIDEO_SUFFIXES = {".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".gif", ".mpeg", ".mpg"}


@dataclass(frozen=True)
class NamedImage:
    """An image (h, w, 3) in BGR, a name for its results, and the file it was read from, if it was."""

    name: str
    pixels: Array
    path: Path | None = None


def read_image(path: Stored | str) -> Array:
    """BGR uint8 image of a file, or one line that says why not."""
    return decode_image(read_encoded(path), path)


def read_encoded(path: Stored | str) -> bytes:
    """The bytes of an image's file, here, at an address or in an archive."""
    if isinstance(path, (str, Path)):
        check_regular(path)
        path = Path(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise HaloposeError(f"cannot read image {path}: {error.strerror or error}") from None


def decode_image(encoded: bytes, path: Stored | str) -> Array:
    """BGR uint8 image of a file's bytes; ``path`` names it in messages."""
    content = np.frombuffer(encoded, np.uint8)
    if not content.size:
        raise HaloposeError(f"image {path} is an empty file: remove it or copy it again")
    try:
        image = cv2.imdecode(content, cv2.IMREAD_COLOR)
    except cv2.error:  # OpenCV refuses absurd sizes in this way
        image = None
    if image is None or not image.size:
        raise HaloposeError(f"image {path} is damaged or of an unknown kind: remove it or copy it again")
    return np.asarray(image)


def write_image(path: Path | str, image: Array, quality: int | None = None) -> None:
    """Write a BGR uint8 image whole or not at all, as the suffix says; ``quality`` of a JPEG is 0 to 100."""
    options = [] if quality is None else [cv2.IMWRITE_JPEG_QUALITY, quality]
    encoded, content = cv2.imencode(Path(path).suffix, image, options)
    if not encoded:
        raise HaloposeError(f"cannot encode {path}: give a quality from 0 to 100")
    write_bytes(path, content.tobytes())


def as_bgr(image: Any, where: str = "image") -> Array:
    """BGR uint8 (h, w, 3) of an array in OpenCV's convention (h, w[, c]) or of a PIL image."""
    if type(image).__module__.split(".")[0] == "PIL":
        from PIL import ImageOps

        if image.mode in ("F", "I"):
            raise HaloposeError(
                f"{where} has the mode {image.mode}, whose range nobody states: convert it to RGB or to 16 bits"
            )
        if image.mode.startswith("I;16"):
            return as_bgr(np.asarray(ImageOps.exif_transpose(image)).astype(np.uint16), where)
        return np.ascontiguousarray(np.asarray(ImageOps.exif_transpose(image).convert("RGB"))[..., ::-1])
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        raise HaloposeError(f"{where} should be an array (h, w), (h, w, 3) or (h, w, 4), got {array.shape}")
    if array.dtype != np.uint8:
        if array.dtype != np.uint16:
            raise HaloposeError(f"{where} should be uint8 or uint16, got {array.dtype}")
        array = (array >> 8).astype(np.uint8)
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array[..., :3])


def _from_tensor(tensor: Any) -> Array:
    """BGR uint8 (N, h, w, 3) of a tensor as torch has them: ([N,] 3, h, w), RGB, uint8 or 0 to 1."""
    array = tensor.detach().cpu().numpy()
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[1] != 3 or not array.size:
        raise HaloposeError(f"a tensor of images should be (3, h, w) or (N, 3, h, w), RGB, got {tensor.shape}")
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise HaloposeError("a tensor of floats should hold values from 0 to 1: divide it by 255")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise HaloposeError(f"a tensor of images should be uint8, or floats from 0 to 1, got {tensor.dtype}")
    return np.ascontiguousarray(array[:, ::-1].transpose(0, 2, 3, 1))


def read_source(source: Any) -> Iterator[NamedImage]:
    """Every image of a source: path, glob, folder, video, stream number or address, array, tensor, PIL, a list."""
    if isinstance(source, (bool, np.bool_, bytes, bytearray, memoryview)):
        raise HaloposeError(
            f"cannot take images from {type(source).__name__}: give a path, an array, a PIL image, a tensor, "
            "or the number of a camera"
        )
    if type(source).__module__.split(".")[0] == "torch":
        source = _from_tensor(source)
    if isinstance(source, int) or (isinstance(source, str) and "://" in source):
        yield from _frames(source, f"stream_{source}")
    elif isinstance(source, (str, Path)):
        paths = _paths(str(source))
        for path, name in zip(paths, distinct_names(paths), strict=True):
            if _is_video(path):
                check_regular(path)
                yield from _frames(str(path), name)
            else:
                yield NamedImage(name, read_image(path), path)
    elif isinstance(source, np.ndarray) or type(source).__module__.split(".")[0] == "PIL":
        if isinstance(source, np.ndarray) and source.ndim == 4:
            yield from (NamedImage(f"image_{i}", as_bgr(image)) for i, image in enumerate(source))
        else:
            yield NamedImage("image_0", as_bgr(source))
    elif isinstance(source, Iterable):
        for number, item in enumerate(source):
            for image in read_source(item):
                named = isinstance(item, (str, Path, int))
                yield image if named else NamedImage(f"image_{number}", image.pixels)
    else:
        raise HaloposeError(f"cannot take images from a {type(source).__name__}")


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names for the results of files: their stems, if no two of them are alike.

    Else their paths below the folder that holds them all, such as ``a/bus`` and ``b/bus``; and if those are alike
    too, with their suffixes.
    """
    whole = [Path(os.path.abspath(path)) for path in paths]
    folder = os.path.commonpath([path.parent for path in whole])
    below = [path.relative_to(folder) for path in whole]
    for names in ([path.stem for path in paths], [path.with_suffix("").as_posix() for path in below]):
        folded = [name.casefold() for name in names]  # some file systems do not tell capitals
        films = {name for name, path in zip(folded, paths, strict=True) if _is_video(path)}
        frames = {name.rpartition("_")[0] for name in folded}  # clip_000012, beside clip.mp4
        if len(set(folded)) == len(paths) and films.isdisjoint(frames):
            return names
    return [path.as_posix() for path in below]


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES


def refuse_empty(text: str) -> None:
    """An empty path would be the current folder, which nobody meant."""
    if not text:
        raise HaloposeError("an empty path names no file: give an image, a folder (. is this one), or a pattern")


def _paths(source: str) -> list[Path]:
    refuse_empty(source)
    path = Path(source)
    if os.path.isdir(path):  # which says no to names that no file can have
        found = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES)
    elif any(letter in source for letter in "*?[") and not os.path.exists(path):
        found = sorted(Path(p) for p in glob.glob(source, recursive=True) if Path(p).is_file())
    else:
        return [path]
    if not found:
        raise HaloposeError(f"no images in {source}")
    return found


def _frames(source: str | int, name: str) -> Iterator[NamedImage]:
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        raise HaloposeError(f"cannot open video {source}: check the path or address")
    expected = capture.get(cv2.CAP_PROP_FRAME_COUNT) if isinstance(source, str) and "://" not in source else 0.0
    try:
        number = 0
        while True:
            read, frame = capture.read()
            if not read:
                break
            yield NamedImage(f"{name}_{number:06d}", np.asarray(frame))
            number += 1
    finally:
        capture.release()
    if not number:
        raise HaloposeError(f"video {source} has no readable frame")
    if number < WHOLE_FILM * expected < 2**31:
        log.warning("video %s ends after %d of %d frames: it may be damaged", source, number, expected)
