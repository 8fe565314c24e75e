"""Figures of docs/novelty.md for runways: what a gate fitted on generic corruptions does in fog, and its rivals.

    python -m experiments.novelty --work work/

Tests the runway heads that ship on scenes of other seeds: fog, every weather that novelty was calibrated on, and
land without a runway. What is drawn and collected stays in the work folder, which may be that of
``experiments.runway_heads``, from whose scenes rivals have their thresholds: a rerun is quick.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from experiments.runway_heads import PLAIN as PLAIN_SCENES
from experiments.runway_heads import calibration_store, drawn
from experiments.shipped_results import markdown
from halopose.boxes import box_area
from halopose.cli.terminal import progress, say
from halopose.data.images import write_image
from halopose.data.loading import load_dataset
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.novelty import Rows, collect_copies, ledoit_wolf, rows_of
from halopose.fitting.store import CollectSettings, MatchStore
from halopose.hosts import shipped
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing.world.dataset import split_seeds, write_dataset
from halopose.landing.world.render import render
from halopose.landing.world.scenes import TRAINING_WEATHERS, SceneSettings, sample_scene
from halopose.predictor import UncertainPose
from halopose.studies.shift import auroc
from halopose.types import Array, Progress, named
from halopose.uncertainty.novelty import COMPONENTS, Novelty, together

COUNTS = {"fog": 200, "bare": 80}
OF_WEATHER = 100
TEST_SEED, FOG_SEED = 41, 43  # heads, detector and gate have seen others, and nothing was chosen on these
CONFIDENCES = (0.25, 0.7)
ALARMS = (0.01, 0.05, 0.1)
SHOWN = 4  # scene of the picture
PLAIN = CollectSettings(assigned=False, conf=0.05, detections=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector than the one that ships, with --artifact")
    parser.add_argument("--artifact", type=Path, help="heads with novelty, by default those that ship")
    parser.add_argument("--rivals", action="store_true", help="fit what the literature offers beside")
    parser.add_argument("--picture", type=Path, help="draw a clear and a foggy scene with alarms here, and stop")
    arguments = parser.parse_args()
    if arguments.picture:
        write_image(arguments.picture, picture())
        return
    host = load_host(arguments.base or shipped.runway_detector())
    artifact = Artifact.load(arguments.artifact or shipped.runway_artifact())
    with progress() as step:
        stores = collected(host, arguments.work, step)
        if arguments.rivals:
            stores["val"] = calibration_store(host, arguments.work, step)
            stores["train"] = copied_store(host, arguments.work, step)
    found = {name: rows_of(artifact, store, PLAIN.conf) for name, store in stores.items() if name != "bare"}
    say("### Fog\n\n" + gate_table(artifact, found))
    say("\n### False alarms\n\n" + alarm_table(artifact, found))
    say("\n### Land without a runway\n\n" + bare_table(artifact, stores["bare"]))
    if arguments.rivals:
        say("\n### Rivals\n\n" + rival_table(artifact, found))


def picture() -> Array:
    """The same approach in clear air and in fog, with what is flagged at 5 %."""
    model = UncertainPose.load("runway")
    scenes = [sample_scene(split_seeds(FOG_SEED, "fog", 20)[SHOWN], weather) for weather in ("clear", "fog")]
    scenes[0] = replace(scenes[1], weather="clear", visibility=scenes[0].visibility)
    images = [render(scene) for scene in scenes]
    return np.hstack([model.predict(image)[0].plot(image, boxes=True, alarm=0.05) for image in images])


def collected(host: Host, work: Path, step: Progress) -> dict[str, MatchStore]:
    """Stores of scenes to test on, by name."""
    stores: dict[str, MatchStore] = {}
    for name in (*COUNTS, *TRAINING_WEATHERS):
        seed, split = FOG_SEED if name == "fog" else TEST_SEED, "val" if name == "bare" else name
        bare = SceneSettings(bare=name == "bare")
        counts = {split: COUNTS.get(name, OF_WEATHER)}
        data = write_dataset(work / f"scenes-{name}-{seed}", counts, seed, settings=bare, processes=2)
        folder = work / f"store-{name}-{seed}"
        stores[name] = collect(host, load_dataset(data, split), folder, PLAIN, named(step, f"collecting {name}"))
    return stores


def copied_store(host: Host, work: Path, step: Progress) -> MatchStore:
    """The scenes that the shipped novelty was fitted on, and their corrupted copies."""
    return collect_copies(host, drawn(work, "train", PLAIN_SCENES), work / "copies", 640, progress=step)


def wrong(rows: Rows) -> Array:
    """Detections (N,) whose worst corner is outside of its 99 % ellipse, or that are of no runway."""
    return rows.wrong > 0


def gate_table(artifact: Artifact, found: dict[str, Rows]) -> str:
    """What the gate keeps in fog at the alarm of 5 %, beside the prototype's rules."""
    novelty = artifact.novelty
    assert novelty is not None
    fog, seen = found["fog"], [found[name] for name in TRAINING_WEATHERS]
    rows = []
    for conf in CONFIDENCES:
        value, usual = novelty.value(fog.evidence), torch.cat([novelty.value(one.evidence) for one in seen])
        scores = torch.cat([one.evidence.score for one in seen])
        at = (fog.evidence.score >= conf).numpy()
        kept = (novelty.p_value(value, conf).numpy() > 0.05) & at
        signal = torch.cat([value[torch.from_numpy(at)], usual[scores >= conf]]).numpy()
        label = np.r_[np.ones(at.sum()), np.zeros(int((scores >= conf).sum()))].astype(bool)
        bad = wrong(fog)
        rows.append(
            [
                f"{conf}",
                f"{at.sum()}, {(bad & at).sum()}",
                f"{kept.sum()}, {(bad & kept).sum()}",
                f"{100 * (bad & kept).sum() / at.sum():.1f} %",
                f"{auroc(signal, label):.3f}",
            ]
        )
    head = ["confidence", "foggy detections, wrong", "kept, wrong", "wrong and kept", "AUROC fog / seen weathers"]
    return markdown(head, rows)


