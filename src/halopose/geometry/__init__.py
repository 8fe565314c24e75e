"""Cameras, poses from points, and their uncertainty."""
