"""Smoothing with covariances: simulated films, a real film, crossing persons, and time per frame.

    python -m research.smoothing --predictions build/multiview/SinglePerson/predictions.json

Simulated films show one person with Student-t errors that are correlated in time, hidden keypoints and outliers. The
errors of single frames are compared with One-Euro (Casiez et al. 2012), with a Kalman filter of constant noise, and
with halopose. The settings of the first two are the best ones for these films; halopose learns from each film. Crossing
persons test identities. On the four films of ``research.multiview`` the table shows the jitter of hips and shoulders,
which hardly move, beside the motion of ankles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from halopose.data.coco import parse_predictions
from halopose.data.files import read_json
from halopose.data.films import by_film
from halopose.keypoints import Keypoints
from halopose.tracking.motion import MeasurementSeries, Motion, run_filter
from halopose.tracking.synthetic_films import Film, synthesize_film
from halopose.tracking.tracker import Tracker, TrackSettings
from halopose.tracking.tracks import follow, track
from halopose.types import Array

LAYOUT = Keypoints.of(17)
LEVELS = (0.5, 0.9, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--films", type=int, default=6)
    parser.add_argument("--predictions", type=Path, help="predictions.json of real films, at 60 Hz")
    parser.add_argument("--picture", type=Path, help="draw an ankle over time here, and nothing else")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        draw(arguments.picture)
        return
    for share in (0.0, 0.3, 0.6):
        synthetic(share, arguments.films)
    crossing()
    speed()
    if arguments.predictions is not None:
        real(arguments.predictions)


def one_euro(seen: Array, rate: float, cutoff: float, beta: float) -> Array:
    """The One-Euro filter over (T, ...): a low pass whose cutoff grows with the speed."""

    def smoothing(frequency: Array | float) -> Array | float:
        return 1 / (1 + rate / (2 * np.pi * frequency))

    place, speed, result = seen[0], np.zeros_like(seen[0]), [seen[0]]
    for value in seen[1:]:
        speed = speed + smoothing(1.0) * ((value - place) * rate - speed)
        place = place + smoothing(cutoff + beta * np.abs(speed)) * (value - place)
        result.append(place)
    return np.array(result)


def constant_noise(seen: Array, rate: float, size: float, acceleration: float, sigma: float) -> Array:
    """A Kalman filter with constant velocity and one noise for all keypoints and frames."""
    count = seen.shape[1]
    factor = np.broadcast_to(sigma * np.eye(2), (*seen.shape, 2))
    motion = Motion(np.full(count, acceleration), np.array(0.0), np.array(1.0))
    used = np.ones(seen.shape[:2], dtype=bool)
    return run_filter(MeasurementSeries(seen, factor, used, None, size, 1 / rate), motion).after.place[0]


def best_of(errors: Callable[..., float], *ranges: Array) -> float:
    """The least error over all combinations of settings."""
    grid = np.stack(np.meshgrid(*ranges), -1).reshape(-1, len(ranges))
    return min(errors(*values) for values in grid)


def synthetic(share: float, films: int) -> None:
    """RMSE in pixels of visible keypoints, and whether the stated covariances hold."""
    made = [synthesize_film(Film(frames=200, share=share, seed=seed)) for seed in range(films)]
    raws = [np.array([poses.keypoints[0] for poses in film.frames]) for film in made]
    seen = [film.visible[:, 0] for film in made]
    truth = [film.truth[:, 0] for film in made]

    def rmse(tracks: list[Array]) -> float:
        squares = [np.square(a - b).sum(-1)[v] for a, b, v in zip(tracks, truth, seen, strict=True)]
        return float(np.sqrt(np.concatenate(squares).mean()))

    euro = best_of(
        lambda c, b: rmse([one_euro(raw, 30.0, c, b) for raw in raws]),
        np.geomspace(0.3, 6, 6),
        np.geomspace(1e-4, 0.1, 5),
    )
    kalman = best_of(
        lambda a, s: rmse([constant_noise(raw, 30.0, 195.0, a, s) for raw in raws]),
        np.geomspace(0.3, 6, 5),
        np.array([13.0]),
    )
    found = [track(film.frames, LAYOUT, rate=30.0) for film in made]
    smooth = rmse([one.poses.keypoints for one in found])
    causal = rmse([one.filtered.keypoints for one in found])
    raw = rmse(raws)
    squared = np.concatenate([
        np.einsum("tki,tkij,tkj->tk", e, np.linalg.inv(one.poses.covariance), e).ravel()
        for one, t in zip(found, truth, strict=True)
        for e in [one.poses.keypoints - t]
    ])  # fmt: skip
    held = " ".join(f"{np.mean(squared <= chi2.ppf(level, 2)):.3f}" for level in LEVELS)
    learnt = np.mean([float(one.motion.share) for one in found])
    print(f"share {share:.1f} (learnt {learnt:.2f}): raw {raw:.1f} px, One-Euro {euro:.1f}, constant {kalman:.1f},")
    print(f"  halopose causal {causal:.1f} (-{1 - causal / raw:.0%}), smoothed {smooth:.1f} (-{1 - smooth / raw:.0%})")
    print(f"  NEES {squared.mean():.2f} of 2; inside 50, 90, 95 %: {held}")


def draw(path: Path) -> None:
    """A chart of one keypoint's x over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    film = synthesize_film(Film(frames=120, seed=5, missed=0.0, hidden=0.2, outliers=0.03))
    found = track(film.frames, LAYOUT, rate=30.0)
    k, seconds = max((9, 10, 15, 16), key=lambda k: int((~film.visible[:, 0, k]).sum())), np.arange(120) / 30
    raw = np.array([poses.keypoints[0, k, 0] for poses in film.frames])
    seen, place = film.visible[:, 0, k], found.poses.keypoints[:, k, 0]
    band = 1.96 * np.sqrt(found.poses.covariance[:, k, 0, 0])
    figure, axes = pyplot.subplots(figsize=(9, 3.6), dpi=110)
    axes.fill_between(seconds, place - band, place + band, color="#0a7d5a", alpha=0.2, lw=0, label="95 % band")
    axes.plot(seconds, place, color="#0a7d5a", lw=1.8, label="smoothed")
    axes.plot(seconds, film.truth[:, 0, k, 0], color="#1d1e20", lw=1.0, ls="--", label="truth")
    axes.plot(seconds[seen], raw[seen], ".", color="#c2510a", ms=5, label="frame by frame")
    axes.plot(seconds[~seen], raw[~seen], "x", color="#999999", ms=4, label="pruned")
    axes.set(
        xlabel="seconds",
        ylabel=f"x of the {LAYOUT.names[k].replace('_', ' ')}, pixels",
        ylim=(place.min() - 90, place.max() + 90),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.14), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def crossing() -> None:
    """Switches of identity, and gaps bridged, of persons who walk through each other."""
    switches = gaps = bridged = persons = 0
    for seed in range(5):
        film = synthesize_film(Film(frames=150, persons=6, crossing=True, missed=0.05, seed=seed))
        tracks = follow(film.frames, LAYOUT, 30.0, TrackSettings(gap=1.5), None, None)
        for one in tracks:
            owners = [int(film.owners[one.first + n][row]) for n, row in enumerate(one.span) if row >= 0]
            switches += sum(a != b for a, b in pairwise(owners))
        for person in range(6):
            present = np.array([person in owner for owner in film.owners])
            gaps += int(np.sum(present[:-1] & ~present[1:]))
        bridged += sum(int(np.sum((np.array(t.span[:-1]) >= 0) & (np.array(t.span[1:]) < 0))) for t in tracks)
        persons += len(tracks)
    print(f"crossing, 5 films of 6 persons: {persons} tracks, {switches} switches, {bridged} of {gaps} gaps bridged")


