"""Reader of OpenCV FileStorage files (yaml or xml) without OpenCV, which crashes on damaged files.

Matrices become mappings of rows, cols and data, as in ROS camera files, or of sizes and data.
"""

from __future__ import annotations

import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.bounded_text import BoundedLoader, parse_yaml, read_text
from halopose.errors import HaloposeError
from halopose.types import Array


class _Loader(BoundedLoader):
    """YAML loader that reads OpenCV's matrices as plain mappings."""


for _tag in ("opencv-matrix", "opencv-nd-matrix"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda loader, node: loader.construct_mapping(node, True))


def read_opencv(path: Path) -> dict[str, Any]:
    """Read the entries of a file by name.

    Raises:
        HaloposeError: The file is neither yaml nor xml, or it has no named entries.
    """
    text = read_text(path)
    content = _xml(path, text) if path.name.lower().endswith(".xml") else _yaml(path, text)
    if not isinstance(content, dict):
        raise HaloposeError(f"{path} is not a camera file: it needs camera_matrix, image_width and image_height")
    return content


def _yaml(path: Path, text: str) -> Any:
    lines = [line for line in text.splitlines() if not line.startswith("%YAML")]  # OpenCV's directive is not valid yaml
    return parse_yaml("\n".join(lines), path, _Loader)


def _xml(path: Path, text: str) -> dict[str, Any]:
    try:
        return {entry.tag: _entry(entry) for entry in ElementTree.fromstring(text)}
    except (ElementTree.ParseError, IndexError, ValueError) as error:
        raise HaloposeError(f"{path} is not valid xml ({error}): export the camera file again") from None


def _entry(entry: ElementTree.Element) -> Any:
    """Convert an entry: a matrix to a mapping, several values to a list, and a single value to a string."""
    if entry.find("data") is not None:
        found = {part.tag: [float(value) for value in (part.text or "").split()] for part in entry if part.tag != "dt"}
        return {name: values[0] if name in ("rows", "cols") else values for name, values in found.items()}
    values = [part.text or "" for part in entry] or shlex.split(entry.text or "")
    return values[0] if len(values) == 1 else values


def matrix_of(entry: Any) -> Array:
    """Return the matrix of an entry.

    Raises:
        IndexError, KeyError, TypeError, ValueError: The entry is no matrix.
    """
    shape = entry["sizes"] if "sizes" in entry else (entry["rows"], entry["cols"])
    return np.array(entry["data"], dtype=np.float64).reshape([int(side) for side in shape])
