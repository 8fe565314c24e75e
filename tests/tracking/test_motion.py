"""Filter against filterpy, smoother against one least-squares solution of all frames."""

from dataclasses import replace

import numpy as np
import pytest
from filterpy.kalman import KalmanFilter
from scipy.stats import chi2

from halopose.tracking.motion import (
    MeasurementSeries,
    Motion,
    Warp,
    begin,
    log_likelihood,
    run_filter,
    run_smoother,
)
from halopose.types import Array

RATE = 25.0
MOTION = Motion(np.array([1.0, 4.0]), np.array(0.4), np.array(0.3))


def walk(frames: int, seed: int, dof: float | None = None, motion: Motion = MOTION) -> tuple[MeasurementSeries, Array]:
    """Two keypoints drawn from the model, a quarter unobserved, and their true positions (T, 2, 2)."""
    rng = np.random.default_rng(seed)
    size, step = 100.0, 1 / RATE
    place, speed = np.array([[0.0, 0.0], [50.0, 80.0]]), rng.normal(0, 20, (2, 2))
    lasting, truth, seen, factors = rng.normal(size=(2, 2)), [], [], []
    noise = np.linalg.cholesky([[step**3 / 3, step**2 / 2], [step**2 / 2, step]])
    for _ in range(frames):
        factor = np.tril(rng.normal(0, 1, (2, 2, 2))) + 5 * np.eye(2)
        weight = np.ones(2) if dof is None else rng.gamma(dof / 2, 2 / dof, 2)
        new = rng.normal(size=(2, 2)) / np.sqrt(weight)[:, None]
        white = np.sqrt(motion.share) * lasting + np.sqrt(1 - motion.share) * new
        truth.append(place)
        seen.append(place + (factor @ white[..., None])[..., 0])
        factors.append(factor)
        push = (motion.acceleration * size)[:, None, None] * (noise @ rng.normal(size=(2, 2, 2)))
        place, speed = place + step * speed + push[:, 0], speed + push[:, 1]
        stays = np.exp(-step / motion.memory)
        lasting = stays * lasting + np.sqrt(1 - stays**2) * rng.normal(size=(2, 2))
    used = rng.random((frames, 2)) > 0.25
    nu = None if dof is None else np.full((frames, 2), dof)
    measured = MeasurementSeries(np.where(used[..., None], seen, np.nan), np.array(factors), used, nu, size, step)
    return measured, np.array(truth)


def test_the_filter_equals_filterpy() -> None:
    measured, _ = walk(40, 0)
    own = run_filter(measured, MOTION)
    for k in range(2):
        first = begin(np.nan_to_num(measured.seen[0]), measured.used[0], measured.size)
        peer = KalmanFilter(6, 2)
        peer.x, peer.P = first.mean[k].copy(), first.covariance[k].copy()
        step, stays = measured.step, np.exp(-measured.step / 0.3)
        small = np.array([[1.0, step, 0], [0, 1, 0], [0, 0, stays]])
        density = (MOTION.acceleration[k] * measured.size) ** 2
        noise = np.diag([density * step**3 / 3, density * step, 1 - stays**2])
        noise[0, 1] = noise[1, 0] = density * step**2 / 2
        peer.F, peer.Q = np.kron(small, np.eye(2)), np.kron(noise, np.eye(2))
        for frame in range(40):
            if frame:
                peer.predict()
            if measured.used[frame, k]:
                factor = measured.factor[frame, k]
                seen_by = np.hstack([np.eye(2), np.zeros((2, 2)), np.sqrt(0.4) * factor])
                peer.update(measured.seen[frame, k], R=0.6 * factor @ factor.T, H=seen_by)
            np.testing.assert_allclose(own.after.mean[frame, k], peer.x, rtol=1e-7, atol=1e-7)
            np.testing.assert_allclose(own.after.covariance[frame, k], peer.P, rtol=1e-6, atol=1e-6)


