"""Long films: windows give the tracks of the whole film, and memory does not grow with its length."""

import gc
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from halopose.data.files import write_json
from halopose.keypoints import Keypoints
from halopose.tracking.frame_store import FrameStore
from halopose.tracking.live_tracking import track_live, track_live_windows
from halopose.tracking.motion import Motion
from halopose.tracking.synthetic_films import Film, synthesize_film
from halopose.tracking.track_files import TrackWriter
from halopose.tracking.tracker import TrackSettings
from halopose.tracking.tracks import TrackWindow, track, track_windows

LAYOUT = Keypoints.of(17)
FILM = synthesize_film(Film(frames=160, persons=2, rate=5.0, missed=0.1, seed=3))


def stored(count: int) -> FrameStore:
    store = FrameStore()
    for poses in FILM.frames[:count]:
        store.append(poses)
    return store


def joined(windows: list[TrackWindow], name: str) -> np.ndarray:
    parts = [window.tracks for window in windows if window.tracks is not None]
    return np.concatenate(
        [getattr(part.poses, name) if hasattr(part.poses, name) else getattr(part, name) for part in parts]
    )


def test_a_store_gives_back_what_tracking_needs() -> None:
    store = FrameStore()
    frames = [FILM.frames[0][:0], *FILM.frames[:3], FILM.frames[0][:0]]
    for poses in frames:
        store.append(poses)
    assert len(store) == len(frames)
    assert all(one == other for one, other in zip(store, frames, strict=True))
    assert store[-2] == frames[-2]


def test_windows_give_the_tracks_of_the_whole_film() -> None:
    motion = Motion.typical(17)
    whole = track(FILM.frames, LAYOUT, rate=5.0, motion=motion)
    [one] = track_windows(stored(160), LAYOUT, rate=5.0, motion=motion, window=160)
    assert one.tracks is not None
    assert one.tracks.to_csv() == whole.to_csv()
    windows = list(track_windows(stored(160), LAYOUT, rate=5.0, motion=motion, window=60))
    assert [(window.start, window.stop) for window in windows] == [(0, 60), (60, 120), (120, 160)]
    for name in ("track_ids", "image_ids", "observed", "boxes", "scores", "class_ids"):
        expected = getattr(whole, name) if hasattr(whole, name) else getattr(whole.poses, name)
        np.testing.assert_allclose(joined(windows, name), expected, atol=1e-9)
    sigma = np.sqrt(np.diagonal(whole.poses.covariance, axis1=2, axis2=3))
    off = np.abs(joined(windows, "keypoints") - whole.poses.keypoints) / sigma
    assert off.max() < 0.05
    ratio = joined(windows, "covariance")[..., 0, 0] / whole.poses.covariance[..., 0, 0]
    assert np.abs(ratio - 1).max() < 0.05


def test_causal_windows_change_nothing() -> None:
    whole = track_live(FILM.frames, LAYOUT, rate=5.0)
    windows = list(track_live_windows(stored(160), LAYOUT, rate=5.0, window=30))
    np.testing.assert_array_equal(joined(windows, "keypoints"), whole.poses.keypoints)
    np.testing.assert_array_equal(joined(windows, "keep"), whole.poses.keep)


@pytest.mark.parametrize("count", [160, 20])
def test_written_files_equal_those_of_the_whole_film(count: int, tmp_path: Path) -> None:
    with TrackWriter(tmp_path) as writer:
        for window in track_live_windows(stored(count), LAYOUT, rate=5.0, window=7):
            if window.tracks is not None:
                writer.add(window.tracks)
    whole = track_live(FILM.frames[:count], LAYOUT, rate=5.0)
    write_json(tmp_path / "expected.json", whole.to_json())
    assert (tmp_path / "tracks.json").read_text() == (tmp_path / "expected.json").read_text()
    assert (tmp_path / "tracks.csv").read_text() == whole.to_csv()
    assert len(json.loads((tmp_path / "tracks.json").read_text())) == len(whole)


def test_a_failure_leaves_the_old_files(tmp_path: Path) -> None:
    (tmp_path / "tracks.json").write_text("old")
    with pytest.raises(RuntimeError), TrackWriter(tmp_path):
        raise RuntimeError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"tracks.json": "old"}


def test_memory_does_not_grow_with_the_film() -> None:
    """Peak of traced memory while the windows of a film and of one of three times its length are consumed."""
    peaks = []
    for times in (2, 2, 6):  # the first run fills caches
        store = FrameStore()
        for _ in range(times):
            for poses in FILM.frames[:40]:
                store.append(poses)
        tracemalloc.start()
        settings = TrackSettings(gap=0.4)
        for window in track_live_windows(store, LAYOUT, rate=5.0, window=20, settings=settings):
            assert window.stop - window.start == 20
            gc.collect()  # so that the peak does not depend on when cycles are collected
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.6 * peaks[1]
