"""Render a scene: intersect each pixel's ray with the ground or the sky, then add air, lights and camera.

Linear radiance 1 is about 10,000 cd/m^2. Every edge is a box filter over the pixel's footprint, against aliasing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import degrees, sin

import numpy as np

from halopose.geometry.camera import Camera, project_points
from halopose.landing.world.camera_effects import as_recorded, through_lens
from halopose.landing.world.clutter import draw_boxes, road_patches
from halopose.landing.world.footage_style import pinhole_for
from halopose.landing.world.image_sensor import colour_planes, develop, pixel_rays
from halopose.landing.world.landscape import LANDSCAPES, landscape, noise_texture, sample
from halopose.landing.world.runway_layout import Patch, field_patches, runway_lights, runway_patches
from halopose.landing.world.scenes import Runway, Scene
from halopose.types import Array

_FAR = 60e3  # metres to the horizon
_CONCRETE = 0.4  # reflectance of a light shoulder
_LUMINANCE = 1e4  # cd / m^2 of radiance 1


@dataclass(frozen=True)
class RayGrid:
    """Rays of all pixels: components (H, W) along the runway axes, their length, and the camera's pose."""

    x: Array
    y: Array
    z: Array
    length: Array
    rotation: Array
    eye: Array
    horizon: Array  # pixels above the end of the ground, (H, W)
    up: Array  # z, or that above the level where the runway is not level


@dataclass(frozen=True)
class Ground:
    """Ground points of the rows from ``top`` down: x, y, distance and footprints (h, W), in metres."""

    top: int
    x: Array
    y: Array
    distance: Array
    width_x: Array
    width_y: Array
    fineness: Array  # log2 of width_x
    cover: Array  # share of the pixel below the horizon


@dataclass(frozen=True)
class Daylight:
    """Linear blue, green, red (3, 1, 1) of direct light on level ground, ambient light, and the sky at horizon
    and zenith.
    """

    direct: Array
    ambient: Array
    horizon: Array
    zenith: Array


def render_scene(scene: Scene) -> Array:
    """Render a scene as an image (H, W, 3), uint8 BGR; deterministic."""
    return as_recorded(develop(radiance(scene), scene), scene)


def radiance(scene: Scene) -> Array:
    """Return the linear radiance (3, H, W), float32, blue, green and red, that reaches the sensor."""
    if scene.footage is None or not scene.camera.distorted:
        return _radiance(scene)
    pinhole = pinhole_for(scene.camera)  # windows of patches assume straight lines
    return through_lens(_radiance(replace(scene, camera=pinhole)), pinhole, scene.camera)


def _radiance(scene: Scene) -> Array:
    view, light = _view(scene), daylight(scene)
    ground = _ground(view, scene.camera)
    image = _sky(scene, view, light)
    surface = _reflectance(scene, view, ground)
    surface *= _illumination(scene, ground, light)
    through = np.exp(ground.distance * np.float32(-scene.extinction))
    surface -= light.horizon
    surface *= through  # Koschmieder: contrast against the horizon decays exponentially
    surface += light.horizon
    edge = int(np.argmax(ground.cover.min(1) == 1))
    _blend(image[:, ground.top : ground.top + edge], ground.cover[:edge], surface[:, :edge])
    image[:, ground.top + edge :] = surface[:, edge:]
    if scene.footage is not None:
        lit = light.direct + light.ambient
        draw_boxes(image, scene.camera, view.rotation, view.eye, scene, lit, light.horizon)
    if scene.lights > 0:
        _add_lights(image, scene, view)
    return image


def _blend(planes: Array, share: Array, colour: Array) -> None:
    """Blend planes (3, h, w) in place with a colour (3, h, w) or (3, 1, 1) by shares (h, w)."""
    change = colour - planes
    change *= share
    planes += change


# --- geometry ---------------------------------------------------------------------------------------------


