"""Files by their address: whatever fsspec knows, such as ``s3://``, ``gs://``, ``memory://`` or ``file://``.

In: an address. Out: bytes, and the few methods of a path that data sets and stores use.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Union

from halopose.errors import HaloposeError

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+(::[a-z0-9+.:/-]*)?:/", re.IGNORECASE)
_ONE_SLASH = re.compile(r"(?<=[a-z0-9]):/+", re.IGNORECASE)
_AT_ONCE = 1000  # files asked for together
_STAMPS = ("mtime", "LastModified", "last_modified", "updated", "created", "ETag", "etag")


@dataclass(frozen=True)
class Address:
    """A file or folder at an address. It behaves as a path does where data sets and stores need one.

    >>> (Address("s3://bucket/images") / "1.jpg").name
    '1.jpg'
    >>> str(Address("s3://bucket/images/1.jpg").with_suffix(".txt"))
    's3://bucket/images/1.txt'
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Address:
        head, scheme, rest = self.url.rpartition("://")
        joined = posixpath.normpath(posixpath.join(rest, name)) if rest else name
        return Address(f"{head}{scheme}{joined}")

    @property
    def name(self) -> str:
        return posixpath.basename(self.url.rstrip("/"))

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """The address, its scheme and folders and name apart."""
        head, scheme, rest = self.url.rpartition("://")
        return (f"{head}{scheme}", *rest.split("/"))

    @property
    def parent(self) -> Address:
        head, scheme, rest = self.url.rstrip("/").rpartition("://")
        return Address(f"{head}{scheme}{posixpath.dirname(rest)}")

    def with_suffix(self, suffix: str) -> Address:
        return Address(posixpath.splitext(self.url)[0] + suffix)

    def below(self, root: Address) -> str:
        """The rest of the address behind a folder's."""
        return posixpath.relpath(self._path, root._path)

    def read_bytes(self) -> bytes:
        return bytes(self._files.cat_file(self._path))

    def part(self, begin: int, end: int) -> bytes:
        """Some of the bytes, without the others."""
        return bytes(self._files.cat_file(self._path, start=begin, end=end))

    def open(self) -> IO[bytes]:
        """For reading from the beginning on."""
        return self._files.open(self._path, "rb")

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Whole or not at all: object stores do no other, and elsewhere a second name is moved to this one."""
        files, path = self._files, self._path
        files.makedirs(posixpath.dirname(path), exist_ok=True)
        if not hasattr(files, "mv_file") or "file" not in _names(files):
            files.pipe_file(path, bytes(content))
            return
        beside = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.{os.getpid()}")
        files.pipe_file(beside, bytes(content))
        files.mv(beside, path)

    def is_file(self) -> bool:
        return bool(self._files.isfile(self._path))

    def is_dir(self) -> bool:
        return bool(self._files.isdir(self._path))

    def unlink(self) -> None:
        self._files.rm_file(self._path)

    def stamp(self) -> tuple[int, int]:
        """Size, and a number that changes when the file is written again."""
        facts = self._files.info(self._path)
        said = next((facts[name] for name in _STAMPS if facts.get(name)), "")
        digest = hashlib.sha256(str(said).encode()).hexdigest()
        return int(facts.get("size") or 0), int(digest[:12], 16)

    def files(self) -> list[Address]:
        """All files below a folder."""
        return [self._at(path) for path in self._files.find(self._path)]

    def glob(self) -> list[Address]:
        """The files that an address with ``*``, ``?`` or ``[`` stands for."""
        return [self._at(str(path)) for path in self._files.glob(self._path)]

    def local(self) -> Path:
        """A copy here for as long as this process lives, made once."""
        size, stamp = self.stamp()
        key = hashlib.sha256(f"{self.url} {size} {stamp}".encode()).hexdigest()[:24]
        copy = _copies() / f"{key}-{self.name}"
        if not copy.is_file():
            handle, name = tempfile.mkstemp(dir=copy.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(self.read_bytes())
            os.replace(name, copy)
        return copy

    @property
    def _files(self) -> Any:
        return _opened(self.url, os.getpid())[0]

    @property
    def _path(self) -> str:
        return str(_opened(self.url, os.getpid())[1])

    def _at(self, path: str) -> Address:
        """The address of another path in the same place."""
        scheme = self.url[: self.url.rindex("://") + 3]
        return Address(scheme + (path if scheme.startswith("file") else path.lstrip("/")))


Place = Union[Path, Address]


def read_together(addresses: Sequence[Address]) -> dict[str, bytes]:
    """The bytes of many files by their addresses, asked for together; those that are not there are left out."""
    found: dict[str, bytes] = {}
    for begin in range(0, len(addresses), _AT_ONCE):
        some = addresses[begin : begin + _AT_ONCE]
        content = some[0]._files.cat([one._path for one in some], on_error="omit")
        by_path = content if isinstance(content, dict) else {some[0]._path: content}
        found |= {one.url: bytes(by_path[one._path]) for one in some if one._path in by_path}
    return found


def to_place(given: Path | str | Address) -> Place:
    """An address if it looks like one, else a path; a ``Path`` of an address has lost a slash.

    >>> to_place(Path("s3://bucket/images"))
    Address(url='s3://bucket/images')
    """
    if isinstance(given, Address):
        return given
    text = str(given)
    if not _SCHEME.match(text):
        return Path(given)
    url = _ONE_SLASH.sub("://", text)
    return Address(url.replace("file://", "file:///") if "file:///" not in url else url)


def beside(place: Place, name: str) -> Place:
    """What a file at ``place`` means by ``name``: an address, an absolute path, or something in its own folder."""
    named = to_place(name)
    if isinstance(named, Address):
        return named
    return place.parent / name


@lru_cache(maxsize=4096)
def _opened(url: str, process: int) -> tuple[Any, str]:
    """The file system of an address and the path in it; connections are those of one process."""
    try:
        import fsspec
    except ImportError:
        raise HaloposeError(f"{url}: addresses need the cloud extra: pip install 'halopose[cloud]'") from None
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise HaloposeError(f"cannot open {url}: {error}") from None
    return files, path


def _names(files: Any) -> tuple[str, ...]:
    named = files.protocol
    return (named,) if isinstance(named, str) else tuple(named)


@lru_cache(maxsize=1)
def _copies() -> Path:
    """A folder that goes when the process that made it does; the ones it forks share it."""
    folder, owner = Path(tempfile.mkdtemp(prefix="halopose-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
