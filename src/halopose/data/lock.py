"""One command at a time in a work folder.

In: a folder. Out: a lock that the system itself lets go of when its process ends, however it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from halopose.data.files import make_folder
from halopose.data.storage.address import Address, Place, to_place
from halopose.errors import HaloposeError

_NAME = ".halopose-lock"


@contextmanager
def locked(folder: Place | str, part: tuple[int, int] = (0, 1)) -> Iterator[Place]:
    """The folder, made if need be, for this process alone; refused if another command works there.

    part: one of several, from 0; each has a lock of its own. At an address nothing can be locked: what is written
    there is whole or absent, so that a second command costs no more than its time.
    """
    place = to_place(folder)
    if isinstance(place, Address):
        yield place
        return
    folder = make_folder(place)
    name = _NAME if part[1] == 1 else f"{_NAME}-{part[0] + 1}-of-{part[1]}"
    try:
        file = open(folder / name, "a+")  # noqa: SIM115, held until the work is done
    except OSError as error:
        raise HaloposeError(f"cannot write to {folder}: {error.strerror or error}") from None
    with file:
        if not _take(file):
            file.seek(0)
            owner = file.read().strip()
            who = f"process {owner}" if owner.isdigit() else "another process"
            raise HaloposeError(f"{who} works in {folder}: wait until it has ended, or choose another folder")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield folder
        finally:
            with suppress(OSError):  # which Windows refuses while it is open
                (folder / name).unlink()


if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[str]) -> bool:
        """Lock a byte far behind the text, which others may still read."""
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