def _view(scene: Scene) -> RayGrid:
    rotation, eye = scene.camera_pose()
    right, down, length = pixel_rays(scene.camera)
    turn = rotation.astype(np.float32)
    x, y, z = (turn[0, k] * right + turn[1, k] * down + turn[2, k] for k in range(3))
    slope = np.hypot(rotation[0, 2] / scene.camera.fx, rotation[1, 2] / scene.camera.fy)
    up = z if scene.footage is None else z - np.float32(scene.footage.slope) * x
    return RayGrid(x, y, z, length, rotation, eye, z / np.float32(slope), up)


def _ground(view: RayGrid, camera: Camera) -> Ground:
    top = int(np.argmax(view.horizon.min(1) < 1))
    rays = slice(top, None)
    height = np.float32(view.eye[2])
    stretch = height / np.maximum(-view.z[rays], height / np.float32(_FAR))
    forward, left = stretch * view.x[rays], stretch * view.y[rays]
    by_u, by_v = view.rotation[0] / camera.fx, view.rotation[1] / camera.fy

    def footprint(offset: Array, axis: int) -> Array:
        """Root of the summed squares of a ground coordinate's two derivatives by pixel."""
        lean = offset / height
        u = np.float32(by_u[axis]) + lean * np.float32(by_u[2])
        v = np.float32(by_v[axis]) + lean * np.float32(by_v[2])
        return stretch * np.sqrt(u * u + v * v)

    width_x = footprint(forward, 0)
    return Ground(
        top=top,
        x=forward + np.float32(view.eye[0]),
        y=left + np.float32(view.eye[1]),
        distance=stretch * view.length[rays],
        width_x=width_x,
        width_y=footprint(left, 1),
        fineness=np.log2(width_x),
        cover=np.clip(np.float32(0.5) - view.horizon[rays], 0, 1),
    )


Window = tuple[slice, slice]


def _windows(scene: Scene, view: RayGrid, ground: Ground, patches: Sequence[Patch]) -> list[Window | None]:
    """Return the rows and columns of the ground that each patch can touch."""
    nearest = view.eye[0] + 1.5 * view.eye[2]  # nearer ground is below the image
    points = np.zeros((len(patches), 4, 3))
    for corners, patch in zip(points, patches, strict=True):
        ends = max(patch.x[0], nearest), max(patch.x[1], nearest)
        low, high = min(low for low, _ in patch.bars), max(high for _, high in patch.bars)
        lean = [patch.slant * (x - patch.x[0]) for x in ends]
        corners[:, 0] = ends[0], ends[0], ends[1], ends[1]
        corners[:, 1] = low + lean[0], high + lean[0], low + lean[1], high + lean[1]
    pixels = project_points(scene.camera, view.rotation, view.eye, points)
    least, most = pixels.min(1), pixels.max(1)
    least[np.isnan(least)], most[np.isnan(most)] = (
        -np.inf,
        np.inf,
    )  # a corner beside the camera may project anywhere
    first = np.maximum(np.floor(least) - 1, (0, ground.top)).astype(int).tolist()
    last = np.minimum(np.ceil(most) + 2, (scene.camera.width, scene.camera.height)).astype(int).tolist()
    return [
        (slice(v0 - ground.top, v1 - ground.top), slice(u0, u1))
        if u0 < u1 and v0 < v1 and patch.x[1] > nearest
        else None
        for patch, (u0, v0), (u1, v1) in zip(patches, first, last, strict=True)
    ]


def _pulse(value: Array, width: Array, low: float, high: float) -> Array:
    """Return the share of the footprint around each value that lies in [low, high]."""
    half = width / 2
    inside = np.minimum(value + half, high)
    inside -= np.maximum(value - half, low)
    np.maximum(inside, 0, out=inside)
    inside /= width
    return inside


def _dashes(value: Array, width: Array, start: float, dash: tuple[float, float]) -> Array:
    """Return the share of the footprint that is painted by dashes."""
    painted, gap = dash
    period = painted + gap

    def total(at: Array) -> Array:
        turns = np.floor(at / period)
        return turns * painted + np.minimum(at - turns * period, painted)

    from_start = value - start
    return (total(from_start + width / 2) - total(from_start - width / 2)) / width


