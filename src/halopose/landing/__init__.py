"""Vision-based landing: from runway corners with 2x2 covariances to a runway-relative position with a covariance.

Axes, corner order, the pose and its perturbation are those of ``halopose.geometry.camera``; lengths are in metres
and angles in radians throughout.
"""
