"""Read images from paths, patterns, folders, arrays, PIL images, tensors, films and streams, and write images.

Every image becomes a BGR uint8 array (h, w, 3). Grey, 16-bit, transparent and EXIF-rotated files are converted.
"""

from __future__ import annotations

import glob
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np

from halopose.data.capture import frames_of
from halopose.data.downloads import download_film, download_image, serves_ranges, web_kind, web_name
from halopose.data.files import check_regular, write_bytes
from halopose.data.image_header import check_pixels, read_header
from halopose.data.storage.archive import Stored
from halopose.data.suffixes import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from halopose.errors import HaloposeError
from halopose.types import Array

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedImage:
    """An image with a name.

    Attributes:
        name: Name of its results.
        pixels: BGR uint8 array (h, w, 3).
        path: The image file it was read from, if any.
        film: The film that it is a frame of, if any.
        frame: Number of the frame in the film, counted from 0.
        rate: Frames per second of its film or stream, without those that a stride leaves out; None if unknown.
        length: Number of such frames in its film, 0 if unknown.
    """

    name: str
    pixels: Array
    path: Path | None = None
    film: Path | None = None
    frame: int | None = None
    rate: float | None = None
    length: int = 0

    @property
    def reader(self) -> Callable[[], Array]:
        """Function that returns the image; it holds the pixels only if they cannot be read again from a file."""
        if self.path is not None:
            return ImageFile(self.path)
        if self.film is not None and self.frame is not None:
            return FilmFrame(self.film, self.frame)
        return PixelsInMemory(self.pixels)


@dataclass(frozen=True)
class ImageFile:
    """Reads an image file when it is called."""

    path: Path

    def __call__(self) -> Array:
        """BGR uint8 image (h, w, 3)."""
        return read_image(self.path)


@dataclass(frozen=True)
class FilmFrame:
    """Reads a frame of a film when it is called."""

    film: Path
    frame: int

    def __call__(self) -> Array:
        """BGR uint8 image (h, w, 3)."""
        capture = cv2.VideoCapture(str(self.film))
        try:
            capture.set(cv2.CAP_PROP_POS_FRAMES, self.frame)
            read, pixels = capture.read()
        finally:
            capture.release()
        if not read:
            raise HaloposeError(f"cannot read frame {self.frame} of {self.film}: the film was moved or changed")
        return np.asarray(pixels)


@dataclass(frozen=True, eq=False)
class PixelsInMemory:
    """Returns the pixels of an image that came from no file."""

    pixels: Array

    def __call__(self) -> Array:
        """BGR uint8 image (h, w, 3)."""
        return self.pixels


def read_image(path: Stored | str) -> Array:
    """Read a file as a BGR uint8 image (h, w, 3)."""
    return decode_image(read_encoded(path), path)


