"""Prediction of poses with a distribution for each keypoint: PyTorch models, exported models, whole folders."""
