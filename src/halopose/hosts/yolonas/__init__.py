"""YOLO-NAS-Pose by LibreYOLO (an optional extra)."""
