"""User files: json is read with one-line errors, and files are written completely or not at all."""

from __future__ import annotations

import io
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from halopose.data.storage.address import Address, Place, to_place
from halopose.data.storage.json_stream import Entries
from halopose.errors import HaloposeError


def read_json(path: Place | str) -> Any:
    """Parse a json file.

    Raises:
        HaloposeError: The file cannot be read or is not complete json.
    """
    with _text(path) as stream:
        text = stream.read()
        if not text.strip():
            raise HaloposeError(f"{path} is empty: write it again")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise _incomplete(path, error.lineno, error.colno) from None


def read_entries(path: Place | str) -> Iterator[tuple[str, Any]]:
    """Iterate over the `Entries` of a json file that may be too long for memory, with the errors of `read_json`."""
    with _text(path) as stream:
        entries = Entries(stream)
        if entries.empty():
            raise HaloposeError(f"{path} is empty: write it again")
        try:
            yield from entries
        except json.JSONDecodeError as error:
            raise _incomplete(path, *entries.where(error)) from None


def _incomplete(path: Place | str, line: int, column: int) -> HaloposeError:
    return HaloposeError(f"{path} is not complete json (line {line}, column {column}): write it again")


@contextmanager
def _text(path: Place | str) -> Iterator[IO[str]]:
    """Open a json file as text and turn every error while it is read into one line."""
    place = to_place(path)
    try:
        if isinstance(place, Address):
            opened: Any = place.open()
        else:
            check_regular(place)
            opened = place.open("rb")
        with io.TextIOWrapper(opened, encoding="utf-8-sig") as stream:  # some editors write a byte order mark
            yield stream
    except HaloposeError:
        raise
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HaloposeError(f"{path} is not text: expected json in UTF-8") from None
    except (RecursionError, ValueError):  # nested too deeply, or a number with too many digits
        raise HaloposeError(f"{path} is json that cannot be read: write it again") from None


def check_regular(path: Path | str) -> None:
    """Raise a HaloposeError unless the path is a regular file, because reading a named pipe would block."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HaloposeError(f"cannot read {str(path)!r}: {reason}") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise HaloposeError(f"cannot read {path}: it is {kind}")


def in_bytes(count: float) -> str:
    """Format a number of bytes with a unit, such as ``3.2 MiB``."""
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(max(count, 1)) // 10), len(units))
    return f"{count / 1024**power:.1f} {units[power - 1]}" if power else f"{count:.0f} bytes"


def is_file(path: Place | str) -> bool:
    """Return whether there is a file, on this machine or at an address."""
    return to_place(path).is_file()


def make_folder(path: Path | str) -> Path:
    """Make a folder and check that files can be written there. Commands call it before they begin to work.

    Raises:
        HaloposeError: The folder cannot be written to, or it is an address.
    """
    if isinstance(to_place(path), Address):
        raise HaloposeError(f"cannot write to {to_place(path)}: give a folder on this machine and copy it afterwards")
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise HaloposeError(f"cannot write to {path}: {error.strerror or error}") from None
    return path


def make_room(path: Path | str) -> Path:
    """Check that a file can be written later, and make its folder."""
    path = Path(path)
    if path.is_dir():
        raise HaloposeError(f"cannot write {path}: it is a folder, name a file")
    make_folder(path.parent)
    return path


def check_target(path: Path | str) -> Place:
    """Check an output that may be at an address, before the work.

    Raises:
        HaloposeError: The output is on this machine and cannot be written, or it would not outlive the process.
    """
    place = to_place(path)
    if not isinstance(place, Address):
        return make_room(place)
    if place.parts[0].lower() == "memory://":
        raise HaloposeError(f"{place} is lost when the command ends: give a file on this machine or in a bucket")
    return place


def write_bytes(path: Place | str, content: bytes | memoryview) -> None:
    """Write a file completely or not at all."""
    path = to_place(path)
    try:
        if isinstance(path, Address):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None


def remove_partial(paths: Iterable[Path]) -> None:
    """Remove temporary files that killed processes left when they wrote these files.

    Call it only while no other process writes them.
    """
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    for folder, wanted in names.items():
        for path in folder.glob(".*.????????"):
            if path.name[1:-9] in wanted and path.is_file() and not path.is_symlink():
                path.unlink()


def write_text(path: Place | str, text: str) -> None:
    """Write a text file in UTF-8 completely or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Place | str, content: Any, indent: int | None = None) -> None:
    """Write a json file completely or not at all. NaN and infinity become null."""
    write_text(path, json.dumps(_without_nan(content), indent=indent, allow_nan=False) + "\n")


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    if isinstance(content, np.ndarray):
        return _without_nan(content.tolist())
    if isinstance(content, np.generic):
        return _without_nan(content.item())
    if isinstance(content, float) and not np.isfinite(content):
        return None
    return content