def _coverage(ground: Ground, window: Window, patch: Patch) -> Array:
    x, y = ground.x[window], ground.y[window]
    width_x, width_y = ground.width_x[window], ground.width_y[window]
    along = _pulse(x, width_x, *patch.x)
    if patch.dash is not None:
        along *= _dashes(x, width_x, patch.x[0], patch.dash)
    if patch.slant:
        y, width_y = y - patch.slant * (x - patch.x[0]), np.hypot(width_y, patch.slant * width_x)
    across = _pulse(y, width_y, *patch.bars[0])
    for bar in patch.bars[1:]:
        across += _pulse(y, width_y, *bar)
    return along * across


# --- ground -----------------------------------------------------------------------------------------------


def _reflectance(scene: Scene, view: RayGrid, ground: Ground) -> Array:
    """Return the reflectance (3, h, W) of the ground: landscape, airfield, taxiways, runways with their markings."""
    rng = np.random.default_rng([scene.seed, 2])
    surface = _landscape(rng, ground)
    grain = sample(noise_texture(1.5, 0.6), ground.x, ground.y, ground.fineness)
    surface *= 1 + np.float32(0.10) * grain
    _airfield(surface, scene, rng, ground, grain)
    if scene.footage is not None:
        _paint(surface, scene, view, ground, road_patches(scene))
    _paint(surface, scene, view, ground, [p for r in reversed(scene.runways) for p in field_patches(r, rng)])
    for runway in reversed(scene.runways):
        _pave(surface, scene, view, ground, runway, rng)
        worn = scene.footage.wear if scene.footage else 0.0
        _paint(surface, scene, view, ground, runway_patches(runway, rng.uniform(0.55, 1.0)), worn)
    return surface


def _landscape(rng: np.random.Generator, ground: Ground) -> Array:
    number = int(rng.integers(LANDSCAPES))
    flip_x, flip_y = rng.choice([-1.0, 1.0], 2)
    offset_x, offset_y = rng.uniform(0, 5120, 2)
    tint = np.exp(rng.normal(0, 0.08, 3)) * np.exp(rng.normal(0, 0.15))
    x = ground.x * np.float32(flip_x) + np.float32(offset_x)
    y = ground.y * np.float32(flip_y) + np.float32(offset_y)
    root = sample(landscape(number), x, y, ground.fineness)
    root *= root
    root *= colour_planes(tint / 255**2)
    return root


def _airfield(surface: Array, scene: Scene, rng: np.random.Generator, ground: Ground, grain: Array) -> None:
    """Draw mown grass, sand or snow around the runways, with a ragged edge."""
    kinds = np.array([(0.04, 0.115, 0.07), (0.06, 0.14, 0.12), (0.09, 0.17, 0.2), (0.035, 0.09, 0.055)])
    grass = colour_planes(kinds[rng.integers(len(kinds))] * np.exp(rng.normal(0, 0.12)))
    reach = rng.uniform(180.0, 420.0)
    ragged = sample(noise_texture(14.0, 1.4, 1), ground.x, ground.y, ground.fineness)
    for runway in scene.runways:
        x0, y0 = runway.threshold
        outside = np.abs(ground.x - np.float32(x0 + runway.length / 2)) - np.float32(runway.length / 2 + 250)
        np.maximum(outside, np.abs(ground.y - np.float32(y0)) - np.float32(reach), out=outside)
        outside += np.float32(40) * ragged
        inside = np.clip(np.float32(0.5) - outside / (12 + ground.width_x), 0, 1)
        rows = np.flatnonzero(inside.max(1) > 0)
        if len(rows):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            mown = grass * (1 + np.float32(0.14) * grain[part] + np.float32(0.12) * ragged[part])
            _blend(surface[:, part], inside[part], mown)


