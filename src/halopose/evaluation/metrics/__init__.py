"""Metrics of the evaluation protocol (paper, section 4): pure functions of flat arrays.

Most take an optional ``weight`` of non-negative integers: a weight of n counts exactly as n copies of the sample.
The bootstrap resamples images by changing weights instead of data.
"""

from halopose.evaluation.metrics.akp import (
    average_keypoint_precision,
    average_precision,
    grade,
    hits_by_threshold,
    keypoint_precision_at,
    keypoint_precisions,
    random_keypoint_precision,
    skill,
    ties_of,
)
from halopose.evaluation.metrics.curves import (
    LEVELS,
    ReliabilityCurve,
    average_coverage_error,
    coverage,
    coverage_of_counts,
    coverage_of_levels,
    level_counts,
    level_index,
    qq_points,
    qq_positions,
    qq_values,
    reliability_curve,
)
from halopose.evaluation.metrics.variance import (
    VarianceBins,
    expected_normalized_calibration_error,
    moment_matching,
    normalized_calibration_errors,
    variance_bins,
)
from halopose.sorting import falling_order, rising_order

__all__ = [
    "LEVELS",
    "ReliabilityCurve",
    "VarianceBins",
    "average_coverage_error",
    "average_keypoint_precision",
    "average_precision",
    "coverage",
    "coverage_of_counts",
    "coverage_of_levels",
    "expected_normalized_calibration_error",
    "falling_order",
    "grade",
    "hits_by_threshold",
    "keypoint_precision_at",
    "keypoint_precisions",
    "level_counts",
    "level_index",
    "moment_matching",
    "normalized_calibration_errors",
    "qq_points",
    "qq_positions",
    "qq_values",
    "random_keypoint_precision",
    "reliability_curve",
    "rising_order",
    "skill",
    "ties_of",
    "variance_bins",
]
