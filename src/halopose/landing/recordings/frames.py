"""Read time-stamped frames of a video, a folder of images, or an MCAP file, one image at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import cv2
import numpy as np

from halopose.data.films import film_facts
from halopose.data.image_header import check_pixels, read_header
from halopose.data.images import as_bgr, read_image, read_source
from halopose.data.suffixes import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from halopose.errors import HaloposeError
from halopose.landing.recordings import need
from halopose.landing.recordings.logs import read_log
from halopose.types import Array

_SLOWEST = 1 / 60  # frames per second
MAX_CHUNK = 2**28  # bytes of one decompressed chunk of an MCAP file; recorders write about 1 MB
_MAGIC, _CHUNK = b"\x89MCAP", 6
TIMES = "times.csv"  # beside the images of a folder: column time_s, one row per image in natural order of the names


@dataclass(frozen=True)
class Frames:
    """Times (N,) in seconds of the logs' clock, and images in the same order.

    For a video, the number of times follows the container; ``images`` may yield fewer.
    """

    path: Path
    times: Array

    def images(self) -> Iterator[tuple[float, Array]]:
        """Yield the time and pixels (h, w, 3), BGR, of each image."""
        found = _images(self.path)
        yield from zip(self.times.tolist(), found, strict=False)


def open_frames(path: Path | str, *, rate: float | None = None, offset: float = 0.0) -> Frames:
    """Open the frames of a film, a folder or an MCAP file.

    Args:
        path: film, folder of images, or MCAP file.
        rate: frames per second; default: the rate of the film, or the ``times.csv`` of a folder.
        offset: seconds to add to get the time of the logs.
    """
    path = Path(path)
    if not path.exists():
        raise HaloposeError(f"no file {path}: give a film, a folder of images or an MCAP file")
    if rate is not None and not _SLOWEST <= rate <= 1000:
        raise HaloposeError(f"the frame rate should be between 1/60 and 1000 frames/s, got {rate}")
    if path.is_dir():
        return Frames(path, _folder_times(path, rate) + offset)
    if path.suffix.lower() == ".mcap":
        return Frames(path, np.array([time for time, _ in _mcap_images(path)]) + offset)
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        raise HaloposeError(f"{path} is neither a film nor a folder nor an MCAP file")
    own, count = film_facts(path)
    if not path.stat().st_size:
        raise HaloposeError(f"{path} is empty: record it again")
    if not count:
        raise HaloposeError(f"{path} does not say how many frames it has: write it as a folder of images")
    return Frames(path, np.arange(count) / (rate or own) + offset)


def _folder_times(path: Path, rate: float | None) -> Array:
    files = _files(path)
    if (path / TIMES).is_file():
        times = read_log(path / TIMES).times
        if len(times) != len(files):
            raise HaloposeError(f"{path / TIMES} has {len(times)} rows for {len(files)} images: give one row per image")
        return times
    if rate is None:
        raise HaloposeError(f"{path} has no {TIMES}: write one with a column time_s, or give --frame-rate")
    return np.arange(len(files)) / rate


def _files(path: Path) -> list[Path]:
    files = sorted((file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES), key=_natural)
    if not files:
        raise HaloposeError(f"no images in {path}")
    return files


def _natural(file: Path) -> tuple[list[tuple[int, int | str]], str]:
    """Return a sort key by which frame2 comes before frame10."""
    parts = re.split(r"([0-9]+)", file.name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part], file.name


def _images(path: Path) -> Iterator[Array]:
    if path.is_dir():
        yield from (read_image(file) for file in _files(path))
    elif path.suffix.lower() == ".mcap":
        yield from (image for _, image in _mcap_images(path))
    else:
        yield from (image.pixels for image in read_source(path))


def _mcap_images(path: Path) -> Iterator[tuple[float, Array]]:
    """Yield header time and pixels of all ``sensor_msgs/CompressedImage`` of the first topic that has any."""
    found = None
    for topic, seconds, coded in _mcap_messages(path):
        if topic != (found or topic):
            continue
        found = topic
        yield seconds, _decode(coded, f"{path}: an image of {found}")
    if found is None:
        raise HaloposeError(f"{path} has no sensor_msgs/CompressedImage: record compressed images")


def _decode(coded: bytes, where: str) -> Array:
    """Decode an image after its header was checked; cv2 raises for some damaged images and returns None for others."""
    known = read_header(coded)
    if known is not None:
        check_pixels(known.width, known.height, where)
    try:
        pixels = cv2.imdecode(np.frombuffer(coded, np.uint8), cv2.IMREAD_UNCHANGED) if known is not None else None
    except cv2.error:
        pixels = None
    if pixels is None:
        raise HaloposeError(f"{where} cannot be decoded: it is damaged or of an unknown format")
    return np.asarray(as_bgr(pixels))


def _mcap_messages(path: Path) -> Iterator[tuple[str, float, bytes]]:
    """Yield topic, header time and bytes of every ``sensor_msgs/CompressedImage``."""
    reader, factory = need("mcap.reader"), need("mcap_ros2.decoder")
    if path.is_file() and not _begins_as_mcap(path):
        raise HaloposeError(f"{path} is not an MCAP file")
    try:
        with path.open("rb") as file:
            _check_chunks(file, path)
            messages = reader.make_reader(file, decoder_factories=[factory.DecoderFactory()])
            for schema, channel, _, message in messages.iter_decoded_messages():
                if schema.name.rsplit("/", 1)[-1] == "CompressedImage":
                    stamp = message.header.stamp
                    yield channel.topic, stamp.sec + 1e-9 * stamp.nanosec, bytes(message.data)
    except HaloposeError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes lead these libraries to any of a dozen classes
        # the message of a struct.error does not help users
        why = "" if type(error).__name__ == "error" else f" ({type(error).__name__})"
        raise HaloposeError(f"{path} is not a complete MCAP file{why}: record it again") from None


def _check_chunks(file: IO[bytes], path: Path) -> None:
    """Refuse chunks that decompress to more than `MAX_CHUNK` bytes, from the sizes in their headers."""
    place = len(_MAGIC) + 3
    while len(head := _read_at(file, place, 9)) == 9:
        if head[0] == _CHUNK:
            start = _read_at(file, place + 9, 128)
            size = int.from_bytes(start[16:24], "little")
            name_end = 32 + int.from_bytes(start[28:32], "little")
            if start[32:name_end] == b"zstd":  # trusts the size in its own header before that of the chunk
                size = max(size, need("zstandard").frame_content_size(start[name_end + 8 :]))
            if size > MAX_CHUNK:
                raise HaloposeError(f"{path} has a chunk of {size} bytes, more than {MAX_CHUNK}: record smaller chunks")
        place += 9 + int.from_bytes(head[1:], "little")
    file.seek(0)


def _read_at(file: IO[bytes], place: int, count: int) -> bytes:
    file.seek(min(place, 2**62))
    return file.read(count)


def _begins_as_mcap(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(5) == _MAGIC
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
