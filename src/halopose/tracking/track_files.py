"""Write tracks of a film window by window, as JSON and CSV."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from halopose.data.files import _without_nan
from halopose.errors import HaloposeError
from halopose.tracking.tracks import CSV_HEADER, PoseTracks


class TrackWriter:
    """Writer of ``tracks.json`` and ``tracks.csv``; both appear complete or not at all.

    Args:
        folder: Folder to write into.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = folder / "tracks.json", folder / "tracks.csv"
        self._files: list[IO[str]] = []
        self._first = True

    def __enter__(self) -> TrackWriter:
        for path in self.paths:
            try:
                handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
                os.close(handle)
                self._files.append(Path(name).open("w", encoding="utf-8", newline=""))
            except OSError as error:
                self._discard()
                raise _unwritable(path, error) from None
        self._write("[", CSV_HEADER)
        return self

    def add(self, tracks: PoseTracks) -> None:
        """Append the poses of the next window."""
        entries = json.dumps(_without_nan(tracks.to_json()), allow_nan=False)[1:-1]
        self._write(entries if self._first or not entries else f", {entries}", tracks.to_csv(header=False))
        self._first = self._first and not entries

    def _write(self, *texts: str) -> None:
        for path, file, text in zip(self.paths, self._files, texts, strict=True):
            try:
                file.write(text)
            except OSError as error:
                raise _unwritable(path, error) from None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._write("]\n", "")
            for file in self._files:
                file.close()
                os.chmod(file.name, 0o644)
            for path, file in zip(self.paths, self._files, strict=True):
                os.replace(file.name, path)
        except OSError as error:
            self._discard()
            raise _unwritable(self.paths[0].parent, error) from None
        except HaloposeError:
            self._discard()
            raise

    def _discard(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # the buffer cannot be written to a full disk
                file.close()
            Path(file.name).unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> HaloposeError:
    return HaloposeError(f"cannot write {path}: {error.strerror or error}")
