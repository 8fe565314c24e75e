"""A window on the screen for annotated images."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from types import TracebackType

import cv2

from halopose.errors import HaloposeError
from halopose.types import Array

_ESCAPE, _QUIT = 27, ord("q")


class Window:
    """A window that shows images; q, Escape or closing the window ends it.

    Args:
        title: Title of the window.
        rate: Write the frames per second into each image.

    Raises:
        HaloposeError: OpenCV has no windows, or there is no screen.
    """

    def __init__(self, title: str = "halopose", rate: bool = False) -> None:
        check_screen()
        os.environ.setdefault("QT_LOGGING_RULES", "*.warning=false")  # Qt warns about missing fonts
        self.title, self._rate = title, rate
        self._last, self._pace = 0.0, 0.0
        self._open = False

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, image: Array, wait: bool = False) -> bool:
        """Show an image.

        Args:
            image: BGR image (h, w, 3).
            wait: Wait until a key is pressed or the window is closed.

        Returns:
            False if q or Escape was pressed or the window was closed; else True.
        """
        if self._rate:
            image = self._with_rate(image)
        if not self._open:
            cv2.namedWindow(self.title, cv2.WINDOW_NORMAL | cv2.WINDOW_KEEPRATIO | cv2.WINDOW_GUI_NORMAL)
            height, width = image.shape[:2]
            shrink = min(1.0, 1280 / width, 800 / height)
            cv2.resizeWindow(self.title, round(width * shrink), round(height * shrink))
            self._open = True
        cv2.imshow(self.title, image)
        key = cv2.waitKey(1) & 0xFF
        while wait and key == 0xFF and self._visible():
            key = cv2.waitKey(50) & 0xFF
        return key not in (_ESCAPE, _QUIT) and self._visible()

    def close(self) -> None:
        """Close the window."""
        if self._open and self._visible():
            cv2.destroyWindow(self.title)
        self._open = False

    def _visible(self) -> bool:
        try:
            return cv2.getWindowProperty(self.title, cv2.WND_PROP_VISIBLE) >= 1
        except cv2.error:
            return False

    def _with_rate(self, image: Array) -> Array:
        now = time.monotonic()
        if self._last:
            pace = now - self._last
            self._pace = pace if not self._pace else 0.9 * self._pace + 0.1 * pace
        self._last = now
        image = image.copy()
        if self._pace:
            size = max(0.6, image.shape[0] / 900)
            text, font = f"{1 / self._pace:.1f} frames/s", cv2.FONT_HERSHEY_SIMPLEX
            (width, height), below = cv2.getTextSize(text, font, size, 1)
            corner = width + 2 * below, height + 3 * below
            cv2.rectangle(image, (0, 0), corner, (30, 30, 30), cv2.FILLED)
            cv2.putText(image, text, (below, height + below), font, size, (240, 240, 240), 1, cv2.LINE_AA)
        return image


def check_screen() -> None:
    """Raise a HaloposeError without window support or screen, because some OpenCV builds abort the process."""
    if not has_windows():
        raise HaloposeError(
            "this OpenCV has no window support: pip uninstall opencv-python-headless, then pip install "
            "opencv-python; or save pictures instead"
        )
    if not has_screen():
        raise HaloposeError("there is no screen (DISPLAY is not set or not reachable): save pictures instead")


def has_windows() -> bool:
    """Return whether OpenCV was built with windows; the headless packages were not."""
    found = re.search(r"^\s*GUI:\s*(\S+)", cv2.getBuildInformation(), re.MULTILINE)
    return found is None or found[1].upper() != "NONE"


def has_screen() -> bool:
    """Return whether windows can be opened. On Linux the X server named by DISPLAY must accept a connection."""
    if not sys.platform.startswith("linux"):
        return True
    place = re.fullmatch(r"(?:unix)?([^:/]*):([0-9]+)(?:\.[0-9]+)?", os.environ.get("DISPLAY", ""))
    if place is None:
        return False
    host, number = place[1], int(place[2])
    if host:
        return _connects(socket.AF_INET, (host, 6000 + number))
    path = f"/tmp/.X11-unix/X{number}"
    return _connects(socket.AF_UNIX, path) or _connects(socket.AF_UNIX, "\0" + path)


def _connects(family: int, address: tuple[str, int] | str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(address)
            return True
    except (OSError, OverflowError):
        return False
