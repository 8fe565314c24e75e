"""Sizes from headers agree with the decoder, and too large images are refused before decoding."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from halopose.data.films import film_facts
from halopose.data.image_header import read_header
from halopose.data.images import decode_image, read_source
from halopose.errors import HaloposeError

PIXELS = np.random.default_rng(0).integers(0, 256, (37, 51, 3), dtype=np.uint8)


def png_of(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2", ".ppm", ".pgm", ".pam"])
@pytest.mark.parametrize("grey", [False, True])
def test_sizes_equal_those_of_the_decoder(suffix: str, grey: bool) -> None:
    if suffix in (".ppm", ".pgm") and grey == (suffix == ".ppm"):
        pytest.skip("no such file")
    content = cv2.imencode(suffix, PIXELS[..., 0] if grey else PIXELS)[1].tobytes()
    header = read_header(content)
    assert header is not None
    assert (header.width, header.height, header.pages, header.damaged) == (51, 37, 1, False)


@pytest.mark.parametrize("options", [{"progressive": True}, {"quality": 30}, {"exif": b"Exif\0\0" + b"x" * 900}])
@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF", "BMP", "PNG", "GIF"])
def test_sizes_of_files_from_another_encoder(kind: str, options: dict[str, object], tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a", kind, **({} if kind in ("TIFF", "BMP", "GIF") else options))
    header = read_header((tmp_path / "a").read_bytes())
    assert header is not None
    assert (header.width, header.height, header.pages, header.damaged) == (51, 37, 1, False)


@pytest.mark.parametrize("limit", [None, "1000"])
def test_too_many_pixels_are_refused_before_decoding(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    content = png_of(30_000, 30_000)
    if limit:
        monkeypatch.setenv("HALOPOSE_MAX_PIXELS", limit)
        content = cv2.imencode(".jpg", PIXELS)[1].tobytes()
    with pytest.raises(HaloposeError, match=r"big\.png has .*HALOPOSE_MAX_PIXELS"):
        decode_image(content, "big.png")
    monkeypatch.setenv("HALOPOSE_MAX_PIXELS", "many")
    with pytest.raises(HaloposeError, match="positive whole number"):
        decode_image(content, "big.png")


def test_large_frames_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5, (64, 48))
    writer.write(np.zeros((48, 64, 3), np.uint8))
    writer.release()
    monkeypatch.setenv("HALOPOSE_MAX_PIXELS", "3000")
    with pytest.raises(HaloposeError, match=r"clip\.avi has 64 x 48"):
        list(read_source(path))


def test_a_film_with_too_many_frames_in_its_header_has_an_unknown_length(tmp_path: Path) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5, (64, 48))
    for _ in range(3):
        writer.write(np.zeros((48, 64, 3), np.uint8))
    writer.release()
    content = path.read_bytes().replace(struct.pack("<I", 3), struct.pack("<I", 2**31 - 2))
    path.write_bytes(content)
    assert film_facts(path)[1] in (0, 3)


def test_further_pages_and_frames_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pages = [Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1].copy())]
    for kind in ("TIFF", "WEBP", "PNG"):
        caplog.clear()
        pages[0].save(tmp_path / "a", kind, save_all=True, append_images=pages[1:])
        with caplog.at_level("WARNING", logger="halopose"):
            assert decode_image((tmp_path / "a").read_bytes(), f"a.{kind}").shape == PIXELS.shape
        assert f"a.{kind}" in caplog.text
        assert "only the first" in caplog.text


def test_a_damaged_jpeg_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    content = cv2.imencode(".jpg", cv2.resize(PIXELS, (640, 480)))[1].tobytes()
    middle = len(content) // 2
    with caplog.at_level("WARNING", logger="halopose"):
        decode_image(content, "whole.jpg")
        decode_image(content + b"a film behind the photograph", "longer.jpg")
        assert not caplog.text
        decode_image(content[:middle] + b"\xff\x41" + content[middle + 2 :], "marker.jpg")
        assert "marker.jpg is damaged" in caplog.text
    with pytest.raises(HaloposeError, match=r"cut\.jpg is damaged"):
        decode_image(content[:middle], "cut.jpg")


@pytest.mark.parametrize(
    "content", [b"\xff\xd8", b"\xff\xd8\xff", b"BM", b"RIFF", b"II*\0", b"P6\n", b"\x89PNG\r\n\x1a\n"]
)
def test_headers_that_end_early_are_one_line_errors(content: bytes) -> None:
    for more in (b"", b"\0" * 40, b"\xff" * 40):
        with pytest.raises(HaloposeError, match=r"a\.jpg (is damaged|has \d+ x)"):
            decode_image(content + more, "a.jpg")
