"""Images and labels in tar archives in the layout of WebDataset.

The files of one sample have the same path without suffix, such as ``0001.jpg`` and ``0001.txt``. Folders ``images``
and ``labels`` inside an archive work as in a YOLO dataset.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Union

from halopose.data.storage.address import Address, Place
from halopose.errors import HaloposeError

_BRACES = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
MAX_ARCHIVES = 100_000  # that a pattern may stand for
MAX_LABEL_BYTES = 2**24  # of one label file
LABELS = ".txt"
_BLOCK = tarfile.BLOCKSIZE
# What tarfile and the file systems of fsspec raise on damaged archives.
_DAMAGE = (tarfile.TarError, ValueError, OverflowError, EOFError, IndexError)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A file in an archive.

    Attributes:
        archive: Where the archive is.
        file: Name in the archive.
        offset: Position of its first byte.
        size: Number of bytes.
        time: Modification time in seconds.
    """

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
        """Return size and time, as of a file."""
        return self.size, self.time


Stored = Union[Path, Address, Member]  # what an image can be read from


def is_archive(name: object) -> bool:
    """Return whether a name is that of an uncompressed tar archive."""
    return str(name).endswith(".tar")


def find_archives(place: Place) -> Sequence[Place]:
    """Return the archives of a pattern with ``{0000..0099}`` or ``*``, in order.

    Raises:
        HaloposeError: A range is reversed or the ranges stand for more than `MAX_ARCHIVES` archives.
    """
    text = str(place)
    count = 1
    for first, last in _BRACES.findall(text):
        count *= int(last) - int(first) + 1
        if int(first) > int(last) or count > MAX_ARCHIVES:
            raise HaloposeError(
                f"{text}: write ranges as {{0000..0099}}, the smaller number first, of at most {MAX_ARCHIVES} archives"
            )
    return _expand(place)


def _expand(place: Place) -> Sequence[Place]:
    text = str(place)
    found = _BRACES.search(text)
    if found is not None:
        numbers = (f"{number:0{len(found[1])}d}" for number in range(int(found[1]), int(found[2]) + 1))
        names = (f"{text[: found.start()]}{number}{text[found.end() :]}" for number in numbers)
        return [archive for name in names for archive in _expand(_like(place, name))]
    if "*" not in text and "?" not in text:
        return [place]
    if isinstance(place, Address):
        return sorted(place.glob(), key=str)
    return sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor))))


def _like(place: Place, name: str) -> Place:
    return Address(name) if isinstance(place, Address) else Path(name)


def read_samples(archive: Place, suffixes: set[str], labels: bool = True) -> Iterator[tuple[Member, str | None]]:
    """Read the index of an archive.

    Args:
        archive: An uncompressed tar archive.
        suffixes: Suffixes of images, in lower case.
        labels: Whether to read label files.

    Yields:
        Each image and the text of its labels, None without a label file.

    Raises:
        HaloposeError: The archive is damaged or cut, or two of its files belong to the same sample.
    """
    images: dict[str, Member] = {}
    texts: dict[str, str] = {}
    try:
        with _stream(archive) as stream:
            length = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            opened = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  closes only the stream
            for entry in opened:
                suffix = PurePosixPath(entry.name).suffix.lower()
                if suffix not in suffixes and not (labels and suffix == LABELS):
                    continue
                if not entry.isdir():
                    _check_plain(archive, entry)
                if entry.offset_data + entry.size > length:
                    raise HaloposeError(f"{archive} is cut: {entry.name} ends after the archive, write it again")
                time = _time(entry.mtime)
                if entry.isfile() and suffix in suffixes:
                    member = Member(archive, entry.name, entry.offset_data, entry.size, time)
                    other = images.setdefault(_stem(entry.name), member)
                    if other is not member:
                        raise HaloposeError(f"{archive}: {other.file} and {entry.name} are one sample: rename one")
                elif entry.isfile():
                    if entry.size > MAX_LABEL_BYTES:
                        raise HaloposeError(f"{archive}: {entry.name} has {entry.size} bytes: it is no label file")
                    file = opened.extractfile(entry)
                    if _stem(entry.name) in texts:
                        raise HaloposeError(f"{archive}: two label files for {_stem(entry.name)}: remove one")
                    texts[_stem(entry.name)] = file.read().decode() if file else ""
            _check_end(archive, stream, opened.offset)
    except HaloposeError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise HaloposeError(f"cannot read {archive}: {error}") from None
    except _DAMAGE:
        raise HaloposeError(f"{archive} is no tar archive, or damaged, or compressed: write it as plain tar") from None
    yield from _with_labels(archive, images, texts, labels)


def _with_labels(
    archive: Place, images: dict[str, Member], texts: dict[str, str], labels: bool
) -> Iterator[tuple[Member, str | None]]:
    """Pair images with the texts of their labels."""
    for image in images.values():
        sample = images.get(_sample(image.file))
        if sample is not None and sample is not image:
            raise HaloposeError(f"{archive}: {sample.file} and {image.file} are images of one sample: remove one")
    by_sample = {_sample(stem): text for stem, text in texts.items() if _sample(stem) in images}
    found = {key: texts.get(key, texts.get(_labels_of(key), by_sample.get(key))) for key in images}
    if labels and images and all(text is None for text in found.values()):
        log.warning("%s: none of its %d images has a label file", archive, len(images))
    for key, image in images.items():
        yield image, found[key]


def _check_plain(archive: Place, entry: tarfile.TarInfo) -> None:
    """Raise a HaloposeError for links, devices and sparse files, whose content does not follow their header."""
    if not entry.isfile() or entry.issparse():
        raise HaloposeError(f"{archive}: {entry.name} is a link or a sparse file: write its bytes into the archive")


def _check_end(archive: Place, stream: IO[bytes], offset: int) -> None:
    """Raise a HaloposeError unless the archive ends with its end marker, a block of zeros.

    tarfile stops without an error at a damaged header and at the end of a file that was cut.
    """
    stream.seek(offset)
    content = stream.read(_BLOCK)
    if len(content) < _BLOCK or content.strip(b"\0"):
        what = "has a damaged header" if content.strip(b"\0") else "is cut: it has no end marker"
        raise HaloposeError(f"{archive} {what} after {offset} bytes: write it again")
    while content := stream.read(2**20):
        if content.strip(b"\0"):
            raise HaloposeError(f"{archive} has content after its end marker: join archives with tar --concatenate")


def _time(seconds: float) -> int:
    """Return a modification time in whole seconds; ValueError if it is not finite."""
    if not math.isfinite(seconds):
        raise ValueError(seconds)
    return int(seconds)


def _stream(archive: Place) -> IO[bytes]:
    return archive.open() if isinstance(archive, Address) else open(archive, "rb")


def _stem(name: str) -> str:
    """Return the path without its last suffix, which the files of a sample share: ``a/cam.1`` of ``a/cam.1.jpg``."""
    return str(PurePosixPath(name).with_suffix(""))


def _sample(name: str) -> str:
    """Return the path up to the first dot of the file name, the sample's name of WebDataset."""
    path = PurePosixPath(name)
    return str(path.with_name(path.name.partition(".")[0] or path.name))


def _labels_of(stem: str) -> str:
    """Return the path with the last folder ``images`` replaced by ``labels``, as YOLO finds labels."""
    folder, separator, rest = f"/{stem}".rpartition("/images/")
    return f"{folder}/labels/{rest}".lstrip("/") if separator else stem
