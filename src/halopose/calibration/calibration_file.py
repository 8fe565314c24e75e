"""Calibrations as files: fit on a prediction file, apply to another, and never score on the same images.

In: COCO results with covariances and ground truth. Out: a small json with the calibration, the pruning
threshold, how that was fitted, and the ids of the images it has seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halopose.boxes import box_area
from halopose.calibration.calibrate import DistributionSet, cross_fitted, fit_calibrations
from halopose.calibration.calibrators import LARGEST_TAU, Calibration, GaussianCalibration, StudentTCalibration
from halopose.calibration.correlation import Correlation
from halopose.calibration.dispersion_model import DispersionModel
from halopose.data.coco import APPLIED_MARK, SEEN_MARK, parse_predictions
from halopose.data.files import read_json, write_json
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses
from halopose.poses import GroundTruth, PoseDistributions, triangle
from halopose.protocol import Area, Protocol
from halopose.rfdetr_units import PRECISION_KEY
from halopose.types import Array, Family
from halopose.uncertainty.distributions import StudentT, scale_tril_from_covariance
from halopose.uncertainty.pruning import GAMMA_KS, Scalarisation, keep_mask, localization_confidence
from halopose.uncertainty.regions import Regions

FORMAT = "halopose-calibration-1"


@dataclass(frozen=True)
class Pruning:
    """How the threshold of a calibration was fitted. None means unknown; defaults are those of files that do not state
    a
    setting.

    Attributes:
        area: object area in the confidence.
        scalarisation: size of a covariance.
        rule: rule for the threshold.
        gamma_ks: similarity of a reliable keypoint.
        sigmas: sigmas (K) of the keypoints.
        area_factor: object area divided by box area.
    """

    area: Area = "annotation"
    scalarisation: Scalarisation = "trace"
    rule: str | None = None
    gamma_ks: float = GAMMA_KS
    sigmas: tuple[float, ...] | None = None
    area_factor: float | None = None

    @classmethod
    def of(cls, protocol: Protocol, layout: Keypoints) -> Pruning:
        """Return how a protocol fits a threshold for these keypoints."""
        rule, gamma_ks = protocol.threshold_rule, protocol.gamma_ks
        return cls(protocol.area, protocol.scalarisation, rule, gamma_ks, layout.sigmas, layout.area_factor)

    def check(self, protocol: Protocol, layout: Keypoints) -> None:
        """Raise an error if the threshold was fitted for another confidence."""
        asked = Pruning.of(protocol, layout)
        for name in ("area", "scalarisation", "rule", "gamma_ks"):
            own, other = getattr(self, name), getattr(asked, name)
            if own not in (None, other):
                raise HaloposeError(
                    f"the threshold of the calibration was fitted with {name} {own}, not {other}: score with "
                    f"{own}, or fit the calibration again with {other}"
                )
        if self.sigmas is not None and not np.allclose(self.sigmas, layout.sigmas):
            raise HaloposeError("the threshold of the calibration was fitted with other sigmas: fit it again")

    @property
    def at_inference(self) -> bool:
        """Whether the confidence needs no annotated area."""
        return self.area == "box" and self.sigmas is not None and self.area_factor is not None

    def keep(self, covariance: Array, boxes: Array, threshold: float) -> Array:
        """Return which keypoints (N, K) of detections with boxes (N, 4) to keep."""
        area, kappa = box_area(boxes) * self.area_factor, 2 * np.asarray(self.sigmas)
        return keep_mask(localization_confidence(covariance, area, kappa, self.scalarisation), threshold)

    def to_json(self) -> dict[str, Any]:
        """Return the known settings by name."""
        content = {name: value for name, value in vars(self).items() if value is not None}
        return content if self.sigmas is None else content | {"sigmas": list(self.sigmas)}

    @classmethod
    def from_json(cls, content: dict[str, Any], keypoints: int) -> Pruning:
        """Build from json content; raise ValueError or TypeError if it is not valid."""
        known: dict[str, Any] = {name: content[name] for name in vars(cls()) if name in content}
        if "sigmas" in known:
            known["sigmas"] = tuple(float(value) for value in known["sigmas"])
        found = cls(**known)
        Protocol(
            area=found.area,
            scalarisation=found.scalarisation,
            threshold_rule="youden" if found.rule is None else found.rule,
            gamma_ks=found.gamma_ks,
        )
        sizes = [1.0 if found.area_factor is None else float(found.area_factor), *(found.sigmas or ())]
        if len(found.sigmas or [0] * keypoints) != keypoints or not all(0 < size < np.inf for size in sizes):
            raise ValueError("sigmas or an area factor that are none")
        return found


@dataclass(frozen=True)
class CalibrationFile:
    """One family's calibration with the names of its keypoints and the images it was fitted on.

    With ``dispersion`` the calibration is one of that model's dispersions, which replace those of the predictions. The
    threshold is for Gaussian covariances, whose temperatures (K,) are ``pruning_tau``; None: those of the calibration.
    """

    calibration: Calibration
    names: tuple[str, ...]
    threshold: float
    image_ids: Array
    regions: Regions | None = None
    correlation: Correlation | None = None
    pruning: Pruning = Pruning()
    dispersion: DispersionModel | None = None
    pruning_tau: Array | None = None

    @property
    def family(self) -> Family:
        return self.calibration.family

    @property
    def needs_no_covariance(self) -> bool:
        """Whether it applies to predictions without covariances."""
        return (
            self.dispersion is not None
            and self.dispersion.base == "size"
            and ("stated" not in self.dispersion.features)
        )

    @classmethod
    def fit(cls, matched: MatchedPoses, images: Array, family: Family, protocol: Protocol) -> CalibrationFile:
        """Calibrate on true positives of the given images (I,), matched or not."""
        fitted = fit_calibrations(matched, protocol)
        calibration: Calibration = fitted.gaussian if family == "gaussian" else fitted.student
        names, pruning = matched.layout.names, Pruning.of(protocol, matched.layout)
        tau = None if family == "gaussian" else fitted.gaussian.tau_.numpy()
        return cls(
            calibration, names, fitted.threshold, images, fitted.regions, fitted.correlation, pruning, pruning_tau=tau
        )

    def save(self, path: Path | str) -> None:
        """Write the calibration as json, after checking that it can be read again."""
        if not _in_range(self.calibration.state_dict()):
            raise HaloposeError(
                "the residuals are not of the order of the covariances, so no calibration can be trusted: check "
                "the units of covariance, which are squared pixels"
            )
        content = self._content()
        write_json(path, {**content, "checksum": _checksum(content)}, indent=1)

    @property
    def checksum(self) -> str:
        """SHA-256 of the content, which tells calibrations apart."""
        return _checksum(self._content())

    def _content(self) -> dict[str, Any]:
        parameters = {name.rstrip("_"): value.tolist() for name, value in self.calibration.state_dict().items()}
        return {
            "format": FORMAT,
            "family": self.family,
            "keypoints": list(self.names),
            **parameters,
            "threshold": self.threshold,
            **self.pruning.to_json(),
            "image_ids": self.image_ids.tolist(),
            **({} if self.regions is None else {"regions": self.regions.to_json()}),
            **({} if self.correlation is None else {"correlation": self.correlation.to_json()}),
            **({} if self.dispersion is None else {"dispersion": self.dispersion.to_json()}),
            **({} if self.pruning_tau is None else {"pruning_tau": self.pruning_tau.tolist()}),
        }

    @classmethod
    def load(cls, path: Path | str) -> CalibrationFile:
        """Read a calibration; raise `HaloposeError` for a damaged file."""
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise HaloposeError(f"{path} is not a calibration: make one with `halopose recalibrate`")
        if content.get("checksum") != _checksum(content):
            raise HaloposeError(f"{path} is damaged or was changed (its checksum does not match): make it again")
        try:
            return cls._parse(content)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
            raise HaloposeError(f"{path} is a damaged calibration: make it again") from None

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> CalibrationFile:
        names = tuple(str(name) for name in content["keypoints"])
        kinds = {"gaussian": GaussianCalibration, "student-t": StudentTCalibration}
        calibration: Calibration = kinds[content["family"]](len(names))
        state = {
            name: torch.tensor([float(value) for value in content[name.rstrip("_")]], dtype=torch.float64)
            for name in calibration.state_dict()
        }
        if any(value.shape != (len(names),) or not torch.isfinite(value).all() for value in state.values()):
            raise ValueError("wrong number of parameters")
        pruning_tau = None
        if "pruning_tau" in content:
            pruning_tau = np.array([float(value) for value in content["pruning_tau"]])
            if pruning_tau.shape != (len(names),) or not _in_range({"tau_": torch.from_numpy(pruning_tau)}):
                raise ValueError("temperatures out of range")
        if not _in_range(state):
            raise ValueError("parameters out of range")
        threshold = float("-inf") if content["threshold"] is None else float(content["threshold"])
        if not threshold < np.inf:
            raise ValueError("a threshold that is no number")
        calibration.load_state_dict(state)
        return cls(
            calibration=calibration,
            names=names,
            threshold=threshold,
            image_ids=np.asarray([int(identity) for identity in content["image_ids"]], dtype=np.int64),
            regions=Regions.from_json(content["regions"], len(names)) if "regions" in content else None,
            correlation=Correlation.from_json(content["correlation"], len(names)) if "correlation" in content else None,
            pruning=Pruning.from_json(content, len(names)),
            dispersion=DispersionModel.from_json(content["dispersion"]) if "dispersion" in content else None,
            pruning_tau=pruning_tau,
        )

    def apply(self, predictions: PoseDistributions) -> PoseDistributions:
        """Return the detections with calibrated distributions; keypoints, boxes and scores do not change.

        So does what is kept, unless the threshold was fitted with the areas of boxes: then that decides.
        """
        if predictions.keypoint_count != len(self.names):
            raise HaloposeError(
                f"the calibration has {len(self.names)} keypoints, the predictions {predictions.keypoint_count}"
            )
        if self.dispersion is not None:
            predictions = self.dispersion.apply(predictions)
        base = predictions.covariance if self.family == "gaussian" else predictions.scale
        distribution = self.calibration(scale_tril_from_covariance(torch.from_numpy(base)))
        keep = predictions.keep
        if self.pruning.at_inference:
            covariance = distribution.covariance.numpy()
            if self.pruning_tau is not None:
                covariance = predictions.covariance * np.square(self.pruning_tau)[:, None, None]
            keep = self.pruning.keep(covariance, predictions.boxes, self.threshold)
        return PoseDistributions(
            boxes=predictions.boxes,
            scores=predictions.scores,
            keypoints=predictions.keypoints,
            covariance=distribution.covariance.numpy(),
            scale=distribution.scale.numpy(),
            dof=distribution.dof.numpy() if isinstance(distribution, StudentT) else None,
            visibility=predictions.visibility,
            keep=keep,
            class_ids=predictions.class_ids,
            image_ids=predictions.image_ids,
            dispersion=predictions.scale,
            regions=self.regions,
            offset=predictions.offset,
            **self._joint_fields(predictions.boxes),
        )

    def _joint_fields(self, boxes: Array) -> dict[str, Any]:
        """How keypoints of detections with boxes (N, 4) err together."""
        if self.correlation is None:
            return {}
        return {
            "correlation": self.correlation.of_objects(box_area(boxes)),
            "joint_dof": self.correlation.dof,
        }


def _in_range(state: Mapping[str, Tensor]) -> bool:
    """Return whether the fitted values (K,) of a calibration are plausible."""
    bounds = {"tau_": (0.0, LARGEST_TAU), "moment_tau_": (0.0, LARGEST_TAU), "nu_": (2.0, np.inf)}
    return all(
        bool(((state[name] > low) & (state[name] < high)).all())
        for name, (low, high) in bounds.items()
        if name in state
    )


def _checksum(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a file's content without its checksum; -inf is written as null."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    if rest.get("threshold") == float("-inf"):
        rest["threshold"] = None
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def apply_to_file(
    calibration: CalibrationFile,
    source: Path | str,
    target: Path | str,
    *,
    joint: bool = False,
    region: float | None = None,
) -> int:
    """Calibrate a prediction file; returns the number of its detections."""
    entries = apply_to_entries(calibration, read_json(source), source, joint=joint, region=region)
    write_json(target, entries)
    return len(entries)


def apply_to_entries(
    calibration: CalibrationFile,
    content: list[dict[str, Any]],
    source: Path | str,
    *,
    joint: bool = False,
    region: float | None = None,
) -> list[dict[str, Any]]:
    """Calibrate COCO results; everything else in them is copied.

    Detections of images that the calibration has seen are marked, so that scoring can refuse them; marks of
    calibrations applied before stay.

    Args:
        calibration: The calibration.
        content: Parsed COCO results.
        source: Name of the file in messages.
        joint: Add how keypoints err together.
        region: Add regions of this probability.

    Raises:
        HaloposeError: This calibration was applied to the file before; a second time would scale twice.
    """
    mark = calibration.checksum[:16]
    if (
        not calibration.needs_no_covariance
        and isinstance(content, list)
        and any(mark in _applied(entry) for entry in content)
    ):
        raise HaloposeError(
            f"{source} was written by this calibration, and would be scaled twice: give the predictions it was made of"
        )
    applied = calibration.apply(parse_predictions(source, content, None, constants=calibration.needs_no_covariance))
    assert applied.image_ids is not None  # always set after parsing
    seen = np.isin(applied.image_ids, calibration.image_ids)
    if joint and calibration.correlation is None:
        raise HaloposeError("the calibration knows no correlation: make it again with `halopose recalibrate`")
    ellipses = None if region is None else triangle(applied.region(region)).tolist()
    written = ["covariance", "scale", "dof", "correlation"] + ["keep"] * calibration.pruning.at_inference
    entries = []
    for n, (old, new, marked) in enumerate(zip(content, applied.to_json(joint), seen.tolist(), strict=True)):
        # Marks of calibrations applied earlier stay.
        replaced = ("scale", "dof", "correlation", "region", "region_probability", PRECISION_KEY)
        entry = {key: value for key, value in old.items() if key not in replaced}
        entry.update({key: new[key] for key in written if key in new})
        if ellipses is not None:
            entry |= {"region": ellipses[n], "region_probability": region}
        if marked:
            entry[SEEN_MARK] = True
        entry[APPLIED_MARK] = [*_applied(old), mark]
        entries.append(entry)
    return entries


def _applied(entry: Any) -> list[Any]:
    """Marks of the calibrations that were applied to a detection."""
    marks = entry.get(APPLIED_MARK) if isinstance(entry, dict) else None
    return marks if isinstance(marks, list) else []


def file_that_prunes(files: Sequence[CalibrationFile]) -> CalibrationFile | None:
    """Return the file whose threshold is used: the Gaussian's if there is one."""
    return min(files, key=lambda file: file.family, default=None)


