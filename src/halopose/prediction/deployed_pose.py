"""A pose model in a folder that ``halopose export`` wrote."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from halopose.data.images import NamedImage, read_source
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.family import DEFAULT_FAMILY, Family
from halopose.keypoints import Keypoints
from halopose.origin import Origin, Speed
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor, checked_family, with_origin


class DeployedPose(Predictor):
    """A model that ``halopose export`` wrote, run without PyTorch. Images run one by one for any batch size."""

    def __init__(self, deployed: Deployed, family: Family = DEFAULT_FAMILY) -> None:
        self.deployed, self.family = deployed, checked_family(family)

    def __repr__(self) -> str:
        return f"DeployedPose({self.deployed.path}, {len(self.layout)} keypoints, {self.family})"

    @property
    def layout(self) -> Keypoints:
        """Names, sigmas and limbs of the predicted keypoints."""
        return self.deployed.layout

    @property
    def imgsz(self) -> int:
        """Default input size in pixels."""
        return self.deployed.facts.imgsz

    @property
    def novelty_size(self) -> int | None:
        """Number of calibration images behind the p-values of images, or None."""
        known = self.deployed.facts.novelty
        return None if known is None else len(known["known_images"])

    def identity(self) -> list[Any]:
        """Everything that predictions depend on, as JSON content."""
        return [self.deployed.digest, self.deployed.facts.visibility_threshold, self.deployed.runtime]

    def _stream(
        self, source: Any, settings: Detecting, family: Family, batch: int
    ) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        began = time.perf_counter()
        for image in read_source(source):
            found = time.perf_counter()
            poses = self.deployed.predict(image.pixels, settings, family)
            speed = Speed(0.0, 1000 * (time.perf_counter() - found), 0.0)
            poses = replace(poses, origin=Origin(layout=self.layout, speed=speed))
            yield image, with_origin(poses, image, 1000 * (found - began))
            began = time.perf_counter()
