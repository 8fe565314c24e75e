"""Several calibrated cameras: 3D keypoints with 3x3 covariances, and persons matched across views and over time."""
