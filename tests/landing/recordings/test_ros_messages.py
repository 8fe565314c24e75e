"""Messages against the classes of rosbags, an independent library of ROS; MCAP files read back."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory
from rosbags.typesys import Stores, get_typestore
from scipy.spatial.transform import Rotation

from halopose.errors import HaloposeError
from halopose.landing.landing_settings import CameraErrors, LandingSettings
from halopose.landing.recordings.position_log import Positions, positions_of
from halopose.landing.recordings.record_flight import site_of
from halopose.landing.recordings.ros_messages import (
    DEVIATION,
    FIX,
    POSE,
    fill,
    messages_at,
    pose_message,
    write_mcap,
)
from tests.landing.test_flight import flown

STORE = get_typestore(Stores.ROS2_HUMBLE)


@pytest.fixture(scope="module")
def positions() -> Positions:
    flight = flown(3, LandingSettings(rate=1.0, camera=CameraErrors(clock=0.0)))
    return positions_of(flight, site_of(flight))


def built(kind: str, content: dict[str, Any]) -> Any:
    """A message of rosbags with the content, which it refuses if a field is missing or unknown."""
    fields = dict(STORE.fielddefs[kind][1])
    assert set(fields) == set(content), kind
    values = {}
    for name, (_, detail) in fields.items():
        value = content[name]
        if isinstance(value, dict):
            value = built(detail, value)
        values[name] = np.asarray(value, dtype=np.float64) if isinstance(value, list) else value
    return STORE.types[kind](**values)


@pytest.mark.parametrize(("topic", "kind"), [("/halopose/enu/pose", POSE), ("/halopose/fix", FIX)])
def test_an_independent_library_takes_the_messages_and_gives_them_back(
    positions: Positions, topic: str, kind: str
) -> None:
    found, content = messages_at(positions, 4)[topic]
    assert found == kind
    message = built(kind, content)
    again = STORE.deserialize_cdr(STORE.serialize_cdr(message, kind), kind)
    stamp = again.header.stamp
    assert stamp.sec + 1e-9 * stamp.nanosec == pytest.approx(positions.times[4], abs=1e-9)
    if kind == FIX:
        assert (again.latitude, again.longitude, again.altitude) == tuple(positions.places[4])
    else:
        place = again.pose.pose.position
        np.testing.assert_array_equal([place.x, place.y, place.z], positions.enu[4])
        np.testing.assert_allclose(again.pose.covariance.reshape(6, 6)[:3, :3], positions.enu_covariance[4], rtol=1e-12)


def test_orientations_of_all_frames_are_one(positions: Positions) -> None:
    """Taken back to runway axes, the aircraft looks the same way in every frame, and its turns vary alike."""
    messages = messages_at(positions, 6)
    site = positions.site
    nose = {}
    for name in ("runway", "enu"):
        pose = messages[f"/halopose/{name}/pose"][1]["pose"]
        turn = Rotation.from_quat([pose["pose"]["orientation"][axis] for axis in "xyzw"]).as_matrix()
        nose[name] = turn[:, 0]
        spread = np.reshape(pose["covariance"], (6, 6))[3:, 3:]
        np.testing.assert_allclose(np.linalg.eigvalsh(spread), np.sort(positions.turn_variance), rtol=1e-9)
    np.testing.assert_allclose(site.turn @ nose["runway"], nose["enu"], atol=1e-12)
    np.testing.assert_allclose(nose["runway"], positions.body[6, :, 0], atol=1e-12)


def test_a_fix_is_one_where_the_position_is_available(positions: Positions) -> None:
    """Where no ILS would serve, beside the localizer's limits, a position is as good as elsewhere."""
    every, none = np.ones(len(positions), bool), np.zeros(len(positions), bool)
    nowhere = replace(positions, available=every, valid=none, flags=((),) * len(positions))
    told = messages_at(nowhere, 0)
    assert told["/halopose/fix"][1]["status"]["status"] == 2
    assert told["/halopose/deviation"][1]["valid"] is False
    wide = messages_at(replace(nowhere, available=none), 0)
    assert wide["/halopose/fix"][1]["status"]["status"] == -1
    assert "alert limit" in wide["/halopose/deviation"][1]["reason"]


def test_an_unknown_attitude_is_wide_and_the_position_stays(positions: Positions) -> None:
    blind = replace(positions, body=np.full_like(positions.body, np.nan))
    pose = messages_at(blind, 0)["/halopose/runway/pose"][1]["pose"]
    assert pose["pose"]["orientation"]["w"] == 1.0
    assert np.reshape(pose["covariance"], (6, 6))[5, 5] > 9
    assert list(pose["pose"]["position"].values()) == positions.position[0].tolist()


def test_an_mcap_file_reads_back(positions: Positions, tmp_path: Path) -> None:
    path = write_mcap(positions, tmp_path / "a" / "positions.mcap")
    seen: dict[str, list[Any]] = {}
    with path.open("rb") as file:
        for schema, channel, record, message in make_reader(
            file, decoder_factories=[DecoderFactory()]
        ).iter_decoded_messages():
            assert schema is not None
            seen.setdefault(channel.topic, []).append((schema.name, record.log_time, message))
    assert {topic: len(found) for topic, found in seen.items()} == dict.fromkeys(
        messages_at(positions, 0), len(positions)
    )
    for n, (name, time, message) in enumerate(seen["/halopose/deviation"]):
        assert (name, time) == (DEVIATION, round(positions.times[n] * 1e9))
        assert (message.localizer, message.glide_slope) == tuple(positions.deviations[n])
        assert (message.localizer_sigma, message.glide_slope_sigma) == tuple(positions.sigma[n])
        assert message.valid == positions.valid[n]
    east = [message.pose.pose.position.x for _, _, message in seen["/halopose/enu/pose"]]
    np.testing.assert_array_equal(east, positions.enu[:, 0])
    earth = np.array([vars_of(message.pose.pose.position) for _, _, message in seen["/halopose/earth/pose"]])
    assert np.abs(np.linalg.norm(earth, axis=1) - 6.37e6).max() < 5e3


def vars_of(point: Any) -> list[float]:
    return [point.x, point.y, point.z]


def test_a_folder_that_cannot_be_written_is_a_one_line_error(positions: Positions, tmp_path: Path) -> None:
    (tmp_path / "positions.mcap").mkdir()
    with pytest.raises(HaloposeError, match="cannot write"):
        write_mcap(positions, tmp_path / "positions.mcap")


def test_times_beyond_what_a_stamp_holds_are_one_line_errors(positions: Positions, tmp_path: Path) -> None:
    """Nanoseconds given as seconds."""
    with pytest.raises(HaloposeError, match="clock of ROS") as caught:
        write_mcap(replace(positions, times=1e9 * (1.7e9 + positions.times)), tmp_path / "positions.mcap")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "positions.mcap").exists()


def test_fill_takes_any_class() -> None:
    blank = SimpleNamespace(
        header=SimpleNamespace(stamp=SimpleNamespace(sec=0, nanosec=0), frame_id=""),
        pose=SimpleNamespace(
            pose=SimpleNamespace(position=SimpleNamespace(), orientation=SimpleNamespace()), covariance=None
        ),
    )
    content = pose_message({"sec": 3, "nanosec": 5}, "runway", np.arange(3.0), np.eye(3), np.eye(6))
    filled = fill(blank, content)
    assert (filled.header.stamp.sec, filled.header.frame_id, filled.pose.pose.position.z) == (3, "runway", 2.0)
    assert (filled.pose.pose.orientation.w, filled.pose.covariance[7]) == (1.0, 1.0)
