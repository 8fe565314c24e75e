"""Files at fsspec addresses such as ``s3://``, ``gs://`` or ``memory://``, with the methods of a path."""

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
from halopose.install_advice import install_command

# Other file systems of fsspec run code (reference), read archives of any size or start programs.
PROTOCOLS = ("file", "memory", "s3", "gs", "az", "http", "https")

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+(::[a-z0-9+.:/-]*)?:/", re.IGNORECASE)
_ONE_SLASH = re.compile(r"(?<=[a-z0-9]):/+", re.IGNORECASE)
_BATCH = 1000  # files of one request
_STAMPS = ("mtime", "LastModified", "last_modified", "updated", "created", "ETag", "etag")


@dataclass(frozen=True)
class Address:
    """A file or folder at an address. It has the methods of a path that datasets and feature caches use.

    Attributes:
        url: The address. Its protocol must be one of `PROTOCOLS` when the address is used.

    Example:
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
        """Protocol, folders and name."""
        head, scheme, rest = self.url.rpartition("://")
        return (f"{head}{scheme}", *rest.split("/"))

    @property
    def parent(self) -> Address:
        head, scheme, rest = self.url.rstrip("/").rpartition("://")
        return Address(f"{head}{scheme}{posixpath.dirname(rest)}")

    def with_suffix(self, suffix: str) -> Address:
        return Address(posixpath.splitext(self.url)[0] + suffix)

    def below(self, root: Address) -> str:
        """Return the path relative to a folder."""
        return posixpath.relpath(self._path, root._path)

    def read_bytes(self) -> bytes:
        return bytes(self._files.cat_file(self._path))

    def part(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end` without fetching the others."""
        return bytes(self._files.cat_file(self._path, start=begin, end=end))

    def open(self) -> IO[bytes]:
        """Open the file for reading."""
        return self._files.open(self._path, "rb")

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Write the file completely or not at all.

        Object stores replace a file atomically. On a disk the content goes to a second file, which is then renamed.
        """
        files, path = self._files, self._path
        files.makedirs(posixpath.dirname(path), exist_ok=True)
        if not hasattr(files, "mv_file") or "file" not in _protocols(files):
            files.pipe_file(path, bytes(content))
            return
        temporary = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.{os.getpid()}")
        files.pipe_file(temporary, bytes(content))
        files.mv(temporary, path)

    def is_file(self) -> bool:
        return bool(self._files.isfile(self._path))

    def is_dir(self) -> bool:
        return bool(self._files.isdir(self._path))

    def unlink(self) -> None:
        self._files.rm_file(self._path)

    def stamp(self) -> tuple[int, int]:
        """Return the size and a number that changes when the file is written again."""
        facts = self._files.info(self._path)
        changed = next((facts[name] for name in _STAMPS if facts.get(name)), "")
        digest = hashlib.sha256(str(changed).encode()).hexdigest()
        return int(facts.get("size") or 0), int(digest[:12], 16)

    def files(self) -> list[Address]:
        """Return all files below a folder."""
        return [self._at(path) for path in self._files.find(self._path)]

    def glob(self) -> list[Address]:
        """Return the files that match an address with ``*``, ``?`` or ``[``."""
        return [self._at(str(path)) for path in self._files.glob(self._path)]

    def local(self) -> Path:
        """Return a copy on this machine. It is made once and removed when this process ends."""
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
        """Return the address of another path in the same file system."""
        scheme = self.url[: self.url.rindex("://") + 3]
        return Address(scheme + (path if scheme.startswith("file") else path.lstrip("/")))


Place = Union[Path, Address]


def read_many(addresses: Sequence[Address]) -> dict[str, bytes]:
    """Read many files of one file system with few requests.

    Returns:
        The bytes of each file by its address. Missing files are left out.
    """
    found: dict[str, bytes] = {}
    for begin in range(0, len(addresses), _BATCH):
        batch = addresses[begin : begin + _BATCH]
        content = batch[0]._files.cat([address._path for address in batch], on_error="omit")
        by_path = content if isinstance(content, dict) else {batch[0]._path: content}
        found |= {address.url: bytes(by_path[address._path]) for address in batch if address._path in by_path}
    return found


def to_place(given: Path | str | Address) -> Place:
    """Return an address if the text has a protocol, else a path.

    A ``Path`` made of an address has lost a slash, which is restored.

    Example:
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
    """Resolve a name that a file mentions: an address, an absolute path or a path relative to the file's folder."""
    named = to_place(name)
    if isinstance(named, Address):
        return named
    return place.parent / name


@lru_cache(maxsize=4096)
def _opened(url: str, process: int) -> tuple[Any, str]:
    """Return the file system of an address and the path in it. Each process has its own connections."""
    protocol = url.partition(":")[0].lower()
    if "::" in url:
        raise HaloposeError(f"cannot open {url}: chained addresses (::) are refused, give a plain address")
    if protocol not in PROTOCOLS:
        raise HaloposeError(f"cannot open {url}: {protocol} is not one of {', '.join(PROTOCOLS)}")
    try:
        import fsspec
    except ImportError:
        raise HaloposeError(f"{url}: addresses need the cloud extra: {install_command('cloud')}") from None
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise HaloposeError(f"cannot open {url}: {error}") from None
    return files, path


def _protocols(files: Any) -> tuple[str, ...]:
    named = files.protocol
    return (named,) if isinstance(named, str) else tuple(named)


@lru_cache(maxsize=1)
def _copies() -> Path:
    """Return a temporary folder that is removed when the process that made it ends. Forked processes share it."""
    folder, owner = Path(tempfile.mkdtemp(prefix="halopose-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
