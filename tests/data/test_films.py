"""Detections of films told apart by their names; writing films is in test_sources.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halopose.data.films import by_film
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions


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
def test_what_is_no_film_is_refused_at_once(names: tuple[str, ...]) -> None:
    with pytest.raises(HaloposeError, match=r"p\.json") as error:
        by_film("p.json", *detections(*names))
    assert "\n" not in str(error.value)
