"""Sources resolve to files with distinct names, and missing ones are reported at once."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from PIL import Image

from halopose.data.films import FilmWriter, film_facts
from halopose.data.images import read_image
from halopose.data.sources import find_sources
from halopose.errors import HaloposeError
from halopose.types import Array

IMAGE = np.full((24, 32, 3), 90, np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "sub/b.png", "sub/deep/a.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / name), IMAGE) if name.endswith("png") else (tmp_path / name).write_text("x")
    return tmp_path


def test_folders_are_searched_to_their_depth(folder: Path) -> None:
    found = find_sources([str(folder)])
    assert [source.name for source in found] == ["a", "sub/b", "sub/deep/a"]
    assert [source.file_name for source in found] == ["a.png", "sub/b.png", "sub/deep/a.png"]
    assert all(next(source.images()).pixels.shape == IMAGE.shape for source in found)


def test_file_names_keep_their_dots(tmp_path: Path) -> None:
    """Of x/a.b.png and y/a.b.png, whose names have folders, the file names were x/a.png and y/a.png."""
    for name in ("x/a.b.png", "y/a.b.png"):
        (tmp_path / name).parent.mkdir()
        cv2.imwrite(str(tmp_path / name), IMAGE)
    assert [source.file_name for source in find_sources([str(tmp_path)])] == ["x/a.b.png", "y/a.b.png"]
    cv2.imwrite(str(tmp_path / "x/a.b.jpg"), IMAGE)
    names = [source.file_name for source in find_sources([str(tmp_path)])]
    assert names == ["x/a.b.jpg", "x/a.b.png", "y/a.b.png"]


def test_several_sources_and_none_twice(folder: Path) -> None:
    one, two = str(folder / "a.png"), str(folder / "sub" / "b.png")
    assert [source.name for source in find_sources([two, one, one, str(folder / "sub" / "b*")])] == ["b", "a"]


def test_one_file_by_two_paths_is_one_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = ["sub/../a.png", "a.png", str(folder / "a.png"), "sub/b.png", "sub"]
    found = [source.path for source in find_sources(given)]
    assert found == [Path("sub/../a.png"), Path("sub/b.png"), Path("sub/deep/a.png")]


def test_an_empty_path_is_not_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(find_sources(["."])) == 3
    with pytest.raises(HaloposeError, match="empty path"):
        find_sources([""])


def test_cameras_and_addresses_are_streams() -> None:
    found = find_sources(["0", "rtsp://camera/1"])
    assert [source.stream for source in found] == [0, "rtsp://camera/1"]


@pytest.mark.parametrize("text", ["no.jpg", "no*.jpg", "\N{SUPERSCRIPT TWO}"])
def test_missing_sources_are_refused_before_reading(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HaloposeError, match=r"no (file|images)"):
        find_sources([text])
    (tmp_path / "empty").mkdir()
    with pytest.raises(HaloposeError, match="no images in empty"):
        find_sources(["empty"])


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    content = cv2.imencode(".png", IMAGE)[1].tobytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    [source] = find_sources(["-"])
    assert np.array_equal(next(source.images()).pixels, IMAGE)
    with pytest.raises(HaloposeError, match="holds no image"):
        next(source.images())  # nothing is left


def piped(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Array:
    """The image that standard input holds."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    [source] = find_sources(["-"])
    return next(source.images()).pixels


def test_standard_input_is_read_as_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned as EXIF says, and with sizes that no memory holds refused."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(IMAGE).save(tmp_path / "turned.jpg", exif=turned)
    found = piped((tmp_path / "turned.jpg").read_bytes(), monkeypatch)
    assert found.shape == (32, 24, 3)
    assert np.array_equal(found, read_image(tmp_path / "turned.jpg"))
    header = b"IHDR" + struct.pack(">IIBBBBB", 2**20, 2**20, 8, 2, 0, 0, 0)
    huge = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    with pytest.raises(HaloposeError, match="holds no image"):
        piped(huge, monkeypatch)


def test_a_folder_where_a_half_written_film_belongs_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / ".film.partial.mp4").mkdir()
    with pytest.raises(HaloposeError, match="cannot write the film"), FilmWriter(tmp_path / "film.mp4", 5) as film:
        film.write(np.zeros((16, 16, 3), np.uint8))


def test_films_out_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    with FilmWriter(path, 12.5) as film:
        for _ in range(5):
            film.write(IMAGE)
    assert film_facts(path) == (12.5, 5)
    [source] = find_sources([str(path)])
    assert source.is_film
    assert [image.name for image in source.images()] == [f"film_{n:06d}" for n in range(5)]
    with pytest.raises(HaloposeError, match="changes its size"):
        write_two_sizes(tmp_path / "other.mp4")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["film.mp4"]
    assert film_facts(tmp_path / "nothing.mp4") == (25.0, 0)


def write_two_sizes(path: Path) -> None:
    with FilmWriter(path, 5) as film:
        film.write(IMAGE)
        film.write(IMAGE[:12])
