"""Images in tar archives, in the layout of WebDataset: files of one sample share all of their name but the suffix.

In: archives, here or at addresses. Out: images that are read one by one, and the labels beside them.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Union

from halopose.data.storage.address import Address, Place
from halopose.errors import HaloposeError

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST = 1_000_000  # archives that a pattern may stand for
LABELS = ".txt"


@dataclass(frozen=True)
class Member:
    """A file in an archive: where its bytes begin, how many they are and when it was put there."""

    archive: Place
    file: str
    offset: int
    size: int
    time: int

    def __str__(self) -> str:
        return f"{self.archive}/{self.file}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.file).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.file).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.file).stem

    def read_bytes(self) -> bytes:
        if isinstance(self.archive, Address):
            return self.archive.part(self.offset, self.offset + self.size)
        with open(self.archive, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def stamp(self) -> tuple[int, int]:
        """Size and time, as of a file."""
        return self.size, self.time


Stored = Union[Path, Address, Member]  # what an image can be read from


def is_archive(name: object) -> bool:
    return str(name).endswith(".tar")


def find_archives(place: Place) -> Sequence[Place]:
    """The archives of a pattern with ``{0000..0099}`` or ``*``, in order."""
    text = str(place)
    found = _BRACES.search(text)
    if found is not None:
        first, last = (int(number) for number in found.groups())
        if not first <= last < first + MOST:
            raise HaloposeError(f"{text}: write numbers as {{0000..0099}}, the smaller one first")
        numbers = (f"{number:0{len(found[1])}d}" for number in range(first, last + 1))
        names = (f"{text[: found.start()]}{number}{text[found.end() :]}" for number in numbers)
        return [one for name in names for one in find_archives(_like(place, name))]
    if "*" not in text and "?" not in text:
        return [place]
    if isinstance(place, Address):
        return sorted(place.glob(), key=str)
    return sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor))))


def _like(place: Place, name: str) -> Place:
    return Address(name) if isinstance(place, Address) else Path(name)


def read_samples(archive: Place, suffixes: set[str], labels: bool = True) -> Iterator[tuple[Member, str | None]]:
    """Images of an archive, by their suffixes, each with the text of its labels if it has any."""
    images: dict[str, Member] = {}
    texts: dict[str, str] = {}
    try:
        with _stream(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as opened:
            for entry in opened:
                member = Member(archive, entry.name, entry.offset_data, entry.size, int(entry.mtime))
                if entry.isfile() and member.suffix.lower() in suffixes:
                    images[_key(entry.name)] = member
                elif entry.isfile() and labels and member.suffix == LABELS:
                    file = opened.extractfile(entry)
                    texts[_key(entry.name)] = file.read().decode() if file else ""
    except tarfile.ReadError:
        raise HaloposeError(f"{archive} is no tar archive, or damaged, or compressed: write it as plain tar") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HaloposeError(f"cannot read {archive}: {error}") from None
    for key, image in images.items():
        yield image, texts.get(key)


def _stream(archive: Place) -> IO[bytes]:
    return archive.open() if isinstance(archive, Address) else open(archive, "rb")


def _key(name: str) -> str:
    """A sample's name: all up to the first dot behind the folders, as in WebDataset."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