def _paint(
    surface: Array, scene: Scene, view: RayGrid, ground: Ground, patches: Sequence[Patch], worn: float = 0.0
) -> None:
    """Paint patches in order; on a worn one the given share is missing in spots."""
    for patch, window in zip(patches, _windows(scene, view, ground, patches), strict=True):
        if window is not None:
            cover = _coverage(ground, window, patch) * np.float32(patch.opacity)
            if worn:
                x, y = (np.float32(2) * each[window] for each in (ground.x, ground.y))
                spots = sample(noise_texture(14.0, 1.4, 1), x, y, ground.fineness[window])
                cover *= np.clip(1 - np.float32(worn) * (1 + np.float32(0.6) * spots), 0, 1)
            _blend(surface[:, window[0], window[1]], cover, colour_planes(patch.colour))


def _pave(
    surface: Array, scene: Scene, view: RayGrid, ground: Ground, runway: Runway, rng: np.random.Generator
) -> None:
    """Draw shoulders, then asphalt or concrete with stains, wheel tracks and rubber."""
    (x0, y0), half = runway.threshold, runway.width / 2
    grey = rng.uniform(0.24, 0.38) if runway.concrete else rng.uniform(0.055, 0.14)
    worn, rubber, warm = rng.uniform(0.05, 0.16), rng.uniform(0.2, 0.65), rng.uniform(-0.05, 0.07)
    along = (x0 - max(runway.before), x0 + runway.length)
    colour, dark = ((g * (1 - warm), g, g * (1 + warm)) for g in (grey, 0.62 * grey + 0.02))
    beside = runway.shoulder
    if scene.footage is not None:
        beside, light = scene.footage.shoulder or beside, scene.footage.lightness
        blue, green, red = (tone + light * (_CONCRETE - tone) for tone in dark)
        dark = blue, green, red
    if beside:
        edges = ((y0 - half - beside, y0 + half + beside),)
        _paint(surface, scene, view, ground, [Patch(along, edges, dark)])
    patch = Patch(along, ((y0 - half, y0 + half),), colour)
    window = _windows(scene, view, ground, [patch])[0]
    if window is None:
        return
    x, y = ground.x[window] - np.float32(x0), ground.y[window] - np.float32(y0)
    fineness = ground.fineness[window]
    stains = sample(noise_texture(1.5, 0.6), x * np.float32(0.12), y, fineness - 3)
    stains += sample(noise_texture(14.0, 1.4, 1), x, y * np.float32(4), fineness)
    tracks = np.exp(-(((np.abs(y) - np.float32(3.2)) / np.float32(3.4)) ** 2))
    landings = _touchdowns(x, runway.length) * np.float32(rubber)
    shade = (1 + np.float32(worn) * stains) * (1 - tracks * (np.float32(0.1) + landings))
    worn_colour = np.maximum(shade, np.float32(0.2)) * colour_planes(colour)
    _blend(surface[:, window[0], window[1]], _coverage(ground, window, patch), worn_colour)


def _touchdowns(x: Array, length: float) -> Array:
    """Return the touchdown points from either end."""
    rising = np.minimum(x, length - x)
    return np.clip((rising - 120) / 220, 0, 1) * np.exp(-np.maximum(rising - 450, 0) / np.float32(260))


# --- light and air ----------------------------------------------------------------------------------------


