"""First prediction: the poses of a photograph with the uncertainty of each keypoint.

python examples/quickstart.py
"""

# %% script
from pathlib import Path

PHOTOGRAPHS = Path(__file__).parent / "photographs"

# %% [markdown]
# # First prediction
#
# Predict the poses in a photograph, read the uncertainty of each keypoint, and draw 95 % ellipses. You need
# `pip install ./models '.[ultralytics]'` in a clone. The first run fetches YOLO11n-pose (6 MB).

# %%
import numpy as np

from halopose import UncertainPose

photo = PHOTOGRAPHS / "astronaut.jpg"  # or a photograph of yours
model = UncertainPose.load()  # YOLO11n-pose with the shipped heads
poses = model.predict(photo)[0]
print(poses)

# %% [markdown]
# `predict` returns one result per image. In a notebook a result draws itself: each ellipse holds the true keypoint with
# 95 % probability. Grey keypoints are pruned as unreliable.

# %%
poses

# %% [markdown]
# ## Read the numbers
#
# `poses.covariance` has shape (detections, keypoints, 2, 2), in squared pixels of the photograph. `poses.std` holds the
# standard deviations along x and y. `poses.keep` is false for keypoints that should not be used.

# %%
for person in poses:
    print(f"person with score {person.scores[0]:.2f}")
    kept = np.asarray(person.keep)[0]
    for k, name in enumerate(person.names):
        (x, y), (dx, dy) = person.keypoints[0, k], person.std[0, k]
        note = "" if kept[k] else "   pruned"
        print(f"  {name:15} {x:6.1f} ± {dx:5.1f}  {y:6.1f} ± {dy:5.1f} px{note}")

# %% [markdown]
# Select keypoints by name. `ellipse` gives the semi-axes and the angle of the region that holds a given probability.

# %%
axes, angle = poses["left_eye"].ellipse(0.95)
long, short = axes[0, 0]
print(f"left eye, semi-axes of the 95 % ellipse: {long:.1f} and {short:.1f} px")

# %% [markdown]
# ## Save
#
# The suffix decides: a picture is drawn, `.json` holds the numbers in COCO format.

# %%
poses.save(f"{photo.stem}-poses.png")
poses.save(f"{photo.stem}-poses.json")

# %% [markdown]
# ## On the command line
#
# ```
# halopose predict photo.jpg photos/ film.mp4 -o poses
# ```
#
# Next: [fit heads to your own model](fit-your-own-model.ipynb), or
# [use the covariances in a filter](filter-with-covariances.ipynb).
