"""Leeds Sports Pose: how well the shipped calibration transfers, and how many images a calibration of one's own needs.

    python -m research.transfer --lsp lsp/ --work work/ -o results/

``lsp`` holds joints.mat and images/ of the extended training set (10,000 persons; 14 joints, of which 12 are COCO's).
Writes them as COCO json, which every command of halopose reads. A hash of the ids divides the images into a pool for
calibration and images for scores. The shipped heads are calibrated on random images of the pool as `halopose
calibrate --match oks` and `--match box` do. An interval covers both the choice of the calibration images and the images
scored. Resumable.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from scipy.io import loadmat

from halopose.calibration.calibrate import apply_calibrations
from halopose.calibration.calibrators import Calibrations
from halopose.cli.terminal import progress, say
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import read_json, write_json, write_text
from halopose.data.splits import hashed_order
from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import resample_images
from halopose.evaluation.noise_floor import coverage_floors
from halopose.evaluation.resampling import ResampledMetrics
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.pipeline import calibrate_heads, true_positives
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses
from halopose.protocol import Match, Protocol
from halopose.types import Array, named
from research.figures import transfer_figure
from research.tables import markdown

COUNTS = (25, 50, 100, 400)
DRAWS = 20
POOL = 800  # images for calibration; the rest is scored
MARGIN = 0.15  # the box around the joints is wider by this share of its sides, as persons reach beyond their joints
AREA_FACTOR = 0.53  # area of a person over that of the box, as for COCO
PROTOCOL = Protocol(area="box", gamma_ks=0.3)
KINDS: tuple[Match, ...] = ("oks", "box")
# COCO's name of each of the 14 joints; neck and top of the head have none.
JOINTS = (
    "right_ankle", "right_knee", "right_hip", "left_hip", "left_knee", "left_ankle", "right_wrist", "right_elbow",
    "right_shoulder", "left_shoulder", "left_elbow", "left_wrist",
)  # fmt: skip
SCORES = ("95 %", "ace", "ence", "nll")


def coco_of(folder: Path, count: int, layout: Keypoints) -> dict[str, object]:
    """COCO json of the first ``count`` images by a hash of their numbers; only visible joints are labelled."""
    joints = loadmat(folder / "joints.mat")["joints"].transpose(2, 0, 1)  # (N, 14, 3)
    columns = [layout.names.index(name) for name in JOINTS]
    images, objects = [], []
    for number in np.sort(hashed_order(np.arange(1, len(joints) + 1))[:count]).tolist():
        name = f"im{number:05d}.jpg"
        picture = cv2.imread(str(folder / "images" / name))
        seen = joints[number - 1, : len(JOINTS)]
        places, visible = seen[:, :2], seen[:, 2] > 0
        if picture is None or visible.sum() < 2:
            continue
        images.append({"id": number, "file_name": name, "height": picture.shape[0], "width": picture.shape[1]})
        keypoints = np.zeros((len(layout), 3))
        keypoints[columns] = np.where(visible[:, None], np.c_[places, np.full(len(places), 2.0)], 0.0)
        low, high = places[visible].min(0), places[visible].max(0)
        edge = MARGIN * (high - low)
        low, high = np.maximum(low - edge, 0), np.minimum(high + edge, [picture.shape[1], picture.shape[0]])
        sides = np.maximum(high - low, 1.0)
        objects.append(
            {
                "id": number,
                "image_id": number,
                "category_id": 1,
                "iscrowd": 0,
                "bbox": [*low.tolist(), *sides.tolist()],
                "area": AREA_FACTOR * float(sides.prod()),
                "num_keypoints": int(visible.sum()),
                "keypoints": keypoints.ravel().tolist(),
            }
        )
    limbs = [[a + 1, b + 1] for a, b in layout.limbs]
    person = {"id": 1, "name": "person", "keypoints": list(layout.names), "skeleton": limbs}
    return {"images": images, "annotations": objects, "categories": [person]}


@dataclass(frozen=True)
class Study:
    """The shipped heads on LSP.

    Attributes:
        artifact: The shipped artifact.
        store: Feature cache of all images.
        pool: Ids of images for calibration.
        matched: True positives of the other images, by kind of match.
    """

    artifact: Artifact
    store: MatchStore
    pool: Array
    matched: dict[Match, MatchedPoses]

    @classmethod
    def of(cls, artifact: Artifact, store: MatchStore) -> Study:
        pool, scored = np.split(hashed_order(store.images), [min(POOL, len(store.images) // 2)])
        heads = artifact.heads
        matched = {kind: true_positives(heads, store, scored, replace(PROTOCOL, match=kind)) for kind in KINDS}
        return cls(artifact, store, pool, matched)

    def calibrated(self, count: int, kind: Match, draw: int) -> Calibrations:
        """Calibrations on random images of the pool, as `halopose calibrate --match` fits them."""
        chosen = np.random.default_rng([count, draw]).permutation(self.pool)[:count]
        settings = replace(self.artifact.card.fit_settings, match=kind)
        return calibrate_heads(self.artifact.heads, self.store, chosen, settings, before=self.artifact.calibrations)

    def scores(self, fitted: Calibrations, kind: Match, draw: int | None) -> list[float]:
        """SCORES on the scored images, or on a bootstrap draw of them."""
        matched, protocol = self.matched[kind], replace(PROTOCOL, match=kind)
        edges = np.asarray(protocol.scale_edges)
        measured = ResampledMetrics.of(matched, apply_calibrations(matched, fitted, protocol), protocol, edges)
        count = measured.image_count
        drawn = np.arange(count) if draw is None else resample_images(count, 1, seed=draw)[0]
        weight = np.bincount(drawn, minlength=count)[measured.image]
        student = measured.statistics["student_t"]
        values = student.resampled(weight)
        held = metrics.coverage_of_levels(student.level["joint"], weight)[0][94]
        return [
            100 * float(held),
            values["ace"],
            measured.statistics["gaussian"].resampled(weight)["ence"],
            values["nll"],
        ]

    def floor(self, kind: Match) -> float:
        """ACE that a perfectly calibrated model exceeds in 2.5 % of such samples."""
        matched, protocol = self.matched[kind], replace(PROTOCOL, match=kind)
        own = apply_calibrations(matched, self.artifact.calibrations, protocol)
        measured = ResampledMetrics.of(matched, own, protocol, np.asarray(protocol.scale_edges))
        level = measured.statistics["student_t"].level["joint"]
        return coverage_floors([level], measured.image, measured.image_count)[0].high

    def rows(self) -> Iterator[tuple[int, Match, Array]]:
        """Number of calibration images (0: the shipped calibration), kind of match, and scores (1 + DRAWS, S)."""
        for kind in KINDS:
            shipped = [self.scores(self.artifact.calibrations, kind, draw) for draw in (None, *range(DRAWS))]
            yield 0, kind, np.array(shipped)
        for count in COUNTS:
            for kind in KINDS:
                fitted = [self.calibrated(count, kind, draw) for draw in range(DRAWS)]
                whole = np.mean([self.scores(each, kind, None) for each in fitted], axis=0)
                drawn = [self.scores(each, kind, draw) for draw, each in enumerate(fitted)]
                yield count, kind, np.array([whole, *drawn])


def table(rows: list[tuple[int, Match, Array]], floors: dict[Match, float]) -> str:
    lines = []
    for count, kind, values in rows:
        cells = ["the shipped calibration" if not count else str(count), kind]
        for name, value, spread in zip(SCORES, values[0], values[1:].std(0, ddof=1), strict=True):
            digits = {"95 %": 1, "nll": 2}.get(name, 3)
            cells.append(f"{value:.{digits}f} ± {1.96 * spread:.{digits}f}")
        lines.append([*cells, f"{floors[kind]:.3f}"])
    head = ["images", "matched by", "95 % ellipse holds", "ACE", "ENCE, Gaussian", "NLL", "floor of the ACE up to"]
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lsp", type=Path, required=True, help="folder with joints.mat and images/")
    parser.add_argument("--count", type=int, default=2400, help="images to use, by a hash of their numbers")
    parser.add_argument("--imgsz", type=int, default=320, help="input size; most images are under 400 px")
    parser.add_argument("--work", type=Path, required=True, help="folder for the annotations and the feature cache")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # of few objects, in every draw
    artifact, host = Artifact.load(shipped_artifact()), load_host(find_base())
    annotations = given.work / f"lsp-{given.count}.json"
    if not annotations.is_file():
        write_json(annotations, coco_of(given.lsp, given.count, artifact.layout))
    dataset = load_dataset(annotations, "", images=given.lsp / "images")
    settings = CollectSettings(imgsz=(given.imgsz,), assigned=False, detections=20, context_features=True)
    with progress() as step:
        store = collect(host, dataset, given.work / f"lsp-{given.count}", settings, named(step, "collecting LSP"))
    study = Study.of(artifact, store)
    found = []
    for count, kind, values in study.rows():
        say(f"{count} images, {kind}: " + ", ".join(f"{n} {v:.3f}" for n, v in zip(SCORES, values[0], strict=True)))
        found.append((count, kind, values))
    floors = {kind: study.floor(kind) for kind in KINDS}
    persons = {kind: (len(matched), int(matched.labelled.sum())) for kind, matched in study.matched.items()}
    note = "; ".join(f"by {kind} {n} persons, {m} keypoints" for kind, (n, m) in persons.items())
    total = len(read_json(annotations)["images"])
    text = f"{total} images, {len(study.pool)} in the pool. Scored: {note}.\n\n{table(found, floors)}\n"
    write_text(given.output / "transfer.md", text)
    transfer_figure(found, floors, given.output / "transfer.png")
    say(text)


if __name__ == "__main__":
    main()
