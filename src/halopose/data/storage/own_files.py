"""Files that the package keeps in an output folder: locks, logs and temporary files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any


def open_without_links(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing that nobody may have replaced by a link to another file.

    Args:
        path: A file that the package itself keeps in an output folder.
        mode: ``wb`` replaces the file. ``a+`` and ``ab`` keep its content.

    Raises:
        OSError: The file cannot be opened, or it is a symbolic link, a hard link or not a regular file.
    """
    if mode.startswith("w"):
        path.unlink(missing_ok=True)
        return open(path, mode.replace("w", "x"))
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file: IO[Any] = open(path, mode, opener=lambda name, given: os.open(name, given | flags, 0o666))  # noqa: SIM115
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, remove it", str(path)) from None
        raise
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        file.close()
        raise OSError(errno.EPERM, "it is a link to another file or no regular file, remove it", str(path))
    return file
