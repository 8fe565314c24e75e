"""The file predictions.json, written while results arrive. A stopped run loses nothing and the next run resumes.

Memory does not grow with the number of results.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from halopose.data.storage.own_files import open_without_links
from halopose.errors import HaloposeError

_NAME = "predictions.json"
_PARTIAL = ".predictions.jsonl"

RunState = Literal["none", "resumable", "other"]


class PredictionLog:
    """Results of a run in a folder.

    Results of a source (an image or a whole film) are kept once `done` was called for it.

    Args:
        folder: Output folder.
        settings: Everything that the results depend on besides the sources. A run with other settings starts from the
            beginning.
        states: State of each source by its name, of `source_state`. A finished source is kept only if its state is
            unchanged; without states every finished source is kept.

    Attributes:
        path: The results file.
        finished: Sources that are complete.
    """

    def __init__(self, folder: Path, settings: Any, states: Mapping[str, Any] | None = None) -> None:
        self.path = folder / _NAME
        self._partial = folder / _PARTIAL
        self._key, self._states = _key(settings), states
        self.finished = self._recover()
        if not self.finished:
            self._write({"key": self._key}, mode="wb")

    def _lines(self) -> Iterator[dict[str, Any]]:
        return _lines(self._partial)

    def _recover(self) -> set[str]:
        """Return the sources that an earlier run with these settings finished, and drop results of others."""
        if next(self._lines(), {}).get("key") != self._key:
            return set()
        found = {line["done"]: line.get("state") for line in self._lines() if "done" in line}
        if self._states is not None:
            found = {
                name: state for name, state in found.items() if state is not None and self._states.get(name) == state
            }
        done = set(found)
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
        self._write({"done": source, "state": None if self._states is None else self._states.get(source)})
        self.finished.add(source)

    def entries(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the entries of each image of the complete sources."""
        for line in self._lines():
            if line.get("source") in self.finished:
                yield line["entries"]

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
                for entry in chain.from_iterable(self.entries()):
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


def run_state(folder: Path, settings: Any, states: Mapping[str, Any]) -> RunState:
    """Return what a folder holds of earlier runs.

    Args:
        folder: Output folder of a prediction.
        settings: As for `PredictionLog`.
        states: As for `PredictionLog`.

    Returns:
        "none" without an earlier run; "resumable" if a run with these settings stopped there, whose sources are all
        among the given ones; "other" if there is a complete run, or a stopped run of another kind.
    """
    partial = folder / _PARTIAL
    if not partial.is_file():
        return "other" if (folder / _NAME).exists() else "none"
    if next(_lines(partial), {}).get("key") != _key(settings):
        return "other"
    for line in _lines(partial):
        name = line.get("done")
        if name is not None and (name not in states or _place(line.get("state")) != _place(states[name])):
            return "other"
    return "resumable"


def source_state(path: Path | None) -> list[Any] | None:
    """Return the absolute path, size and time of modification of a file; None for a stream or standard input."""
    if path is None:
        return None
    try:
        facts = path.stat()
    except OSError:
        return [os.path.realpath(path), None, None]
    return [os.path.realpath(path), facts.st_size, facts.st_mtime_ns]


def _place(state: Any) -> Any:
    """Return the path of a source state."""
    return state[0] if isinstance(state, list) and state else None


def _key(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log up to the first one that is damaged."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
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
