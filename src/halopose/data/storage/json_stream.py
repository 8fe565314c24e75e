"""Streaming reader of json files that are too large for memory; values are those of the standard library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

CHUNK = 2**20  # characters
_CUT = 2  # characters of an incomplete number at the end of a chunk that the decoder may leave, such as e-
LIST = type("_List", (), {"__repr__": lambda _: "LIST"})()  # marks the beginning of a list
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Entries:
    """Iterator over the entries of a json text as pairs (key, value).

    A list in the outermost object gives ``LIST`` and then each of its entries, all with the key of the list. Any other
    value gives one pair. If the outermost value is a list, the key is "".

    Args:
        stream: Text.
        chunk: Number of characters to read at a time.

    Example:
        >>> import io
        >>> list(Entries(io.StringIO('{"info": {"year": 2017}, "images": [{"id": 1}, {"id": 2}]}')))
        [('info', {'year': 2017}), ('images', LIST), ('images', {'id': 1}), ('images', {'id': 2})]
    """

    def __init__(self, stream: IO[str], chunk: int = CHUNK) -> None:
        self._stream, self._chunk = stream, chunk
        self._text, self._place, self._ended = "", 0, False
        self._lines, self._column = 1, 1  # position of the buffer in the whole text

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        first = self._peek()
        if first == "[":
            yield "", LIST
            yield from (("", value) for value in self._list())
        elif first == "{":
            yield from self._object()
        else:
            yield "", self._value()
        if self._peek():
            self._fail()

    def empty(self) -> bool:
        """Return whether the text is empty except for white space."""
        return not self._peek()

    def _object(self) -> Iterator[tuple[str, Any]]:
        self._take("{")
        if self._peek() == "}":
            self._take("}")
            return
        while True:
            key = self._value()
            if not isinstance(key, str):
                self._fail()
            self._take(":")
            if self._peek() == "[":
                yield key, LIST
                for value in self._list():
                    yield key, value
            else:
                yield key, self._value()
            if self._take(",}") == "}":
                return

    def _list(self) -> Iterator[Any]:
        self._take("[")
        if self._peek() == "]":
            self._take("]")
            return
        while True:
            yield self._value()
            if self._take(",]") == "]":
                return

    def _value(self) -> Any:
        """Return the next value; read until it is complete."""
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._place)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            if len(self._text) - end <= _CUT and self._more():  # a number may continue in the next chunk
                continue
            self._place = end
            return value

    def _peek(self) -> str:
        """Return the next character after white space without consuming it; empty at the end."""
        while True:
            found = _SPACE.match(self._text, self._place)
            self._place = found.end() if found else self._place
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._more():
                return ""

    def _take(self, expected: str) -> str:
        found = self._peek()
        if not found or found not in expected:
            self._fail()
        self._place += 1
        return found

    def _more(self) -> bool:
        """Read more text; False at the end.

        The buffer doubles, so that the number of attempts to decode a long value stays small.
        """
        left = len(self._text) - self._place
        read = "" if self._ended else self._stream.read(max(self._chunk, left))
        if not read:
            self._ended = True
            return False
        done = self._text[: self._place]
        lines = done.count("\n")
        self._column = len(done) - done.rfind("\n") if lines else self._column + len(done)
        self._lines += lines
        self._text, self._place = self._text[self._place :] + read, 0
        return True

    def _fail(self) -> None:
        raise json.JSONDecodeError("unexpected", self._text, self._place)

    def where(self, error: json.JSONDecodeError) -> tuple[int, int]:
        """Return line and column of an error in the whole text."""
        column = error.colno if error.lineno > 1 else self._column + error.colno - 1
        return self._lines + error.lineno - 1, column
