"""Calibrated predictive distributions for the keypoints of trained, frozen pose models."""

__version__ = "0.1.0"
