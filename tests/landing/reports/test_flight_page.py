"""The report page of a landing and its log, on the made-up flight of the pictures' tests."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from halopose.data.files import read_json, write_json
from halopose.landing.flight import Flight
from halopose.landing.landing_settings import CameraErrors
from halopose.landing.navigation.fusion import consistency
from halopose.landing.navigation.sensors import ATTITUDE
from halopose.landing.reports.flight_charts import error_chart
from halopose.landing.reports.flight_page import log_of, render_page
from halopose.landing.reports.flight_pictures import PHOTOGRAPHS, SPLIT
from halopose.types import Array
from tests.helpers.values import present
from tests.landing.reports.test_flight_pictures import (
    DOUBTED,
    EXCLUDED,
    OUTAGE,
    PRUNED,
    UNSEEN,
    UNSOLVED,
    fabricate,
)

SUMMARY = {
    "frames": 9,
    "fused_rms": 1.2345,
    "consistent": True,
    "note": "<script>alert(1)</script>",
    "missing": float("nan"),
    "error": {"vision": {"x": 54.25, "z": -3.5}, "fused": {"x": 0.875}},
    "sources": {"glide_slope": 321},
}
STILLS = [b"RIFF and so on", b"RIFF another"]


@pytest.fixture(scope="module")
def flight() -> Flight:
    return fabricate()


@pytest.fixture(scope="module")
def page(flight: Flight) -> str:
    return render_page(flight, SUMMARY, STILLS)


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


def numbers(path: str) -> Array:
    return np.array([float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)])


def test_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?://|<script src|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", page)
    assert set(re.findall(r'src="([a-z]+):', page)) == {"data"}


def test_the_film_s_stills_are_embedded_as_they_are_and_can_be_stopped(page: str, flight: Flight) -> None:
    film = json.loads(present(re.search(r'id="stills">(.*?)</script>', page))[1])
    content = [still.removeprefix("data:image/webp;base64,") for still in film["stills"]]
    assert [base64.b64decode(each) for each in content] == STILLS
    assert '<button id="play" type="button">Pause</button>' in page
    assert page.count(f'src="{film["stills"][0]}"') == 3  # what is drawn in two halves, and above it what was seen
    bare = render_page(flight, SUMMARY)
    assert "<img" not in bare
    assert "<script" not in bare


def test_camera_pictures_are_not_inverted(page: str) -> None:
    outline = present(re.search(r"polygon\((.*?)\)", page))[1]
    corners = np.array([[float(part.rstrip("%")) for part in place.split()] for place in outline.split(", ")])
    pixels = corners / 100 * [SPLIT, 720]
    for (left, top, width, height), found in zip(PHOTOGRAPHS, (pixels[:5], pixels[5:10]), strict=True):
        np.testing.assert_allclose([*found.min(0), *found.max(0)], [left, top, left + width, top + height], atol=0.01)
    assert page.count(".film .drawn { filter: invert(") == 2  # dark by the system, and dark by the switch


def test_summary_is_shown_whole(page: str) -> None:
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', page))
    cells = {label: re.findall(r"<td>(.*?)</td>", row) for label, row in rows.items()}
    assert cells["fused rms"] == ["1.23"]
    assert cells["consistent"] == ["yes"]
    assert cells["missing"] == ["–"]
    assert cells["note"] == ["&lt;script&gt;alert(1)&lt;/script&gt;"]
    assert cells["Vision"] == ["54.2", "−3.5"]
    assert cells["fused"] == ["0.875", "–"]
    assert cells["Glide slope"] == ["321"]


def test_drawings_are_whole_and_inside(page: str) -> None:
    found = drawings(page)
    assert len(found) == 11
    for svg in found:
        width, height = (float(size) for size in svg.attrib["viewBox"].split()[2:])
        for path in svg.iter("path"):
            places = re.sub(r"[hv]\d+", "", path.attrib["d"])
            assert "nan" not in places
            x, y = numbers(places).reshape(-1, 2).T
            assert ((x >= 0) & (x <= width) & (y >= 0) & (y <= height)).all()


def test_bands_hold_what_they_should(flight: Flight, page: str) -> None:
    """Drawn errors lie inside their drawn band exactly when they are below two standard deviations."""
    for axis, svg in enumerate(drawings(page)[:3]):
        shapes = {path.get("class"): numbers(path.attrib["d"].replace("h0", "")) for path in svg.iter("path")}
        band, line = shapes["band fused"].reshape(-1, 2), shapes["line fused"].reshape(-1, 2)
        count = len(flight.frame_times)
        low, high = band[:count, 1], band[count:, 1][::-1]
        inside = (line[:, 1] >= high) & (line[:, 1] <= low)
        error = np.abs(flight.fused - flight.position)[:, axis]
        near = np.abs(error - 2 * np.sqrt(flight.fused_covariance[:, axis, axis])) < 0.05
        expected = error <= 2 * np.sqrt(flight.fused_covariance[:, axis, axis])
        np.testing.assert_array_equal(inside[~near], expected[~near])


def test_consistency_is_that_of_the_flight(flight: Flight, page: str) -> None:
    nis, nees = consistency(flight.track.nis_of("vision"), 3), consistency(flight.nees, 3)
    assert f"NIS of vision: mean {nis.mean:.2f}" in page
    assert f"NEES of the fused position: mean {nees.mean:.2f}" in page


def test_outages_and_rejections_are_named(flight: Flight, page: str) -> None:
    silent = re.search(r"GNSS silent ([\d.]+) to ([\d.]+) s", page)
    assert np.array(present(silent).groups(), dtype=float) == pytest.approx(OUTAGE, abs=0.25)
    frames = len(flight.frame_times)
    assert f"{frames}, 3 not used" in page
    accepted = np.ones(len(flight.track.times), dtype=bool)
    accepted[np.flatnonzero(flight.track.source == "radio")[:2]] = False
    assert ", 2 rejected" in render_page(replace(flight, track=replace(flight.track, accepted=accepted)), {})


def test_an_error_beyond_its_level_is_marked(flight: Flight, page: str) -> None:
    assert "beyond its level" not in page
    levels = flight.vision_fixes.levels / 1000
    assert "beyond its level" in render_page(
        replace(flight, vision_fixes=replace(flight.vision_fixes, levels=levels)), {}
    )


def test_bands_of_vision_hold_the_attitude_s_bias(flight: Flight) -> None:
    """Yaw, off by what the IRS and the mounting are, moves the fix by 5 km per radian to the left."""
    sensitivity = np.zeros_like(flight.vision_fixes.sensitivity)
    sensitivity[:, 1, 0] = 5000.0
    fixes = replace(
        flight.vision_fixes, covariance=np.tile(np.eye(3), (len(sensitivity), 1, 1)), sensitivity=sensitivity
    )
    chart = error_chart(replace(flight, vision_fixes=fixes), 1)
    band = dict(chart.shapes)["band vision"]
    yaw = np.hypot(ATTITUDE.bias.sigma[0], np.sqrt(CameraErrors().turn_variance(flight.scenario.camera)[0]))
    expected = chart.y(np.array([-1, 1]) * 2 * np.hypot(1, 5000.0 * yaw))
    np.testing.assert_allclose([numbers(band)[1], numbers(band)[-1]], expected, atol=0.06)


def test_a_blind_flight_has_a_page_and_a_log() -> None:
    blind = fabricate(blind=True)
    page = render_page(blind, {})
    assert "no position" in page
    assert "vision: no values" in page
    assert "vision" not in log_of(blind)["sources"]
    assert len(drawings(page)) == 11


def test_log_comes_back_from_json(flight: Flight, tmp_path: Path) -> None:
    log = log_of(flight)
    json.dumps(log, allow_nan=False)
    write_json(tmp_path / "log.json", log)
    assert read_json(tmp_path / "log.json") == log


def test_log_holds_the_flight(flight: Flight) -> None:
    log = log_of(flight)
    frames = log["frames"]
    assert [frame["time"] for frame in frames] == flight.frame_times.tolist()
    np.testing.assert_array_equal([frame["truth"]["position"] for frame in frames], flight.position)
    np.testing.assert_array_equal([frame["fused"]["covariance"] for frame in frames], flight.fused_covariance)
    np.testing.assert_array_equal([frame["fused"]["nees"] for frame in frames], flight.nees)
    assert frames[UNSEEN]["vision"]["position"] is None
    assert frames[UNSEEN]["corners"]["near_left"]["pixel"] is None
    assert frames[UNSOLVED]["vision"]["covariance"] is None
    assert frames[UNSOLVED]["vision"]["reason"].startswith("too few points")
    assert frames[EXCLUDED]["vision"]["excluded"] == "far_left"
    assert not frames[PRUNED]["corners"]["far_right"]["kept"]
    assert not frames[DOUBTED]["vision"]["trusted"]
    assert frames[DOUBTED]["vision"]["accepted"] is None
    np.testing.assert_array_equal(frames[0]["vision"]["position"], flight.vision_fixes.position[0])


def test_log_counts_what_the_filter_took(flight: Flight) -> None:
    log = log_of(flight)
    track = flight.track
    assert {source: entry["measurements"] for source, entry in log["sources"].items()} == {
        source: len(track.times_of(source)) for source in ("irs", *np.unique(track.source).tolist())
    }
    updates = [frame["vision"] for frame in log["frames"] if frame["vision"]["nis"] is not None]
    np.testing.assert_array_equal([update["nis"] for update in updates], track.nis_of("vision"))
    assert log["sources"]["vision"]["rejected"] == sum(not update["accepted"] for update in updates)
