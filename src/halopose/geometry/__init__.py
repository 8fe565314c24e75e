"""Cameras, poses from points, and their uncertainty; useful without any aircraft."""
