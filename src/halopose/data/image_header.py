"""Size and number of pages of an image, read from its header before anything is decoded."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass

from halopose.errors import HaloposeError

MAX_PIXELS = 100_000_000  # of one image or frame, unless HALOPOSE_MAX_PIXELS says otherwise
_PNM = re.compile(rb"P[1-7][\s\0]")
_PNM_SIZE = re.compile(rb"P[1-6](?:\s+|#[^\n]*\n)*(\d{1,9})(?:\s+|#[^\n]*\n)+(\d{1,9})")
_PAM_SIZE = re.compile(rb"P7\n(?:.*\n)*?WIDTH (\d{1,9})\n(?:.*\n)*?HEIGHT (\d{1,9})\n")
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_MARKER_IN_SCAN = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)  # restart markers belong to a scan
_SEGMENTS = {0xC4, 0xDA, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # that may stand between two scans


@dataclass(frozen=True)
class ImageHeader:
    """What the header of an image file says.

    Attributes:
        width: Width in pixels.
        height: Height in pixels.
        pages: 1, or 2 if the file has several pages or frames, of which only the first is decoded.
        damaged: Whether the compressed data is cut or contains impossible markers (JPEG only).
    """

    width: int
    height: int
    pages: int = 1
    damaged: bool = False


def pixel_budget() -> int:
    """Return the most pixels that an image may have: ``HALOPOSE_MAX_PIXELS``, else `MAX_PIXELS`."""
    given = os.environ.get("HALOPOSE_MAX_PIXELS")
    if given is None:
        return MAX_PIXELS
    if not (given.isascii() and given.isdigit() and int(given[:18]) > 0):
        raise HaloposeError(f"HALOPOSE_MAX_PIXELS is a positive whole number, got {given!r}")
    return int(given)


def check_pixels(width: float, height: float, name: object) -> None:
    """Raise a HaloposeError if an image or the frames of a film have more pixels than the budget."""
    if width * height > pixel_budget():
        raise HaloposeError(
            f"{name} has {width:.0f} x {height:.0f} pixels, more than {pixel_budget()}: make it smaller, or set "
            "HALOPOSE_MAX_PIXELS if you trust it"
        )


def read_header(content: bytes) -> ImageHeader | None:
    """Read the header of an encoded image; None if the format is unknown or the header is damaged."""
    try:
        for signature, reader in _READERS:
            if content.startswith(signature):
                return reader(content)
        if _PNM.match(content):
            found = (_PAM_SIZE if content.startswith(b"P7") else _PNM_SIZE).match(content[:4096])
            return ImageHeader(int(found[1]), int(found[2])) if found else None
        if content[4:8] == b"ftyp":
            return _avif(content)
    except (struct.error, IndexError):
        pass
    return None


def _png(content: bytes) -> ImageHeader:
    width, height = struct.unpack_from(">II", content, 16)
    return ImageHeader(width, height, 2 if b"acTL" in content[:1024] else 1)


def _gif(content: bytes) -> ImageHeader:
    width, height = struct.unpack_from("<HH", content, 6)
    return ImageHeader(width, height)


def _bmp(content: bytes) -> ImageHeader:
    if struct.unpack_from("<I", content, 14)[0] == 12:  # OS/2
        width, height = struct.unpack_from("<HH", content, 18)
    else:
        width, height = struct.unpack_from("<ii", content, 18)
    return ImageHeader(abs(width), abs(height))


def _jpeg(content: bytes) -> ImageHeader | None:
    place, size = 2, None
    while True:
        if content[place] != 0xFF:
            return None
        while content[place] == 0xFF:
            place += 1
        marker = content[place]
        length = struct.unpack_from(">H", content, place + 1)[0]
        if marker in _START_OF_FRAME:
            height, width = struct.unpack_from(">HH", content, place + 4)
            size = width, height
        if marker == 0xDA:
            break
        place += 1 + length
    return ImageHeader(*size, damaged=_is_cut(content, place + 1 + length)) if size else None


def _is_cut(content: bytes, place: int) -> bool:
    """Return whether the scans of a JPEG from `place` on do not end with an end marker."""
    while True:
        found = _MARKER_IN_SCAN.search(content, place)
        if found is None:
            return True
        marker = found[1][0]
        if marker == 0xD9:
            return False
        if marker not in _SEGMENTS or found.end() + 2 > len(content):
            return True
        place = found.end() + struct.unpack_from(">H", content, found.end())[0]


def _webp(content: bytes) -> ImageHeader | None:
    kind = content[12:16]
    if content[8:12] != b"WEBP":
        return None
    if kind == b"VP8X":
        width = int.from_bytes(content[24:27], "little") + 1
        return ImageHeader(width, int.from_bytes(content[27:30], "little") + 1, 2 if content[20] & 2 else 1)
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", content, 21)[0]
        return ImageHeader((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    width, height = struct.unpack_from("<HH", content, 26)
    return ImageHeader(width & 0x3FFF, height & 0x3FFF)


def _tiff(content: bytes) -> ImageHeader | None:
    order = "<" if content.startswith(b"II") else ">"
    big = struct.unpack_from(order + "H", content, 2)[0] == 43
    word, entry = ("Q", 20) if big else ("I", 12)
    start = struct.unpack_from(order + word, content, 8 if big else 4)[0]
    count = struct.unpack_from(order + ("Q" if big else "H"), content, start)[0]
    first = start + (8 if big else 2)
    size: dict[int, int] = {}
    for place in range(first, first + min(count, 4096) * entry, entry):
        tag, kind = struct.unpack_from(order + "HH", content, place)
        if tag in (256, 257):
            code = {3: "H", 4: "I", 16: "Q"}.get(kind, "I")
            size[tag] = struct.unpack_from(order + code, content, place + (12 if big else 8))[0]
    following = struct.unpack_from(order + word, content, first + count * entry)[0]
    return ImageHeader(size[256], size[257], 2 if following else 1) if len(size) == 2 else None


def _jp2(content: bytes) -> ImageHeader | None:
    """JPEG 2000, as a bare code stream or in boxes: the SIZ segment gives the corners of the image."""
    place = content.find(b"\xff\x4f\xff\x51")
    if place < 0:
        return None
    right, bottom, left, top = struct.unpack_from(">IIII", content, place + 8)
    return ImageHeader(max(right - left, 0), max(bottom - top, 0))


def _avif(content: bytes) -> ImageHeader | None:
    sizes = [struct.unpack_from(">II", content, found.end() + 4) for found in re.finditer(b"ispe", content[:65536])]
    return ImageHeader(*max(sizes, key=lambda size: int(size[0] * size[1]))) if sizes else None


_READERS = (
    (b"\xff\xd8", _jpeg),
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"RIFF", _webp),
    (b"BM", _bmp),
    (b"II*\0", _tiff),
    (b"MM\0*", _tiff),
    (b"II+\0", _tiff),
    (b"MM\0+", _tiff),
    (b"\0\0\0\x0cjP  ", _jp2),
    (b"\xff\x4f\xff\x51", _jp2),
    (b"GIF8", _gif),
)
