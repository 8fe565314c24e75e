"""The files, films and streams that the arguments of a command name, each with a distinct name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halopose.data.images import (
    VIDEO_SUFFIXES,
    NamedImage,
    decode_image,
    distinct_names,
    find_files,
    read_image,
    read_source,
)
from halopose.errors import HaloposeError
from halopose.types import Array

STDIN = "-"


@dataclass(frozen=True)
class Source:
    """One image, film or stream.

    Attributes:
        name: Distinct name without suffix.
        path: The file; None for a stream and for standard input.
        stream: Camera number or address of a stream.
    """

    name: str
    path: Path | None = None
    stream: str | int | None = None

    @property
    def is_film(self) -> bool:
        return self.path is not None and self.path.suffix.lower() in VIDEO_SUFFIXES

    @property
    def file_name(self) -> str:
        """Name of the file, with folders if two files of a run have the same name."""
        if self.path is None or self.name == self.path.stem:
            return self.name if self.path is None else self.path.name
        return self.name if self.name.endswith(self.path.name) else self.name + self.path.suffix

    def images(self) -> Iterator[NamedImage]:
        """Iterate over the image or the frames."""
        if self.stream is not None:
            yield from read_source(self.stream)
        elif self.path is None:
            yield NamedImage(self.name, _standard_input())
        elif self.is_film:
            for number, image in enumerate(read_source(self.path)):
                yield replace(image, name=f"{self.name}_{number:06d}")
        else:
            yield NamedImage(self.name, read_image(self.path), self.path)


def find_sources(given: Sequence[str]) -> list[Source]:
    """Find all sources that the arguments name.

    Args:
        given: Files, folders with all subfolders, patterns, cameras, stream addresses, or ``-``, standard input.

    Raises:
        HaloposeError: An argument names no file.
    """
    streams = [Source(f"stream_{text}", stream=_stream(text)) for text in given if _stream(text) is not None]
    paths = [path for text in given if text != STDIN and _stream(text) is None for path in find_files(text)]
    files: dict[str, Path] = {}
    for path in paths:  # several arguments may name the same file
        files.setdefault(os.path.realpath(path), path)
    paths = list(files.values())
    names = distinct_names(paths) if paths else []
    found = [Source(name, path) for name, path in zip(names, paths, strict=True)]
    return found + [Source("stdin")] * (STDIN in given) + streams


def _stream(text: str) -> str | int | None:
    """Return the number of a camera or the address of a stream; None for a path."""
    if text.isascii() and text.isdigit():
        return int(text)
    return text if "://" in text else None


def _standard_input() -> Array:
    try:
        return decode_image(sys.stdin.buffer.read(), "on standard input")
    except HaloposeError:
        raise HaloposeError("standard input holds no image: pipe the bytes of one image file") from None
