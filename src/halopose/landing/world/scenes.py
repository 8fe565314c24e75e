"""Scenes of an approach: all parameters of one rendered frame, drawn from a seed.

Lengths are in metres, angles in radians. Axes and corner order are those of ``halopose.geometry.camera``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import radians, tan
from typing import Literal, get_args

import numpy as np

from halopose.boxes import PART_ASPECT, part_around
from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount, camera_pose, project_points, rotation_from_angles
from halopose.landing.runway import runway_corners
from halopose.landing.world.footage_style import Footage, footage_ranges, sample_footage, sample_pavement
from halopose.types import Array

Weather = Literal["clear", "haze", "dusk", "night", "fog"]

WEATHERS: tuple[Weather, ...] = get_args(Weather)
TRAINING_WEATHERS: tuple[Weather, ...] = ("clear", "haze", "dusk", "night")  # fog is held out as the shifted condition
KOSCHMIEDER = 3.912  # extinction times visibility: contrast of a black object falls to 2 %
AIMING_POINT = 300.0  # the glide path meets the ground this far beyond the threshold

_VISIBILITY = {
    "clear": (25e3, 80e3),
    "haze": (9e3, 20e3),
    "dusk": (14e3, 50e3),
    "night": (14e3, 50e3),
    "fog": (600.0, 3000.0),
}
_SUN = {"clear": (15, 65), "haze": (12, 55), "dusk": (-4, 4), "night": (-30, -14), "fog": (8, 50)}  # degrees
_DARK_LIGHTS = {"dusk": (0.02, 0.15), "night": (0.01, 0.06), "fog": (0.3, 1.0)}  # share of the full intensity
_ATTEMPTS = 200


@dataclass(frozen=True)
class Runway:
    """A runway in runway axes: centre (x, y) of its threshold, size, pavement, designator and lights.

    Attributes:
        length: length in metres.
        width: width in metres.
        designator: designator.
        concrete: whether the pavement is concrete.
        shoulder: metres of shoulder.
        threshold: centre (x, y) of the threshold.
        before: metres of pavement before a displaced threshold, along its left and right side stripe.
        counted: whether labelled corners begin there and not at the threshold.
    """

    length: float
    width: float
    designator: str = "27"
    concrete: bool = False
    shoulder: float = 0.0
    threshold: tuple[float, float] = (0.0, 0.0)
    before: tuple[float, float] = (0.0, 0.0)
    counted: bool = False

    def corners(self) -> Array:
        """Return the labelled corners near left, near right, far right, far left (4, 3)."""
        corners = runway_corners(self.length, self.width) + np.array([*self.threshold, 0.0])
        corners[:2, 0] -= np.array(self.before) * self.counted
        return corners


@dataclass(frozen=True)
class CameraSensor:
    """Effects of the camera: lens blur and motion (u, v) in pixels, noise at full scale, gains.

    ``exposure`` is relative to the automatic one, ``white_balance`` is (blue, green, red), ``vignette`` is the loss in
    the corners.
    """

    blur: float = 0.6
    motion: tuple[float, float] = (0.0, 0.0)
    noise: float = 0.01
    exposure: float = 1.0
    white_balance: tuple[float, float, float] = (1.0, 1.0, 1.0)
    vignette: float = 0.0


@dataclass(frozen=True)
class Scene:
    """One frame: pose of the aircraft, camera, and world.

    Attributes:
        seed: seed of the surroundings.
        weather: weather.
        runway: the runway to land on.
        position: position (3,) of the aircraft.
        attitude: yaw, pitch, roll (3,).
        camera: the camera.
        mount: its mounting.
        visibility: meteorological visibility in metres.
        sun: elevation and azimuth, the azimuth to the right of the landing direction.
        lights: intensity of the lights as a share of full intensity.
        sensor: effects of the camera.
        parallel: a parallel runway.
        frame: seed of the noise.
        bare: whether the runways are removed and nothing is labelled.
        footage: effects of a real camera and airport.
    """

    seed: int
    weather: Weather
    runway: Runway
    position: Array
    attitude: Array
    camera: Camera
    mount: Mount
    visibility: float
    sun: tuple[float, float]
    lights: float
    sensor: CameraSensor = field(default_factory=CameraSensor)
    parallel: Runway | None = None
    frame: int = 0
    bare: bool = False
    footage: Footage | None = None

    @property
    def runways(self) -> tuple[Runway, ...]:
        """The runway to land on, then its parallel if there is one; none if the scene is bare."""
        if self.bare:
            return ()
        return (self.runway,) if self.parallel is None else (self.runway, self.parallel)

    @property
    def extinction(self) -> float:
        """Extinction of the air per metre (Koschmieder)."""
        return KOSCHMIEDER / self.visibility

    def camera_pose(self) -> tuple[Array, Array]:
        """Rotation (3, 3) from runway to camera axes, and the camera's position (3,)."""
        return camera_pose(rotation_from_angles(*self.attitude), self.position, self.mount)