def known_calibrations(files: Sequence[CalibrationFile], layout: Keypoints, protocol: Protocol) -> dict[str, Any]:
    """What calibration files give ``cross_fit``: Gaussian, Student-t and threshold, as far as there are files.

    The threshold is that of the Gaussian's file, if there is one; the protocol must be the one it was fitted by.
    """
    known: dict[str, Any] = {}
    for file in files:
        if isinstance(file.calibration, GaussianCalibration):
            known["gaussian"] = file.calibration
        elif isinstance(file.calibration, StudentTCalibration):
            known["student"] = StudentTCalibration(len(file.names), covariance=protocol.covariance)
            known["student"].load_state_dict(file.calibration.state_dict())
    pruner = file_that_prunes(files)
    if pruner is not None:
        pruner.pruning.check(protocol, layout)
        known["threshold"] = pruner.threshold
    return known


def distributions_under(files: Sequence[CalibrationFile], matched: MatchedPoses, protocol: Protocol) -> DistributionSet:
    """Return the distributions of true positives under calibration files; missing families are cross-fitted."""
    return cross_fitted(matched, protocol, **known_calibrations(files, matched.layout, protocol))


def images_seen(content: list[dict[str, Any]], calibrations: Sequence[CalibrationFile]) -> Array:
    """Return ids of images that a calibration was fitted on: marked in the detections, or listed in a file."""
    marked = [entry["image_id"] for entry in content if entry.get(SEEN_MARK)]
    listed = [calibration.image_ids for calibration in calibrations]
    return np.unique(np.concatenate([np.asarray(marked, dtype=np.int64), *listed]))


def only_images(
    predictions: PoseDistributions, truth: GroundTruth, images: Array
) -> tuple[PoseDistributions, GroundTruth]:
    """Return predictions and ground truth of the given images (I,) only."""
    assert predictions.image_ids is not None
    return predictions[np.isin(predictions.image_ids, images)], truth.select_images(images)
