"""Settings of training, of the out-of-distribution model, and of a whole fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from halopose.protocol import CovarianceKind, Protocol
from halopose.uncertainty.heads import HeadSettings
from halopose.uncertainty.pruning import GAMMA_KS

CalibrationSource = Literal["assigned", "matched"]
CalibrationMatch = Literal["oks", "box", "both"]


@dataclass(frozen=True)
class TrainSettings:
    """How heads are trained.

    Attributes:
        epochs: Upper limit of epochs.
        batch: Cells per step.
        learning_rate: Peak learning rate of AdamW, after the warm-up.
        weight_decay: Weight decay of AdamW.
        alpha: Exponent of the confidence in the retention weight (eq. 8); 0 switches it off.
        scale_weight: Weight cells by 1 / s^2 (eq. 9).
        dof: Degrees of freedom of a Student-t loss, which limits the influence of rare large errors; None: the
            Gaussian loss of the paper. Calibration fits the temperatures in both cases.
        holdout: Fraction of the images held out for early stopping.
        patience: Epochs without improvement on held-out images before training stops.
        last: Keep the last epoch instead of the best one on held-out images.
        clip: Largest gradient norm.
        warmup: Fraction of the steps with a rising learning rate.
        seed: Seed of the weights and of the order of cells.
        pool_bytes: Memory for shuffling: shards are shuffled, pooled up to this size, and their rows shuffled.
    """

    epochs: int = 12
    batch: int = 512
    learning_rate: float = 3e-4
    weight_decay: float = 1e-2
    alpha: float = 1.0
    scale_weight: bool = True
    dof: float | None = None
    holdout: float = 0.1
    patience: int = 6
    last: bool = False
    clip: float = 1.0
    warmup: float = 0.05
    seed: int = 0
    pool_bytes: int = 2 * 2**30


@dataclass(frozen=True)
class NoveltySettings:
    """How the out-of-distribution model is fitted.

    Attributes:
        images: Largest number of training images that are copied with corruptions.
        fewest: Fewest trusted detections in clean images.
        conf: Lowest score of the detections used.
        trusted: Lowest score of the detections that represent the training distribution.
        detections: Detections collected per image.
        ridge: Ridge penalty of the logistic regressions.
        folds: Folds of training images for the standardisation.
        bins: Bins of the isotonic regression that widens covariances.
    """

    images: int = 300
    fewest: int = 60
    conf: float = 0.05
    trusted: float = 0.25
    detections: int = 10
    ridge: float = 3.0
    folds: int = 4
    bins: int = 20


@dataclass(frozen=True)
class FitSettings:
    """Everything a fit depends on.

    Attributes:
        train: Training of the heads.
        head: Architecture of the heads.
        train_sizes: Input sizes at which training images are collected.
        imgsz: Input size of calibration, evaluation and prediction.
        conf: Lowest score of the detections collected for calibration.
        iou: IoU threshold of non-maximum suppression.
        calibration: Calibrate on detections matched to objects, or on label-assigned cells (the paper).
        match: Detections that calibration takes as true positives. "oks": those of COCO's matching (the paper). "box":
            those whose box matches, at the default score of predictors. "both": Student-t distributions and regions
            for both, with a feature-conditional scale if the heads have context features; from 400 objects on.
        calibration_share: Fraction of the validation images used for calibration.
        cells_per_object: Largest number of assigned cells per object.
        gamma_ks: Keypoint similarity from which a keypoint counts as reliable for the pruning threshold.
        visibility: Prune by the visibility score as well.
        batch: Images per forward pass.
        rule: ``Protocol.threshold_rule``.
        region_scales: ``Protocol.region_scales``.
        split_student: Whether kept and pruned keypoints get a Student-t each.
        covariance: ``Protocol.covariance``.
        min_samples: Samples under which a keypoint's temperature is blended with that of all keypoints.
        novelty_images: Largest number of training images from which the out-of-distribution model is fitted; 0:
            none is fitted.
        preset: Name of the preset that the settings started from.

    Example:
        >>> FitSettings(train=TrainSettings(epochs=4), imgsz=320).calibration
        'matched'
    """

    train: TrainSettings = field(default_factory=TrainSettings)
    head: HeadSettings = field(default_factory=HeadSettings)
    train_sizes: tuple[int, ...] = (640,)
    imgsz: int = 640
    conf: float = 0.01
    iou: float = 0.7
    calibration: CalibrationSource = "matched"
    match: CalibrationMatch = "both"
    calibration_share: float = 0.2
    cells_per_object: int = 10
    gamma_ks: float = GAMMA_KS
    visibility: bool = True
    batch: int = 1
    rule: str = "youden"
    region_scales: bool = False
    novelty_images: int = 300
    split_student: bool = True
    covariance: CovarianceKind = "auto"
    min_samples: float = 50.0
    preset: Literal["paper", "best"] | None = None

    @property
    def protocol(self) -> Protocol:
        """Protocol of thresholds and scores: areas are box areas, the only ones known at inference."""
        return Protocol(
            match="box" if self.match == "box" else "oks",
            area="box",
            gamma_ks=self.gamma_ks,
            visibility=self.visibility,
            split_student=self.split_student,
            covariance=self.covariance,
            min_samples=self.min_samples,
            threshold_rule=self.rule,
            region_scales=self.region_scales,
        )

    def to_json(self) -> dict[str, Any]:
        """Settings as JSON values."""
        return {**asdict(self), "head": self.head.to_json(), "train_sizes": list(self.train_sizes)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FitSettings:
        """Settings from JSON values; missing settings take their defaults.

        Raises:
            KeyError: The training or head settings are missing.
            TypeError: A setting is unknown.
        """
        given = {
            "match": "oks",  # of artifacts that do not say it
            "covariance": "moment",
            **content,
            "train": TrainSettings(**content["train"]),
            "head": HeadSettings.from_json(content["head"]),
            "train_sizes": tuple(content["train_sizes"]),
        }
        return cls(**given)
