"""Maximum-likelihood temperatures and tails from squared Mahalanobis distances (paper, equations 12 and 18).

In: distances (N, K) and weights, as a ``Sample``. Out: tau (K,) of a Gaussian, nu and tau (K,) of a Student-t.
"""

from halopose.calibration.estimation.gaussian_mle import gaussian_temperature, likeliest_bound
from halopose.calibration.estimation.profile import NU_MAX, NU_MIN
from halopose.calibration.estimation.sample import Sample
from halopose.calibration.estimation.student_mle import student_parameters

__all__ = [
    "NU_MAX",
    "NU_MIN",
    "Sample",
    "gaussian_temperature",
    "likeliest_bound",
    "student_parameters",
]
