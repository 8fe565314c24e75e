"""C3D files of long scenes, and of persons who come late, as ezc3d reads them."""

from pathlib import Path

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.multiview.scene import Person, ReconstructedScene, SceneObservations
from halopose.multiview.scene_files import to_c3d
from halopose.multiview.triangulation import Points, ViewObservations

LAYOUT = Keypoints.of(3)


def long_scene(first: int, count: int, layout: Keypoints = LAYOUT) -> ReconstructedScene:
    """One person from a frame on, who walks 1 mm per frame."""
    points = len(layout)
    place = np.zeros((count, points, 3))
    place[:, :, 0] = np.arange(count)[:, None] / 1000
    spread = np.broadcast_to(1e-6 * np.eye(3), (count, points, 3, 3))
    nothing = np.zeros((0, 2))
    seen = ViewObservations(np.zeros((0, 2, 2)), np.zeros((0, 2, 2, 2)), nothing.astype(bool))
    gathered = SceneObservations(seen, np.zeros(0), np.zeros(0), np.zeros(0), nothing)
    triangulated = Points(
        np.zeros((0, 3)), np.zeros((0, 3, 3)), np.zeros(0), nothing.astype(bool), nothing.astype(bool)
    )
    person = Person(1, first + np.arange(count), place, spread, np.full((count, points), 2), np.ones((count, points)))
    return ReconstructedScene([person], [], layout, 50.0, np.zeros(0), gathered, triangulated)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 5), (499, 20), (0, 65535), (0, 65538), (0, 70001), (65530, 10), (70000, 10)]
)
def test_ezc3d_reads_every_frame_and_where_they_begin(first: int, count: int, tmp_path: Path) -> None:
    ezc3d = pytest.importorskip("ezc3d")
    scene = long_scene(first, count)
    (tmp_path / "one.c3d").write_bytes(to_c3d(scene.persons[0], scene))
    content = ezc3d.c3d(str(tmp_path / "one.c3d"))
    points = content["data"]["points"]
    assert points.shape == (4, 3, count)
    np.testing.assert_allclose(points[0, 0], np.arange(count), atol=1e-2)
    if first < 65535:  # beyond, the header has no room for it
        assert content["header"]["points"]["first_frame"] == first
    words = [content["parameters"]["TRIAL"][f"ACTUAL_{end}_FIELD"]["value"] for end in ("START", "END")]
    low, high = np.array(words).T.astype(int) % 65536
    assert (low + 65536 * high).tolist() == [first + 1, first + count]
    assert content["parameters"]["POINT"]["LONG_FRAMES"]["value"][0] == count


@pytest.mark.parametrize("count", [255, 256, 600])
def test_ezc3d_reads_the_names_of_more_keypoints_than_one_parameter_holds(count: int, tmp_path: Path) -> None:
    ezc3d = pytest.importorskip("ezc3d")
    layout = Keypoints.of(count)
    scene = long_scene(0, 4, layout)
    (tmp_path / "one.c3d").write_bytes(to_c3d(scene.persons[0], scene))
    content = ezc3d.c3d(str(tmp_path / "one.c3d"))
    assert content["data"]["points"].shape == (4, count, 4)
    parameters = content["parameters"]["POINT"]
    parts = [f"LABELS{number if number > 1 else ''}" for number in range(1, -(-count // 255) + 1)]
    assert [name for part in parts for name in parameters[part]["value"]] == list(layout.names)


def test_more_keypoints_than_c3d_can_name_are_refused() -> None:
    scene = long_scene(0, 2, Keypoints.of(9000))
    with pytest.raises(HaloposeError, match="9000 keypoints"):
        to_c3d(scene.persons[0], scene)