def daylight(scene: Scene) -> Daylight:
    """Return the light for the sun's elevation and the weather."""
    elevation = degrees(scene.sun[0])
    if scene.weather == "night":
        glow = 2.5e-4 * np.array([1.0, 0.82, 0.75])
        return _light(glow * 0, glow, glow * (0.55, 0.6, 0.65), glow * (0.25, 0.2, 0.2))
    ambient = 0.32 * 10 ** (min(elevation - 10, 0) * 0.1)
    if scene.weather == "dusk":
        warm = np.array([0.55, 0.72, 1.15]) * ambient
        direct = 1.1 * max(sin(scene.sun[0]), 0.0) * np.array([0.25, 0.55, 1.0])
        return _light(direct, ambient * np.array([1.0, 0.95, 0.95]), 2.6 * warm, ambient * _LATE_BLUE)
    high = sin(scene.sun[0])
    direct = high * np.array([0.84, 0.97, 1.08])
    if scene.weather == "clear":
        return _light(direct, ambient * np.array([1.15, 1.0, 0.85]), _BRIGHT * (0.92, 0.82, 0.74), _BLUE)
    if scene.weather == "haze":
        ambient *= 1.3
        return _light(0.6 * direct, np.full(3, ambient), _BRIGHT * (0.86, 0.84, 0.81), _PALE_BLUE)
    grey = np.full(3, 0.35 + 0.25 * high)
    return _light(0.0 * direct, 1.1 * grey, grey, grey)


_BRIGHT = np.array(0.8)
_BLUE, _PALE_BLUE, _LATE_BLUE = np.array([(0.55, 0.27, 0.12), (0.6, 0.5, 0.42), (1.9, 1.25, 0.95)])


def _light(*colours: Array) -> Daylight:
    return Daylight(*(colour_planes(colour) for colour in colours))


def _illumination(scene: Scene, ground: Ground, light: Daylight) -> Array:
    """Return the light on the ground (3, 1, 1), or (3, h, W) with shadows of scattered clouds."""
    rng = np.random.default_rng([scene.seed, 4])
    if scene.weather != "clear" or rng.random() < 0.5:
        return light.direct + light.ambient
    shift = rng.uniform(0, 20e3, 2).astype(np.float32)
    clouds = sample(noise_texture(60.0, 1.6, 2), ground.x + shift[0], ground.y + shift[1], ground.fineness)
    sunlit = np.clip((np.float32(0.9) - clouds) / np.float32(0.5), 0.25, 1)
    return light.ambient + sunlit * light.direct


def _sky(scene: Scene, view: RayGrid, light: Daylight) -> Array:
    """Return planes (3, H, W) with the sky down to the horizon: gradient, sun glow, clouds, hills."""
    image = np.empty((3, *view.x.shape), np.float32)
    rows = slice(0, int(np.flatnonzero(view.horizon.max(1) > -2).max(initial=-1)) + 1)
    elevation = np.maximum(view.up[rows] / view.length[rows], 0)
    azimuth = np.arctan2(-view.y[rows], view.x[rows])
    sky = image[:, rows]
    sky[:] = light.zenith
    _blend(sky, np.exp(elevation * np.float32(-7.0)), light.horizon)
    if scene.weather not in ("night", "fog"):
        glow = np.float32(0.5 if scene.weather == "dusk" else 0.12)
        away = np.maximum(np.cos(azimuth - np.float32(scene.sun[1])), np.float32(-0.3))
        sky *= 1 + glow * away * colour_planes((0.3, 0.7, 1.2))
    if scene.weather != "fog":
        _add_clouds(sky, scene, elevation, azimuth, light)
        _add_hills(sky, scene, elevation, azimuth, light)
    return image


def _add_clouds(sky: Array, scene: Scene, elevation: Array, azimuth: Array, light: Daylight) -> None:
    """Add clouds in flat bands, thinner towards the horizon."""
    rng = np.random.default_rng([scene.seed, 5])
    level, shift = rng.uniform(-0.6, 2.2), rng.uniform(0, 500, 2).astype(np.float32)
    height = np.log(elevation + np.float32(0.02)) * np.float32(90)
    noise = sample(noise_texture(1.0, 1.7, 3), azimuth * 160 + shift[0], height + shift[1], np.zeros_like(azimuth))
    cover = np.clip((noise - np.float32(level)) / np.float32(0.9), 0, 0.85)
    cover *= np.minimum(elevation / np.float32(0.03), 1)
    _blend(sky, cover, light.horizon * np.float32(0.6 if scene.weather == "night" else 1.12))


