"""Keypoints over time: identities, filters that use the covariance of each keypoint, and smoothed tracks."""
