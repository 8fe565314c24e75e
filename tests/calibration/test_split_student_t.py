"""Student-t distributions of kept and of pruned keypoints: each fits its part, and both cover all keypoints."""

import pytest
import torch

from halopose.calibration.calibrators import StudentTCalibration
from halopose.calibration.split_student_t import SplitStudentT
from halopose.uncertainty.distributions import StudentT


def two_kinds(count: int = 6000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residuals of which a third have heavy tails and three times the scale, unit factors, and which are kept."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.eye(2, dtype=torch.float64).expand(count, 2, 2, 2)
    keep = torch.rand((count, 2), generator=generator) < 2 / 3
    dof = torch.where(keep, 12.0, 3.0).double()
    drawn = StudentT(factors, dof).sample(1, generator)[0]
    return torch.where(keep[..., None], drawn, 3 * drawn), factors, keep


def test_each_part_gets_its_own_distribution_and_the_covariance_of_all() -> None:
    residual, factors, keep = two_kinds()
    whole = StudentTCalibration(2)
    whole.fit(residual, factors)
    split_student = SplitStudentT.fit(whole, residual, factors, torch.ones_like(keep), keep)
    assert split_student is not None
    torch.testing.assert_close(split_student.kept.tau_, torch.ones(2).double(), atol=0.05, rtol=0)
    torch.testing.assert_close(split_student.pruned.tau_, torch.full((2,), 3.0).double(), atol=0.3, rtol=0)
    assert float(split_student.kept.nu_.min()) > 7 > 4 > float(split_student.pruned.nu_.max())
    distribution = split_student(factors, keep)
    assert torch.equal(distribution.dof[keep[:, 0], 0], split_student.kept.nu_[0].expand(int(keep[:, 0].sum())))
    torch.testing.assert_close(distribution.covariance, whole(factors).covariance)
    inside = distribution.mahalanobis_cdf(distribution.mahalanobis(residual))
    assert abs(float((inside < 0.5).double().mean()) - 0.5) < 0.02
    nll = [-float(each.log_prob(residual).mean()) for each in (distribution, whole(factors))]
    assert nll[0] < nll[1] - 0.01


@pytest.mark.parametrize("kept", [True, False])
def test_where_nothing_or_all_is_pruned_there_is_nothing_to_part(kept: bool) -> None:
    residual, factors, keep = two_kinds(200)
    whole = StudentTCalibration(2)
    whole.fit(residual, factors)
    assert SplitStudentT.fit(whole, residual, factors, torch.ones_like(keep), torch.full_like(keep, kept)) is None


def test_a_keypoint_that_is_never_pruned_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    residual, factors, keep = two_kinds(400)
    keep[:, 0] = True
    whole = StudentTCalibration(2).fit(residual, factors)
    with caplog.at_level("WARNING", "halopose"):
        split_student = SplitStudentT.fit(whole, residual, factors, torch.ones_like(keep), keep)
    assert split_student is not None
    assert not caplog.text
    torch.testing.assert_close(split_student.pruned.nu_[0], split_student.pruned.nu_[1])  # that of all pruned ones
