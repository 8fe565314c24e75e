"""The exception for errors that a user can correct.

Its message is one line that says what is wrong and what to do. The command line prints it and exits with code 2.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Escape control characters, because a file name could contain commands to the terminal.

    Tabs and line ends are not escaped.

    Example:
        >>> print(printable("a\x1b[2J.jpg"))
        a\x1b[2J.jpg
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class HaloposeError(ValueError):
    """An input is not usable. The message says what to do; control characters in it are escaped.

    Example:
        >>> from halopose import Artifact
        >>> Artifact.load("nowhere.safetensors")
        Traceback (most recent call last):
        halopose.errors.HaloposeError: no artifact at nowhere.safetensors: make one with `halopose fit`
    """

    def __str__(self) -> str:
        return printable(super().__str__())
