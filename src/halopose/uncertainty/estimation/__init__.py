"""Maximum-likelihood temperatures and tails from squared Mahalanobis distances (paper, equations 12 and 18).

In: distances (N, K) and weights, as a ``Sample``. Out: tau (K,) of a Gaussian, nu and tau (K,) of a Student-t.
"""

from halopose.uncertainty.estimation.gaussian import gaussian_temperature, likeliest_bound
from halopose.uncertainty.estimation.profile import NU_MAX, NU_MIN
from halopose.uncertainty.estimation.sample import Sample
from halopose.uncertainty.estimation.student import student_parameters

__all__ = ["NU_MAX", "NU_MIN", "Sample", "gaussian_temperature", "likeliest_bound", "student_parameters"]
