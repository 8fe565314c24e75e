"""Sensors, and the Kalman filters that fuse them."""
