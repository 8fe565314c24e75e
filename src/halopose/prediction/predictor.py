"""The interface of models that predict poses with a distribution for each keypoint, and checks of its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from halopose.data.images import NamedImage
from halopose.deploy.deployed_model import Detecting
from halopose.errors import HaloposeError
from halopose.family import FAMILIES, Family
from halopose.keypoints import Keypoints
from halopose.origin import Origin, Speed
from halopose.poses import PoseDistributions

SMALLEST, LARGEST = 32, 16384  # input sizes in pixels


class Predictor(ABC):
    """A model that predicts poses with a distribution for each keypoint.

    Attributes:
        family: Default output distribution, "gaussian" or "student-t".
    """

    family: Family

    @property
    @abstractmethod
    def layout(self) -> Keypoints:
        """Names, sigmas and limbs of the predicted keypoints."""

    @property
    @abstractmethod
    def imgsz(self) -> int:
        """Default input size in pixels."""

    @property
    @abstractmethod
    def novelty_size(self) -> int | None:
        """Number of calibration images behind the out-of-distribution p-values of images; None without p-values."""

    @property
    def has_novelty(self) -> bool:
        """Whether predicted poses carry out-of-distribution p-values."""
        return self.novelty_size is not None

    @abstractmethod
    def identity(self) -> list[Any]:
        """Return everything that predictions depend on, as JSON content."""

    @abstractmethod
    def _stream(
        self, source: Any, settings: Detecting, family: Family, batch: int
    ) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        """Yield images and their poses; the options are valid."""

    def __call__(self, source: Any, **options: Any) -> list[PoseDistributions]:
        """The same as ``predict``."""
        return self.predict(source, **options)

    def predict(
        self,
        source: Any,
        *,
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        family: Family | None = None,
        batch: int = 1,
    ) -> list[PoseDistributions]:
        """Predict the poses of every image of a source.

        Args:
            source: An image (h, w, 3) in BGR, a PIL image, the path of an image, film, folder or pattern, the
                address of a stream, or a list of these.
            conf: Lowest score of a detection.
            iou: Overlap of boxes above which non-maximum suppression removes the weaker one.
            imgsz: Input size in pixels; default: the artifact's.
            family: "gaussian" or "student-t"; default: the model's.
            batch: Number of images that are read and run at once; images of one shape run together. An exported model
                runs them one by one. Convolutions round differently in a batch: keypoints change by up to
                0.0005 pixels and each entry of a covariance by up to 0.004 % of the product of its two standard
                deviations. Entries near zero change by up to 0.25 % of themselves.

        Returns:
            One ``PoseDistributions`` for each image, in pixels of that image.
        """
        return [poses for _, poses in self.stream(source, conf=conf, iou=iou, imgsz=imgsz, family=family, batch=batch)]

    def stream(
        self,
        source: Any,
        *,
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        family: Family | None = None,
        batch: int = 1,
    ) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        """Yield images and their poses one by one, for films and streams that do not fit in memory.

        The arguments are those of ``predict``.
        """
        check_options(conf, iou, imgsz, batch)
        distribution = self.family if family is None else checked_family(family)
        return self._stream(source, Detecting(conf, iou, imgsz), distribution, batch)


def check_options(conf: Any, iou: Any, imgsz: Any, batch: Any) -> None:
    """Refuse thresholds, input sizes and batch sizes that are out of range.

    Args:
        conf: Lowest score of a detection, from 0 to 1.
        iou: IoU of non-maximum suppression, from 0 to 1.
        imgsz: Input size in pixels, or None.
        batch: Number of images per batch.
    """
    for value in (conf, iou):
        if not isinstance(value, (float, Real)) or not 0 <= float(value) <= 1:
            raise HaloposeError(f"conf and iou must lie between 0 and 1, got {conf!r} and {iou!r}")
    if not isinstance(batch, (int, Integral)) or int(batch) < 1:
        raise HaloposeError(f"batch must be a whole number of 1 or more, got {batch!r}")
    if imgsz is not None and not (isinstance(imgsz, (int, Integral)) and SMALLEST <= int(imgsz) <= LARGEST):
        raise HaloposeError(f"imgsz must be a whole number from {SMALLEST} to {LARGEST}, got {imgsz!r}")


def checked_family(family: str) -> Family:
    """Return the name of an output distribution if it is known, else raise ``HaloposeError``."""
    for known in FAMILIES:
        if family == known:
            return known
    raise HaloposeError(f"unknown family {family!r}: give gaussian or student-t")


def with_origin(poses: PoseDistributions, image: NamedImage, read_ms: float) -> PoseDistributions:
    """Add the name, file and reader of the image to poses. Pixels that can be read again are not stored.

    Args:
        poses: Poses whose origin has the layout and the speed of the model.
        image: The image that the poses were predicted for.
        read_ms: Duration of reading it in milliseconds.
    """
    origin = poses.origin or Origin()
    speed = replace(origin.speed or Speed(0.0, 0.0, 0.0), read=read_ms)
    path = image.film if image.path is None else image.path
    found = replace(origin, name=image.name, path=path, frame=image.frame, read=image.reader, speed=speed)
    return replace(poses, origin=found)
