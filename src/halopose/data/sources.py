"""The files, films and streams that the arguments of a command name, each with a distinct name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from halopose.data.downloads import web_kind, web_name
from halopose.data.images import (
    NamedImage,
    decode_image,
    distinct_names,
    find_files,
    read_image,
    read_source,
)
from halopose.data.suffixes import VIDEO_SUFFIXES
from halopose.errors import HaloposeError
from halopose.types import Array

STDIN = "-"


@dataclass(frozen=True)
class Source:
    """One image, film or stream.

    Attributes:
        name: Distinct name without suffix.
        path: The file; None for a stream and for standard input.
        stream: Camera number, or address of an image, film or stream.
        kind: What an address names: image, film or stream; a camera is a stream.
    """

    name: str
    path: Path | None = None
    stream: str | int | None = None
    kind: str = "stream"

    @property
    def is_film(self) -> bool:
        """Whether the source has frames: a film, a camera or a stream."""
        if self.stream is not None:
            return self.kind != "image"
        return self.path is not None and self.path.suffix.lower() in VIDEO_SUFFIXES

    @property
    def is_endless(self) -> bool:
        """Whether only the user ends it: a camera or a stream."""
        return self.stream is not None and self.kind == "stream"

    @property
    def file_name(self) -> str:
        """Name of the file, with folders if two files of a run have the same name."""
        if self.path is None or self.name == self.path.stem:
            return self.name if self.path is None else self.path.name
        return self.name if self.name.endswith(self.path.name) else self.name + self.path.suffix

    def images(self, stride: int = 1) -> Iterator[NamedImage]:
        """Iterate over the image or every ``stride``-th frame."""
        if self.stream is not None:
            for number, image in enumerate(read_source(self.stream, stride)):
                yield replace(image, name=f"{self.name}_{number:06d}" if self.is_film else self.name)
        elif self.path is None:
            yield NamedImage(self.name, _standard_input())
        elif self.is_film:
            for number, image in enumerate(read_source(self.path, stride)):
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
    paths = [path for text in given if text != STDIN and _stream(text) is None for path in find_files(text)]
    files: dict[str, Path] = {}
    for path in paths:  # several arguments may name the same file
        files.setdefault(os.path.realpath(path), path)
    paths = list(files.values())
    names = distinct_names(paths) if paths else []
    found = [Source(name, path) for name, path in zip(names, paths, strict=True)]
    taken = {name.casefold() for name in names}
    streams = [_streamed(stream, taken) for text in given for stream in [_stream(text)] if stream is not None]
    return found + [Source("stdin")] * (STDIN in given) + streams


def _streamed(stream: str | int, taken: set[str]) -> Source:
    """Return the source of a camera or an address, with a name that no other source has."""
    name, kind = (f"camera_{stream}", "stream") if isinstance(stream, int) else (web_name(stream), web_kind(stream))
    free = next(text for text in chain([name], (f"{name}-{n}" for n in count(2))) if text.casefold() not in taken)
    taken.add(free.casefold())
    return Source(free, stream=stream, kind=kind)


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