def test_the_smoother_equals_all_frames_solved_at_once() -> None:
    """The posterior of a linear Gaussian model is one least-squares problem."""
    measured, _ = walk(6, 1)
    smoothed, _ = run_smoother(measured, MOTION)
    causal = run_filter(measured, MOTION)
    first = begin(np.nan_to_num(measured.seen[0]), measured.used[0], measured.size)
    k, frames = 1, 6
    information, pull = np.zeros((36, 36)), np.zeros(36)
    information[:6, :6] = np.linalg.inv(first.covariance[k])
    pull[:6] = information[:6, :6] @ first.mean[k]
    for n in range(1, frames):
        change = causal.transitions[n]
        noise = causal.before.covariance[n, k] - change @ causal.after.covariance[n - 1, k] @ change.T
        rows = np.hstack([-change, np.eye(6)])
        at = slice(6 * (n - 1), 6 * (n + 1))
        information[at, at] += rows.T @ np.linalg.inv(noise) @ rows
    for n in range(frames):
        if measured.used[n, k]:
            factor = measured.factor[n, k]
            rows = np.hstack([np.eye(2), np.zeros((2, 2)), np.sqrt(0.4) * factor])
            inverse = np.linalg.inv(0.6 * factor @ factor.T)
            at = slice(6 * n, 6 * n + 6)
            information[at, at] += rows.T @ inverse @ rows
            pull[at] += rows.T @ inverse @ measured.seen[n, k]
    spread = np.linalg.inv(information)
    np.testing.assert_allclose(smoothed.mean[:, k].ravel(), spread @ pull, rtol=1e-4, atol=1e-4)
    for n in range(frames):
        block = spread[6 * n : 6 * n + 6, 6 * n : 6 * n + 6]
        np.testing.assert_allclose(smoothed.covariance[n, k], block, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dof", [None, 4.0])
def test_errors_are_as_large_as_stated(dof: float | None) -> None:
    """For observed and for bridged frames; and smoothing reduces the error."""
    squared, bridged, ratio = [], [], []
    for seed in range(12):
        measured, truth = walk(60, seed, dof)
        smoothed, causal = run_smoother(measured, MOTION)
        place, spread = smoothed.place
        error = place - truth
        distance = np.einsum("tki,tkij,tkj->tk", error, np.linalg.inv(spread), error)
        squared.append(distance)
        bridged.append(distance[~measured.used])
        early = causal.after.place[0] - truth
        ratio.append(np.sqrt(np.square(error)[10:].mean() / np.square(early)[10:].mean()))
    held = np.mean(np.array(squared) < chi2.ppf(0.95, 2))
    assert 0.91 < held < 0.98
    assert 0.9 < np.mean(np.concatenate(bridged) < chi2.ppf(0.95, 2)) < 0.99
    assert np.mean(ratio) < 0.85


def test_an_outlier_counts_for_little_under_a_student_t() -> None:
    measured, truth = walk(40, 5, 4.0)
    wild = replace(measured, seen=measured.seen.copy(), used=np.ones_like(measured.used))
    wild.seen[:] = np.nan_to_num(measured.seen, nan=0.0)
    wild.seen[~measured.used] = truth[~measured.used]
    plain = run_smoother(wild, MOTION)[0].place[0][20, 0]
    wild.seen[20, 0] += 400.0
    moved = run_smoother(wild, MOTION)[0].place[0][20, 0]
    gaussian = run_smoother(replace(wild, nu=None), MOTION)[0].place[0][20, 0]
    assert np.abs(moved - plain).max() < 10
    assert np.abs(gaussian - plain).max() > 20


def test_the_likelihood_prefers_the_truth() -> None:
    tried = Motion(
        np.array([[1.0, 4.0]] * 4) * np.array([[1.0], [8.0], [1.0], [1.0]]),
        np.array([[0.4], [0.4], [0.01], [0.9]]),
        np.full((4, 1), 0.3),
    )
    total = np.sum([log_likelihood(walk(120, seed, 4.0)[0], tried).sum(1) for seed in range(4)], axis=0)
    assert total.argmax() == 0


def test_a_moving_camera_is_taken_out() -> None:
    """The same walk seen by a rotating camera: the smoothed positions move with the image."""
    measured, _ = walk(30, 7)
    turn = np.array([[0.9, -0.1], [0.1, 0.9]])
    offsets = np.random.default_rng(0).normal(0, 30, (30, 2))
    warps: list[Warp | None] = [None]
    linear, offset = [np.eye(2)], [np.zeros(2)]
    for n in range(1, 30):
        warps.append(Warp(turn, offsets[n]))
        linear.append(turn @ linear[-1])
        offset.append(turn @ offset[-1] + offsets[n])
    moved_by, shift = np.array(linear), np.array(offset)
    still, _ = run_smoother(measured, MOTION)
    place = np.einsum("tij,tkj->tki", moved_by, measured.seen) + shift[:, None]
    factor = np.linalg.cholesky(
        moved_by[:, None] @ measured.factor @ np.swapaxes(moved_by[:, None] @ measured.factor, -1, -2)
    )
    moving = replace(measured, seen=place, factor=factor, warps=tuple(warps), size=measured.size)
    there, _ = run_smoother(moving, replace(MOTION, share=np.array(0.0)))
    here, _ = run_smoother(measured, replace(MOTION, share=np.array(0.0)))
    expected = np.einsum("tij,tkj->tki", moved_by, here.place[0]) + shift[:, None]
    # Accelerations are in pixels of each frame, so that a shrinking image makes them slightly larger.
    assert np.abs(there.place[0] - expected)[:5].max() < 1.0
    assert np.isfinite(still.mean).all()
