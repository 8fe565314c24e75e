"""Settings of an evaluation (paper, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from halopose.errors import HaloposeError
from halopose.uncertainty.pruning import GAMMA_KS, Scalarisation, risk_guarantee

Area = Literal["annotation", "box"]
CovarianceKind = Literal["auto", "moment", "paper"]

Match = Literal["oks", "box"]

MAX_DETECTIONS = 20  # detections of an image that are matched, as in COCO
IOU_THRESHOLD = 0.5  # smallest IoU of a match by box
SCORE_THRESHOLD = 0.25  # smallest score of a match by box: the default of predictors


@dataclass(frozen=True)
class Protocol:
    """Settings of an evaluation. ``PRESETS["paper"].protocol`` has the paper's.

    Attributes:
        match: Which detections are true positives: "oks", COCO's greedy matching by OKS, or "box", greedy matching by
            the IoU of boxes, which keeps detections whose keypoints are far off.
        oks_threshold: Smallest OKS of a match by OKS.
        iou_threshold: Smallest IoU of a match by box.
        score_threshold: Smallest score of a detection that is matched by box.
        max_detections: Detections matched per image and class.
        area: s^2 of the localization confidence. "box": the area of the predicted box times the area factor of the
            keypoints, as at inference. "annotation": the annotated area (the paper). The similarity of a keypoint
            always uses the annotated area.
        scalarisation: Size of a covariance in the localization confidence.
        threshold_rule: youden, distance, f1, or a risk guarantee such as risk:0.05@0.95.
        gamma_ks: Keypoint similarity from which a keypoint counts as correct.
        visibility: Prune by the visibility score as well (eq. 22), if no threshold of it is given.
        split_student: Whether kept and pruned keypoints get a Student-t each.
        covariance: Covariance of a Student-t. "auto": eq. 17, but the second moment of the residuals where the degrees
            of freedom are near 2 and eq. 17 diverges. "paper": eq. 17. "moment": the second moment.
        min_samples: As in ``Calibration``.
        scale_edges: Areas that separate the object scales.
        folds: Folds of images; each fold is scored with a calibration fitted on the others.
        bootstrap: Number of bootstrap draws over images.
        seed: Seed of the bootstrap and of the random ranking.
        region_scales: Fit separate regions and correlations for each object scale.
        extended: Also evaluate what the paper does not have: conformal regions, the joint distribution, noise floors,
            proper scores and groups of keypoints.

    Example:
        >>> Protocol(bootstrap=200).oks_threshold
        0.5
    """

    match: Match = "oks"
    oks_threshold: float = 0.5
    iou_threshold: float = IOU_THRESHOLD
    score_threshold: float = SCORE_THRESHOLD
    max_detections: int = MAX_DETECTIONS
    area: Area = "box"
    scalarisation: Scalarisation = "trace"
    threshold_rule: str = "youden"
    gamma_ks: float = GAMMA_KS
    visibility: bool = False
    split_student: bool = False
    covariance: CovarianceKind = "auto"
    min_samples: float = 50.0
    scale_edges: tuple[float, ...] = (32.0**2, 96.0**2)
    folds: int = 5
    bootstrap: int = 0
    seed: int = 0
    region_scales: bool = False
    extended: bool = True

    def __post_init__(self) -> None:
        risk_guarantee(self.threshold_rule)
        kinds = {"match": Match, "area": Area, "scalarisation": Scalarisation, "covariance": CovarianceKind}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                raise HaloposeError(f"{name} is {' or '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if not 0 <= self.gamma_ks <= 1:
            raise HaloposeError(f"gamma_ks is a similarity from 0 to 1, got {self.gamma_ks}")
        edges = self.scale_edges
        if not all(0 < edge < math.inf for edge in edges) or any(low >= high for low, high in pairwise(edges)):
            raise HaloposeError(f"scale_edges are positive areas in rising order, got {edges}")
