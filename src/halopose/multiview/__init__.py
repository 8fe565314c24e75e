"""Several calibrated cameras: keypoints in space with 3x3 covariances, persons across views and over time."""
