"""Settings of an evaluation (paper, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from halopose.errors import HaloposeError
from halopose.uncertainty.pruning import GAMMA_KS, Scalarisation, risk_guarantee

Area = Literal["annotation", "box"]
CovarianceKind = Literal["moment", "paper"]

MAX_DETECTIONS = 20  # detections of an image that are matched, as in COCO


@dataclass(frozen=True)
class Protocol:
    """How predictions are scored; the defaults are the paper's.

    area: the s^2 of the localization confidence, ``annotation`` as in the paper, or ``box``, the predicted
    box's area times the keypoints' area factor, which is all there is at inference. The similarity of a keypoint
    always takes the annotated area. visibility: whether pruning looks at the visibility score too (eq. 22), where
    its threshold is not given. threshold_rule: youden, distance, f1, or a promise such as risk:0.05@0.95. tails:
    whether kept and pruned keypoints get a Student-t each. min_samples: as in ``Calibration``. scale_edges: areas
    that part the object scales. folds: how many parts the images are cut into, so that each is scored with a
    calibration that never saw it. region_scales: whether every object scale has regions and a correlation
    of its own.

    >>> Protocol(area="box", bootstrap=200).oks_threshold
    0.5
    """

    oks_threshold: float = 0.5
    max_detections: int = MAX_DETECTIONS
    area: Area = "annotation"
    scalarisation: Scalarisation = "trace"
    threshold_rule: str = "youden"
    gamma_ks: float = GAMMA_KS
    visibility: bool = False
    split_student: bool = False
    covariance: CovarianceKind = "moment"
    min_samples: float = 50.0
    scale_edges: tuple[float, ...] = (32.0**2, 96.0**2)
    folds: int = 5
    bootstrap: int = 0
    seed: int = 0
    region_scales: bool = False

    def __post_init__(self) -> None:
        risk_guarantee(self.threshold_rule)
        kinds = {"area": Area, "scalarisation": Scalarisation, "covariance": CovarianceKind}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                raise HaloposeError(f"{name} is {' or '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if not 0 <= self.gamma_ks <= 1:
            raise HaloposeError(f"gamma_ks is a similarity from 0 to 1, got {self.gamma_ks}")
        edges = self.scale_edges
        if not all(0 < edge < math.inf for edge in edges) or any(low >= high for low, high in pairwise(edges)):
            raise HaloposeError(f"scale_edges are positive areas in rising order, got {edges}")
