"""The monitor of a predictor: single images count, and of a film one frame in a second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.prediction.stream_monitor import StreamMonitor


def poses(p: float | None) -> PoseDistributions:
    none = np.zeros((0, 1, 2, 2))
    known = None if p is None else np.array([p])
    return PoseDistributions(np.zeros((0, 4)), np.zeros(0), np.zeros((0, 1, 2)), none, none, image_novelty=known)


def model(size: int | None) -> Any:
    return SimpleNamespace(novelty_size=size)


def test_unusual_images_raise_one_alarm(caplog: pytest.LogCaptureFixture) -> None:
    watch = StreamMonitor(model(99), 0.01)
    raised = [watch.update(poses(0.01), f"{n}.jpg") for n in range(40)]
    assert sum(raised) == 1
    assert caplog.text.count("those of the calibration") == 1
    assert f"{raised.index(True)}.jpg" in caplog.text


def test_one_frame_in_a_second_counts() -> None:
    watch = StreamMonitor(model(99), 0.01)
    for n in range(100):
        watch.update(poses(0.5), f"a {n}", "a.mp4", 10.0)
    assert watch.state.count == 10
    for n in range(30):
        watch.update(poses(0.5), f"b {n}", "b.mp4", None)
    assert watch.state.count == 12
    watch.update(poses(None), "c.jpg")
    assert watch.state.count == 12


def test_a_model_without_an_out_of_distribution_model_is_refused() -> None:
    with pytest.raises(HaloposeError, match="--monitor"):
        StreamMonitor(model(None), 0.01)
