"""Covariances of RF-DETR: the factor that its loss leaves out, and calibration with and without it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from halopose.calibration.calibrate import fit_gaussian
from halopose.calibration.dispersion_model import cross_fitted_dispersions
from halopose.data.coco import parse_predictions
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.rfdetr_units import PRECISION_KEY, area_share, lacks_area, pixel_covariance

SIDE = 1000.0
KEYPOINTS = 4
FLOOR = 0.034  # 95th percentile of the ENCE of calibrated Gaussians, 1,200 objects of 4 keypoints in 20 bins


def simulated(count: int = 1200, seed: int = 1, with_size: float = 0.0) -> tuple[SimpleNamespace, GroundTruth]:
    """RF-DETR-style key points, one object per image: true deviations divided by the root of the box's share.

    True deviations rise with the size of the object to the power ``with_size``.
    """
    rng = np.random.default_rng(seed)
    share = np.exp(rng.uniform(np.log(0.005), np.log(0.5), count))
    side = SIDE * np.sqrt(share)
    deviation = 8 * (side[:, None] / 300) ** with_size * np.exp(rng.normal(0, 0.1, (count, KEYPOINTS)))
    place = rng.uniform(0, 1, (count, KEYPOINTS, 2)) * side[:, None, None]
    found = place + rng.normal(size=place.shape) * deviation[..., None]
    boxes = np.concatenate([np.zeros((count, 2)), np.tile(side[:, None], (1, 2))], axis=1)
    stated = np.square(deviation)[..., None, None] * np.eye(2) / share[:, None, None, None]
    precision = np.zeros((count, KEYPOINTS, 3))
    precision[..., 0] = precision[..., 2] = -np.log(np.sqrt(stated[..., 0, 0]) / SIDE)
    images, one, no = np.arange(count), np.ones(count, dtype=np.int64), np.zeros(count, dtype=bool)
    key_points = SimpleNamespace(
        xy=found, keypoint_confidence=rng.uniform(0.5, 1, (count, KEYPOINTS)),
        detection_confidence=rng.uniform(0.5, 1, count), class_id=one - 1, visible=None,
        data={
            "covariance": stated, "xyxy": boxes, "source_shape": np.full((count, 2), SIDE), "image_id": images,
            PRECISION_KEY: precision,
        },
    )  # fmt: skip
    layout = Keypoints.of(KEYPOINTS, sigmas=[0.1] * KEYPOINTS)
    labelled = np.ones((count, KEYPOINTS), dtype=bool)
    return key_points, GroundTruth(images, images, one, place, labelled, boxes, side**2, no, no, layout)


def ence(poses: PoseDistributions, truth: GroundTruth) -> float:
    return evaluate(match_poses(poses, truth), None, Protocol(folds=2)).gaussian.ence


def test_a_temperature_cannot_correct_the_area_and_the_adapter_does() -> None:
    key_points, truth = simulated()
    as_stated = PoseDistributions.from_rfdetr(key_points, times_area=False)
    adapted = PoseDistributions.from_rfdetr(key_points, version="1.11.2")
    assert ence(as_stated, truth) > 0.48
    true = PoseDistributions.from_rfdetr(key_points, times_area=True)
    assert np.array_equal(adapted.covariance, true.covariance)
    assert ence(adapted, truth) < FLOOR
    tau = fit_gaussian(match_poses(adapted, truth)).tau_
    assert np.allclose(tau, 1, atol=0.05)


def test_recalibration_by_size_finds_the_area_too() -> None:
    key_points, truth = simulated()
    as_stated = PoseDistributions.from_rfdetr(key_points, times_area=False)
    by_size = cross_fitted_dispersions(as_stated, truth, Protocol(), ["size", "stated"], "stated")
    assert ence(by_size, truth) < FLOOR


def test_files_of_precisions_are_recognised(caplog: pytest.LogCaptureFixture) -> None:
    key_points, _ = simulated(5)
    poses = PoseDistributions.from_rfdetr(key_points, times_area=True)
    entries: list[dict[str, Any]] = [
        {key: value for key, value in entry.items() if key != "covariance"}
        | {PRECISION_KEY: key_points.data[PRECISION_KEY][n].tolist(), "source_shape": [SIDE, SIDE]}
        for n, entry in enumerate(poses.to_json())
    ]
    read = parse_predictions("p.json", entries, None)
    assert np.allclose(read.covariance, poses.covariance)
    assert "RF-DETR" in caplog.text
    with pytest.raises(HaloposeError, match="source_shape"):
        parse_predictions("p.json", [entries[0] | {"source_shape": [0, 1]}], None)
    with pytest.raises(HaloposeError, match="out of range"):
        parse_predictions("p.json", [entries[0] | {PRECISION_KEY: [[-1e4, 0, 0]] * KEYPOINTS}], None)


def test_unknown_versions_are_refused() -> None:
    assert lacks_area("1.11.2")
    assert lacks_area("1.10.0")
    for version in ("1.12.0", "2.0", "new"):
        with pytest.raises(HaloposeError):
            lacks_area(version)


def their_module(monkeypatch: pytest.MonkeyPatch, file: str) -> Any:
    """A file of the installed rfdetr, without the rest of the package, which needs torchvision; skipped without it."""
    spec = importlib.machinery.PathFinder.find_spec("rfdetr")
    if spec is None or spec.origin is None:
        pytest.skip("rfdetr is not installed")
    logger = ModuleType("rfdetr.utilities.logger")
    logger.get_logger = lambda: logging.getLogger("rfdetr")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rfdetr", ModuleType("rfdetr"))
    monkeypatch.setitem(sys.modules, "rfdetr.utilities", ModuleType("rfdetr.utilities"))
    monkeypatch.setitem(sys.modules, "rfdetr.utilities.logger", logger)
    found = importlib.util.spec_from_file_location("theirs", Path(spec.origin).parent / file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_the_optimum_of_their_loss_is_off_by_the_area(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Their own loss on known residuals: the best factor states the true deviation over the root of the area."""
    heads = their_module(monkeypatch, "models/heads/keypoints.py")
    count, true = 4000, 0.02
    target = torch.full((count, 1, 3), 0.5)
    target[..., 2] = 2
    residual = true * torch.randn((count, 1, 2), generator=torch.Generator().manual_seed(0))
    areas, classes = torch.full((count,), share), torch.zeros(count, dtype=torch.long)

    def loss(level: float) -> float:
        predicted = torch.zeros((count, 1, 8))
        predicted[..., :2] = target[..., :2] - residual
        predicted[..., 4] = predicted[..., 6] = level
        return float(heads.compute_l1_keypoint_loss(predicted, target, classes, areas, [1])[3].mean())

    levels = np.linspace(1, 5, 401)
    best = levels[int(np.argmin([loss(level) for level in levels]))]
    precision, shape = np.array([[[best, 0.0, best]]]), np.array([[SIDE, SIDE]])
    stated = their_module(monkeypatch, "utilities/keypoints.py").precision_cholesky_to_pixel_covariance
    assert np.allclose(stated(precision, shape), pixel_covariance(precision, shape), rtol=1e-5)
    assert np.sqrt(stated(precision, shape)[0, 0, 0, 0]) / (true * SIDE) == pytest.approx(share**-0.5, rel=0.05)
    boxes = np.array([[0, 0, SIDE * share, SIDE]])
    own = pixel_covariance(precision, shape) * area_share(boxes, shape)[:, None, None, None]
    assert np.sqrt(own[0, 0, 0, 0]) == pytest.approx(true * SIDE, rel=0.05)
