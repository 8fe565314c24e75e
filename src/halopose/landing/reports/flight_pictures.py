"""Pictures of a landing: camera image, vision fix and fused position, one composition per frame or as an animation.

Compositions are (720, 1280, 3) in BGR, after the figure in the paper. The truth is black, vision orange, the fused
track blue; ellipses contain 95 %.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import cv2
import numpy as np
import torch
from scipy.ndimage import gaussian_filter1d

from halopose.errors import HaloposeError
from halopose.install_advice import install_command
from halopose.landing.association import expected_corners
from halopose.landing.flight import Flight
from halopose.landing.frame_buffer import MOST
from halopose.landing.summary import total_covariance
from halopose.landing.vision_fix import usable_corners
from halopose.landing.world.scenes import AIMING_POINT
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian, StudentT, scale_tril_from_covariance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

Box = tuple[float, float, float, float]  # left, top, width, height in pixels

WIDTH, HEIGHT = 1280, 720
RATE, QUALITY = 10.0, 75  # animations: frames per second, and WebP quality
ANIMATIONS = (".webp", ".gif", ".png", ".apng")
PROBABILITY = 0.95
TRUTH, VISION_DRIFT, FUSED = "#16171a", "#d9600a", "#0b6aa6"
_ON_PICTURE = {VISION_DRIFT: "#ff9a2e", FUSED: "#53b9ff"}  # brighter colours for dark pictures
_PRUNED, _MUTED, _GRID, _BAD, _PAPER = "#d8d8d8", "#6b6d72", "#e9e8e4", "#b3261e", "#ffffff"
_STYLE: dict[Any, Any] = {
    "font.sans-serif": ["Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9.0,
    "axes.unicode_minus": True,
}
_PICTURE: Box = (24, 64, 720, 432)
_MAGNIFIED: Box = (24, 512, 240, 184)
SPLIT = 776  # x in pixels that separates the camera image and its numbers from the views
PHOTOGRAPHS = (_PICTURE, _MAGNIFIED)  # photographs, which are not inverted in dark mode
_VIEWS = (("Top", 0, 1), ("Side", 0, 2), ("Front", 1, 2))
_AXES = ("x", "y", "z")
_NEAREST = np.array([25.0, 2.0, 2.0])  # metres: smallest half width of a view
_SPREADS = 4.0  # smallest half width in standard deviations
_TRAIL = 6  # number of earlier ellipses shown
_CIRCLE = np.stack([f(np.linspace(0, 2 * np.pi, 73)) for f in (np.cos, np.sin)], axis=1)
_CORNERS = ("near left", "near right", "far right", "far left")


def draw_film(flight: Flight, most: int = MOST) -> list[Array]:
    """Yield the compositions (720, 1280, 3), uint8 BGR, of at most ``most`` frames, evenly spaced."""
    if most < 1:
        raise HaloposeError(f"an animation takes one frame or more, got {most}")
    composition, frames = Composition(flight), flight.frames_with_images
    return [composition.draw(n) for n in frames[:: math.ceil(len(frames) / most)]]


def write_film(frames: Sequence[Array], path: Path | str, rate: float = RATE, quality: int = QUALITY) -> Path:
    """Write a looping animation as WebP, GIF or APNG, by suffix, at ``rate`` frames per second."""
    path = Path(path)
    check_animation(path)
    if not rate > 0:
        raise HaloposeError(f"an animation takes a rate above 0, got {rate}")
    film = cv2.Animation()
    film.frames = list(frames)
    film.durations = [round(1000 / rate)] * len(film.frames)
    film.loop_count = 0  # loop forever
    _write(film, path, [cv2.IMWRITE_WEBP_QUALITY, quality] if path.suffix.lower() == ".webp" else [])
    return path


def stills(frames: Sequence[Array], quality: int = QUALITY) -> list[bytes]:
    """Return each frame as a WebP file, for a page that can stop at any of them."""
    return [cv2.imencode(".webp", frame, [cv2.IMWRITE_WEBP_QUALITY, quality])[1].tobytes() for frame in frames]


def check_animation(path: Path) -> None:
    """Raise an error before the flight if an animation cannot be written."""
    if path.suffix.lower() not in ANIMATIONS:
        raise HaloposeError(f"cannot animate as {path.name}: name it {', '.join(ANIMATIONS)}")
    if not hasattr(cv2, "imwriteanimation"):
        raise HaloposeError("animations need OpenCV 4.11: pip install -U opencv-python-headless")
    _check_matplotlib()


def _check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise HaloposeError(f"pictures of a landing need matplotlib: {install_command('landing')}")


def _write(film: Any, path: Path, options: list[int]) -> None:
    """Write the animation completely or not at all."""
    suffix = ".png" if path.suffix.lower() == ".apng" else path.suffix.lower()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / f"film{suffix}"
            if not cv2.imwriteanimation(str(written), film, options):
                raise HaloposeError(f"OpenCV cannot write {path.name}: try .webp")
            os.replace(written, path)
    except OSError as error:
        raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None


def state_of(flight: Flight, n: int) -> tuple[str, bool]:
    """Return the result of frame n in words, and whether its position may be used."""
    corner_detections, fixes = flight.corner_detections, flight.vision_fixes
    if not corner_detections.seen[n]:
        return corner_detections.reason(n), False
    if not fixes.solved[n]:
        return f"no position: {fixes.reasons[n]}", False
    if not fixes.trusted[n]:
        return f"not trusted: {fixes.reasons[n].removeprefix('not trusted: ')}", False
    if fixes.excluded[n] >= 0:
        return f"solved without {_CORNERS[int(fixes.excluded[n])]}", True
    pruned = 4 - int(usable_corners(corner_detections.select([n]), flight.settings).sum())
    return f"solved, {pruned} pruned" if pruned else "solved", True


def outlines(centre: Array, scale: Array, dof: Array | None = None) -> Array:
    """Return 95 % ellipses (M, 73, 2) around centres (M, 2).

    Args:
        centre: centres (M, 2).
        scale: covariances (M, 2, 2), or scale matrices of a Student-t distribution.
        dof: its degrees of freedom (M,); None for a Gaussian.
    """
    factors = scale_tril_from_covariance(torch.from_numpy(np.ascontiguousarray(scale, dtype=np.float64)))
    distribution = (
        Gaussian(factors) if dof is None else StudentT(factors, torch.from_numpy(np.asarray(dof, np.float64)))
    )
    axes, angles = (value.numpy() for value in distribution.ellipse(PROBABILITY))
    cos, sin = np.cos(angles), np.sin(angles)
    turn = np.stack([cos, -sin, sin, cos], axis=-1).reshape(-1, 2, 2)
    return centre[:, None] + (axes[:, None] * _CIRCLE) @ turn.swapaxes(1, 2)


class Composition:
    """Figure of all frames, built once; drawing a frame only updates its parts."""

    def __init__(self, flight: Flight) -> None:
        if len(flight.images) != len(flight.frame_times):
            raise HaloposeError(
                f"a picture of each frame is needed: {len(flight.images)} images, {len(flight.frame_times)} frames"
            )
        _check_matplotlib()
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.flight = flight
        self._style: Any = rc_context
        with self._style(_STYLE):
            figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=_PAPER)
            self._canvas: Any = FigureCanvasAgg(figure)
            spread = total_covariance(flight)
            window = _windows(flight, spread)
            self._parts: list[_Part] = [
                _Caption(figure, flight),
                _Picture(figure, flight),
                _Picture(figure, flight, magnified=True),
                _Table(figure, flight),
                *(
                    _PlotView(figure, (828, 84 + 212 * row, 428, 164), flight, spread, window, *view)
                    for row, view in enumerate(_VIEWS)
                ),
            ]

    def draw(self, n: int) -> Array:
        """Return frame n (720, 1280, 3), uint8 BGR."""
        if not 0 <= n < len(self.flight.frame_times):
            raise HaloposeError(f"there is no frame {n}: the flight has {len(self.flight.frame_times)}")
        if not self.flight.images[n].size:
            raise HaloposeError(f"the image of frame {n} was not kept: draw those of flight.frames_with_images")
        with self._style(_STYLE):
            for part in self._parts:
                part.show(n)
            self._canvas.draw()
        return cv2.cvtColor(np.asarray(self._canvas.buffer_rgba()), cv2.COLOR_RGBA2BGR)


class _Part(Protocol):
    def show(self, n: int) -> None: ...


def _place(figure: Figure, box: Box) -> Axes:
    """Return axes at (left, top, width, height) in pixels from the upper left."""
    left, top, width, height = box
    return figure.add_axes((left / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT))


def _write_at(figure: Figure, left: float, top: float, text: str = "", **style: Any) -> Text:
    """Write text whose baseline starts, or with ha="right" ends, at pixels from the upper left."""
    return figure.text(left / WIDTH, 1 - top / HEIGHT, text, **{"va": "baseline", **style})


class _Caption:
    """Position of the aircraft and result of the frame, above the image; the legend above the views."""

    def __init__(self, figure: Figure, flight: Flight) -> None:
        self.flight = flight
        self.where = _write_at(figure, 24, 36, size=15, weight="bold", color=TRUTH)
        self.air = f"runway {flight.scenario.designator}, {flight.scenario.air}"
        self.when = _write_at(figure, 24, 54, color=_MUTED)
        self.state = _write_at(figure, 744, 36, ha="right", size=11, weight="bold")
        self.why = _write_at(figure, 744, 54, ha="right", color=_MUTED)
        for left, name, colour in ((834, "truth", TRUTH), (904, "vision", VISION_DRIFT), (980, "fused", FUSED)):
            _write_at(figure, left, 36, "\N{BLACK CIRCLE}", color=colour, size=11, ha="center")
            _write_at(figure, left + 10, 36, name, color=TRUTH, size=11)
        _write_at(figure, 1256, 36, "metres, ellipses hold 95 %", ha="right", color=_MUTED)

    def show(self, n: int) -> None:
        (x, _, z), time = self.flight.reference[n], self.flight.frame_times[n] - self.flight.frame_times[0]
        self.where.set_text(f"{_kilometres(-x)} to the threshold, {z:.0f} m high")
        self.when.set_text(f"{self.air}, {time:.1f} s")
        words, usable = state_of(self.flight, n)
        state, _, why = words.partition(": ")
        self.state.set_text(state)
        self.state.set_color(FUSED if usable else _BAD)
        self.why.set_text(why)


class _Picture:
    """Camera image with corners: detected with ellipses, by the filter, and if magnified also true ones."""

    def __init__(self, figure: Figure, flight: Flight, *, magnified: bool = False) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.patches import Rectangle

        self.flight, self.magnified, place = flight, magnified, flight.scenario
        camera, mount, corners = place.camera, place.mount, place.corners
        self.true = expected_corners(camera, mount, flight.position, flight.attitude, corners)
        self.fused = expected_corners(camera, mount, flight.fused, flight.attitude, corners)
        self.axes = _place(figure, _MAGNIFIED if magnified else _PICTURE)
        self.axes.set_axis_off()
        extent = (-0.5, camera.width - 0.5, camera.height - 0.5, -0.5)
        around = Rectangle((-1e4, -1e4), 2e4, 2e4, color="#26282c", zorder=-1)  # the window leaves the image
        self.axes.add_patch(around)
        self.image = self.axes.imshow(flight.images[0][..., ::-1], extent=extent, interpolation="bicubic")
        self.axes.set(xlim=extent[:2], ylim=extent[2:], autoscale_on=False, aspect="auto")
        self.lines = {
            name: self.axes.plot([], [], color=colour, lw=width, ls=style)[0]
            for name, colour, width, style in (
                ("true", TRUTH, 1.0, (0, (2, 2))),
                ("fused", _ON_PICTURE[FUSED], 1.2, "-"),
                ("seen", _ON_PICTURE[VISION_DRIFT], 0.8, "-"),
            )
        }
        self.ellipses = PolyCollection([], linewidths=1.3 if magnified else 1.0)
        self.axes.add_collection(self.ellipses, autolim=False)
        self.dots = self.axes.plot([], [], "o", color=_ON_PICTURE[VISION_DRIFT], ms=2.6 if magnified else 1.8)[0]
        self.frame = Rectangle((0, 0), 0, 0, fill=False, ec="white", lw=0.8, alpha=0.8)
        self.axes.add_patch(self.frame)
        self.zoom = self.axes.text(
            0.97, 0.06, "", transform=self.axes.transAxes, ha="right", color="white", size=9, weight="bold"
        )

    def show(self, n: int) -> None:
        left, right, top, bottom = self._window(n)
        self.image.set_data(cv2.cvtColor(self.flight.images[n], cv2.COLOR_BGR2RGB))
        if self.magnified:
            self.axes.set(xlim=(left, right), ylim=(bottom, top))
            self.zoom.set_text(f"{_MAGNIFIED[2] / (right - left):.1f}\N{MULTIPLICATION SIGN}")
            self.lines["true"].set_data(*_closed(self.true[n]))
        else:
            self.frame.set_bounds(left, top, right - left, bottom - top)
        self.lines["fused"].set_data(*_closed(self.fused[n]))
        self._show_detection(n)

    def _show_detection(self, n: int) -> None:
        seen, pixels = self.flight.corner_detections, self.flight.corner_detections.pixels[n]
        known = np.flatnonzero(np.isfinite(pixels).all(1) & np.isfinite(seen.scale[n]).all((1, 2)))
        colours = [_ON_PICTURE[VISION_DRIFT] if seen.keep[n, k] else _PRUNED for k in known]
        dof = None if seen.dof is None else seen.dof[n, known]
        self.ellipses.set_verts(list(outlines(pixels[known], seen.scale[n, known], dof)))
        self.ellipses.set(edgecolors=colours, facecolors=[(*_rgb(colour), 0.25) for colour in colours])
        self.lines["seen"].set_data(*_closed(pixels))
        self.dots.set_data(*pixels[known].T)

    def _window(self, n: int) -> tuple[float, float, float, float]:
        """Return left, right, top, bottom of the magnified part around the true runway."""
        camera = self.flight.scenario.camera
        corners = self.true[n] if np.isfinite(self.true[n]).all() else self.fused[n]
        if not np.isfinite(corners).all():
            return -0.5, camera.width - 0.5, -0.5, camera.height - 0.5
        low, high = corners.min(0), corners.max(0)
        width, height = 1.15 * (high - low) + 14
        shape = _MAGNIFIED[2] / _MAGNIFIED[3]
        half_width, half_height = max(width, height * shape) / 2, max(height, width / shape) / 2
        u, v = (low + high) / 2
        return u - half_width, u + half_width, v - half_height, v + half_height


class _Table:
    """Table of true position, vision and fused position and their differences, by axis."""

    def __init__(self, figure: Figure, flight: Flight) -> None:
        self.flight = flight
        columns = (
            (424, "truth", TRUTH),
            (512, "vision", VISION_DRIFT),
            (588, "diff", VISION_DRIFT),
            (676, "fused", FUSED),
            (744, "diff", FUSED),
        )
        for right, name, colour in columns:
            _write_at(figure, right, 544, name, ha="right", color=colour, size=11, weight="bold")
        for row, (axis, meaning) in enumerate(zip(_AXES, ("along", "left", "up"), strict=True)):
            _write_at(figure, 292, _row(row), axis, size=12, weight="bold", color=TRUTH)
            _write_at(figure, 306, _row(row), meaning, color=_MUTED)
        note = "In the picture: corners as detected, runway as fused, dashed as it is"
        _write_at(figure, 292, 694, note, color=_MUTED)
        self.cells = [
            [_write_at(figure, right, _row(row), ha="right", color=colour, size=12) for right, _, colour in columns]
            for row in range(3)
        ]

    def show(self, n: int) -> None:
        truth, vision, fused = self.flight.position[n], self.flight.vision_fixes.position[n], self.flight.fused[n]
        values = np.stack([truth, vision, vision - truth, fused, fused - truth], axis=1)
        for cells, row in zip(self.cells, values, strict=True):
            for column, (cell, value) in enumerate(zip(cells, row, strict=True)):
                cell.set_text(_metres(value, signed=column in (2, 4)))


def _row(number: int) -> float:
    return 580.0 + 36 * number


def _metres(value: float, *, signed: bool = False) -> str:
    if not np.isfinite(value):
        return "–"
    return f"{value:{'+' if signed else ''}.1f}".replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0")


def _kilometres(metres: float) -> str:
    return f"{metres / 1000:.2f} km" if metres >= 1000 else f"{metres:.0f} m"


class _PlotView:
    """One projection around the aircraft: flown path, estimates so far, and the current ones with ellipses.

    Args:
        spread: covariances (N, 3, 3) of the vision fixes.
        window: half widths (N, 3) of the view.
    """

    def __init__(
        self,
        figure: Figure,
        box: Box,
        flight: Flight,
        spread: Array,
        window: Array,
        name: str,
        across: int,
        up: int,
    ) -> None:
        from matplotlib.collections import LineCollection
        from matplotlib.ticker import MaxNLocator

        self.flight, self.spread, self.window, self.axis = flight, spread, window, [across, up]
        self.axes = _place(figure, box)
        self.axes.set(autoscale_on=False)
        self.axes.tick_params(length=0, labelcolor=_MUTED, labelsize=8.5, pad=5)
        self.axes.grid(color=_GRID, lw=0.8)
        self.axes.set_axisbelow(True)
        self.axes.spines[:].set_visible(False)
        self.axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        self.axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        left, top, width, _ = box
        _write_at(figure, left, top - 8, name, size=11, weight="bold", color=TRUTH)
        _write_at(figure, left + width, top - 8, f"{_AXES[up]} over {_AXES[across]}", ha="right", color=_MUTED)
        self.path = self.axes.plot([], [], color="#a5a39d", lw=1.0, ls=(0, (5, 4)))[0]
        self.trail = LineCollection([], colors=VISION_DRIFT, linewidths=0.6, alpha=0.3)
        self.axes.add_collection(self.trail, autolim=False)
        plot = self.axes.plot
        self.doubted = plot([], [], "o", mfc="none", mec=VISION_DRIFT, ms=4, mew=0.8, alpha=0.6)[0]
        self.trusted = plot([], [], "o", mfc=VISION_DRIFT, mec="none", ms=4, alpha=0.45)[0]
        self.fused = plot([], [], color=FUSED, lw=3.6, alpha=0.55, solid_capstyle="butt")[0]
        self.true = plot([], [], color=TRUTH, lw=1.1)[0]
        self.now = {
            colour: (
                self.axes.fill([], [], fc=(*_rgb(colour), 0.16), ec=colour, lw=1.5)[0],
                plot([], [], "o", color=colour, ms=size, mec=_PAPER, mew=0.8)[0],
            )
            for colour, size in ((VISION_DRIFT, 7), (FUSED, 6))
        }
        self.here = plot([], [], "+", color=TRUTH, ms=13, mew=1.3)[0]

    def show(self, n: int) -> None:
        flight, centre, half = self.flight, self.flight.reference[n], self.window[n]
        low, high = (centre - half)[self.axis], (centre + half)[self.axis]
        ends = (high[0], low[0]) if self.axis[0] == 1 else (low[0], high[0])  # view from behind: left is left
        self.axes.set(xlim=ends, ylim=(low[1], high[1]))
        track, true = flight.track, (flight.frame_times, flight.position)
        for line, (times, places) in ((self.true, true), (self.fused, (track.times, track.positions))):
            recent = (times <= flight.frame_times[n]) & (abs(places[:, 0] - centre[0]) <= half[0])
            line.set_data(*places[recent][:, self.axis].T)
        self.here.set_data(*flight.position[n][self.axis, None])
        self._show_glide_path(centre, half)
        past = np.flatnonzero(np.abs(flight.reference[: n + 1, 0] - centre[0]) <= half[0])
        solved, trusted = flight.vision_fixes.solved.astype(bool), flight.vision_fixes.trusted.astype(bool)
        for line, which in ((self.trusted, trusted), (self.doubted, ~trusted)):
            line.set_data(*flight.vision_fixes.position[past[which[past]]][:, self.axis].T)
        earlier = past[solved[past] & (past < n)][-_TRAIL:]
        self.trail.set_segments(list(self._ellipses(flight.vision_fixes.position[earlier], self.spread[earlier])))
        self._show_now(VISION_DRIFT, flight.vision_fixes.position[n], self.spread[n])
        self._show_now(FUSED, flight.fused[n], flight.fused_covariance[n])

    def _ellipses(self, position: Array, covariance: Array) -> Array:
        """Return the outlines (M, 73, 2) of positions (M, 3) with covariances (M, 3, 3) in this view."""
        return outlines(position[:, self.axis], covariance[:, self.axis][:, :, self.axis])

    def _show_now(self, colour: str, position: Array, covariance: Array) -> None:
        ellipse, dot = self.now[colour]
        known = bool(np.isfinite(position).all() and np.isfinite(covariance).all())
        ellipse.set_visible(known)
        dot.set_visible(known)
        if known:
            ellipse.set_xy(self._ellipses(position[None], covariance[None])[0])
            dot.set_data(*position[self.axis, None])

    def _show_glide_path(self, centre: Array, half: Array) -> None:
        along = centre[0] + half[0] * np.array([-1.0, 1.0])
        path = np.stack([along, np.zeros(2), _glide(self.flight) * (AIMING_POINT - along)], axis=1)
        if self.axis[0] == 1:  # from behind the path is a point: draw the localizer plane
            path[:, 2] = centre[2] + half[2] * np.array([-1.0, 1.0])
        self.path.set_data(*path[:, self.axis].T)


def _glide(flight: Flight) -> float:
    """Return the slope of the straight path to the aiming point that fits the flight best."""
    along, _, up = (flight.reference * (-1, 1, 1) + (AIMING_POINT, 0, 0)).T
    return float(along @ up / (along @ along))


def _windows(flight: Flight, spread: Array) -> Array:
    """Return half widths of views (N, 3): some standard deviations, smoothed over time so that axes do not jump."""
    spreads = [np.sqrt(np.diagonal(c, axis1=1, axis2=2)) for c in (spread, flight.fused_covariance)]
    known = np.fmax(*spreads)
    frames = np.arange(len(known))
    for axis in known.T:
        finite = np.isfinite(axis)
        axis[:] = np.interp(frames, frames[finite], axis[finite]) if finite.any() else 0.0
    wide = gaussian_filter1d(
        np.log(np.maximum(_SPREADS * known, _NEAREST)), max(len(known) / 40, 0.5), axis=0, mode="nearest"
    )
    return np.exp(wide)


def _closed(corners: Array) -> Array:
    """Return corners (4, 2) as a closed outline (2, 5)."""
    return corners[[0, 1, 2, 3, 0]].T


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = bytes.fromhex(colour[1:])
    return red / 255, green / 255, blue / 255
