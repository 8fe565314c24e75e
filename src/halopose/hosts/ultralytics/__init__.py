"""Ultralytics YOLO-Pose (AGPL-3.0, an optional extra).

The framework looks up two hosts whenever it is imported, to see whether it is online. Nobody asked for that here.
"""

import os

os.environ.setdefault("YOLO_OFFLINE", "true")
