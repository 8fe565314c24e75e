"""predictions.json, written as results come: a stopped run loses nothing, and the next one goes on.

In: entries of one source after the other. Out: a COCO results file; memory does not grow with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halopose.errors import HaloposeError

_NAME = "predictions.json"
_PARTIAL = ".predictions.jsonl"


class PredictionLog:
    """Results of a run in a folder. ``settings``: all that results depend on; other settings start anew.

    A source (an image, or a whole film) is kept once ``done`` was called for it.
    """

    def __init__(self, folder: Path, settings: Any) -> None:
        self.path = folder / _NAME
        self._partial = folder / _PARTIAL
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
        self.finished = self._recover()
        if not self.finished:
            self._write({"key": self._key}, mode="wb")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """What a run before wrote, as far as its lines are as they were written."""
        with open(self._partial, "rb") as file:
            for line in file:
                seal, _, body = line.rstrip(b"\n").partition(b" ")
                if seal != _seal(body):
                    return
                yield json.loads(body)

    def _recover(self) -> set[str]:
        """Sources that an earlier run with these settings finished; what it had of others is dropped."""
        if not self._partial.is_file() or next(self._lines(), {}).get("key") != self._key:
            return set()
        done = {line["done"] for line in self._lines() if "done" in line}
        kept = self._partial.with_suffix(".kept")
        with open(kept, "wb") as file:
            for line in self._lines():
                if "key" in line or line.get("done", line.get("source")) in done:
                    file.write(_sealed(line))
        os.replace(kept, self._partial)
        return done

    def _write(self, content: dict[str, Any], mode: str = "ab") -> None:
        try:
            with open(self._partial, mode) as file:
                file.write(_sealed(content))
        except OSError as error:
            raise HaloposeError(
                f"cannot write {self._partial}: {error.strerror or error}; free some space and run it again, it goes on"
            ) from None

    def add(self, source: str, entries: list[dict[str, Any]]) -> None:
        """Entries of one image of a source."""
        self._write({"source": source, "entries": entries})

    def done(self, source: str) -> None:
        """The source is complete."""
        self._write({"done": source})
        self.finished.add(source)

    def close(self, complete: bool) -> int:
        """Write predictions.json of the sources that are done; their number.

        complete: forget how far it came, as there is nothing to go on with.
        """
        temporary = self.path.with_suffix(".writing")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write("[")
                first = True
                for line in self._lines():
                    if line.get("source") in self.finished:
                        for entry in line["entries"]:
                            file.write(("\n" if first else ",\n") + json.dumps(entry))
                            first = False
                file.write("\n]\n")
            os.replace(temporary, self.path)
            if complete:
                self._partial.unlink()
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise HaloposeError(f"cannot write {self.path}: {error.strerror or error}") from None
        return len(self.finished)


def _seal(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)


def _sealed(content: dict[str, Any]) -> bytes:
    """A line that shows whether it is as it was written."""
    body = json.dumps(content).encode()
    return _seal(body) + b" " + body + b"\n"