@dataclass(frozen=True)
class SceneSettings:
    """Ranges from which scenes are drawn.

    Attributes:
        camera: the camera.
        distance: range of the distance before the threshold, log-uniform.
        glide: range of the glide path angle.
        glide_spread: standard deviation of the angle from the glide path.
        localizer: standard deviation of the angle from the centreline.
        crab: largest crab angle, twice its standard deviation.
        pitch: range of the aircraft's pitch.
        roll_spread: standard deviation of the roll.
        tilt: pitch of the camera against the aircraft; negative is down.
        tilt_spread: its standard deviation.
        parallel_share: share of scenes with a parallel runway.
        bare: remove the runways.
        footage: draw a camera, ranges and effects of real footage for every scene.
        paved: share of footage scenes with pavement before the threshold; labels begin there in most of them.
        part: size in pixels of a crop around the runway, as region-of-interest refinement uses; 0 for the whole image.
    """

    camera: Camera = field(default_factory=lambda: Camera.from_fov(640, 384, radians(30)))
    distance: tuple[float, float] = (300.0, 6000.0)
    glide: tuple[float, float] = (radians(2.5), radians(3.5))
    glide_spread: float = radians(0.15)
    localizer: float = radians(0.7)
    crab: float = radians(8.0)
    pitch: tuple[float, float] = (radians(2.0), radians(5.0))
    roll_spread: float = radians(2.0)
    tilt: float = radians(-6.5)
    tilt_spread: float = radians(0.4)
    parallel_share: float = 0.2
    bare: bool = False
    footage: bool = False
    paved: float = 0.0
    part: int = 0


def check_weather(weather: str) -> None:
    if weather not in WEATHERS:
        raise HaloposeError(f"unknown weather {weather!r}: {', '.join(WEATHERS)}")


def sample_scene(seed: int, weather: Weather = "clear", settings: SceneSettings | None = None) -> Scene:
    """Draw the scene of a seed: the runway to land on is completely in view, a parallel one completely or not at
    all.
    """
    check_weather(weather)
    settings = settings or SceneSettings()
    if settings.footage:
        settings = _as_footage(seed, settings)
    world = sample_world(seed, weather, settings)
    if settings.footage and settings.paved:
        before, counted = sample_pavement(seed, settings.paved)
        world = replace(world, runway=replace(world.runway, before=before, counted=counted))
    rng = np.random.default_rng([seed, 1])
    for _ in range(_ATTEMPTS):
        scene = _place(world, rng, settings)
        if np.all(scene.camera.contains(runway_pixels(scene, scene.runway))):
            if settings.part:
                scene = replace(scene, camera=_part_of(scene, settings.part, rng))
            footage = sample_footage(seed) if settings.footage else None
            return replace(_without_cut_parallel(scene), bare=settings.bare, footage=footage)
    raise HaloposeError("the runway is never completely in view: widen the field of view or the distances")


def _as_footage(seed: int, settings: SceneSettings) -> SceneSettings:
    """Return the settings with the camera of a seed and ranges that suit it."""
    ranges = footage_ranges(seed)
    return replace(
        settings,
        camera=ranges.camera,
        distance=(settings.distance[0], min(settings.distance[1], ranges.farthest)),
        glide=ranges.glide,
        localizer=ranges.localizer,
        crab=ranges.crab,
        roll_spread=ranges.roll_spread,
        tilt_spread=ranges.tilt_spread,
    )


def sample_world(seed: int, weather: Weather, settings: SceneSettings) -> Scene:
    """Draw runways, light, air and camera of a seed, with the aircraft at the origin."""
    rng = np.random.default_rng([seed, 0])
    runway = _sample_runway(rng)
    parallel = _sample_parallel(rng, runway) if rng.random() < settings.parallel_share else None
    visibility = float(np.exp(rng.uniform(*np.log(_VISIBILITY[weather]))))
    sun = (radians(rng.uniform(*_SUN[weather])), float(rng.uniform(-np.pi, np.pi)))
    lit = rng.random() < 0.4  # by day
    lights = rng.uniform(*_DARK_LIGHTS.get(weather, (0.05, 0.4))) * (lit or weather in _DARK_LIGHTS)
    mount = Mount.looking(
        yaw=rng.normal(0, radians(0.4)),
        pitch=settings.tilt + rng.normal(0, settings.tilt_spread),
        roll=rng.normal(0, radians(0.3)),
        lever_arm=rng.normal((4.0, 0.0, 0.5), (1.5, 0.3, 0.3)),
    )
    return Scene(
        seed, weather, runway, np.zeros(3), np.zeros(3), settings.camera, mount, visibility, sun, float(lights),
        _sample_sensor(rng, weather), parallel,
    )  # fmt: skip


