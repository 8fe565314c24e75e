"""track and triangulate from existing predictions, and their errors."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from halopose.cli.app import app
from halopose.data.films import film_facts
from halopose.data.images import read_image
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.tracking.synthetic_films import Film, synthesize_film
from tests.helpers.models import ROOT
from tests.helpers.rigs import film, rig, walk
from tests.multiview.test_rig import toml_of


def run(*arguments: object) -> None:
    app([str(argument) for argument in arguments], standalone_mode=False)


def write(path: Path, films: dict[str, list[PoseDistributions]]) -> Path:
    entries = []
    for name, frames in films.items():
        for number, poses in enumerate(frames):
            entries += [{**entry, "file_name": f"{name}_{number:06d}"} for entry in poses.to_json()]
    path.write_text(json.dumps(entries))
    return path


def test_track_from_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = synthesize_film(Film(frames=40, persons=2))
    path = write(tmp_path / "predictions.json", {"clip": made.frames})
    run("track", path, "--rate", "30", "-o", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "2 tracks in 40" in printed
    assert "error variance" in printed
    entries = json.loads((tmp_path / "out" / "tracks.json").read_text())
    assert {entry["track_id"] for entry in entries} == {1, 2}
    assert (tmp_path / "out" / "tracks.csv").read_text().startswith("frame,time,track_id")
    run("track", path, "--rate", "30", "--causal", "-o", tmp_path / "live")
    assert "50%" in capsys.readouterr().out
    run("track", path, "--rate", "30", "--responsive", "1", "-o", tmp_path / "responsive")
    assert "responsive filter" in capsys.readouterr().out
    short = write(tmp_path / "short.json", {"clip": made.frames[:25]})
    run("track", short, "--rate", "30", "--causal", "-o", tmp_path / "before")
    run("track", short, "--rate", "30", "--responsive", "1", "-o", tmp_path / "responsive_before")
    for folder, shorter in (("live", "before"), ("responsive", "responsive_before")):
        for name in ("tracks.json", "tracks.csv"):  # nothing of later frames is in it
            live, before = ((tmp_path / part / name).read_text().rstrip("]\n") for part in (folder, shorter))
            assert len(before) > 1000
            assert live.startswith(before)


@pytest.mark.usefixtures("published_base", "one_thread")
def test_track_a_film(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A photograph that moves across the picture, with the model that ships: one person, seen in every frame."""
    photo = read_image(ROOT / "examples" / "photographs" / "astronaut.jpg")
    writer = cv2.VideoWriter(str(tmp_path / "film.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10.0, (512, 512))
    for n in range(8):
        writer.write(cv2.warpAffine(photo, np.array([[0.8, 0, 20.0 + 5 * n], [0, 0.8, 60.0]]), (512, 512)))
    writer.release()
    run("track", tmp_path / "film.mp4", "--camera-motion", "-o", tmp_path / "out")
    assert "in 8 frames" in capsys.readouterr().out
    assert film_facts(tmp_path / "out" / "film.mp4") == (10.0, 8)
    nose = [entry["keypoints"][0] for entry in json.loads((tmp_path / "out" / "tracks.json").read_text())]
    np.testing.assert_allclose(np.diff(nose), 5.0, atol=1.5)


def test_triangulate_from_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    views = rig()
    path = write(tmp_path / "all.json", {view.name: film(view, [walk(20)], n) for n, view in enumerate(views)})
    (tmp_path / "cameras.toml").write_text(toml_of(views))
    run(
        "triangulate",
        tmp_path / "cameras.toml",
        path,
        "--smooth",
        "--offsets",
        "0,0,0,0",
        "-o",
        tmp_path / "scene",
    )
    printed = capsys.readouterr().out
    assert "1 person in 20 frames" in printed
    assert "predicted from the others" in printed
    written = {file.name for file in (tmp_path / "scene").iterdir()}
    assert written == {"scene.csv", "scene.html", "person_1.trc", "person_1.c3d"}
    assert "25 frames" in printed
    wrong = (("1,2", "takes 4 numbers"), ("x", "takes whole frames"), (f"0,{'9' * 20},0,0", "takes whole frames"))
    for offsets, message in wrong:
        with pytest.raises(HaloposeError, match=message):
            run("triangulate", tmp_path / "cameras.toml", path, "--offsets", offsets, "-o", tmp_path / "scene")
    with pytest.raises(HaloposeError, match="4 cameras"):
        run("triangulate", tmp_path / "cameras.toml", "a.mp4", "-o", tmp_path / "scene")


def test_films_of_other_names_are_taken_as_they_appear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    views = rig()
    (tmp_path / "cameras.toml").write_text(toml_of(views))
    names = ["north", "south", "east", "west"]  # not in the order of the alphabet
    films = {name: film(view, [walk(6)], n) for n, (name, view) in enumerate(zip(names, views, strict=True))}
    path = write(tmp_path / "all.json", films)
    run("triangulate", tmp_path / "cameras.toml", path, "--rate", "30", "-o", tmp_path / "scene")
    printed = capsys.readouterr().out
    assert "north of cam0, south of cam1, east of cam2, west of cam3" in printed.replace("\n", " ")
    assert "1 person in 6 frames" in printed
    assert "25 frames" not in printed
    path = write(tmp_path / "some.json", {("cam3" if name == "north" else name): f for name, f in films.items()})
    with pytest.raises(HaloposeError, match="camera cam0"):
        run("triangulate", tmp_path / "cameras.toml", path, "-o", tmp_path / "scene")


def test_missing_files_and_non_films_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="no file"):
        run("track", tmp_path / "none.mp4", "-o", tmp_path)
    made = synthesize_film(Film(frames=6))
    both = write(tmp_path / "two.json", {"a": made.frames, "b": made.frames})
    with pytest.raises(HaloposeError, match="2 films"):
        run("track", both, "-o", tmp_path)
    (tmp_path / "plain.json").write_text(json.dumps(made.frames[0].to_json()))
    with pytest.raises(HaloposeError, match="no file_name"):
        run("track", tmp_path / "plain.json", "-o", tmp_path)


def test_nothing_is_begun_that_would_overwrite_its_own_film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halopose.prediction.uncertain_pose import UncertainPose

    monkeypatch.setattr(UncertainPose, "load", lambda *_, **__: pytest.fail("the work has begun"))
    (tmp_path / "film.mp4").write_bytes(b"a film")
    with pytest.raises(HaloposeError, match="choose another --output"):
        run("track", tmp_path / "film.mp4", "-o", tmp_path)
    (tmp_path / "tracks.json").write_text("[]")
    with pytest.raises(HaloposeError, match="choose another --output"):
        run("track", tmp_path / "tracks.json", "-o", tmp_path)
