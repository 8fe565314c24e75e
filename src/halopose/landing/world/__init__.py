"""Simulated world: scenes, rendered images, and approaches."""