def _sample_runway(rng: np.random.Generator) -> Runway:
    width = float(rng.choice([45.0, 60.0, 30.0, 23.0, 40.0, 50.0], p=[0.45, 0.2, 0.2, 0.05, 0.05, 0.05]))
    longest = 2400.0 if width <= 30 else 4000.0
    return Runway(
        length=float(np.round(rng.triangular(1500.0, 0.6 * longest + 600, longest))),
        width=width,
        designator=f"{rng.integers(1, 37):02d}",
        concrete=bool(rng.random() < 0.35),
        shoulder=float(rng.choice([0.0, 3.0, 7.5])) if width >= 45 else 0.0,
    )


def _sample_parallel(rng: np.random.Generator, runway: Runway) -> Runway:
    side = int(rng.choice([-1, 1]))
    beside = _sample_runway(rng)
    number = runway.designator[:2]
    offset = (float(rng.uniform(-800.0, 1500.0)), side * float(rng.uniform(220.0, 1100.0)))
    return replace(beside, designator=number + ("L" if side > 0 else "R"), threshold=offset)


def _sample_sensor(rng: np.random.Generator, weather: Weather) -> CameraSensor:
    dark = weather in ("dusk", "night")
    return CameraSensor(
        blur=float(rng.uniform(0.4, 1.0)),
        motion=(float(rng.normal(0, 0.4)), float(rng.normal(0, 0.8))),
        noise=float(rng.uniform(0.012, 0.035) if dark else rng.uniform(0.004, 0.018)),
        exposure=float(np.exp(rng.normal(0, 0.18))),
        white_balance=(float(np.exp(rng.normal(0, 0.05))), 1.0, float(np.exp(rng.normal(0, 0.05)))),
        vignette=float(rng.uniform(0, 0.3)),
    )


def _place(world: Scene, rng: np.random.Generator, settings: SceneSettings) -> Scene:
    """Place the aircraft on its approach; in fog no farther than the threshold is visible."""
    near, far = settings.distance
    far = min(far, max(near, 0.9 * world.visibility))
    distance = float(np.exp(rng.uniform(np.log(near), np.log(far))))
    glide = rng.uniform(*settings.glide) + rng.normal(0, settings.glide_spread)
    lateral = (distance + AIMING_POINT) * rng.normal(0, settings.localizer) + rng.normal(0, 2.0)
    height = max((distance + AIMING_POINT) * tan(glide), 12.0)
    attitude = np.array(
        [
            np.clip(rng.normal(0, settings.crab / 2), -settings.crab, settings.crab),
            rng.uniform(*settings.pitch),
            rng.normal(0, settings.roll_spread),
        ]
    )
    return replace(world, position=np.array([-distance, lateral, height]), attitude=attitude)


def _part_of(scene: Scene, size: int, rng: np.random.Generator) -> Camera:
    """Return the camera of a crop with ``size`` pixels around the runway to land on, not always centred."""
    corners = runway_pixels(scene, scene.runway)
    low, high = corners.min(0), corners.max(0)
    free = np.maximum(np.array([size, PART_ASPECT * size]) - (high - low), 0)
    away = rng.uniform(-0.4, 0.4, 2) * free
    part = part_around(np.concatenate([low + away, high + away]), scene.camera.width, scene.camera.height, size)
    return scene.camera.part(*part, size)


def _without_cut_parallel(scene: Scene) -> Scene:
    """Remove a parallel runway that the image border cuts: it can neither be labelled nor ignored."""
    if scene.parallel is None:
        return scene
    whole = scene.camera.contains(runway_pixels(scene, scene.parallel)).all()
    return scene if whole or not _meets_image(scene, scene.parallel) else replace(scene, parallel=None)


def _meets_image(scene: Scene, runway: Runway) -> bool:
    """Return whether any point along the runway's edges is in the image."""
    share = np.linspace(0.0, 1.0, 41)[:, None]
    near_left, near_right, far_right, far_left = runway.corners()
    edges = [a + share * (b - a) for a, b in ((near_left, far_left), (near_right, far_right))]
    pixels = project_points(scene.camera, *scene.camera_pose(), np.concatenate(edges))
    return bool(np.any(scene.camera.contains(pixels)))


def runway_pixels(scene: Scene, runway: Runway) -> Array:
    """Return pixels (4, 2) of a runway's corners, NaN behind the camera."""
    return project_points(scene.camera, *scene.camera_pose(), runway.corners())


def corners_in_image(scene: Scene, runway: Runway | None = None) -> tuple[Array, Array]:
    """Return pixels (4, 2) of the corners of a runway, by default the one to land on, and which are visible (4,).

    A visible corner is in the image and nearer than the visibility.
    """
    runway = runway or scene.runway
    pixels = runway_pixels(scene, runway)
    distance = np.linalg.norm(runway.corners() - scene.camera_pose()[1], axis=-1)
    return pixels, scene.camera.contains(pixels) & (distance < scene.visibility)


def labelled_runways(scene: Scene) -> Sequence[Runway]:
    """Return the runways with all four corners in the image, the one to land on first."""
    return [r for r in scene.runways if np.all(scene.camera.contains(runway_pixels(scene, r)))]
