"""Frames of folders and MCAP files with their times; another size than the calibration's is one line."""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
from mcap_ros2.writer import Writer

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera
from halopose.landing.frame_buffer import FrameBuffer
from halopose.landing.recordings import frames as frames_module
from halopose.landing.recordings.cameras import Lens
from halopose.landing.recordings.frames import open_frames
from halopose.landing.recordings.replay import detections_in
from halopose.landing.recordings.ros_messages import definition, header
from halopose.types import Array
from tests.landing.test_commands import Blind

TIMES = (10.0, 10.5, 11.25)


def pictures() -> list[Array]:
    return [np.full((48, 64, 3), 40 * n, np.uint8) for n in (1, 2, 3)]


def folder_of(path: Path, times: tuple[float, ...] = TIMES) -> Path:
    for n, picture in enumerate(pictures()):
        cv2.imwrite(str(path / f"{n}.png"), picture)
    (path / "times.csv").write_text("time_s\n" + "\n".join(map(str, times)) + "\n")
    return path


def mcap_of(path: Path, kind: str = "sensor_msgs/msg/CompressedImage", images: Sequence[bytes] = ()) -> Path:
    """As a camera driver records: PNG images on one topic, and another topic that must not be mixed in."""
    with path.open("wb") as file:
        writer: Any = Writer(file)
        schema = writer.register_msgdef(kind, definition(kind))
        encoded = images or [cv2.imencode(".png", picture)[1].tobytes() for picture in pictures()]
        for time, coded in zip(TIMES, encoded, strict=False):
            for topic, data in (("/nose", coded), ("/tail", b"")):
                message = {"header": header(time, "camera"), "format": "png", "data": data}
                writer.write_message(topic, schema, message, log_time=round(time * 1e9))
        writer.finish()
    return path


def test_an_image_of_absurd_size_is_a_one_line_error(tmp_path: Path) -> None:
    """A PNG header that claims 100,000 x 100,000 pixels."""
    claimed = struct.pack(">II", 100_000, 100_000)
    head = b"IHDR" + claimed + b"\x08\x02\x00\x00\x00"
    coded = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    path = mcap_of(tmp_path / "flight.mcap", images=[coded])
    with pytest.raises(HaloposeError, match="more than 100000000"):
        open_frames(path)


def test_chunks_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 kB can decompress to gigabytes; also where the chunk claims less than its data."""
    path = mcap_of(tmp_path / "flight.mcap", images=[bytes(4000)])
    content = path.read_bytes()
    monkeypatch.setattr(frames_module, "MAX_CHUNK", 3000)
    with pytest.raises(HaloposeError, match="a chunk of 4") as caught:
        open_frames(path)
    size = int(str(caught.value).split("chunk of ")[1].split()[0])
    path.write_bytes(content.replace(struct.pack("<Q", size), struct.pack("<Q", 5), 1))
    with pytest.raises(HaloposeError, match="a chunk of 4"):
        open_frames(path)


@pytest.mark.parametrize("form", ["folder", "mcap"])
def test_frames_come_with_their_times(tmp_path: Path, form: str) -> None:
    path = folder_of(tmp_path) if form == "folder" else mcap_of(tmp_path / "flight.mcap")
    frames = open_frames(path, offset=-10.0)
    found = list(frames.images())
    np.testing.assert_allclose([time for time, _ in found], np.array(TIMES) - 10)
    for (_, image), picture in zip(found, pictures(), strict=True):
        np.testing.assert_array_equal(image, picture)


def test_an_mcap_file_without_images_or_cut_off_is_a_one_line_error(tmp_path: Path) -> None:
    path = mcap_of(tmp_path / "flight.mcap")
    (tmp_path / "cut.mcap").write_bytes(path.read_bytes()[:300])
    with pytest.raises(HaloposeError, match="complete MCAP") as caught:
        open_frames(tmp_path / "cut.mcap")
    assert "\n" not in str(caught.value)
    with (tmp_path / "empty.mcap").open("wb") as file:
        empty: Any = Writer(file)
        empty.finish()
    with pytest.raises(HaloposeError, match="record compressed images"):
        open_frames(tmp_path / "empty.mcap")


def test_damaged_bytes_anywhere_in_an_mcap_file_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    whole, rng = mcap_of(tmp_path / "flight.mcap").read_bytes(), np.random.default_rng(0)
    lines = []
    for place in rng.integers(len(whole), size=60):
        (tmp_path / "damaged.mcap").write_bytes(whole[:place] + rng.bytes(4) + whole[place + 4 :])
        try:
            list(open_frames(tmp_path / "damaged.mcap").images())
        except HaloposeError as error:
            lines.append(str(error))
    assert len(lines) > 10
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("rate", [0.0, 1e-9, -1.0, float("nan"), 1e4])
def test_a_rate_that_no_film_has_is_a_one_line_error(tmp_path: Path, rate: float) -> None:
    with pytest.raises(HaloposeError, match="frame rate"):
        open_frames(folder_of(tmp_path), rate=rate)


def test_a_file_that_is_no_film_is_refused(tmp_path: Path) -> None:
    (tmp_path / "garbage.mcap").write_bytes(b"not one of them" * 9)
    with pytest.raises(HaloposeError, match="MCAP"):
        open_frames(tmp_path / "garbage.mcap")
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(HaloposeError, match=r"empty\.mp4 is empty"):
        open_frames(tmp_path / "empty.mp4")


def test_frames_of_a_folder_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for n in (1, 2, 10, 11, 100):
        cv2.imwrite(str(tmp_path / f"frame{n}.png"), np.full((4, 4, 3), n, np.uint8))
    found = [int(image[0, 0, 0]) for _, image in open_frames(tmp_path, rate=1.0).images()]
    assert found == [1, 2, 10, 11, 100]


def test_times_that_do_not_fit_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="2 rows for 3"):
        open_frames(folder_of(tmp_path, TIMES[:2]))
    with pytest.raises(HaloposeError, match="time goes back"):
        open_frames(folder_of(tmp_path, TIMES[::-1]))


def test_images_for_a_film_are_kept_rectified(tmp_path: Path) -> None:
    frames, model = open_frames(folder_of(tmp_path)), cast(Any, Blind())
    lens, buffer = Lens(Camera.from_fov(64, 48, 0.5), fisheye=(0.9, 0.0, 0.0, 0.0)), FrameBuffer(3, most=2)
    detections_in(model, frames, lens, 0.5, None, buffer)
    assert buffer.kept == [0, 2]
    assert np.abs(buffer[2].astype(int) - lens.rectified_image(pictures()[2])).mean() < 2


def test_frames_of_another_size_than_the_calibration_are_one_line_errors(tmp_path: Path) -> None:
    frames = open_frames(folder_of(tmp_path))
    model: Any = Blind()
    times, found = detections_in(model, frames, Lens(Camera.from_fov(64, 48, 0.5)), 0.5)
    assert len(times) == len(found) == 3
    with pytest.raises(HaloposeError, match="64 by 48, a calibration of 128 by 96") as caught:
        detections_in(model, frames, Lens(Camera.from_fov(128, 96, 0.5)), 0.5)
    assert "\n" not in str(caught.value)
