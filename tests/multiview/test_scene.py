"""Scenes with known truth: identities, calibrated covariances, time offsets, and files for other tools."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.multiview.leave_one_out import leave_one_out, worse_camera
from halopose.multiview.person_matching import epipolar_distance, group_people
from halopose.multiview.scene import ReconstructedScene, build_scene, smooth_scene
from halopose.multiview.scene_files import to_c3d, to_csv, to_trc
from halopose.multiview.synchronise import estimate_offsets
from halopose.reports.scene_report import render_reconstruction
from tests.helpers.rigs import film, rig, walk

LAYOUT = Keypoints.of(17)
VIEWS = rig()
TRUTH = [walk(40), walk(40, np.array([0.9, -0.8, 0.05]), 1.1)]


@pytest.fixture(scope="module")
def scene() -> ReconstructedScene:
    return build_scene(VIEWS, [film(view, TRUTH, n) for n, view in enumerate(VIEWS)], LAYOUT, rate=30.0)


def test_epipolar_distances_are_chi_squares() -> None:
    one, other = (film(VIEWS[n], [walk(150)], 10 + n) for n in (0, 1))
    found = [epipolar_distance(VIEWS[0], VIEWS[1], a, b)[0, 0] for a, b in zip(one, other, strict=True)]
    assert np.mean(found) == pytest.approx(1.0, abs=0.1)
    assert np.mean(np.array(found) < chi2.ppf(0.95, 1)) == pytest.approx(0.95, abs=0.015)


def test_persons_are_the_same_in_all_views() -> None:
    places = [0, 7, 23]
    for n in places:
        poses = [film(view, [truth[n : n + 1] for truth in TRUTH], 50 + n)[0] for view in VIEWS]
        groups = group_people(VIEWS, poses)
        assert groups.shape == (2, 4)
        for members in groups:
            seen = [poses[view].keypoints[member] for view, member in enumerate(members)]
            apart = [[np.abs(seen[v] - VIEWS[v].project(truth[n])).mean() for truth in TRUTH] for v in range(4)]
            assert len({int(np.argmin(row)) for row in apart}) == 1


def test_persons_are_followed_and_errors_are_as_stated(scene: ReconstructedScene) -> None:
    assert [len(person.frames) for person in scene.persons] == [40, 40]
    for person in scene.persons:
        truth = min(TRUTH, key=lambda t: float(np.abs(t - person.place).mean()))
        error = person.place - truth
        squared = np.einsum("tki,tkij,tkj->tk", error, np.linalg.inv(person.covariance), error)
        assert squared.mean() == pytest.approx(3, rel=0.15)
        smoothed = next(p for p in smooth_scene(scene).persons if p.identity == person.identity)
        assert np.sqrt(np.square(smoothed.place - truth).mean()) < 0.85 * np.sqrt(np.square(error).mean())


def test_a_camera_is_as_the_others_predict_it(scene: ReconstructedScene) -> None:
    found = leave_one_out(VIEWS, scene.gathered, others=3)
    assert found is not None
    assert found.coverage(0.95) == pytest.approx(0.95, abs=0.02)
    assert found.squared.mean() == pytest.approx(2, rel=0.1)
    silent = leave_one_out(VIEWS, worse_camera(scene.gathered, 1, 30.0, stated=False), consistent=None)
    told = leave_one_out(VIEWS, worse_camera(scene.gathered, 1, 30.0), consistent=None)
    assert silent is not None
    assert told is not None
    assert silent.coverage(0.95) < 0.8
    assert told.coverage(0.95) == pytest.approx(0.95, abs=0.02)


def test_films_that_are_apart_are_found_to_be() -> None:
    long = walk(60, speed=3.0)
    films = [film(view, [long[shift : shift + 45]], n, 0.5, 2.0) for n, (view, shift) in enumerate(
        zip(VIEWS, (5, 3, 5, 9), strict=True))]  # fmt: skip
    found = estimate_offsets(VIEWS, films, reach=6)
    assert found.whole.tolist() == [0, 2, 0, -4]
    assert found.spread < 0.5
    together = build_scene(VIEWS, films, LAYOUT, rate=30.0, offsets=found.whole)
    assert together.points.used.sum() > 0.99 * together.points.given.sum()
    apart = build_scene(VIEWS, films, LAYOUT, rate=30.0)
    assert apart.points.used.sum() < 0.9 * together.points.used.sum()


def test_ezc3d_reads_what_was_written(scene: ReconstructedScene, tmp_path: Path) -> None:
    ezc3d = pytest.importorskip("ezc3d")
    person = scene.persons[0]
    (tmp_path / "one.c3d").write_bytes(to_c3d(person, scene))
    content = ezc3d.c3d(str(tmp_path / "one.c3d"))
    points = content["data"]["points"]
    np.testing.assert_allclose(points[:3].T, np.moveaxis(1000 * person.place, 0, 0), rtol=1e-5, atol=1e-3)
    assert content["parameters"]["POINT"]["LABELS"]["value"] == list(LAYOUT.names)
    assert content["parameters"]["POINT"]["RATE"]["value"][0] == 30.0
    assert content["parameters"]["POINT"]["UNITS"]["value"] == ["mm"]


def test_trc_and_csv(scene: ReconstructedScene) -> None:
    person = scene.persons[0]
    lines = to_trc(person, scene, "one.trc").splitlines()
    assert lines[2].split("\t")[2:5] == ["40", "17", "m"]
    assert [len(line.split("\t")) for line in lines[6:]] == [2 + 3 * 17] * 40
    first = np.array(lines[6].split("\t")[2:5], dtype=float)
    x, y, z = person.place[0, 0]
    np.testing.assert_allclose(first, [y, z, x], atol=1e-6)  # y up, and right-handed still
    rows = list(csv.DictReader(io.StringIO(to_csv(scene))))
    assert len(rows) == 2 * 40 * 17
    assert float(rows[0]["zz"]) == pytest.approx(person.covariance[0, 0, 2, 2], rel=1e-5)


def test_the_page_holds_the_scene_and_needs_nothing(scene: ReconstructedScene) -> None:
    page = render_reconstruction(scene)
    assert "2 persons in 40 frames" in page
    assert "https://" not in page
    assert '"id":2' in page
    assert "0 persons in 0 frames" in render_reconstruction(replace(scene, persons=[]))


def test_invalid_inputs_are_refused() -> None:
    with pytest.raises(HaloposeError, match="for each camera"):
        build_scene(VIEWS, [], LAYOUT, rate=30.0)
    far = [film(view, [walk(3, np.array([0.4 * n, 0.0, 0.3 * n]))], n, 0.5, 1.0) for n, view in enumerate(VIEWS)]
    with pytest.raises(HaloposeError, match="seen by two cameras"):
        build_scene(VIEWS, far, LAYOUT, rate=30.0)
    short = [film(view, [walk(4)], n) for n, view in enumerate(VIEWS)]
    with pytest.raises(HaloposeError, match="5 frames"):
        build_scene(VIEWS, short, LAYOUT, rate=30.0)
