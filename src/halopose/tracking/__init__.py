"""Keypoints over time: who is who, filters whose noise is each keypoint's own covariance, and smoothed tracks."""
