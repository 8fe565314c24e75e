"""Ultralytics YOLO-Pose (AGPL-3.0, an optional extra)."""