def alarm_table(artifact: Artifact, found: dict[str, Rows]) -> str:
    """Share flagged of detections, and of images, by weather and nominal rate, with binomial standard errors."""
    novelty = artifact.novelty
    assert novelty is not None
    rows = []
    parts: dict[str, list[Rows]] = {name: [found[name]] for name in (*TRAINING_WEATHERS, "fog")}
    parts["seen weathers together"] = [found[name] for name in TRAINING_WEATHERS]
    for name, group in parts.items():
        cells = []
        for conf in CONFIDENCES:
            every = torch.cat([novelty.p_value(novelty.value(one.evidence), conf) for one in group])
            chance = every[torch.cat([one.evidence.score for one in group]) >= conf].numpy()
            cells += [_share(chance <= rate) for rate in ALARMS]
        images = torch.cat([novelty.image_p_value(novelty.image_value(one.vectors)) for one in group]).numpy()
        rows.append([name, *cells, *(_share(images <= rate) for rate in ALARMS)])
    head = ["", *(f"conf {conf}, {100 * rate:g} %" for conf in CONFIDENCES for rate in ALARMS)]
    return markdown([*head, *(f"images, {100 * rate:g} %" for rate in ALARMS)], rows)


def _share(flagged: Array) -> str:
    share = flagged.mean() if len(flagged) else float("nan")
    return f"{100 * share:.1f} ± {100 * np.sqrt(share * (1 - share) / max(len(flagged), 1)):.1f} %"


def bare_table(artifact: Artifact, store: MatchStore) -> str:
    """Images without a runway that answer with a detection, and with one that passes."""
    novelty = artifact.novelty
    assert novelty is not None
    rows = []
    images = len(store.images)
    found = rows_of(artifact, store, PLAIN.conf)
    for conf in CONFIDENCES:
        at = (found.evidence.score >= conf).numpy()
        passing = at & (novelty.p_value(novelty.value(found.evidence), conf).numpy() > 0.05)
        rows.append([f"{conf}", str(images), *(str(len(np.unique(found.image[mask]))) for mask in (at, passing))])
    return markdown(["confidence", "images", "with a detection", "with one that passes"], rows)


# --- rivals -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rival:
    """A number for each detection, larger for what is more unlike, and what it costs beside the gate's inputs."""

    signal: Callable[[Rows], Array]