def speed() -> None:
    """Milliseconds a frame with 20 persons: pairing alone, and all of an update."""
    film = synthesize_film(Film(frames=40, persons=20, seed=0))
    tracker = Tracker(LAYOUT, 30.0)
    pairing, whole = [], []
    for poses in film.frames:
        began = time.perf_counter()
        tracker._pairs(poses)
        pairing.append(time.perf_counter() - began)
        tracker.update(poses)
        whole.append(time.perf_counter() - began - pairing[-1])
    print(f"20 persons: pairing {1e3 * np.median(pairing[5:]):.1f} ms, update {1e3 * np.median(whole[5:]):.1f} ms")


def real(path: Path) -> None:
    """Jitter (standard deviation of second differences over sqrt 6) of what rests, and how far results lag."""
    content = read_json(path)
    films = by_film(path, content, parse_predictions(path, content, None))
    rest, moving = [5, 6, 11, 12], [15, 16, 9, 10]
    rows: dict[str, list[tuple[float, float]]] = {}
    learnt = []
    for frames in films.values():
        found = track(frames, LAYOUT, rate=60.0)
        learnt.append((float(found.motion.share), float(found.motion.memory)))
        identity = np.bincount(found.track_ids).argmax()
        part = found.rows(identity=int(identity))
        if len(part) < len(frames):
            continue
        one = next(
            t for t in follow(frames, LAYOUT, 60.0, TrackSettings(), found.motion, None) if t.identity == identity
        )
        raw = np.array([frames[n].keypoints[row] for n, row in enumerate(one.rows[: len(frames)])])
        smooth = found.poses.keypoints[part]
        tracks = {"frame by frame": raw, "One-Euro (1 Hz, 0.007)": one_euro(raw, 60.0, 1.0, 0.007),
                  "halopose, causal": found.filtered.keypoints[part], "halopose, smoothed": smooth}  # fmt: skip
        for name, places in tracks.items():
            jitter = np.std(np.diff(places[:, rest], 2, axis=0)) / np.sqrt(6)
            rows.setdefault(name, []).append((float(jitter), lag(places[:, moving], smooth[:, moving])))
    print("real films: " + ", ".join(f"{s:.2f} of the variance lasts for {m:.1f} s" for s, m in learnt))
    for name, values in rows.items():
        jitter, late = np.mean(values, axis=0)
        print(f"  {name:24} jitter {jitter:.2f} px, lag {late:+.1f} frames")


def lag(places: Array, reference: Array, reach: int = 10) -> float:
    """Frames by which places come after a reference that looks both ways, where they agree best."""
    cost = []
    for shift in range(-2, reach + 1):
        a = places[reach + shift : len(places) - reach + shift]
        cost.append(np.square(a - reference[reach : len(places) - reach]).mean())
    best = int(np.clip(np.argmin(cost), 1, len(cost) - 2))
    below, at, above = cost[best - 1 : best + 2]
    return float(best - 2 + np.clip((below - above) / (2 * (above - 2 * at + below)), -1, 1))


if __name__ == "__main__":
    main()
