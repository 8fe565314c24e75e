"""Figures of docs/evidence/out-of-distribution.md for runways: the gate in fog, and other methods.

    python -m research.runway_novelty --work work/

Tests the shipped runway heads on scenes of other seeds: fog, every weather of the calibration, and land without a
runway. The gate was fitted on generic corruptions. Scenes and feature caches stay in the work folder, which may be
that of ``research.runway_heads``: other methods get their thresholds from its calibration scenes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from halopose.cli.terminal import progress, say
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.data.images import write_image
from halopose.evaluation.region_scores import ALARM_RATES, FlaggedShare
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.novelty_fitting import Rows, calibrate_novelty, collect_copies, rows_of
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing import shipped_detectors
from halopose.landing.world.dataset_writer import split_seeds, write_dataset
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import TRAINING_WEATHERS, SceneSettings, sample_scene
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.studies.shift_study import auroc
from halopose.types import Array, Progress, named
from research.novelty_rivals import CONFIDENCES, passes_cost, rival_table, seen_again, wrong
from research.runway_heads import PLAIN as PLAIN_SCENES
from research.runway_heads import calibration_scenes, calibration_store, drawn
from research.tables import markdown

COUNTS = {"fog": 200, "bare": 80}
OF_WEATHER = 100
TEST_SEED, FOG_SEED = 41, 43  # heads, detector and gate have seen others, and nothing was chosen on these
FRESH_SEED = 47  # of more scenes of a weather
SHOWN = 4  # scene of the picture
PLAIN = CollectSettings(assigned=False, conf=0.05, detections=10)

Scenes = tuple[str, Dataset]  # with the label of their folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector than the one that ships, with --artifact")
    parser.add_argument(
        "--artifact", type=Path, help="heads with an out-of-distribution model; default: the shipped heads"
    )
    parser.add_argument("--rivals", action="store_true", help="fit what the literature offers beside")
    parser.add_argument("--alarms", type=int, metavar="N", help="false alarms alone, on N fresh scenes a weather")
    parser.add_argument("--weather", nargs="+", choices=TRAINING_WEATHERS, default=TRAINING_WEATHERS)
    parser.add_argument("--picture", type=Path, help="draw a clear and a foggy scene with alarms here, and stop")
    arguments = parser.parse_args()
    if arguments.picture:
        write_image(arguments.picture, picture())
        return
    host = load_host(arguments.base or shipped_detectors.runway_detector())
    artifact = Artifact.load(arguments.artifact or shipped_detectors.runway_artifact())
    with progress() as step:
        if arguments.alarms:
            say(fresh_alarms(host, artifact, arguments.work, arguments.weather, arguments.alarms, step))
            return
        data = scenes(arguments.work)
        stores = collected(host, data, arguments.work, step)
        bare = stores.pop("bare")
        found = rows_by_name(artifact, stores)
        say("### Fog\n\n" + gate_table(artifact, found))
        say("\n### False alarms\n\n" + alarm_table(artifact, found))
        say("\n### Land without a runway\n\n" + bare_table(artifact, bare))
        if arguments.rivals:
            say("\n### Rivals\n\n" + rivals(host, artifact, data, found, arguments.work, step))


def picture() -> Array:
    """The same approach in clear air and in fog, with what is flagged at 5 %."""
    model = UncertainPose.load("runway")
    scenes = [sample_scene(split_seeds(FOG_SEED, "fog", 20)[SHOWN], weather) for weather in ("clear", "fog")]
    scenes[0] = replace(scenes[1], weather="clear", visibility=scenes[0].visibility)
    images = [render_scene(scene) for scene in scenes]
    return np.hstack([model.predict(image)[0].plot(image, boxes=True, alarm=0.05) for image in images])


def scenes(work: Path) -> dict[str, Scenes]:
    """Scenes to test on, by name."""
    found = {}
    for name in (*COUNTS, *TRAINING_WEATHERS):
        seed, split = FOG_SEED if name == "fog" else TEST_SEED, "val" if name == "bare" else name
        settings = SceneSettings(bare=name == "bare")
        found[name] = sampled(work, f"{name}-{seed}", split, COUNTS.get(name, OF_WEATHER), seed, settings)
    return found


def sampled(work: Path, label: str, split: str, count: int, seed: int, settings: SceneSettings | None = None) -> Scenes:
    """Scenes of a seed in the folder of a label."""
    data = write_dataset(work / f"scenes-{label}", {split: count}, seed, settings=settings, processes=2)
    return label, load_dataset(data, split)


def collected(host: Host, data: Mapping[str, Scenes], work: Path, step: Progress) -> dict[str, MatchStore]:
    """Stores of scenes, by name."""
    return {
        name: collect(host, one, work / f"store-{label}", PLAIN, named(step, f"collecting {name}"))
        for name, (label, one) in data.items()
    }


def rows_by_name(artifact: Artifact, stores: Mapping[str, MatchStore]) -> dict[str, Rows]:
    """Inputs of the out-of-distribution model for these detections."""
    return {name: rows_of(artifact, store, PLAIN.conf) for name, store in stores.items()}


def rivals(
    host: Host, artifact: Artifact, data: Mapping[str, Scenes], found: dict[str, Rows], work: Path, step: Progress
) -> str:
    """The table of rivals, whose thresholds are from the calibration scenes."""
    stores = {"val": calibration_store(host, work, step), "train": copied_store(host, work, step)}
    found = found | rows_by_name(artifact, stores)
    images = {name: one for name, (_, one) in data.items()} | {"val": calibration_scenes(work)}
    views = seen_again(host, images, found, artifact.imgsz, work, step)
    return rival_table(artifact, found, views, passes_cost(host, images["fog"], artifact.imgsz))


def copied_store(host: Host, work: Path, step: Progress) -> MatchStore:
    """The scenes that the shipped novelty was fitted on, and their corrupted copies."""
    return collect_copies(host, drawn(work, "train", PLAIN_SCENES), work / "copies", 640, progress=step)


def gate_table(artifact: Artifact, found: dict[str, Rows]) -> str:
    """Detections that the gate keeps in fog at a false-alarm rate of 5 %, beside other rules."""
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
    """Share flagged of detections, and of images, by weather and nominal rate, ± one standard error."""
    novelty = artifact.novelty
    assert novelty is not None
    usual = [name for name in TRAINING_WEATHERS if name in found]
    parts: dict[str, list[Rows]] = {name: [found[name]] for name in (*usual, "fog") if name in found}
    parts["seen weathers together"] = [found[name] for name in usual]
    rows = []
    for name, group in parts.items():
        cells = []
        for conf in CONFIDENCES:
            trusted = [one.select(np.flatnonzero(one.poses.scores >= conf)) for one in group]
            chance = torch.cat([novelty.p_value(novelty.value(one.evidence), conf) for one in trusted])
            cells += flagged_cells(chance.numpy(), np.concatenate([one.image for one in trusted]))
        images = torch.cat([novelty.image_p_value(novelty.image_value(one.vectors)) for one in group])
        rows.append([name, *cells, *flagged_cells(images.numpy(), np.concatenate([one.ids for one in group]))])
    head = ["", *(f"conf {conf}, {rate} %" for conf in CONFIDENCES for rate in ALARM_RATES)]
    return markdown([*head, *(f"images, {rate} %" for rate in ALARM_RATES)], rows)


def flagged_cells(chance: Array, image: Array) -> list[str]:
    """Per cent flagged at every rate, with one standard error over images, from p-values (n,)."""
    found = FlaggedShare.of(chance, image)
    return [f"{100 * share:.1f} ± {100 * error:.1f} %" for share, error in zip(found.share, found.error, strict=True)]


def fresh_alarms(
    host: Host, artifact: Artifact, work: Path, weathers: Sequence[str], count: int, step: Progress
) -> str:
    """False alarms on further scenes of some weathers, and what ranking within a weather would do."""
    data = {name: sampled(work, f"{name}-{FRESH_SEED}-{count}", name, count, FRESH_SEED) for name in weathers}
    found = rows_by_name(artifact, collected(host, data, work, step))
    fog = {"fog": sampled(work, f"fog-{FOG_SEED}", "fog", COUNTS["fog"], FOG_SEED)}
    found |= rows_by_name(artifact, collected(host, fog, work, step))
    store = calibration_store(host, work, step)
    alone = "### Ranked among calibration detections of one weather alone"
    tables = alarm_table(artifact, found), within_table(artifact, store, found)
    return f"### False alarms\n\n{tables[0]}\n\n{alone}\n\n{tables[1]}"


def within_table(artifact: Artifact, store: MatchStore, found: Mapping[str, Rows]) -> str:
    """FlaggedShare at 5 %, and kept in fog, if p-values were ranks within a weather, which only the generator knows."""
    rows = []
    for place, weather in enumerate(TRAINING_WEATHERS):
        if weather not in found:
            continue
        images = np.sort(store.images)[place :: len(TRAINING_WEATHERS)]  # scenes take their weathers in turn
        novelty = calibrate_novelty(artifact, store, images).novelty
        assert novelty is not None
        for conf in CONFIDENCES:
            own, fog = (one.select(np.flatnonzero(one.poses.scores >= conf)) for one in (found[weather], found["fog"]))
            chance = novelty.p_value(novelty.value(own.evidence), conf).numpy()
            kept = novelty.p_value(novelty.value(fog.evidence), conf).numpy() > 0.05
            counts = f"{kept.sum()}, {(kept & wrong(fog)).sum()} of {len(kept)}"
            rows.append([weather, f"{conf}", flagged_cells(chance, own.image)[ALARM_RATES.index(5)], counts])
    return markdown(["", "confidence", "flagged at 5 %", "foggy detections kept, wrong"], rows)


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


if __name__ == "__main__":
    main()
