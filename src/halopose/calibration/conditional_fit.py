"""Calibration for detections matched by OKS and by box at once, with a feature-conditional scale.

True positives by OKS leave out detections whose keypoints are far off; a user cannot. A Student-t fitted on matches by
OKS is too narrow for matches by box, and both are too narrow for occluded keypoints. The fit maximises the likelihood
on the union of both. It adds the squared coverage error of groups that need annotations: matches by OKS, occluded
keypoints, kept keypoints, small objects, and the 95 % and 99 % ellipses of matches by box. Prediction needs
none of these groups: the scale depends on ``uncertainty.conditional_scale.INPUTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from halopose.calibration.calibrators import StudentTCalibration
from halopose.calibration.split_student_t import SplitStudentT
from halopose.types import Array
from halopose.uncertainty.conditional_scale import INPUTS, KNOTS, ConditionalScale, scale_basis

FEWEST_OBJECTS = 400  # with fewer the groups are too small, and calibration is by OKS alone
BOX_ONLY_WEIGHT = 0.5  # of detections that match by box alone, in the likelihood
CENSORED = 0.97  # residuals beyond this level count in the likelihood as outside of it, however far
GROUP_WEIGHTS = {"oks": 4.0, "occluded by oks": 2.0, "kept": 2.0, "small by oks": 1.0}
# Occluded keypoints matched by box come first; what it costs is in docs/evidence/calibration-by-match.md.
OCCLUDED_FIRST = {
    **GROUP_WEIGHTS, "occluded by box": 8.0, "small by box": 1.0, "score": 0.4,
    "keypoint by oks": 1.0, "keypoint by box": 1.0,
}  # fmt: skip
SCORE_EDGES = (0.25, 0.5, 0.75)  # detection scores that separate groups of matches by OKS
BOX_LEVELS = {0.95: 1.0, 0.99: 1.0}  # of matches by box, with weights
_PENALTY = 50.0  # nats a keypoint for a mean squared coverage error of 1
_RIDGE, _KEYPOINT_RIDGE = 20.0, 4.0  # of the scale's weights, and of keypoints towards their mean
_SOFT_LEVEL, _SOFT_SURPRISAL = 0.01, 0.1  # widths of the smoothed steps of coverage
_MIN_DOF, _MAX_LOG_DOF = 2.05, 8.0
_QUANTILES = (0.01, 0.15, 0.5, 0.85, 0.99)  # of the inputs, where the knots are
_LEVELS = torch.arange(0.02, 1, 0.02, dtype=torch.float64)
_ROUNDS, _ITERATIONS = 2, 150


@dataclass(frozen=True)
class ConditionalSample:
    """N detections that match an object by OKS, by box or by both.

    Attributes:
        distance: Squared Mahalanobis distances (N, K) before calibration.
        labelled: Labelled keypoints (N, K).
        inputs: ``scale_inputs`` (N, K, F) of the detections.
        by_oks: Whether each detection (N,) matches by OKS.
        by_box: Whether each detection (N,) matches by box.
        occluded: Keypoints (N, K) annotated as occluded; none where the annotation does not tell.
        small: Whether each object (N,) is small.
    """

    distance: Array
    labelled: Array
    inputs: Array
    by_oks: Array
    by_box: Array
    occluded: Array
    small: Array

    def __len__(self) -> int:
        return len(self.distance)

    @classmethod
    def concatenate(cls, parts: list[ConditionalSample]) -> ConditionalSample:
        """Join the samples of several parts of the data."""
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def scaled(self, log_scale: Array) -> ConditionalSample:
        """The sample with Cholesky factors times exp(log_scale) (N, K)."""
        return replace(self, distance=self.distance * np.exp(-2 * log_scale))


def fit_scale(
    sample: ConditionalSample, keep: Array | None = None, weights: Mapping[str, float] = GROUP_WEIGHTS
) -> ConditionalScale:
    """Fit the feature-conditional scale, together with Student-t distributions, which are not returned.

    Args:
        sample: Detections under dispersions without a scale.
        keep: Keypoints (N, K) that pruning keeps; they and the others have a Student-t each. Default: one for all.
        weights: Weights of the groups' coverage errors.
    """
    inputs, seen = sample.inputs, sample.labelled
    rows = [inputs[seen[:, k], k, 0] for k in range(seen.shape[1])]
    typical = float(np.median(inputs[..., 0][seen]))
    centre = _stored(np.array([np.median(each) if len(each) else typical for each in rows]))
    centred = ConditionalScale(centre, torch.empty(0), torch.empty(0)).centred(torch.from_numpy(inputs))
    knots = _stored(np.quantile(centred.numpy()[seen], _QUANTILES, axis=0).T)
    basis = scale_basis(centred, knots).reshape(*seen.shape, -1).numpy()
    group = np.zeros(seen.shape, dtype=np.int64) if keep is None else np.where(keep, 0, 1)
    fitted = _fit(sample, group, basis, weights=weights)
    return ConditionalScale(centre, knots, torch.from_numpy(fitted.weights.reshape(len(INPUTS), KNOTS - 1)))


def _stored(values: Array) -> Tensor:
    """Values in the precision of an artifact."""
    return torch.from_numpy(values).half().double()


def fit_tails(
    sample: ConditionalSample, keep: Array, like: StudentTCalibration, weights: Mapping[str, float] = GROUP_WEIGHTS
) -> tuple[StudentTCalibration, SplitStudentT | None]:
    """Student-t calibrations of all keypoints, and of kept and pruned ones.

    Args:
        sample: Detections under dispersions that have their scale already.
        keep: Keypoints (N, K) that pruning keeps.
        like: Calibration of the same dispersions, whose covariance and sample counts are taken over.
        weights: Weights of the groups' coverage errors.
    """
    whole = _student(_fit(sample, np.zeros(keep.shape, dtype=np.int64), weights=weights), 0, like)
    if not (sample.labelled & keep).any() or not (sample.labelled & ~keep).any():
        return whole, None
    fitted = _fit(sample, np.where(keep, 0, 1), kept=keep, weights=weights)
    return whole, SplitStudentT(_student(fitted, 0, like), _student(fitted, 1, like))


@dataclass(frozen=True)
class _Fitted:
    """Temperatures and degrees of freedom (G, K) of G groups, and weights (W,) of the basis."""

    tau: Tensor
    nu: Tensor
    weights: Array


def _student(fitted: _Fitted, group: int, like: StudentTCalibration) -> StudentTCalibration:
    calibration = StudentTCalibration(like.keypoints, min_samples=like.min_samples, covariance=like.covariance)
    calibration.tau_, calibration.nu_ = fitted.tau[group].clone(), fitted.nu[group].clone()
    calibration.moment_tau_ = like.moment_tau_.clone()
    calibration.effective_samples_ = like.effective_samples_.clone()
    return calibration


class _Objective:
    """Negative log-likelihood plus penalties on the coverage error of groups, as a function of the parameters."""

    def __init__(
        self,
        sample: ConditionalSample,
        group: Array,
        basis: Array | None,
        kept: Array | None,
        weights: Mapping[str, float],
    ) -> None:
        instance, keypoint = np.nonzero(sample.labelled)
        self.keypoint = torch.from_numpy(keypoint)
        self.group = torch.from_numpy(group[instance, keypoint])
        self.distance = torch.from_numpy(sample.distance[instance, keypoint])
        width = 0 if basis is None else basis.shape[-1]
        self.basis = torch.zeros((len(keypoint), 0), dtype=torch.float64)
        if basis is not None:
            self.basis = torch.from_numpy(basis[instance, keypoint])
        by_oks, by_box = sample.by_oks[instance], sample.by_box[instance]
        self.weight = torch.from_numpy(np.where(by_box & ~by_oks, BOX_ONLY_WEIGHT, 1.0))
        masks = {"oks": by_oks}
        for name, matches in (("oks", by_oks), ("box", by_box)):
            masks[f"occluded by {name}"] = matches & sample.occluded[instance, keypoint]
            masks[f"small by {name}"] = matches & sample.small[instance]
            masks |= {f"keypoint by {name} {k}": matches & (keypoint == k) for k in range(sample.labelled.shape[1])}
        score = np.digitize(expit(sample.inputs[instance, keypoint, INPUTS.index("detection score")]), SCORE_EDGES)
        masks |= {f"score {number}": by_oks & (score == number) for number in range(len(SCORE_EDGES) + 1)}
        if kept is not None:
            masks["kept"] = by_oks & kept[instance, keypoint]
        self.groups = [
            (weights[kind], torch.from_numpy(np.flatnonzero(mask)))
            for name, mask in masks.items()
            if (kind := name.rstrip(" 0123456789")) in weights and mask.any()
        ]
        self.by_box = torch.from_numpy(np.flatnonzero(by_box))
        shape = (int(group.max(initial=0)) + 1, sample.labelled.shape[1])
        self.log_tau = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        self.log_dof = torch.full(shape, 1.4, dtype=torch.float64, requires_grad=True)
        self.weights = torch.zeros(width, dtype=torch.float64, requires_grad=True)
        self.cut = torch.full_like(self.distance, torch.inf)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.log_tau, self.log_dof, self.weights]

    def state(self) -> tuple[Tensor, Tensor]:
        """Logarithm of the temperature, and degrees of freedom, of each of the n keypoints."""
        place = self.group, self.keypoint
        return self.log_tau[place] + self.basis @ self.weights, _dof(self.log_dof[place])

    def censor(self) -> None:
        """Censor the residuals beyond the level ``CENSORED`` of the present fit."""
        with torch.no_grad():
            log_tau, nu = self.state()
            self.cut = nu * torch.expm1(-2 / nu * np.log(1 - CENSORED)) * torch.exp(2 * log_tau)

    def __call__(self) -> Tensor:
        log_tau, nu = self.state()
        precision = torch.exp(-2 * log_tau) / nu
        surprisal = nu / 2 * torch.log1p(self.distance * precision)  # 1 - exp(-surprisal) is the CDF
        beyond = self.distance > self.cut
        density = 2 * log_tau + (nu + 2) / nu * surprisal
        outside = nu / 2 * torch.log1p(torch.where(beyond, self.cut, 1.0) * precision)
        loss = (self.weight * torch.where(beyond, outside, density)).sum()
        loss = loss + _RIDGE / 2 * self.weights.square().sum()
        for values in (self.log_tau, self.log_dof):
            loss = loss + _KEYPOINT_RIDGE * (values - values.mean(1, keepdim=True)).square().sum()
        return (loss + _PENALTY * self._coverage_errors(surprisal)) / len(self.distance)

    def _coverage_errors(self, surprisal: Tensor) -> Tensor:
        total = surprisal.new_zeros(())
        level = -torch.expm1(-surprisal)
        for group_weight, rows in self.groups:
            coverage = torch.sigmoid((_LEVELS[:, None] - level[rows]) / _SOFT_LEVEL).mean(1)
            total = total + group_weight * len(rows) * (coverage - _LEVELS).square().mean()
        for probability, weight in BOX_LEVELS.items():
            if len(self.by_box):
                inside = (-np.log(1 - probability) - surprisal[self.by_box]) / _SOFT_SURPRISAL
                error = (torch.sigmoid(inside).mean() - probability).square() / (probability * (1 - probability))
                total = total + 0.1 * weight * len(self.by_box) * error
        return total


def _dof(log_dof: Tensor) -> Tensor:
    return _MIN_DOF + log_dof.clamp(max=_MAX_LOG_DOF).exp()


def _fit(
    sample: ConditionalSample,
    group: Array,
    basis: Array | None = None,
    kept: Array | None = None,
    weights: Mapping[str, float] = GROUP_WEIGHTS,
) -> _Fitted:
    """Fit temperatures and degrees of freedom by group (N, K) and keypoint, and weights of a basis (N, K, W)."""
    objective = _Objective(sample, group, basis, kept, weights)
    for _ in range(_ROUNDS):
        optimiser = torch.optim.LBFGS(
            objective.parameters, max_iter=_ITERATIONS, line_search_fn="strong_wolfe", tolerance_change=1e-10
        )
        optimiser.step(_closure(optimiser, objective))
        objective.censor()
    tau, nu = objective.log_tau.detach().exp(), _dof(objective.log_dof.detach())
    return _Fitted(tau, nu, objective.weights.detach().numpy())


def _closure(optimiser: torch.optim.Optimizer, objective: _Objective) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    return closure
