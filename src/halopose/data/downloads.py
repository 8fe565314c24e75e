"""Images and films at http addresses: what an address names, and its download.

Addresses of cameras (rtsp, mjpeg over http) are left to OpenCV.
"""

from __future__ import annotations

import http.client
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from halopose.data.suffixes import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from halopose.errors import HaloposeError

TIMEOUT = 10.0  # seconds without an answer
LARGEST_IMAGE = 2**28  # bytes

WebKind = Literal["image", "film", "stream"]


def web_kind(address: str) -> WebKind:
    """Return what an address names, from its suffix or else from the media type that the server states.

    An address that is not http, or that cannot be reached, counts as a stream.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme.lower() not in ("http", "https"):
        return "stream"
    suffix = PurePosixPath(parts.path).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return "image"
    if suffix in VIDEO_SUFFIXES:
        return "film"
    if suffix:  # such as .m3u8 or .mjpg
        return "stream"
    try:
        with closing(_opened(address)) as answer:
            return "image" if answer.headers.get_content_maintype() == "image" else "stream"
    except HaloposeError:
        return "stream"


def web_name(address: str) -> str:
    """Return a name for results that is valid on every file system: the file's stem, or the host and path."""
    parts = urllib.parse.urlsplit(address)
    path = PurePosixPath(urllib.parse.unquote(parts.path))
    whole = f"{parts.hostname or ''}_{parts.port or ''}_{parts.path}"
    text = path.stem if path.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES else f"stream_{whole}"
    return re.sub(r"(?:[^\w.-]|_)+", "_", text).strip("_.") or "stream"


def download_image(address: str) -> bytes:
    """Download the bytes of an image file."""
    with closing(_opened(address)) as answer:
        try:
            content = answer.read(LARGEST_IMAGE + 1)
        except (OSError, http.client.HTTPException) as error:
            raise HaloposeError(f"cannot download {address}: {_reason(error)}") from None
    if len(content) > LARGEST_IMAGE:
        raise HaloposeError(f"{address} has more than {LARGEST_IMAGE >> 20} MiB: it is no usual image")
    return bytes(content)


def serves_ranges(address: str) -> bool:
    """Return whether the server sends parts of the file, as OpenCV needs to read a film from an address."""
    with closing(_opened(address, {"Range": "bytes=0-0"})) as answer:
        return bool(answer.status == http.client.PARTIAL_CONTENT)


def download_film(address: str, target: Path) -> None:
    """Download a film to a file."""
    with closing(_opened(address)) as answer:
        try:
            with target.open("wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
        except (OSError, http.client.HTTPException) as error:
            raise HaloposeError(f"cannot download {address} to {target}: {_reason(error)}") from None


def _opened(address: str, headers: Mapping[str, str] | None = None) -> Any:
    """Return the open answer of the server."""
    request = urllib.request.Request(address, headers={"User-Agent": "halopose", **(headers or {})})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise HaloposeError(f"cannot reach {address}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    reason = getattr(error, "reason", None)
    return str(getattr(reason, "strerror", None) or reason or getattr(error, "strerror", None) or error)
