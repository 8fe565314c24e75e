"""What a user names on the command line, as a list of files to go through one after the other.

In: files, folders, patterns, streams, standard input. Out: sources with distinct names, each known to be there.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from halopose.data.images import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    NamedImage,
    decode_image,
    distinct_names,
    read_image,
    read_source,
    refuse_empty,
)
from halopose.errors import HaloposeError
from halopose.types import Array

STDIN = "-"


@dataclass(frozen=True)
class Source:
    """One image, film or stream; ``name`` is unlike all others and has no suffix."""

    name: str
    path: Path | None = None
    stream: str | int | None = None

    @property
    def is_film(self) -> bool:
        return self.path is not None and self.path.suffix.lower() in VIDEO_SUFFIXES

    @property
    def file_name(self) -> str:
        """The file's name; with folders where two files of a run have one name."""
        if self.path is None or self.name == self.path.stem:
            return self.name if self.path is None else self.path.name
        return self.name if self.name.endswith(self.path.name) else self.name + self.path.suffix

    def images(self) -> Iterator[NamedImage]:
        """The image, or the frames one by one."""
        if self.stream is not None:
            yield from read_source(self.stream)
        elif self.path is None:
            yield NamedImage(self.name, _standard_input())
        elif self.is_film:
            for number, image in enumerate(read_source(self.path)):
                yield NamedImage(f"{self.name}_{number:06d}", image.pixels)
        else:
            yield NamedImage(self.name, read_image(self.path), self.path)


def find_sources(given: Sequence[str]) -> list[Source]:
    """Every file of what is given, folders with all that is below them; what is not there is said at once."""
    streams = [Source(f"stream_{text}", stream=_stream(text)) for text in given if _stream(text) is not None]
    paths = [path for text in given if text != STDIN and _stream(text) is None for path in _files(text)]
    files: dict[str, Path] = {}
    for path in paths:  # one file may be named in several ways
        files.setdefault(os.path.realpath(path), path)
    paths = list(files.values())
    names = distinct_names(paths) if paths else []
    found = [Source(name, path) for name, path in zip(names, paths, strict=True)]
    return found + [Source("stdin")] * (STDIN in given) + streams


def _stream(text: str) -> str | int | None:
    """The number of a camera, or an address; None for a path."""
    if text.isascii() and text.isdigit():
        return int(text)
    return text if "://" in text else None


def _files(text: str) -> list[Path]:
    refuse_empty(text)
    path = Path(text)
    if os.path.isdir(path):  # which says no to names that no file can have
        wanted = IMAGE_SUFFIXES | VIDEO_SUFFIXES
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in wanted)
    elif any(letter in text for letter in "*?[") and not os.path.exists(path):
        found = sorted(Path(file) for file in glob.glob(text, recursive=True) if Path(file).is_file())
    elif os.path.exists(path):
        return [path]
    else:
        raise HaloposeError(f"no file {path}: give an image, a folder, a pattern, a video or a stream")
    if not found:
        raise HaloposeError(f"no images in {text}")
    return found


def _standard_input() -> Array:
    try:
        return decode_image(sys.stdin.buffer.read(), "on standard input")
    except HaloposeError:
        raise HaloposeError("standard input holds no image: pipe the bytes of one image file") from None
