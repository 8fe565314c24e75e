"""Align a layered model of a planar target with the pixels of one image, starting from an uncertain position.

The target is a plane z = 0 made of layers: areas with a common brightness and sharp borders. Each pixel is a mix of
layers. The shares (coverages) follow from the camera's position: the pixel's ray meets the plane at (x, y), and a
border is blurred by the pixel's footprint. Brightness per layer and channel is linear and is solved in closed form
within the search (variable projection), so the search is over the position, the blur and, if it is uncertain, the
attitude.

    image ~ sum_l coverage_l(position, blur) * brightness_l(image row)

Residuals are Student-t. The covariance is the sandwich estimate over blocks of pixels, plus a share of the prior's
covariance for errors that blocks cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import cv2
import numpy as np
from scipy.special import ndtr

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, exp_so3, normalise, project_points
from halopose.types import Array, Mask

Lights = Literal["auto", "on", "off"]

_DOF = 4.0  # of the residuals
_MEDIAN_CHI2 = 0.79  # median of the mean of three squared normal residuals
_BLUR, _BLUR_SPREAD = 0.85, 0.2  # pixels; standard deviation of its logarithm
_LAMP_BLUR = 1 / 12  # pixels^2 that a point spreads over beyond the blur of an area
_HALO = 4.2  # pixels, radius of the faint halo around a bright lamp
_LAMP_REACH = 11.0  # pixels around a lamp in which it is modelled
_DARKEST = 1e-6  # linear light
_SATURATED = 252  # brightest value of a pixel that is not clipped
_NOISE = (2e-6, 2e-3, 3e-3)  # relative variances of linear light: constant, photons, texture
_PRIOR = 1.6  # inflation of the prior's standard deviations during the search
_STEP = 1e-3  # of numerical derivatives
_ALONG, _ACROSS = (-2.4, -1.2, 0.0, 1.2, 2.4), (-1.2, 0.0, 1.2)  # grid in standard deviations of the prior
_APART = 1.1  # smallest distance of two starts in standard deviations
_STARTS, _FINALISTS = 5, 3
_HOPELESS = 40.0  # log likelihood behind the best start beyond which none is tried
_UNLIT_GAIN, _LIT_GAIN, _SURELY_LIT_GAIN = 6.0, 12.0, 60.0  # log likelihood gained by lamps: off, likely on, on
_LARGEST_BLUR_RATIO = 2.0
_BLOCK_ROWS = 6  # rows of a block of the sandwich covariance
_ROWS_PER_KNOT, _MOST_KNOTS = 8, 8
_FEWEST_PIXELS = 60


@dataclass(frozen=True)
class AlignmentSettings:
    """Settings of ``align_model``.

    Attributes:
        band: Width in pixels of the band around borders that is used.
        pixels: Largest number of pixels of the final fit.
        coarse_pixels: Largest number of pixels of the search.
        inflation: Factor on the sandwich covariance, fitted on scenes apart.
        floor: Share of the prior's standard deviation that is added as a lower bound.
        contrast: Log likelihood by which the layers must beat a picture without borders.
        narrowing: Largest ratio of the stated standard deviation to the prior's, along its longest axis.
        shift: Largest shift in the prior's standard deviations.
        gap: Log likelihood by which the best minimum must beat any other.
    """

    band: float = 6.0
    pixels: int = 6000
    coarse_pixels: int = 900
    inflation: float = 3.0
    floor: float = 0.05
    contrast: float = 400.0
    narrowing: float = 0.5
    shift: float = 4.0
    gap: float = 3.0


class GroundPoints(NamedTuple):
    """Points (N,) where rays of pixels meet the plane.

    Attributes:
        x: Coordinate x.
        y: Coordinate y.
        blur_x: Standard deviation of the blur along x.
        blur_y: Standard deviation of the blur along y.
        pixel_x: Length of a pixel along x.
        pixel_y: Length of a pixel along y.
    """

    x: Array
    y: Array
    blur_x: Array
    blur_y: Array
    pixel_x: Array
    pixel_y: Array

    def select(self, rows: Array) -> GroundPoints:
        """Return some of the points."""
        return GroundPoints(*(values[rows] for values in self))

    def x_share(self, low: float, high: float) -> Array:
        """Return the shares (N,) of the pixels with x in [low, high]."""
        return np.asarray(ndtr((high - self.x) / self.blur_x) - ndtr((low - self.x) / self.blur_x))

    def y_share(self, low: float, high: float) -> Array:
        """Return the shares (N,) of the pixels with y in [low, high]."""
        return np.asarray(ndtr((high - self.y) / self.blur_y) - ndtr((low - self.y) / self.blur_y))


class Layer(NamedTuple):
    """One layer.

    Attributes:
        coverage: Shares (N,) of the pixels.
        knots: Number of knots of its brightness along image rows, at most; 0: a quadratic.
        spread: Standard deviation of its brightness, relative to the median brightness of the pixels.
    """

    coverage: Array
    knots: int
    spread: float = 5.0


class LampRow(NamedTuple):
    """Lamps of one kind: places (L, 3); ``knots`` as in ``Layer``; ``bright`` lamps have a halo in the dark."""

    places: Array
    knots: int
    bright: bool


class PlaneModel(Protocol):
    """A planar target described by layers.

    The coverages of a pixel sum to 1 over the layers whose ``spread`` is at least 1. The others change the brightness
    of a part of them.
    """

    @property
    def corners(self) -> Array:
        """Corners (K, 3) that enclose the target."""

    @property
    def lamps(self) -> Sequence[LampRow]:
        """Rows of lamps; the first one decides whether lamps are on."""

    def informative(self, ground: GroundPoints, band: float) -> Mask:
        """Return which pixels (N,) are within ``band`` pixels of a border, and modelled."""

    def layers(self, ground: GroundPoints) -> list[Layer]:
        """Return the layers."""


@dataclass(frozen=True)
class Alignment:
    """Position of the camera by alignment; the prior where it was refused.

    Attributes:
        position: Position (3,).
        covariance: Covariance (3, 3).
        reason: Empty, or why the alignment was refused.
        contrast: Log likelihood by which layers beat a picture without borders.
        gap: Log likelihood by which the best minimum beats the next one.
        shift: Largest shift along an axis of the prior, in standard deviations.
        blur: Standard deviation (2,) of the blur in u and v in pixels.
        pixels: Number of pixels.
        lit: Whether lamps are part of the model.
    """

    position: Array
    covariance: Array
    reason: str = ""
    contrast: float = 0.0
    gap: float = 0.0
    shift: float = 0.0
    blur: tuple[float, float] = (_BLUR, _BLUR)
    pixels: int = 0
    lit: bool = False

    @property
    def accepted(self) -> bool:
        """Whether position and covariance are refined."""
        return not self.reason


def align_model(
    image: Array,
    camera: Camera,
    R_cam_plane: Array,
    position: Array,
    covariance: Array,
    model: PlaneModel,
    *,
    attitude_covariance: Array | None = None,
    lights: Lights = "auto",
    settings: AlignmentSettings | None = None,
) -> Alignment:
    """Refine the position of a camera by aligning a planar model with the image.

    Args:
        image: Image (H, W, 3), uint8, values proportional to the square root of light.
        camera: The camera.
        R_cam_plane: Rotation (3, 3) from the plane's axes to the camera's.
        position: Prior position (3,) of the camera in the plane's axes, as from ``solve_position``.
        covariance: Its covariance (3, 3).
        model: The target.
        attitude_covariance: Covariance (3, 3) of the rotation about the plane's axes; None: exact.
        lights: Whether lamps are on; "auto" decides by likelihood.
        settings: Settings.

    Returns:
        The aligned position, or the prior with the reason why it stays.

    Raises:
        HaloposeError: The image is not (H, W, 3) of uint8, or not of the camera's size.
    """
    settings = settings or AlignmentSettings()
    expected = (camera.height, camera.width, 3)
    if image.dtype != np.uint8 or image.shape != expected:
        raise HaloposeError(f"align_model takes a uint8 image {expected}, got {image.dtype} {image.shape}")
    prior = _Prior.of(position, covariance, attitude_covariance)
    view = _View(image, camera, R_cam_plane, model, prior)
    too_few = Alignment(position, covariance, f"fewer than {_FEWEST_PIXELS} pixels show borders of the target")
    coarse = _Fit.around(view, prior.start, settings.band, settings.coarse_pixels, dark=lights == "on")
    if coarse is None:
        return too_few
    candidates = _search(coarse, lights)
    fine = _Fit.around(view, candidates[0].minima[0].parameters, settings.band, settings.pixels, dark=lights == "on")
    if fine is None:
        return too_few
    found = [fine.finish(candidate, settings) for candidate in candidates]
    best = found[0]
    reason = _refusal(best, settings)
    if not reason and len(found) > 1 and prior.distance(best.parameters, found[1].parameters) > 2 * best.narrowing:
        reason = "the position depends on whether lamps are on, which the image does not show"
    return Alignment(
        position=position if reason else prior.position_of(best.parameters),
        covariance=covariance if reason else prior.root @ best.spread @ prior.root.T,
        reason=reason,
        contrast=best.contrast,
        gap=best.gap,
        shift=best.shift,
        blur=_blur_of(best.parameters),
        pixels=len(fine.light),
        lit=best.lit,
    )


class _Finished(NamedTuple):
    """A fit on all pixels; ``spread`` is the covariance (3, 3) of the position in units of the prior."""

    parameters: Array
    spread: Array
    contrast: float
    gap: float
    lit: bool

    @property
    def shift(self) -> float:
        return float(np.abs(self.parameters[:3]).max())

    @property
    def narrowing(self) -> float:
        return float(np.sqrt(self.spread[0, 0]))


def _refusal(found: _Finished, settings: AlignmentSettings) -> str:
    blur_u, blur_v = _blur_of(found.parameters)
    if found.contrast < settings.contrast:
        return "the target's borders do not stand out from the background"
    if found.shift > settings.shift:
        return "the aligned position is too far from the prior"
    if found.gap < settings.gap:
        return "two positions explain the image equally well"
    if max(blur_u / blur_v, blur_v / blur_u) > _LARGEST_BLUR_RATIO:
        return "the blur of the borders in u and v differs more than motion explains"
    if found.narrowing > settings.narrowing:
        return "the image does not determine the position better than the prior"
    return ""


# --- parameters -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prior:
    """Parameters are: position in axes and standard deviations of the prior, longest axis first (3), log blur in u and
    v (2), and, where uncertain, the rotation in standard deviations (3).
    """

    position: Array
    root: Array  # (3, 3), columns are the axes times their standard deviations
    rotation_root: Array | None
    spread: Array  # standard deviations of the parameters

    @classmethod
    def of(cls, position: Array, covariance: Array, attitude_covariance: Array | None) -> _Prior:
        values, axes = np.linalg.eigh(covariance)
        root = (axes * np.sqrt(np.maximum(values, 1e-12)))[:, ::-1]
        spread = np.array([_PRIOR] * 3 + [_BLUR_SPREAD] * 2)
        if attitude_covariance is None:
            return cls(position, root, None, spread)
        turn = np.linalg.cholesky(attitude_covariance)
        return cls(position, root, turn, np.concatenate([spread, np.ones(3)]))

    @property
    def start(self) -> Array:
        return np.zeros(len(self.spread))

    def position_of(self, parameters: Array) -> Array:
        return np.asarray(self.position + self.root @ parameters[:3])

    def rotate(self, R_cam_plane: Array, parameters: Array) -> Array:
        if self.rotation_root is None:
            return R_cam_plane
        return np.asarray(R_cam_plane @ exp_so3(-(self.rotation_root @ parameters[5:])))

    def cost(self, parameters: Array) -> float:
        return 0.5 * float(np.sum((parameters / self.spread) ** 2))

    def distance(self, one: Array, other: Array) -> float:
        return float(np.abs(one[:3] - other[:3]).max())


def _blur_of(parameters: Array) -> tuple[float, float]:
    u, v = (_BLUR * np.exp(np.clip(parameters[3:5], -1.5, 1.5))).tolist()
    return u, v


class _View:
    """Image in linear light with the rays of all pixels around the target."""

    def __init__(self, image: Array, camera: Camera, R_cam_plane: Array, model: PlaneModel, prior: _Prior) -> None:
        self.image, self.camera, self.R_cam_plane, self.model, self.prior = image, camera, R_cam_plane, model, prior

    def window(self, parameters: Array, band: float) -> tuple[Array, Array]:
        """Return columns and rows (N,) of the pixels of a box around the target."""
        place, turn = self.prior.position_of(parameters), self.prior.rotate(self.R_cam_plane, parameters)
        corners = project_points(self.camera, turn, place, self.model.corners)
        size = np.array([self.camera.width, self.camera.height])
        seen = np.isfinite(corners).all(1)
        low, high = np.zeros(2, int), size - 1  # a corner behind the camera may be anywhere in the image
        if seen.all():
            low = np.floor(corners.min(0) - band - 4).clip(0, size).astype(int)
            high = np.ceil(corners.max(0) + band + 4).clip(-1, size - 1).astype(int)
        elif not seen.any():
            high = np.full(2, -1)
        rows, columns = np.mgrid[low[1] : high[1] + 1, low[0] : high[0] + 1]
        return columns.ravel(), rows.ravel()

    def rays(self, columns: Array, rows: Array) -> Array:
        """Return rays (N, 3) of pixels at depth 1 in camera axes."""
        plain = normalise(self.camera, np.stack([columns, rows], axis=-1).astype(float))
        return np.concatenate([plain, np.ones((len(plain), 1))], axis=1)

    def ground(self, rays: Array, parameters: Array) -> GroundPoints:
        """Return where rays (N, 3) in camera axes meet the plane."""
        place, turn = self.prior.position_of(parameters), self.prior.rotate(self.R_cam_plane, parameters)
        blur_u, blur_v = _blur_of(parameters)
        along = rays @ turn
        stretch = -place[2] / along[:, 2]
        slope_x, slope_y = along[:, 0] / along[:, 2], along[:, 1] / along[:, 2]
        by_u, by_v = turn[0] / self.camera.fx, turn[1] / self.camera.fy
        x_u, x_v = stretch * (by_u[0] - slope_x * by_u[2]), stretch * (by_v[0] - slope_x * by_v[2])
        y_u, y_v = stretch * (by_u[1] - slope_y * by_u[2]), stretch * (by_v[1] - slope_y * by_v[2])
        return GroundPoints(
            x=place[0] + stretch * along[:, 0],
            y=place[1] + stretch * along[:, 1],
            blur_x=np.hypot(blur_u * x_u, blur_v * x_v),
            blur_y=np.hypot(blur_u * y_u, blur_v * y_v),
            pixel_x=np.hypot(x_u, x_v),
            pixel_y=np.hypot(y_u, y_v),
        )


# --- fit --------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """A fit at given parameters: cost, design (N, C), brightness (C, 3), residuals (N, 3), weights (N,)."""

    parameters: Array
    cost: float
    design: Array
    brightness: Array
    residual: Array
    weight: Array


@dataclass(frozen=True)
class _Fit:
    """Pixels of one fit.

    Attributes:
        view: image and camera.
        rays: rays (N, 3) in camera axes.
        columns: columns (N,).
        rows: rows (N,).
        light: linear light (N, 3).
        variance: relative variances (N, 3) of it.
        clipped: which values are saturated (N, 3).
        blocks: number of each pixel's block (N,).
        sides: on which side of the target a pixel lies (N,), 1 or -1.
        pairs: pixel and lamp of each pair nearby, by row of lamps.
        level: median brightness.
        dark: whether lamps have halos and follow a quadratic.
        lit: whether lamps are part of the model.
        scale: variance of the relative residuals; 0: not yet known.
    """

    view: _View
    rays: Array
    columns: Array
    rows: Array
    light: Array
    variance: Array
    clipped: Array
    blocks: Array
    sides: Array
    pairs: tuple[tuple[Array, Array], ...]
    level: float
    dark: bool
    lit: bool = True
    scale: float = 0.0

    @classmethod
    def around(cls, view: _View, parameters: Array, band: float, most: int, *, dark: bool) -> _Fit | None:
        """Choose the pixels around the borders for given parameters; None if there are too few."""
        columns, rows = view.window(parameters, band)
        rays = view.rays(columns, rows)
        if not len(rays):
            return None
        below = (rays @ view.prior.rotate(view.R_cam_plane, parameters))[:, 2] < -1e-6
        columns, rows, rays = columns[below], rows[below], rays[below]
        chosen = np.flatnonzero(view.model.informative(view.ground(rays, parameters), band))
        if len(chosen) < _FEWEST_PIXELS:
            return None
        if len(chosen) > most:
            chosen = np.sort(np.random.default_rng(0).permutation(chosen)[:most])
        columns, rows, rays = columns[chosen], rows[chosen], rays[chosen]
        part = view.image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        inside = rows - rows.min(), columns - columns.min()
        linear = np.square(part.astype(np.float64) / 255)
        light, smooth = linear[inside], cv2.blur(linear, (3, 3))[inside]
        sides = np.where(view.ground(rays, parameters).y > 0, 1, -1)
        constant, photons, texture = _NOISE
        blocks = (rows - rows.min()) // _BLOCK_ROWS * 2 + (sides > 0)
        place, turn = view.prior.position_of(parameters), view.prior.rotate(view.R_cam_plane, parameters)
        pairs = []
        for lamps in view.model.lamps:
            pixels = project_points(view.camera, turn, place, lamps.places)
            near = (np.abs(columns[:, None] - pixels[:, 0]) < _LAMP_REACH) & (
                np.abs(rows[:, None] - pixels[:, 1]) < _LAMP_REACH
            )
            pixel, lamp = np.nonzero(near)
            pairs.append((pixel, lamp))
        return cls(
            view, rays, columns, rows, light, constant + smooth * (photons + texture * smooth),
            part[inside] >= _SATURATED, blocks, sides, tuple(pairs), max(float(np.median(light)), _DARKEST), dark,
        )  # fmt: skip

    @cached_property
    def _bases(self) -> dict[int, Array]:
        return {}

    def _knots(self, most: int) -> Array:
        """Return the basis (N, B) of a brightness along image rows."""
        if most not in self._bases:
            self._bases[most] = self._new_knots(most)
        return self._bases[most]

    def _new_knots(self, most: int) -> Array:
        low, high = self.rows.min(), self.rows.max()
        height = max(float(high - low), 1.0)
        along = (self.rows - low) / height
        if most == 0:
            return np.stack([np.ones_like(along), along, along * along], axis=1)
        count = min(int(np.clip((height + 1) / _ROWS_PER_KNOT, 2, _MOST_KNOTS)), most)
        if count == 1:
            return np.ones((len(along), 1))
        return np.maximum(0, 1 - np.abs(along[:, None] * (count - 1) - np.arange(count)))

    def design(self, parameters: Array) -> tuple[Array, Array]:
        """Return the design matrix (N, C) and the precision (C,) of each brightness, relative to the level."""
        ground = self.view.ground(self.rays, parameters)
        columns, precision = [], []
        for layer in self.view.model.layers(ground):
            basis = self._knots(layer.knots)
            columns.append(layer.coverage[:, None] * basis)
            precision += [layer.spread**-2] * basis.shape[1]
        if self.lit:
            for column in self.lamp_columns(parameters):
                columns.append(column)
                precision += [1e-8] * column.shape[1]
        return np.concatenate(columns, axis=1), np.array(precision)

    def _picture(self, parameters: Array, brightness: Array) -> Array:
        """Return design @ brightness (N, 3) for other parameters, without the design matrix."""
        picture, first = np.zeros_like(self.light), 0
        for layer in self.view.model.layers(self.view.ground(self.rays, parameters)):
            basis = self._knots(layer.knots)
            last = first + basis.shape[1]
            picture += layer.coverage[:, None] * (basis @ brightness[first:last])
            first = last
        for column in self.lamp_columns(parameters) if self.lit else ():
            last = first + column.shape[1]
            picture += column @ brightness[first:last]
            first = last
        return picture

    def lamp_columns(self, parameters: Array) -> list[Array]:
        place = self.view.prior.position_of(parameters)
        turn = self.view.prior.rotate(self.view.R_cam_plane, parameters)
        spread = np.sqrt(np.square(_blur_of(parameters)) + _LAMP_BLUR)
        columns = []
        for lamps, (pixel, lamp) in zip(self.view.model.lamps, self.pairs, strict=True):
            if not len(pixel):
                continue
            pixels = project_points(self.view.camera, turn, place, lamps.places)[lamp]
            strength = 1e6 / np.square(lamps.places - place).sum(1)[lamp]
            u, v = self.columns[pixel] - pixels[:, 0], self.rows[pixel] - pixels[:, 1]

            def image_of(size_u: float, size_v: float, u: Array = u, v: Array = v, each: Array = strength) -> Array:
                return each * np.exp(-0.5 * (np.square(u / size_u) + np.square(v / size_v)))

            core = np.bincount(pixel, image_of(*spread), len(self.rows))
            knots = lamps.knots if self.dark or lamps.knots else 2
            columns.append(core[:, None] * self._knots(knots))
            if self.dark and lamps.bright:
                columns.append(np.bincount(pixel, image_of(_HALO, _HALO), len(self.rows))[:, None])
        return columns

    def state(self, parameters: Array, rounds: int = 2) -> _State:
        """Solve the brightness for given parameters by reweighted least squares."""
        design, precision = self.design(parameters)
        precision = precision / self.level**2
        flat = 1 / self.variance.mean(1)
        weight, scale = flat, self.scale or 1.0
        for _ in range(rounds):
            weighted = design * weight[:, None]
            normal = design.T @ weighted
            normal[np.diag_indices(len(normal))] += precision * scale
            brightness = np.linalg.solve(normal, weighted.T @ self.light)
            residual = self.light - design @ brightness
            residual[self.clipped & (residual < 0)] = 0.0  # a clipped pixel may be brighter than it shows
            size = np.mean(residual * residual / self.variance, axis=1)
            scale = self.scale or float(np.median(size)) / _MEDIAN_CHI2 + 1e-9
            robust = (_DOF + 1) / (_DOF + size / scale)
            weight = flat * robust
        cost = 0.5 * (_DOF + 1) * float(np.log1p(size / scale / _DOF).sum())
        cost += float((precision[:, None] * brightness**2).sum()) / 6 + self.view.prior.cost(parameters)
        return _State(parameters, cost, design, brightness, residual, robust)

    def scaled(self, parameters: Array) -> _Fit:
        """Return the fit with the scale of the residuals fixed to its value at given parameters."""
        found = replace(self, scale=0.0).state(parameters)
        size = np.mean(found.residual**2 / self.variance, axis=1)
        return replace(self, scale=float(np.median(size)) / _MEDIAN_CHI2 + 1e-9)

    def _slopes(self, state: _State) -> tuple[Array, Array]:
        """Return derivatives (N, 3, P) of the picture, without what brightness absorbs, and weights (N, 3)."""
        picture = state.design @ state.brightness
        slopes = np.empty((*picture.shape, len(state.parameters)))
        for k in range(len(state.parameters)):
            moved = state.parameters.copy()
            moved[k] += _STEP
            slopes[..., k] = (self._picture(moved, state.brightness) - picture) / _STEP
        flat = slopes.reshape(len(picture), -1)
        weighted = state.design * (state.weight / self.variance.mean(1))[:, None]
        normal = state.design.T @ weighted
        normal[np.diag_indices(len(normal))] += self.scale * self.design(state.parameters)[1] / self.level**2
        free = (flat - state.design @ np.linalg.solve(normal, weighted.T @ flat)).reshape(slopes.shape)
        weight = state.weight[:, None] / self.variance / (3 * self.scale)
        weight[self.clipped & (state.residual == 0)] = 0
        return free, weight

    def minimise(self, parameters: Array, steps: int = 12) -> _State:
        """Find the nearest minimum by Levenberg-Marquardt steps."""
        state, damping = self.state(parameters), 1e-2
        prior = np.diag(self.view.prior.spread**-2.0)
        for _ in range(steps):
            slopes, weight = self._slopes(state)
            gradient = np.einsum("ncp,nc->p", slopes, weight * state.residual) - prior @ state.parameters
            flat = slopes.reshape(-1, slopes.shape[-1])
            curvature = (flat * weight.reshape(-1, 1)).T @ flat + prior
            for _ in range(6):
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
                moved = self.state(state.parameters + step)
                if moved.cost < state.cost - 1e-9:
                    break
                damping *= 5
            else:
                break
            gain, state, damping = state.cost - moved.cost, moved, max(damping / 5, 1e-4)
            if gain < 1e-3 or np.abs(step[:3]).max() < 1e-4:
                break
        return state

    def covariance(self, state: _State) -> Array:
        """Return the sandwich covariance (P, P) of the parameters over blocks of pixels."""
        slopes, weight = self._slopes(state)
        flat = slopes.reshape(-1, slopes.shape[-1])
        prior = np.diag(self.view.prior.spread**-2.0)
        bread = np.linalg.inv((flat * weight.reshape(-1, 1)).T @ flat + prior)
        scores = np.zeros((self.blocks.max() + 1, slopes.shape[-1]))
        np.add.at(scores, self.blocks, np.einsum("ncp,nc->np", slopes, weight * state.residual))
        used = int(np.any(scores != 0, axis=1).sum())
        few = used / max(used - slopes.shape[-1], 2)  # few blocks understate the spread of their scores
        return np.asarray(bread @ (few * scores.T @ scores + prior) @ bread)

    def finish(self, candidate: _Candidate, settings: AlignmentSettings) -> _Finished:
        """Refine the minima of a search and return the best one."""
        prior = self.view.prior
        fit = replace(self, lit=candidate.lit).scaled(candidate.minima[0].parameters)
        finals = sorted((fit.minimise(each.parameters) for each in candidate.minima), key=lambda state: state.cost)
        best = finals[0]
        gaps = [each.cost - best.cost for each in finals[1:] if prior.distance(each.parameters, best.parameters) > 0.1]
        spread = settings.inflation * fit.covariance(best)[:3, :3] + settings.floor**2 * np.eye(3)
        contrast = fit.cost_without_borders() - best.cost
        return _Finished(best.parameters, spread, contrast, min(gaps, default=np.inf), fit.lit)

    def cost_without_borders(self) -> float:
        """Return the cost of a picture whose brightness differs only by image row and side of the target."""
        rows = self._knots(_MOST_KNOTS)
        design = np.concatenate([rows, rows * self.sides[:, None]], axis=1)
        flat = 1 / self.variance.mean(1)
        weight = flat
        for _ in range(3):
            weighted = design * weight[:, None]
            normal = design.T @ weighted
            normal[np.diag_indices(len(normal))] += 1e-9 * np.trace(normal)
            residual = self.light - design @ np.linalg.solve(normal, weighted.T @ self.light)
            size = np.mean(residual**2 / self.variance, axis=1) / self.scale
            weight = flat * (_DOF + 1) / (_DOF + size)
        return 0.5 * (_DOF + 1) * float(np.log1p(size / _DOF).sum())


class _Candidate(NamedTuple):
    """Minima of a search, best first, with or without lamps."""

    minima: list[_State]
    lit: bool


def _search(fit: _Fit, lights: Lights) -> list[_Candidate]:
    """Return the minima from a grid of starts; where it is unclear whether lamps are on, both, the likelier first."""
    fit = replace(fit, lit=lights == "on").scaled(fit.view.prior.start)
    found = _Candidate(_minima(fit), fit.lit)
    if lights != "auto":
        return [found]
    lit = replace(fit, lit=True)
    states = sorted((lit.minimise(state.parameters, steps=5) for state in found.minima), key=lambda state: state.cost)
    gain = found.minima[0].cost - states[0].cost
    lamps = lit.lamp_columns(states[0].parameters)
    brightness = states[0].brightness[-sum(column.shape[1] for column in lamps) :][:2] if lamps else np.zeros((1, 3))
    if gain < _UNLIT_GAIN or brightness.mean(0).min() <= 0:
        return [found]
    both = [_Candidate(states, lit=True), found]
    if gain > _SURELY_LIT_GAIN:
        return both[:1]
    return both if gain > _LIT_GAIN else both[::-1]


def _minima(fit: _Fit) -> list[_State]:
    base = fit.view.prior.start
    grid = []
    for along in _ALONG:
        for side in _ACROSS:
            for last in _ACROSS:
                place = base.copy()
                place[:3] = along, side, last
                grid.append((fit.state(place, rounds=1).cost, place))
    grid.sort(key=lambda entry: entry[0])
    starts: list[Array] = []
    for cost, place in grid:
        near = len(starts) < _STARTS and cost - grid[0][0] < _HOPELESS
        if near and all(np.abs(place[:3] - other[:3]).max() > _APART for other in starts):
            starts.append(place)
    found = sorted((fit.minimise(start, steps=5) for start in starts), key=lambda state: state.cost)
    kept = found[:1]
    for state in found[1:]:
        far = all(fit.view.prior.distance(state.parameters, other.parameters) > 0.15 for other in kept)
        if len(kept) < _FINALISTS and far and state.cost - found[0].cost < 12:
            kept.append(state)
    return kept
