"""A Rerun recording reads back with images, positions and ellipses of the stated probability."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halopose.landing.landing_settings import CameraErrors, LandingSettings
from halopose.landing.recordings.position_log import positions_of
from halopose.landing.recordings.record_flight import site_of
from halopose.landing.recordings.rerun_file import ellipse, write_rerun
from tests.landing.test_flight import flown


def test_it_reads_back(tmp_path: Path) -> None:
    chunks = pytest.importorskip("rerun.chunk")  # which Python 3.10 does not have
    flight = flown(3, LandingSettings(rate=0.5, camera=CameraErrors(clock=0.0)))
    grey = np.full((flight.scenario.camera.height, flight.scenario.camera.width, 3), 90, np.uint8)
    count = len(flight.frame_times)
    flight = replace(flight, images=(grey,) * count)
    path = write_rerun(flight, positions_of(flight, site_of(flight)), tmp_path / "landing.rrd")
    rows: Counter[str] = Counter()
    for chunk in chunks.RrdReader(path).stream().to_chunks():
        rows[chunk.entity_path] += chunk.num_rows
    for name in ("track", "fused", "vision", "camera/image", "camera/corners"):
        assert rows[f"/runway/{name}"] == count, name
    assert rows["/runway/outline"] == 1
    assert rows["/deviation/localizer"] == rows["/deviation/glide_slope_sigma"] == count


def test_an_ellipse_holds_95_percent() -> None:
    spread = np.array([[4.0, 1.5], [1.5, 1.0]])
    outline = ellipse(np.array([10.0, 20.0]), spread) - (10.0, 20.0)
    distance = (outline * np.linalg.solve(spread, outline.T).T).sum(1)
    np.testing.assert_allclose(distance, 5.991, rtol=1e-3)
