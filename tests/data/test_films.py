"""Detections grouped by film, and films written completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose.data.films import FilmWriter, by_film
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.types import Array


def detections(*names: str) -> tuple[list[dict[str, Any]], PoseDistributions]:
    """One detection for each name; its score is its number."""
    count = len(names)
    spread = np.tile(np.eye(2), (count, 3, 1, 1))
    scores = np.arange(count, dtype=float)
    poses = PoseDistributions(np.ones((count, 4)), scores, np.ones((count, 3, 2)), spread, spread)
    return [{"file_name": name} for name in names], poses


def test_frames_come_in_order_with_the_empty_ones_between() -> None:
    films = by_film("p.json", *detections("b_000002", "a_b_000000", "b_000000", "b_000002"))
    assert {name: [frame.scores.tolist() for frame in frames] for name, frames in films.items()} == {
        "a_b": [[1.0]],
        "b": [[2.0], [], [0.0, 3.0]],
    }
    assert list(films) == ["b", "a_b"]  # as they appear


@pytest.mark.parametrize(
    "names", [(), ("photo.jpg",), ("clip_000001", "x"), ("clip_999999999",), (f"clip_{'9' * 5000}",)]
)
def test_files_that_are_no_film_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(HaloposeError, match=r"p\.json") as error:
        by_film("p.json", *detections(*names))
    assert "\n" not in str(error.value)


def write_all(film: FilmWriter, frames: Array) -> None:
    for frame in frames:
        film.write(frame)


def test_a_film_that_lacks_frames_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: OpenCV writes on without an error."""
    frames = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), dtype=np.uint8)
    write = FilmWriter._is_complete

    def cut(film: FilmWriter) -> bool:
        content = film._partial.read_bytes()
        film._partial.write_bytes(content[: len(content) // 2])
        return write(film)

    monkeypatch.setattr(FilmWriter, "_is_complete", cut)
    with pytest.raises(HaloposeError, match="disk may be full"), FilmWriter(tmp_path / "a.mp4", 5) as film:
        write_all(film, frames)
    assert not list(tmp_path.iterdir())


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".a.partial.mp4").symlink_to(tmp_path / "precious")
    with FilmWriter(tmp_path / "a.mp4", 5) as film:
        film.write(np.zeros((48, 64, 3), np.uint8))
    assert (tmp_path / "precious").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "precious"]
