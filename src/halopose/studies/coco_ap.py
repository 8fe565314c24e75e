"""AP and AR of cached detections by pycocotools, with bootstrap draws over images."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.evaluation.bootstrap import resample_images
from halopose.fitting.feature_cache import MatchStore
from halopose.install_advice import install_command
from halopose.poses import GroundTruth, PoseDistributions
from halopose.studies.residual_analysis import constant_predictions
from halopose.types import Array

_COCO_SCORES = ("ap", "ap50", "ap75", "ap_medium", "ap_large", "ar", "ar50", "ar75", "ar_medium", "ar_large")


@dataclass(frozen=True)
class CocoScores:
    """AP and AR of the detections of a feature cache, as pycocotools prints them; -1 for sizes without objects."""

    evaluator: Any
    images: int

    @classmethod
    def of(cls, store: MatchStore) -> CocoScores:
        require_pycocotools()
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        truth, predictions = store.ground_truth(), constant_predictions(store)
        with contextlib.redirect_stdout(io.StringIO()):
            annotated = COCO()
            annotated.dataset = _coco_truth(truth)
            annotated.createIndex()
            evaluator = COCOeval(annotated, annotated.loadRes(_coco_results(predictions)), "keypoints")
            evaluator.params.kpt_oks_sigmas = np.asarray(store.layout.sigmas)
            evaluator.evaluate()
        return cls(evaluator, len(evaluator.params.imgIds))

    def scores(self) -> dict[str, float]:
        """AP and AR without resampling."""
        return self._of_images(np.arange(self.images))

    def draws(self, count: int) -> Iterator[dict[str, float]]:
        """AP and AR under ``count`` resamplings of images, the same for all base models on the same images."""
        for pick in resample_images(self.images, count):
            yield self._of_images(pick)

    def _of_images(self, pick: Array) -> dict[str, float]:
        """AP and AR of images (n,), with repetition. pycocotools orders results by category, area range and image."""
        matches = self.evaluator.evalImgs
        by_image = np.empty(len(matches), dtype=object)
        by_image[:] = matches
        self.evaluator.evalImgs = by_image.reshape(-1, self.images)[:, pick].ravel().tolist()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.evaluator.accumulate()
                self.evaluator.summarize()
        finally:
            self.evaluator.evalImgs = matches
        return dict(zip(_COCO_SCORES, map(float, self.evaluator.stats), strict=True))


def _coco_truth(truth: GroundTruth) -> dict[str, Any]:
    keypoints = np.concatenate([truth.keypoints, 2.0 * truth.labelled[..., None]], axis=2)
    columns = (truth.image_ids, truth.class_ids, truth.boxes, truth.area, truth.crowd, truth.ignore)
    annotations = [
        {
            "id": number + 1,
            "image_id": int(image),
            "category_id": int(category),
            "bbox": box.tolist(),
            "area": float(area),
            "iscrowd": int(crowd),
            "ignore": int(ignored),
            "keypoints": points.ravel().tolist(),
            "num_keypoints": int((points[:, 2] > 0).sum()),
        }
        for number, (image, category, box, area, crowd, ignored, points) in enumerate(
            zip(*columns, keypoints, strict=True)
        )
    ]
    return {
        "images": [{"id": int(image)} for image in truth.images],
        "categories": [{"id": int(category)} for category in np.unique(truth.class_ids)],
        "annotations": annotations,
    }


def _coco_results(predictions: PoseDistributions) -> list[dict[str, Any]]:
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    visible = np.ones((*predictions.keypoints.shape[:2], 1))
    points = np.concatenate([predictions.keypoints, visible], axis=2).reshape(len(predictions), -1)
    columns = (predictions.image_ids, predictions.class_ids, predictions.scores, points)
    return [
        {
            "image_id": int(image),
            "category_id": int(category),
            "score": float(score),
            "keypoints": row.tolist(),
        }
        for image, category, score, row in zip(*columns, strict=True)
    ]


def require_pycocotools() -> None:
    """Check that pycocotools is installed."""
    try:
        import pycocotools  # noqa: F401
    except ImportError:
        raise HaloposeError(f"AP and AR need pycocotools: {install_command('studies')}") from None