def rivals(artifact: Artifact, train: Rows) -> dict[str, Rival]:
    """What the literature offers on the same features, all fitted on the same training images."""
    novelty = artifact.novelty
    assert novelty is not None
    usual = train.select(np.flatnonzero(train.clean & (train.poses.scores >= 0.25)))

    def of_components(*names: str) -> Callable[[Rows], Array]:
        index = [COMPONENTS.index(name) for name in names]
        return lambda rows: together(unit(novelty, rows)[:, index]).numpy()

    table = {
        "score alone": Rival(lambda rows: -rows.poses.scores),
        "stated covariance": Rival(
            lambda rows: np.linalg.det(rows.poses.covariance).max(1) / box_area(rows.poses.boxes) ** 2
        ),
        "nearest neighbours of the window": Rival(neighbours(usual)),
        "relative Mahalanobis of the window": Rival(relative(train, usual)),
        "Mahalanobis of the window": Rival(of_components("window")),
        "Mahalanobis of the image": Rival(of_components("image")),
        "both distances": Rival(of_components("window", "image")),
        "reliability": Rival(of_components("unreliable")),
        "clean or corrupted": Rival(of_components("changed")),
        "all four: the gate": Rival(of_components(*COMPONENTS)),
    }
    return table


def unit(novelty: Novelty, rows: Rows) -> torch.Tensor:
    """Standardised components (N, 4)."""
    level = rows.evidence.level
    return (novelty.components(rows.evidence) - novelty.centre[level]) / novelty.scale[level]


def _windows(rows: Rows) -> torch.Tensor:
    window = rows.evidence.window
    return window / window.norm(dim=1, keepdim=True).clamp(min=1e-12)


def neighbours(usual: Rows, count: int = 10) -> Callable[[Rows], Array]:
    """Distance to the tenth nearest clean window of the level."""

    def signal(rows: Rows) -> Array:
        result = np.full(len(rows.poses), np.inf)
        for level in range(3):
            known = _windows(usual)[usual.evidence.level == level]
            at = (rows.evidence.level == level).numpy()
            if at.any() and len(known) >= count:
                distance = torch.cdist(_windows(rows)[torch.from_numpy(at)], known)
                result[at] = distance.kthvalue(count, dim=1).values.numpy()
        return result

    return signal


def relative(train: Rows, usual: Rows) -> Callable[[Rows], Array]:
    """Mahalanobis distance to clean windows less that to all windows, corrupted ones included."""

    def fitted(rows: Rows, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = _windows(rows)[rows.evidence.level == level].double()
        return known.mean(0), torch.linalg.inv(ledoit_wolf(known))

    def square(vectors: torch.Tensor, law: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        away = vectors.double() - law[0]
        return ((away @ law[1]) * away).sum(1)

    laws = {
        level: (fitted(usual, level), fitted(train, level))
        for level in range(3)
        if (usual.evidence.level == level).sum() > 20
    }

    def signal(rows: Rows) -> Array:
        result = np.full(len(rows.poses), np.inf)
        for level, (near, far) in laws.items():
            at = rows.evidence.level == level
            vectors = _windows(rows)[at]
            result[at.numpy()] = (square(vectors, near) - square(vectors, far)).numpy()
        return result

    return signal


def rival_table(artifact: Artifact, found: dict[str, Rows]) -> str:
    """Every rival with its threshold from the calibration images, at 5 % of them given up."""
    fog, val = found["fog"], found["val"]
    seen = [found[name] for name in TRAINING_WEATHERS]
    rows = []
    for name, rival in rivals(artifact, found["train"]).items():
        began = time.perf_counter()
        value = rival.signal(fog)
        cost = 1e6 * (time.perf_counter() - began) / len(fog.poses)
        usual, known = np.concatenate([rival.signal(one) for one in seen]), rival.signal(val)
        scores = np.concatenate([one.poses.scores for one in seen])
        cells = []
        for conf in CONFIDENCES:
            at = fog.poses.scores >= conf
            limit = np.quantile(known[val.poses.scores >= conf], 0.95)
            kept = at & (value <= limit)
            area = auroc(
                np.r_[value[at], usual[scores >= conf]],
                np.r_[np.ones(at.sum()), np.zeros((scores >= conf).sum())] > 0,
            )
            cells += [f"{area:.3f}", f"{kept.sum()}, {(wrong(fog) & kept).sum()}"]
        rows.append([name, *cells, f"{cost:.0f}"])
    head = ["rule", *(f"{what} at {conf}" for conf in CONFIDENCES for what in ("AUROC", "kept, wrong"))]
    return markdown([*head, "microseconds a detection"], rows)


if __name__ == "__main__":
    main()