def read_encoded(path: Stored | str) -> bytes:
    """Read the bytes of an image file on this machine, at an address or in an archive."""
    if isinstance(path, (str, Path)):
        check_regular(path)
        path = Path(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise HaloposeError(f"cannot read image {path}: {error.strerror or error}") from None


def decode_image(encoded: bytes, path: Stored | str) -> Array:
    """Decode the bytes of an image file. The header is checked first.

    Args:
        encoded: Content of the file.
        path: Name of the file in messages.

    Returns:
        BGR uint8 image (h, w, 3), the first page of files that have several.

    Raises:
        HaloposeError: The file is empty, damaged, of an unknown format, or has more pixels than `pixel_budget`.
    """
    if not encoded:
        raise HaloposeError(f"image {path} is an empty file: remove it or copy it again")
    header = read_header(encoded)
    image = None
    if header is not None:
        check_pixels(header.width, header.height, f"image {path}")
        try:
            image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error:  # OpenCV raises it for some damaged files
            image = None
    if header is None or image is None or not image.size:
        raise HaloposeError(f"image {path} is damaged or of an unknown format: remove it or copy it again")
    if header.pages > 1:
        log.warning("image %s has several pages or frames: only the first is used", path)
    if header.damaged:
        log.warning("image %s is damaged or cut: parts of it may be grey or wrong, copy it again", path)
    return np.asarray(image)


def write_image(path: Path | str, image: Array, quality: int | None = None) -> None:
    """Write an image completely or not at all.

    Args:
        path: The suffix chooses the format.
        image: BGR uint8 array (h, w, 3).
        quality: Quality of a JPEG, 0 to 100.
    """
    options = [] if quality is None else [cv2.IMWRITE_JPEG_QUALITY, quality]
    encoded, content = cv2.imencode(Path(path).suffix, image, options)
    if not encoded:
        raise HaloposeError(f"cannot encode {path}: give a quality from 0 to 100")
    write_bytes(path, content.tobytes())


def as_bgr(image: Any, where: str = "image") -> Array:
    """Convert an image to BGR uint8 (h, w, 3).

    Args:
        image: Array (h, w) or (h, w, c) in OpenCV's channel order, uint8 or uint16, or a PIL image.
        where: Name of the image in messages.
    """
    if type(image).__module__.split(".")[0] == "PIL":
        from PIL import ImageOps

        if image.mode in ("F", "I"):
            raise HaloposeError(
                f"{where} has the mode {image.mode}, whose range is unknown: convert it to RGB or to 16 bits"
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
    """Convert an RGB tensor (3, h, w) or (N, 3, h, w), uint8 or float from 0 to 1, to BGR uint8 (N, h, w, 3)."""
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


def read_source(source: Any, stride: int = 1) -> Iterator[NamedImage]:
    """Iterate over the images of a source.

    Args:
        source: Path, pattern, folder, film, camera number, address of an image, film or stream, array, tensor, PIL
            image, or an iterable of these. A folder stands for the images and films below it.
        stride: Use every n-th frame of films and streams.

    Yields:
        Each image. Frames of a film are named ``clip_000012``, counted without those that ``stride`` leaves out.
    """
    if isinstance(source, (bool, np.bool_, bytes, bytearray, memoryview)):
        raise HaloposeError(
            f"cannot take images from {type(source).__name__}: give a path, an array, a PIL image, a tensor, "
            "or the number of a camera"
        )
    if type(source).__module__.split(".")[0] == "torch":
        source = _from_tensor(source)
    if isinstance(source, int):
        yield from _frames(source, f"camera_{source}", stride)
    elif isinstance(source, str) and "://" in source:
        yield from _at_address(source, stride)
    elif isinstance(source, (str, Path)):
        paths = [Path(source)] if _is_plain(str(source)) else find_files(str(source))
        for path, name in zip(paths, distinct_names(paths), strict=True):
            if _is_video(path):
                check_regular(path)
                yield from _frames(str(path), name, stride, path)
            else:
                yield NamedImage(name, read_image(path), path)
    elif isinstance(source, np.ndarray) or type(source).__module__.split(".")[0] == "PIL":
        if isinstance(source, np.ndarray) and source.ndim == 4:
            yield from (NamedImage(f"image_{i}", as_bgr(image)) for i, image in enumerate(source))
        else:
            yield NamedImage("image_0", as_bgr(source))
    elif isinstance(source, Iterable):
        for number, item in enumerate(source):
            for image in read_source(item, stride):
                named = isinstance(item, (str, Path, int))
                yield image if named else NamedImage(f"image_{number}", image.pixels)
    else:
        raise HaloposeError(f"cannot take images from a {type(source).__name__}")


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Choose names for the results of files.

    Returns:
        The stems of the files, if they differ. Otherwise paths relative to the common folder, such as ``a/bus`` and
        ``b/bus``. If these are not distinct either, the same with suffixes.
    """
    absolute = [Path(os.path.abspath(path)) for path in paths]
    folder = os.path.commonpath([path.parent for path in absolute])
    below = [path.relative_to(folder) for path in absolute]
    for names in ([path.stem for path in paths], [path.with_suffix("").as_posix() for path in below]):
        folded = [name.casefold() for name in names]  # some file systems ignore case
        films = {name for name, path in zip(folded, paths, strict=True) if _is_video(path)}
        frames = {name.rpartition("_")[0] for name in folded}  # clip_000012, next to clip.mp4
        if len(set(folded)) == len(paths) and films.isdisjoint(frames):
            return names
    return [path.as_posix() for path in below]


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES


def _is_plain(text: str) -> bool:
    """Return whether a text names one file, which may be missing."""
    return bool(text) and not os.path.isdir(text) and (os.path.exists(text) or not any(c in text for c in "*?["))


def find_files(text: str) -> list[Path]:
    """Find the files of a path or pattern.

    Args:
        text: A file, a folder or a pattern with ``*``, ``?``, ``[`` or ``**``. An existing file with such a name
            comes first. A folder stands for all images and films below it.

    Raises:
        HaloposeError: There is no such file, or the folder or pattern has no images.
    """
    if not text:
        raise HaloposeError("an empty path names no file: give an image, a folder (. is this one), or a pattern")
    path = Path(text)
    if os.path.isdir(path):  # unlike Path.is_dir, false for names that no file can have
        suffixes = IMAGE_SUFFIXES | VIDEO_SUFFIXES
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes)
    elif not _is_plain(text):
        found = sorted(Path(name) for name in glob.glob(text, recursive=True) if Path(name).is_file())
    elif os.path.exists(path):
        return [path]
    else:
        raise HaloposeError(f"no file {path}: give an image, a folder, a pattern, a video or a stream")
    if not found:
        raise HaloposeError(f"no images in {text}")
    return found


def _frames(source: str | int, name: str, stride: int, film: Path | None = None) -> Iterator[NamedImage]:
    for count, frame in enumerate(frames_of(source, stride)):
        yield NamedImage(
            f"{name}_{count:06d}", frame.pixels, film=film, frame=frame.number, rate=frame.rate, length=frame.length
        )


def _at_address(address: str, stride: int) -> Iterator[NamedImage]:
    """Images of an address. A film on a server that sends no parts of files is downloaded first."""
    kind, name = web_kind(address), web_name(address)
    if kind == "image":
        yield NamedImage(name, decode_image(download_image(address), address))
    elif kind == "film" and not serves_ranges(address):
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / f"film{Path(urlsplit(address).path).suffix}"
            download_film(address, local)
            yield from _frames(str(local), name, stride)
    else:
        yield from _frames(address, name, stride)
