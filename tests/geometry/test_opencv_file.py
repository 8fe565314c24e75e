"""Files of OpenCV's FileStorage, as OpenCV writes them, and damaged ones."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.opencv_file import matrix_of, read_opencv


@pytest.mark.parametrize("name", ["a.yml", "a.xml"])
def test_matrices_and_names_are_read_as_opencv_wrote_them(tmp_path: Path, name: str) -> None:
    matrix = np.random.default_rng(0).normal(size=(3, 4))
    store = cv2.FileStorage(str(tmp_path / name), cv2.FILE_STORAGE_WRITE)
    store.startWriteStruct("names", cv2.FileNode_SEQ)
    for each in ("left one", "right"):
        store.write("", each)
    store.endWriteStruct()
    store.write("K", matrix)
    store.release()
    content = read_opencv(tmp_path / name)
    assert content["names"] == ["left one", "right"]
    assert np.array_equal(matrix_of(content["K"]), matrix)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yml", "a: [1", "is not yaml"),
        ("a.xml", "<opencv_storage><K>", "xml"),
        ("a.yml", "just words", "camera file"),
    ],
)
def test_damage_is_a_one_line_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(HaloposeError, match=message):
        read_opencv(tmp_path / name)
