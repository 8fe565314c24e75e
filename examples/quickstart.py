"""Predict the poses of a photograph, print the uncertainty of each keypoint, and draw a picture.

python examples/quickstart.py                  # photograph in the examples folder
python examples/quickstart.py my-photo.jpg
"""

import sys
from pathlib import Path

import numpy as np

from halopose import UncertainPose

photo = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "photographs" / "astronaut.jpg"
model = UncertainPose.load()  # YOLO11n-pose with the shipped heads
poses = model.predict(photo)[0]

keep = np.asarray(poses.keep)
for person in range(len(poses)):
    print(f"person {person + 1}, score {poses.scores[person]:.2f}")
    for k, name in enumerate(poses.names):
        x, y = poses.keypoints[person, k]
        across, along = np.sqrt(np.linalg.eigvalsh(poses.covariance[person, k]))
        verdict = "" if keep[person, k] else "   pruned (unreliable)"
        print(f"  {name:15} at {x:6.1f} {y:6.1f}, off by {across:5.1f} to {along:5.1f} px{verdict}")

picture = f"{photo.stem}-poses.png"
poses.save(picture)
print(f"-> {picture}")
