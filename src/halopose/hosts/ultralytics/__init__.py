"""Ultralytics YOLO-Pose (AGPL-3.0, an optional extra).

On import the framework looks up two hosts to see whether it is online; this is switched off here.
"""

import os

os.environ.setdefault("YOLO_OFFLINE", "true")
