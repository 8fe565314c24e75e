"""Files of OpenCV's FileStorage, read without OpenCV, which crashes on damaged ones.

In: yaml or xml. Out: what they hold by name; matrices are mappings of rows, cols and data, as in ROS's camera
files, or of sizes and data.
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
    """Also reads OpenCV's matrices, as plain mappings."""


for _tag in ("opencv-matrix", "opencv-nd-matrix"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda loader, node: loader.construct_mapping(node, True))


def read_opencv(path: Path) -> dict[str, Any]:
    """The entries of a file by name; refused if it is neither yaml nor xml."""
    text = read_text(path)
    content = _xml(path, text) if path.name.lower().endswith(".xml") else _yaml(path, text)
    if not isinstance(content, dict):
        raise HaloposeError(f"{path} is no camera file: it needs camera_matrix, image_width and image_height")
    return content


def _yaml(path: Path, text: str) -> Any:
    lines = [line for line in text.splitlines() if not line.startswith("%YAML")]  # OpenCV's is no yaml directive
    return parse_yaml("\n".join(lines), path, _Loader)


def _xml(path: Path, text: str) -> dict[str, Any]:
    try:
        return {entry.tag: _entry(entry) for entry in ElementTree.fromstring(text)}
    except (ElementTree.ParseError, IndexError, ValueError) as error:
        raise HaloposeError(f"{path} is not xml ({error}): write the camera file again") from None


def _entry(entry: ElementTree.Element) -> Any:
    """A matrix as a mapping, several values as a list, one as it is."""
    if entry.find("data") is not None:
        found = {part.tag: [float(value) for value in (part.text or "").split()] for part in entry if part.tag != "dt"}
        return {name: values[0] if name in ("rows", "cols") else values for name, values in found.items()}
    values = [part.text or "" for part in entry] or shlex.split(entry.text or "")
    return values[0] if len(values) == 1 else values


def matrix_of(entry: Any) -> Array:
    """A matrix of its entry; IndexError, KeyError, TypeError or ValueError if it is none."""
    shape = entry["sizes"] if "sizes" in entry else (entry["rows"], entry["cols"])
    return np.array(entry["data"], dtype=np.float64).reshape([int(side) for side in shape])
