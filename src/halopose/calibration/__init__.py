"""Calibration: temperatures, Student-t parameters, conformal regions, keypoint correlation and pruning thresholds."""
