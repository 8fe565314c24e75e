"""Synthetic films with known truth: walking persons, with errors drawn from the stated distributions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.data.synthetic_poses import TEMPLATE
from halopose.keypoints import COCO_SIGMAS, PERSON_AREA_FACTOR
from halopose.poses import PoseDistributions
from halopose.types import Array

_SWING = np.array([2, 2, 2, 2, 2, 3, 3, 8, 8, 16, 16, 3, 3, 9, 9, 18, 18]) / 100  # of the height
_STRIDE = 0.9  # duration of half a step in seconds
_BEFORE = 40  # steps of correlated noise before the film starts


@dataclass(frozen=True)
class Film:
    """Parameters of a synthetic film.

    Attributes:
        frames: Number of frames.
        persons: Number of persons.
        rate: Frame rate in frames per second.
        height: Height of a person in pixels.
        dof: Degrees of freedom of the errors, or None for the Gaussian.
        share: Fraction of the error variance that is correlated over time.
        memory: Correlation time of the errors in seconds.
        hidden: Fraction of time that a keypoint is hidden: its errors are four times as large, and it is pruned.
        outliers: Fraction of keypoints at a random position on the person.
        missed: Fraction of missing detections.
        crossing: Whether the persons cross and hide each other.
        seed: Seed of the random numbers.
    """

    frames: int = 300
    persons: int = 1
    rate: float = 30.0
    height: float = 400.0
    dof: float | None = 4.0
    share: float = 0.3
    memory: float = 0.3
    hidden: float = 0.1
    outliers: float = 0.01
    missed: float = 0.0
    crossing: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SyntheticFilm:
    """A synthetic film with its truth.

    Attributes:
        frames: Poses of each frame.
        truth: True keypoints (T, P, 17, 2).
        owners: Person of each detection, for each frame.
        visible: Whether a keypoint is visible (T, P, 17).
    """

    frames: list[PoseDistributions]
    truth: Array
    owners: list[Array]
    visible: Array


def synthesize_film(film: Film | None = None) -> SyntheticFilm:
    """Generate detections of walking persons with the true distribution of their errors."""
    film = film or Film()
    rng = np.random.default_rng(film.seed)
    truth = _walks(film, rng)
    hidden = _intervals(rng, truth.shape[:3], film.hidden, round(0.5 * film.rate))
    factor = _factors(film, rng, truth.shape[:3], hidden)
    seen = truth + _errors(film, rng, factor)
    wild = rng.random(seen.shape[:3]) < film.outliers
    size = film.height * np.array([0.5, 1.0])
    seen = np.where(wild[..., None], truth.mean(2, keepdims=True) + rng.uniform(-0.5, 0.5, seen.shape) * size, seen)
    present = rng.random(truth.shape[:2]) >= film.missed
    if film.crossing:
        present &= ~_behind(truth, film)
    frames, owners = [], []
    for n in range(film.frames):
        chosen = rng.permutation(np.flatnonzero(present[n]))
        frames.append(_poses(film, seen[n, chosen], truth[n, chosen], factor[n, chosen], ~hidden[n, chosen]))
        owners.append(chosen)
    return SyntheticFilm(frames, truth, owners, ~hidden)


def _walks(film: Film, rng: np.random.Generator) -> Array:
    """Keypoints (T, P, 17, 2) of persons who walk back and forth with swinging arms and legs."""
    time = np.arange(film.frames)[:, None] / film.rate
    if film.crossing:  # from both sides, so that they meet in the middle
        way = np.where(np.arange(film.persons) % 2 == 0, 1.0, -1.0)
        middle = film.frames / film.rate / 2
        behind = (time - middle) * 0.5 - 0.6 * (np.arange(film.persons) // 2)
        centre = film.height * (2.0 + way * behind)
        depth = np.broadcast_to(0.12 * film.height * np.arange(film.persons), centre.shape)
    else:
        period, phase = rng.uniform(4, 8, film.persons), rng.uniform(0, 2 * np.pi, film.persons)
        centre = film.height * (0.6 * np.sin(2 * np.pi * time / period + phase) + 1.5 * np.arange(film.persons))
        depth = 0.05 * film.height * np.sin(2 * np.pi * time / 7 + phase)
    gait = 2 * np.pi * np.cumsum(rng.uniform(0.8, 1.2, (film.frames, film.persons)), 0) / film.rate / (2 * _STRIDE)
    gait = gait + rng.uniform(0, 2 * np.pi, film.persons)
    side = np.where(np.arange(17) % 2 == 0, 1.0, -1.0) * np.where(np.arange(17) >= 11, 1.0, -1.0)
    swing = film.height * _SWING * side * np.sin(gait)[..., None]
    bounce = 0.012 * film.height * np.cos(2 * gait)[..., None]
    pose = (TEMPLATE - [0.5, 0.0]) * film.height * np.array([0.45, 1.0])
    down = np.broadcast_to(depth[..., None] + bounce, swing.shape)
    place = pose + np.stack([centre[..., None] + swing, down], -1)
    return place + 0.2 * film.height


def _intervals(rng: np.random.Generator, shape: tuple[int, ...], part: float, length: int) -> Array:
    """Random intervals (T, P, 17) of ``length`` frames that cover a fraction ``part`` of the time."""
    begins = rng.random(shape) < part / max(length, 1)
    on = np.zeros(shape, dtype=bool)
    for shift in range(min(length, shape[0])):
        on[shift:] |= begins[: shape[0] - shift]
    return on


def _factors(film: Film, rng: np.random.Generator, shape: tuple[int, ...], hidden: Array) -> Array:
    """Factors (T, P, 17, 2, 2) with varying size, aspect and direction."""
    area = PERSON_AREA_FACTOR * 0.45 * film.height**2
    base = 0.5 * np.sqrt(area) * COCO_SIGMAS
    spread = np.exp(_slow(rng, shape, film.rate) * 0.35 + 0.2 * rng.normal(size=shape)) * base
    aspect, lean = np.exp(0.3 * _slow(rng, shape, film.rate)), 0.4 * _slow(rng, shape, film.rate)
    spread = np.where(hidden, 4 * spread, spread)
    factor = np.zeros((*shape, 2, 2))
    factor[..., 0, 0], factor[..., 1, 1] = spread * aspect, spread / aspect
    factor[..., 1, 0] = spread * lean
    return factor


def _slow(rng: np.random.Generator, shape: tuple[int, ...], rate: float) -> Array:
    return _lasting(rng, shape, np.exp(-1 / (0.5 * rate)))


def _lasting(rng: np.random.Generator, shape: tuple[int, ...], stays: float) -> Array:
    """Standard normal numbers, each correlated with its predecessor along axis 0."""
    fresh = np.sqrt(1 - stays**2) * rng.normal(size=(shape[0] + _BEFORE, *shape[1:]))
    fresh[0] = rng.normal(size=shape[1:])
    for step in range(1, len(fresh)):
        fresh[step] += stays * fresh[step - 1]
    return np.asarray(fresh[_BEFORE:])


def _errors(film: Film, rng: np.random.Generator, factor: Array) -> Array:
    """Errors (T, P, 17, 2): a correlated Gaussian part and a white part."""
    shape = factor.shape[:-1]
    new = rng.normal(size=shape)
    if film.dof is not None:
        new = new / np.sqrt(rng.gamma(film.dof / 2, 2 / film.dof, shape[:-1]))[..., None]
    lasting = _lasting(rng, shape, np.exp(-1 / (film.memory * film.rate)))
    white = np.sqrt(film.share) * lasting + np.sqrt(1 - film.share) * new
    return np.asarray((factor @ white[..., None])[..., 0])


def _behind(truth: Array, film: Film) -> Array:
    """Whether a person is hidden (T, P) by a person with a higher number."""
    centre = truth.mean(2)
    apart = np.abs(centre[:, :, None, 0] - centre[:, None, :, 0])
    before = np.tri(truth.shape[1], k=-1, dtype=bool).T
    return np.asarray(((apart < 0.12 * film.height) & before).any(2))


def _poses(film: Film, seen: Array, truth: Array, factor: Array, visible: Array) -> PoseDistributions:
    scale = factor @ np.swapaxes(factor, -1, -2)
    dof = None if film.dof is None else np.full(17, film.dof)
    covariance = scale if film.dof is None or film.dof <= 2 else scale * film.dof / (film.dof - 2)
    margin = 0.05 * film.height
    boxes = np.concatenate([truth.min(1) - margin, truth.max(1) + margin], axis=1) if len(truth) else np.zeros((0, 4))
    visibility = np.where(visible, 0.9, 0.2)
    return PoseDistributions(
        boxes, np.full(len(seen), 0.9), seen, covariance, scale, dof, visibility=visibility, keep=visible,
        class_ids=np.ones(len(seen), dtype=np.int64),
    )  # fmt: skip
