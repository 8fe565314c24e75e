"""Images from every kind of source, and one line for each that cannot be read."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from halopose.data.images import as_bgr, distinct_names, read_image, read_source, write_image
from halopose.errors import HaloposeError
from halopose.types import Array

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREY = COLOURS[..., 0].copy()


def names_and_pixels(source: Any) -> tuple[list[str], list[Array]]:
    images = list(read_source(source))
    return [image.name for image in images], [image.pixels for image in images]


def one_line(error: pytest.ExceptionInfo[HaloposeError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.png", "a.PNG", "c.bmp"):
        cv2.imwrite(str(tmp_path / name), COLOURS)
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("photos/a/bus.jpg", "bus"),
        ("photos/a/bus.jpg photos/b/car.jpg", "bus car"),
        ("photos/a/bus.jpg photos/b/bus.jpg photos/b/car.jpg", "a/bus b/bus b/car"),
        ("photos/bus.jpg photos/a/Bus.jpg", "bus a/Bus"),
        ("photos/bus.jpg photos/bus.png", "bus.jpg bus.png"),
        ("../x/1.jpg x/1.jpg", "x/1 here/x/1"),
        ("clip.mp4 clip_000000.jpg", "clip.mp4 clip_000000.jpg"),
        ("clip.mp4 frames/clip_000000.jpg", "clip frames/clip_000000"),
    ],
)
def test_names_of_results_are_unique_per_image(
    paths: Any, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert distinct_names([Path(path) for path in paths.split()]) == names.split()


stems = st.sampled_from(["bus", "BUS", "bus.png", "clip", "clip_000000", "a"])
suffixes = st.sampled_from([".jpg", ".png", ".mp4"])
folders = st.lists(st.sampled_from(["a", "b", "bus", ".."]), max_size=3).map("/".join)


@given(st.lists(st.builds(lambda *parts: Path(parts[0]) / "".join(parts[1:]), folders, stems, suffixes), min_size=1))
def test_no_two_files_share_a_name(paths: Any) -> None:
    """Nor does a frame of a film; and no name leads out of the folder of results."""
    files = sorted({path.resolve() for path in paths})
    named = distinct_names(files)
    results = [f"{n}_000000" if p.suffix == ".mp4" else n for n, p in zip(named, files, strict=True)]
    assert len(set(results)) == len(files)
    assert not any(".." in Path(name).parts or name.startswith("/") for name in named)


@pytest.mark.parametrize("shape", [(1, 1, 3), (50, 12000, 3), (12000, 50, 3), (6, 9, 3)])
def test_colour_files_of_all_sizes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "image.png"
    cv2.imwrite(str(path), pixels)
    assert np.array_equal(read_image(path), pixels)


def test_grey_16_bit_and_transparent_files_become_bgr(tmp_path: Path) -> None:
    deep = (COLOURS.astype(np.uint16) << 8) + 200
    transparent = np.dstack([COLOURS, GREY])
    for name, pixels, expected in (
        ("grey.png", GREY, np.repeat(GREY[..., None], 3, 2)),
        ("deep.png", deep, COLOURS),
        ("deep_grey.png", deep[..., 0], np.repeat(GREY[..., None], 3, 2)),
        ("transparent.png", transparent, COLOURS),
    ):
        cv2.imwrite(str(tmp_path / name), pixels)
        found = read_image(tmp_path / name)
        assert found.dtype == np.uint8
        assert np.abs(found.astype(int) - expected).max() <= 1, name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(tmp_path: Path, orientation: int) -> None:
    smooth = np.zeros((32, 48, 3), np.uint8)
    smooth[:16, :16], smooth[16:, 24:] = (0, 0, 255), (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(smooth[..., ::-1])
    image.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    upright = {1: smooth, 2: smooth[:, ::-1], 3: smooth[::-1, ::-1], 4: smooth[::-1]}
    turned = smooth.transpose(1, 0, 2)
    upright |= {5: turned, 6: turned[:, ::-1], 7: turned[::-1, ::-1], 8: turned[::-1]}
    for found in (read_image(tmp_path / "turned.jpg"), as_bgr(Image.open(tmp_path / "turned.jpg"))):
        assert found.shape == upright[orientation].shape
        assert np.abs(found.astype(int) - upright[orientation]).mean() < 5


def test_written_images_are_read_back(tmp_path: Path) -> None:
    write_image(tmp_path / "new" / "a.png", COLOURS)
    assert np.array_equal(read_image(tmp_path / "new" / "a.png"), COLOURS)
    smooth = np.tile(np.linspace(0, 255, 64, dtype=np.uint8)[:, None, None], (1, 64, 3))
    for quality, loss in ((None, 2), (95, 2), (30, 8)):
        write_image(tmp_path / "b.jpg", smooth, quality)
        assert np.abs(read_image(tmp_path / "b.jpg").astype(int) - smooth).mean() < loss


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_half_image(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match=r"cannot write .*a\.png") as error:
        write_image(tmp_path / "a.png", COLOURS)
    one_line(error)
    assert not list(tmp_path.iterdir())


def test_unreadable_files_are_one_line_errors(tmp_path: Path) -> None:
    good = tmp_path / "good.jpg"
    cv2.imwrite(str(good), COLOURS)
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "cut.png").write_bytes(cv2.imencode(".png", COLOURS)[1].tobytes()[:40])
    for name in ("empty.jpg", "text.jpg", "cut.png", "missing.jpg"):
        with pytest.raises(HaloposeError, match=name) as error:
            read_image(tmp_path / name)
        one_line(error)
    with pytest.raises(HaloposeError) as error:
        read_image(tmp_path)
    one_line(error)


def test_folder_glob_list_and_path(folder: Path) -> None:
    assert names_and_pixels(folder)[0] == ["a", "b", "c"]
    assert names_and_pixels(str(folder / "*.png"))[0] == ["b"]
    assert names_and_pixels(str(folder / "**" / "*.[pb][nm][gp]"))[0] == ["b", "c"]
    names, pixels = names_and_pixels([folder / "b.png", str(folder / "c.bmp"), COLOURS, Image.fromarray(GREY)])
    assert names == ["b", "c", "image_2", "image_3"]
    assert all(np.array_equal(image, COLOURS) for image in pixels[:3])
    assert np.array_equal(pixels[3], np.repeat(GREY[..., None], 3, 2))


def test_a_file_keeps_its_name_in_a_list(folder: Path) -> None:
    cv2.imwrite(str(folder / "image_0.png"), COLOURS)
    assert names_and_pixels([folder / "b.png", folder / "image_0.png"])[0] == ["b", "image_0"]


def test_a_name_with_glob_letters_is_a_file_if_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "odd[1].png"
    path.write_bytes(cv2.imencode(".png", COLOURS)[1].tobytes())
    assert names_and_pixels(str(path))[0] == ["odd[1]"]


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (COLOURS, COLOURS),
        (GREY, np.repeat(GREY[..., None], 3, 2)),
        (GREY[..., None], np.repeat(GREY[..., None], 3, 2)),
        (np.dstack([COLOURS, GREY]), COLOURS),
        (COLOURS.astype(np.uint16) * 256 + 255, COLOURS),
        (COLOURS[:, ::-1], COLOURS[:, ::-1]),
        (Image.fromarray(COLOURS[..., ::-1]), COLOURS),
        (Image.fromarray(GREY).convert("P"), np.repeat(GREY[..., None], 3, 2)),
    ],
)
def test_arrays_and_pil_images(pixels: Any, expected: Array) -> None:
    found = names_and_pixels(pixels)[1]
    assert len(found) == 1
    assert found[0].dtype == np.uint8
    assert found[0].flags.c_contiguous
    assert np.array_equal(found[0], expected)


def test_pil_16_bit_is_scaled_like_a_file(tmp_path: Path) -> None:
    deep = (np.arange(54, dtype=np.uint16).reshape(6, 9) * 1200) + 7
    cv2.imwrite(str(tmp_path / "deep.png"), deep)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = as_bgr(Image.open(tmp_path / "deep.png"))
    assert np.abs(found.astype(int) - read_image(tmp_path / "deep.png")).max() <= 1


def test_a_stack_of_arrays_is_a_list() -> None:
    assert names_and_pixels(np.stack([COLOURS, COLOURS[::-1]]))[0] == ["image_0", "image_1"]


@pytest.mark.parametrize(
    "wrong",
    [
        COLOURS.astype(float),
        COLOURS.astype(np.int64),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros(5, np.uint8),
        np.zeros((2, 2, 3, 4, 5), np.uint8),
        3.5,
        None,
    ],
)
def test_wrong_arrays_are_one_line_errors(wrong: Array | float | None) -> None:
    with pytest.raises(HaloposeError) as error:
        list(read_source(wrong))
    one_line(error)


@pytest.mark.parametrize(("suffix", "codec"), [("avi", "MJPG"), ("mp4", "mp4v")])
def test_video_frames(tmp_path: Path, suffix: str, codec: str) -> None:
    path = tmp_path / f"clip.{suffix}"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 5, (64, 48))
    assert writer.isOpened()
    for value in (40, 120, 200):
        writer.write(np.full((48, 64, 3), value, np.uint8))
    writer.release()
    for source in (path, tmp_path):
        names, frames = names_and_pixels(source)
        assert names == ["clip_000000", "clip_000001", "clip_000002"]
        assert all(frame.shape == (48, 64, 3) for frame in frames)
        assert [round(float(frame.mean()) / 40) for frame in frames] == [1, 3, 5]


def test_broken_videos_and_empty_places_are_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "broken.mp4", tmp_path / "none.mp4", tmp_path / "empty", str(tmp_path / "*.gif")):
        with pytest.raises(HaloposeError) as error:
            list(read_source(source))
        one_line(error)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pictures_of_an_unknown_range_are_refused(mode: str) -> None:
    """Made eight bits, they would be cut off at 255 without a word."""
    with pytest.raises(HaloposeError, match=f"the mode {mode}") as error:
        as_bgr(Image.fromarray(np.full((4, 4), 3000, np.float32 if mode == "F" else np.int32)))
    one_line(error)


@pytest.mark.parametrize("wrong", [True, b"photo.jpg", bytearray(3), np.bool_(True)])
def test_unsupported_source_types_are_refused(wrong: object) -> None:
    with pytest.raises(HaloposeError, match="cannot take images from") as error:
        list(read_source(wrong))
    one_line(error)


def test_tensors_are_as_torch_has_them() -> None:
    tensor = torch.from_numpy(np.ascontiguousarray(COLOURS[..., ::-1].transpose(2, 0, 1)))
    for same in (tensor, tensor[None], tensor.float() / 255, tensor.double()[None] / 255):
        [image] = read_source(same)
        assert np.array_equal(image.pixels, COLOURS)
    assert len(list(read_source(torch.stack([tensor, tensor])))) == 2
    for wrong in (tensor.float(), tensor.long(), tensor[:2], tensor[0], torch.full((3, 4, 4), float("nan"))):
        with pytest.raises(HaloposeError, match="tensor") as error:
            list(read_source(wrong))
        one_line(error)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("pipe.jpg", "pipe.mp4"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(HaloposeError, match="regular file"):
            list(read_source(tmp_path / name))


def test_a_film_that_ends_early_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5, (64, 48))
    for value in range(40):
        writer.write(np.full((48, 64, 3), 5 * value, np.uint8))
    writer.release()
    with caplog.at_level("WARNING", logger="halopose"):
        whole = len(list(read_source(path)))
        assert (whole, caplog.text) == (40, "")
        content = path.read_bytes()
        (tmp_path / "cut.avi").write_bytes(content[: len(content) // 2])
        some = len(list(read_source(tmp_path / "cut.avi")))
    assert 0 < some < whole
    assert f"ends after {some} of 40 frames" in caplog.text


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_image("a.png", np.zeros((4, 4, 3), np.uint8))
    assert [image.name for image in read_source(".")] == ["a"]
    with pytest.raises(HaloposeError, match="empty path"):
        list(read_source(""))
