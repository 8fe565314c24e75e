"""A lock that lets one command at a time work in a folder. The system releases it when the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from halopose.data.files import make_folder
from halopose.data.storage.address import Address, Place, to_place
from halopose.data.storage.own_files import open_without_links
from halopose.errors import HaloposeError

_NAME = ".halopose-lock"


@contextmanager
def locked(folder: Place | str, part: tuple[int, int] = (0, 1)) -> Iterator[Place]:
    """Make a folder and lock it for this process.

    Addresses cannot be locked. Files there are written completely or not at all, so that a second command only
    does the work twice.

    Args:
        folder: Folder on this machine or at an address.
        part: Index, from 0, and number of the processes that share the work. Each part has a separate lock.

    Yields:
        The folder.

    Raises:
        HaloposeError: Another process works in the folder, or it cannot be written to.
    """
    place = to_place(folder)
    if isinstance(place, Address):
        yield place
        return
    folder = make_folder(place)
    name = _NAME if part[1] == 1 else f"{_NAME}-{part[0] + 1}-of-{part[1]}"
    try:
        file = _open_current(folder / name)
    except OSError as error:
        raise HaloposeError(f"cannot write to {folder / name}: {error.strerror or error}") from None
    with file:
        if not _take(file):
            file.seek(0)
            owner = file.read().strip()
            who = f"process {owner}" if owner.isdigit() else "another process"
            raise HaloposeError(f"{who} works in {folder}: wait until it has ended, or choose another folder")
        file.truncate(0)
        with suppress(OSError):  # on a full disk the folder is locked all the same, by an unnamed process
            os.write(file.fileno(), str(os.getpid()).encode())
        try:
            yield folder
        finally:
            with suppress(OSError):  # Windows refuses it while the file is open
                (folder / name).unlink()


def _open_current(path: Path) -> IO[str]:
    """Open the lock file; again if the process that held it removed it in between."""
    while True:
        file = open_without_links(path, "a+")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[str]) -> bool:
        """Lock a byte far behind the text, so that other processes can read the text."""
        file.seek(2**20)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _take(file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
