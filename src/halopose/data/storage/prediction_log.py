"""The file predictions.json, written while results arrive. A stopped run loses nothing and the next run resumes.

Memory does not grow with the number of results.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halopose.data.storage.own_files import open_without_links
from halopose.errors import HaloposeError

_NAME = "predictions.json"
_PARTIAL = ".predictions.jsonl"


class PredictionLog:
    """Results of a run in a folder.

    Results of a source (an image or a whole film) are kept once `done` was called for it.

    Args:
        folder: Output folder.
        settings: Everything that the results depend on. A run with other settings starts from the beginning.

    Attributes:
        path: The results file.
        finished: Sources that are complete.
    """

    def __init__(self, folder: Path, settings: Any) -> None:
        self.path = folder / _NAME
        self._partial = folder / _PARTIAL
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
        self.finished = self._recover()
        if not self.finished:
            self._write({"key": self._key}, mode="wb")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Iterate over the lines of the log up to the first one that is damaged."""
        with open(self._partial, "rb") as file:
            for line in file:
                checksum, _, body = line.rstrip(b"\n").partition(b" ")
                if checksum != _checksum(body):
                    return
                try:
                    content = json.loads(body)
                except (ValueError, RecursionError):
                    return
                if not _is_line(content):
                    return
                yield content

    def _recover(self) -> set[str]:
        """Return the sources that an earlier run with these settings finished, and drop results of others."""
        if not self._partial.is_file() or next(self._lines(), {}).get("key") != self._key:
            return set()
        done = {line["done"] for line in self._lines() if "done" in line}
        kept = self._partial.with_suffix(".kept")
        try:
            with open_without_links(kept, "wb") as file:
                for line in self._lines():
                    if "key" in line or line.get("done", line.get("source")) in done:
                        file.write(_with_checksum(line))
            os.replace(kept, self._partial)
        except OSError as error:
            raise HaloposeError(f"cannot write {kept}: {error.strerror or error}") from None
        return done

    def _write(self, content: dict[str, Any], mode: str = "ab") -> None:
        try:
            with open_without_links(self._partial, mode) as file:
                file.write(_with_checksum(content))
        except OSError as error:
            raise HaloposeError(
                f"cannot write {self._partial}: {error.strerror or error}; free some space and run it again to resume"
            ) from None

    def add(self, source: str, entries: list[dict[str, Any]]) -> None:
        """Add the entries of one image of a source."""
        self._write({"source": source, "entries": entries})

    def done(self, source: str) -> None:
        """Mark a source as complete."""
        self._write({"done": source})
        self.finished.add(source)

    def close(self, complete: bool) -> int:
        """Write predictions.json with the results of the complete sources.

        Args:
            complete: Whether the run is finished, so that there is nothing to resume.

        Returns:
            The number of complete sources.
        """
        temporary = self.path.with_suffix(".writing")
        try:
            with open_without_links(temporary, "wb") as file:
                file.write(b"[")
                first = True
                for line in self._lines():
                    if line.get("source") in self.finished:
                        for entry in line["entries"]:
                            file.write((("\n" if first else ",\n") + json.dumps(entry)).encode())
                            first = False
                file.write(b"\n]\n")
            os.replace(temporary, self.path)
            if complete:
                self._partial.unlink()
        except OSError as error:
            if temporary.is_file():
                temporary.unlink()
            raise HaloposeError(f"cannot write {self.path}: {error.strerror or error}") from None
        return len(self.finished)


def _is_line(content: Any) -> bool:
    """Return whether a line has the form in which this class writes lines."""
    if not isinstance(content, dict):
        return False
    names = ("key", "done", "source")
    entries = content.get("entries", [])
    return (
        sum(isinstance(content.get(name), str) for name in names) == 1
        and ("source" in content) == ("entries" in content)
        and isinstance(entries, list)
        and all(isinstance(entry, dict) for entry in entries)
    )


def _checksum(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)


def _with_checksum(content: dict[str, Any]) -> bytes:
    """Return a line of the log with its checksum."""
    body = json.dumps(content).encode()
    return _checksum(body) + b" " + body + b"\n"