def _add_hills(sky: Array, scene: Scene, elevation: Array, azimuth: Array, light: Daylight) -> None:
    """Add two ridges at the horizon, dimmed by the air."""
    rng = np.random.default_rng([scene.seed, 6])
    focal = np.float32(scene.camera.fx)
    bearing = np.linspace(azimuth.min(initial=0), azimuth.max(initial=0), 400)
    for distance in (45e3, 22e3):
        turns, phase = rng.uniform(6, 60, (6, 1)), rng.uniform(0, 2 * np.pi, (6, 1))
        top = rng.gamma(1.2, 0.0035) * (0.4 + (np.sin(bearing * turns + phase) / (1 + 0.12 * turns)).sum(0))
        rows = np.flatnonzero(elevation.min(1, initial=1) < top.max())
        if not len(rows):
            continue
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        ridge = np.interp(azimuth[part], bearing, top).astype(np.float32)
        cover = np.clip((ridge - elevation[part]) * focal + np.float32(0.5), 0, 1) * (ridge > 0)
        clear = np.float32(np.exp(-scene.extinction * distance))
        slope = colour_planes((0.04, 0.06, 0.045)) * (light.direct + light.ambient)
        _blend(sky[:, part], cover, slope * clear + light.horizon * (1 - clear))


# --- lights -----------------------------------------------------------------------------------------------


def _add_lights(image: Array, scene: Scene, view: RayGrid) -> None:
    """Add runway lights, and town lights in the dark, as points over four pixels; the lens blurs them."""
    rng = np.random.default_rng([scene.seed, 7])
    for runway in scene.runways:
        lamps = runway_lights(runway, view.eye, rng)
        _splat(image, scene, view, lamps.place, lamps.colour, lamps.candela * scene.lights)
    if scene.weather in ("dusk", "night"):
        _splat(image, scene, view, *_town_lights(scene, rng))


def _town_lights(scene: Scene, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    towns = rng.integers(3, 25)
    centre = np.column_stack([rng.uniform(-6e3, 25e3, towns), rng.uniform(-9e3, 9e3, towns)])
    member = rng.integers(towns, size=900)
    spread = rng.uniform(100, 900, towns)[member, None]
    place = centre[member] + spread * rng.standard_normal((900, 2))
    outside = (np.abs(place[:, 1]) > 250) | (place[:, 0] < -1500) | (place[:, 0] > scene.runway.length + 300)
    warm = rng.random((900, 1))
    colour = warm * np.array([0.25, 0.65, 1.0]) + (1 - warm) * np.array([0.8, 0.95, 1.0])
    candela = np.exp(rng.normal(np.log(60.0), 1.0, 900)) * outside
    return np.column_stack([place, np.full(900, 5.0)]), colour, candela


def _splat(image: Array, scene: Scene, view: RayGrid, place: Array, colour: Array, candela: Array) -> None:
    height, width = image.shape[1:]
    pixels = project_points(scene.camera, view.rotation, view.eye, place)
    distance = np.linalg.norm(place - view.eye, axis=-1)
    inside = np.isfinite(pixels).all(-1) & (pixels > 0).all(-1) & (pixels < (width - 1, height - 1)).all(-1)
    pixels, distance, colour, candela = (a[inside] for a in (pixels, distance, colour, candela))
    per_pixel = scene.camera.fx * scene.camera.fy / _LUMINANCE  # illuminance of a point light as radiance of one pixel
    flux = candela * per_pixel / distance**2 * np.exp(-scene.extinction * distance)
    corner = np.floor(pixels).astype(int)
    part = pixels - corner
    flat = image.reshape(3, -1)
    for step_v in (0, 1):
        for step_u in (0, 1):
            share = np.abs(1 - step_u - part[:, 0]) * np.abs(1 - step_v - part[:, 1])
            index = (corner[:, 1] + step_v) * width + corner[:, 0] + step_u
            for plane, strength in zip(flat, colour.T, strict=True):
                np.add.at(plane, index, (flux * share * strength).astype(np.float32))
