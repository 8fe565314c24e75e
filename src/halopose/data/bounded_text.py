"""Readers of yaml and toml that refuse files which would take much time or memory.

A yaml file of a few hundred bytes can describe gigabytes with aliases, and a toml key of 100 kB takes a parser half a
minute. Every yaml or toml file that the package reads goes through these functions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from halopose.data.files import check_regular
from halopose.data.storage.address import Address, Place
from halopose.errors import HaloposeError

MAX_BYTES = 2**20  # of a file
MAX_VALUES = 20_000  # of a yaml file, with the content of aliases counted where they are used
MAX_DEPTH = 50  # of nested yaml
MAX_SCALAR = 2**16  # characters of one yaml value
MAX_KEY_PARTS = 32  # of a dotted toml key

_KEY_PART = r"""(?:(?<![\w-])[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?:{_KEY_PART}[ \t]*\.[ \t]*){{{MAX_KEY_PARTS},}}")


class _TooLarge(Exception):
    """The file describes more than the limits allow."""


class BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """A safe loader that stops at `MAX_VALUES` values. Subclasses may add constructors."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose the next node and count it."""
        self._values += 1
        self._depth += 1
        if self._values > MAX_VALUES or self._depth > MAX_DEPTH:
            raise _TooLarge
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_text(path: Place) -> str:
    """Read a small text file in UTF-8, with or without a byte order mark.

    Raises:
        HaloposeError: The file cannot be read, has more than `MAX_BYTES` bytes or is not text.
    """
    try:
        if isinstance(path, Address):
            content = path.part(0, MAX_BYTES + 1)
        else:
            check_regular(path)
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise HaloposeError(f"{path} has more than {MAX_BYTES} bytes: give a smaller file")
        return content.decode("utf-8-sig")
    except HaloposeError:
        raise
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HaloposeError(f"{path} is not text in UTF-8: write it again") from None


def parse_yaml(text: str, path: Place | str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """Parse yaml.

    Args:
        text: Content of the file.
        path: Name of the file in messages.
        loader: Loader with further constructors.

    Raises:
        HaloposeError: The text is not yaml or describes more than the limits allow.
    """
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _count_values(node, {})
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except _TooLarge:
        raise HaloposeError(
            f"{path} describes more than {MAX_VALUES} values or nests too deeply: give a simpler file"
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise HaloposeError(f"{path} is not yaml{where}: correct it or give another file") from None


def _count_values(node: Any, counts: dict[int, int]) -> int:
    """Count the values below a node; the content of an alias counts each time it is used."""
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = MAX_VALUES + 1  # a node that contains itself never ends
    total = 1
    if isinstance(node, yaml.ScalarNode):
        total += len(node.value) // MAX_SCALAR * MAX_VALUES
    else:
        for entry in node.value:
            for part in entry if isinstance(entry, tuple) else (entry,):
                total += _count_values(part, counts)
    if total > MAX_VALUES:
        raise _TooLarge
    counts[id(node)] = total
    return total


def read_yaml(path: Place) -> dict[str, Any]:
    """Read a yaml file that holds a mapping."""
    content = parse_yaml(read_text(path), path)
    if not isinstance(content, dict):
        raise HaloposeError(f"{path} is not a mapping of names to values: give a yaml file such as a YOLO data yaml")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Read a toml file."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    text = read_text(path)
    if _LONG_KEY.search(text):
        raise HaloposeError(f"{path} has a key of {MAX_KEY_PARTS} parts or more: use shorter keys")
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise HaloposeError(f"{path} is not toml ({error}): correct it") from None
    return content
