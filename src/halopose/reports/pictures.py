"""Example pictures where the truth is known: residual lines and NLL, before and after pruning."""

from __future__ import annotations

import numpy as np

from halopose.data.dataset import Objects, Record
from halopose.drawing import Truth, draw_poses
from halopose.errors import HaloposeError
from halopose.evaluation.matching import candidate_pairs, greedy_match
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host
from halopose.poses import Array, GroundTruth, PoseDistributions
from halopose.predictor import UncertainPose


def draw_example(artifact: Artifact, host: Host, record: Record) -> Array | None:
    """Matched detections of one image, all keypoints on the left, those kept on the right."""
    try:
        image, objects = record.read()
    except HaloposeError:
        return None
    poses = UncertainPose(host, artifact).predict(image)[0]
    matched, truth = _match(poses, objects, np.asarray(artifact.sigmas), artifact.keypoint_names)
    if not len(matched):
        return None
    names = artifact.keypoint_names
    before = draw_poses(image, _unpruned(matched), truth=truth, names=names)
    after = draw_poses(image, matched, truth=truth, show_pruned=False, names=names)
    return np.concatenate([before, after], axis=1)


def _unpruned(poses: PoseDistributions) -> PoseDistributions:
    from dataclasses import replace

    return replace(poses, keep=np.ones_like(poses.keep))


def _match(
    poses: PoseDistributions, objects: Objects, sigmas: Array, names: tuple[str, ...]
) -> tuple[PoseDistributions, Truth]:
    ids = np.zeros(len(objects), dtype=np.int64)
    truth = GroundTruth(
        images=np.zeros(1, dtype=np.int64),
        image_ids=ids,
        class_ids=objects.class_ids + 1,
        keypoints=objects.keypoints,
        labelled=objects.labelled,
        boxes=np.concatenate([objects.boxes[:, :2], objects.boxes[:, 2:] - objects.boxes[:, :2]], axis=1),
        area=objects.area,
        crowd=objects.crowd,
        ignore=objects.crowd | ~objects.labelled.any(1),
        names=names,
        sigmas=sigmas,
    )
    pairs = candidate_pairs(poses, truth)
    taken = greedy_match(pairs, len(poses), truth.ignore, truth.crowd, np.array([0.5]))[0]
    found = np.flatnonzero((taken >= 0) & ~truth.ignore[taken]) if len(truth) else np.zeros(0, dtype=np.int64)
    return poses[found], Truth(truth.keypoints[taken[found]], truth.labelled[taken[found]])
