"""Weights that halopose ships: a runway detector, its heads, and heads for YOLO11n-pose.

Nothing to call: ``halopose.hosts.shipped`` looks up the files of this package by name.
"""

__version__ = "0.1.0"
