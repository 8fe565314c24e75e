"""Smoothing with covariances: simulated films, a real film, crossing persons, and time per frame.

    python -m research.smoothing --predictions A/predictions.json B/predictions.json --calibration Calib.qca.txt

Simulated films show one person with Student-t errors that are correlated in time, hidden keypoints and outliers. The
errors of single frames are compared with One-Euro (Casiez et al. 2012), with a Kalman filter of constant noise, and
with halopose. The settings of the first two are the best ones for these films; halopose learns from each film. Crossing
persons test identities. On the four films of ``research.multiview`` the table shows the jitter of hips and shoulders,
which hardly move, beside the lag of wrists and ankles. A curve shows other settings of One-Euro and of the responsive
filter. Coverage is the share of 95 % ellipses that hold the position that the three other cameras see.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from halopose.data.coco import parse_predictions
from halopose.data.files import read_json
from halopose.data.films import by_film
from halopose.keypoints import Keypoints
from halopose.multiview.rig import read_calibration
from halopose.multiview.triangulation import ViewObservations, triangulate_points
from halopose.poses import PoseDistributions
from halopose.tracking.live_tracking import track_live
from halopose.tracking.motion import MeasurementSeries, Motion, run_filter
from halopose.tracking.synthetic_films import Film, synthesize_film
from halopose.tracking.tracker import Tracker, TrackSettings
from halopose.tracking.tracks import PoseTracks, follow, track
from halopose.types import Array
from research.multiview import interval

LAYOUT = Keypoints.of(17)
LEVELS = (0.5, 0.9, 0.95)
RATE = 60.0  # frames per second of the real films
REST, MOVING = [5, 6, 11, 12], [15, 16, 9, 10]  # shoulders and hips; ankles and wrists


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--films", type=int, default=6)
    parser.add_argument("--predictions", type=Path, nargs="+", help="predictions.json of real films, at 60 Hz")
    parser.add_argument("--calibration", type=Path, help="cameras of the first of these films, to measure coverage")
    parser.add_argument("--curve", type=Path, help="draw jitter and lag of the real films here")
    parser.add_argument("--real", action="store_true", help="real films only")
    parser.add_argument("--picture", type=Path, help="draw an ankle over time here, and nothing else")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        draw(arguments.picture)
        return
    if not arguments.real:
        for share in (0.0, 0.3, 0.6):
            synthetic(share, arguments.films)
        crossing()
        speed()
    if arguments.predictions is not None:
        real(arguments.predictions, arguments.calibration, arguments.curve)


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
    quick = [
        track_live(film.frames, LAYOUT, rate=30.0, settings=TrackSettings(responsive=1, confirm=1)) for film in made
    ]
    responsive = rmse([one.poses.keypoints for one in quick])
    raw = rmse(raws)
    squared, quick_squared = (
        np.concatenate([
            np.einsum("tki,tkij,tkj->tk", e, np.linalg.inv(one.poses.covariance), e).ravel()
            for one, t in zip(tracks, truth, strict=True)
            for e in [one.poses.keypoints - t]
        ])
        for tracks in (found, quick)
    )  # fmt: skip
    held = " ".join(f"{np.mean(squared <= chi2.ppf(level, 2)):.3f}" for level in LEVELS)
    learnt = np.mean([float(one.motion.share) for one in found])
    print(f"share {share:.1f} (learnt {learnt:.2f}): raw {raw:.1f} px, One-Euro {euro:.1f}, constant {kalman:.1f},")
    print(f"  halopose causal {causal:.1f} (-{1 - causal / raw:.0%}), smoothed {smooth:.1f} (-{1 - smooth / raw:.0%})")
    print(f"  NEES {squared.mean():.2f} of 2; inside 50, 90, 95 %: {held}")
    inside = np.mean(quick_squared <= chi2.ppf(0.95, 2))
    print(f"  responsive {responsive:.1f} (-{1 - responsive / raw:.0%}), inside 95 %: {inside:.3f}")


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


@dataclass(frozen=True)
class RealFilm:
    """The main person of a real film, seen in every frame.

    Attributes:
        frames: Poses of each frame.
        rows: Index of the person in each frame.
        raw: Keypoints frame by frame (T, 17, 2).
        tracks: The offline tracks, with the fitted motion.
        part: Rows of the person in ``tracks``.
    """

    frames: Sequence[PoseDistributions]
    rows: Sequence[int]
    raw: Array
    tracks: PoseTracks
    part: Array

    @property
    def smooth(self) -> Array:
        """Keypoints (T, 17, 2) that use frames in both directions."""
        return self.tracks.poses.keypoints[self.part]

    def responsive(self, factor: float) -> PoseDistributions:
        """Poses of the person from the responsive filter, from the first detection on."""
        settings = TrackSettings(responsive=factor, confirm=1)
        live = track_live(self.frames, LAYOUT, rate=RATE, settings=settings)
        near = [
            min(live.rows(frame=n).tolist(), key=lambda row: np.abs(live.poses.keypoints[row] - seen).sum())
            for n, seen in enumerate(self.smooth)
        ]
        return live.poses[np.array(near)]


def films_of(path: Path) -> list[RealFilm]:
    """Films in which the person with most detections is followed through all frames."""
    content = read_json(path)
    result = []
    for frames in by_film(path, content, parse_predictions(path, content, None)).values():
        found = track(frames, LAYOUT, rate=RATE)
        identity = int(np.bincount(found.track_ids).argmax())
        part = found.rows(identity=identity)
        if len(part) < len(frames):
            continue
        tracks = follow(frames, LAYOUT, RATE, TrackSettings(), found.motion, None)
        rows = next(t for t in tracks if t.identity == identity).rows[: len(frames)]
        raw = np.array([frames[n].keypoints[row] for n, row in enumerate(rows)])
        result.append(RealFilm(frames, rows, raw, found, part))
    return result


def real(paths: Sequence[Path], calibration: Path | None, picture: Path | None) -> None:
    """Jitter and lag of One-Euro and of our filters on real films, with a curve over their settings."""
    curves = []
    for number, path in enumerate(paths):
        films = films_of(path)
        tracks = {
            "frame by frame": [film.raw for film in films],
            "One-Euro (1 Hz, 0.007)": [one_euro(film.raw, RATE, 1.0, 0.007) for film in films],
            "halopose, causal": [film.tracks.filtered.keypoints[film.part] for film in films],
            "halopose, responsive": [film.responsive(1.0).keypoints for film in films],
            "halopose, smoothed": [film.smooth for film in films],
        }
        known = [(float(film.tracks.motion.share), float(film.tracks.motion.memory)) for film in films]
        print(f"{path}, {len(films)} films: " + ", ".join(f"{s:.2f} of the variance for {m:.1f} s" for s, m in known))
        for name, places in tracks.items():
            jitter, late = jitter_and_lag(films, places)
            print(f"  {name:24} jitter {jitter:.2f} px, lag {late:+.2f} frames")
        curves.append((path.parent.name, curve(films)))
        for name, points in curves[-1][1].items():
            print(f"  {name}: " + ", ".join(f"({jitter:.2f}, {late:+.2f})" for jitter, late in points))
        if calibration is not None and number == 0:
            coverage(calibration, films)
    if picture is not None:
        draw_curves(curves, picture)


def jitter_and_lag(films: Sequence[RealFilm], places: Sequence[Array]) -> tuple[float, float]:
    """Means over films: standard deviation of second differences of hips and shoulders over sqrt 6, and the lag."""
    jitter = [np.std(np.diff(one[:, REST], 2, axis=0)) / np.sqrt(6) for one in places]
    late = [lag(one[:, MOVING], film.smooth[:, MOVING]) for one, film in zip(places, films, strict=True)]
    return float(np.mean(jitter)), float(np.mean(late))


def curve(films: Sequence[RealFilm]) -> dict[str, list[tuple[float, float]]]:
    """Jitter and lag over the settings of One-Euro and of the responsive filter."""
    factors = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
    found = {
        f"One-Euro, {cutoff:g} Hz": [
            jitter_and_lag(films, [one_euro(film.raw, RATE, cutoff, beta) for film in films])
            for beta in (0.001, 0.002, 0.004, 0.007, 0.012, 0.02, 0.05)
        ]
        for cutoff in (0.3, 1.0, 3.0)
    }
    responsive = [jitter_and_lag(films, [film.responsive(f).keypoints for film in films]) for f in factors]
    return found | {"halopose, responsive": responsive}


def draw_curves(curves: Sequence[tuple[str, dict[str, list[tuple[float, float]]]]], path: Path) -> None:
    """A chart of jitter and lag, one panel for each film."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.8), dpi=110, squeeze=False)
    greys = iter(["#b9b9b9", "#8a8a8a", "#5c5c5c"] * len(curves))
    for axes, (name, lines) in zip(panels[0], curves, strict=True):
        for label, points in lines.items():
            own = label.startswith("halopose")
            style = {"color": "#0a7d5a", "lw": 2.2} if own else {"color": next(greys), "lw": 1.4}
            axes.plot(*np.array(points).T, marker="o", ms=4, label=label, **style)
        axes.plot(*lines["halopose, responsive"][4], "o", ms=9, mfc="none", mec="#0a7d5a")
        axes.plot(*lines["One-Euro, 1 Hz"][3], "o", ms=9, mfc="none", mec="#c2510a")
        axes.set(title=name, xlabel="jitter at rest, pixels", ylabel="lag, frames", xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def coverage(calibration: Path, films: Sequence[RealFilm]) -> None:
    """Share of body keypoints whose 95 % ellipse holds the position that the three other cameras see."""
    views = read_calibration(calibration)
    poses = [PoseDistributions.concatenate([f.frames[n][row] for n, row in enumerate(f.rows)]) for f in films]
    frames, keypoints = poses[0].keypoints.shape[:2]
    points = frames * keypoints
    seen = ViewObservations(
        np.stack([one.mean.reshape(points, 2) for one in poses], axis=1),
        np.stack([one.covariance.reshape(points, 2, 2) for one in poses], axis=1),
        np.stack([np.asarray(one.keep, dtype=bool).reshape(points) for one in poses], axis=1),
    )
    kinds = {
        "frame by frame": poses,
        "halopose, causal": [film.tracks.filtered[film.part] for film in films],
        "halopose, responsive": [film.responsive(1.0) for film in films],
        "halopose, smoothed": [film.tracks.poses[film.part] for film in films],
    }
    body = np.tile(np.arange(keypoints) >= 5, frames)
    squares: dict[str, list[Array]] = {name: [] for name in kinds}
    series: list[Array] = []
    for number, view in enumerate(views):
        used = seen.used.copy()
        used[:, number] = False
        rows = np.flatnonzero(body & seen.used[:, number] & (used.sum(1) == len(views) - 1))
        found = triangulate_points(views, seen.take(rows, used[rows]), consistent=None)
        jacobian = view.jacobian(found.place)
        spread = jacobian @ found.covariance @ np.swapaxes(jacobian, -1, -2)
        for name, kind in kinds.items():
            error = kind[number].mean.reshape(points, 2)[rows] - view.project(found.place)
            total = kind[number].covariance.reshape(points, 2, 2)[rows] + spread
            squares[name].append(np.einsum("ni,nij,nj->n", error, np.linalg.inv(total), error))
        series.append(rows % keypoints + keypoints * number)
    for name, values in squares.items():
        inside = (np.concatenate(values) <= chi2.ppf(0.95, 2)).astype(float)
        print(f"  {name:24} {len(inside)} keypoints in 95 %: {interval(inside, np.concatenate(series))}")


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
