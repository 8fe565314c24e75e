"""Fit heads for your own model, save and load them, and predict.

python examples/your_own_model.py
"""

# %% [markdown]
# # Fit your own model
#
# You have a trained pose model and the data it was trained with. This tutorial trains uncertainty heads for it,
# calibrates them, checks them on held-out images and predicts. The model itself does not change.
#
# The model here is a runway detector with four keypoints, and its 80 images are rendered. That is far too few for good
# heads, but the tutorial runs in half a minute. For your model set `base` to its checkpoint and `data` to its
# data.yaml.

# %%
from pathlib import Path

folder = Path("your-own-model")

# %%
from halopose.landing.shipped_detectors import runway_detector
from halopose.landing.world.dataset_writer import write_dataset

base = runway_detector()  # a checkpoint, such as "mine.pt"
data = write_dataset(folder / "data", {"train": 40, "val": 40}, seed=5)  # a data.yaml
print(data.read_text())

# %% [markdown]
# ## Fit
#
# `fit` runs the frozen model once over the images and stores the features, trains the heads on them, calibrates on one
# part of the validation images and scores on the rest. If it is interrupted, a rerun continues.

# %%
from halopose import FitSettings, UncertainPose, fit
from halopose.data.dataset_loading import load_dataset
from halopose.fitting.settings import TrainSettings
from halopose.hosts.loading import load_host

training = TrainSettings(epochs=12, batch=32)  # small batches: there are few images
settings = FitSettings(training, imgsz=320, train_sizes=(320,), calibration_share=0.5, novelty_images=0)
train, val = load_dataset(data, "train"), load_dataset(data, "val")
artifact, scores = fit(load_host(base), train, val, folder / "work", settings)
artifact.save(folder / "heads.safetensors")

# %% [markdown]
# ## Check
#
# ACE is the average coverage error: 0 for perfect calibration. AKP skill says how well the stated uncertainty ranks
# keypoints: 0 for a random order, 1 for a perfect one. Both are measured on images that neither heads nor calibration
# have seen.

# %%
for name in ("uncalibrated", "gaussian", "student_t"):
    found = scores.distribution(name)
    print(f"{name:14} ACE {found.ace:.3f}   NLL {found.nll:.2f}")
print(f"skill {scores.akp_skill:.2f} from {scores.keypoints} keypoints")

# %% [markdown]
# ## Predict

# %%
model = UncertainPose.load(base, folder / "heads.safetensors")
images = sorted((folder / "data" / "images" / "val").iterdir())
results = model.predict(images[:8])
detected = [poses for poses in results if len(poses)]
(x, y), (dx, dy) = detected[0].keypoints[0, 0], detected[0].std[0, 0]
print(f"near left corner at {x:.1f} ± {dx:.1f}, {y:.1f} ± {dy:.1f} px")

# %%
detected[0]

# %% [markdown]
# ## The same on the command line
#
# ```
# halopose fit data.yaml --base mine.pt -o mine.safetensors
# halopose predict photos/ --base mine.pt --artifact mine.safetensors
# ```
#
# `fit` also writes a report with charts and a verdict in words. [How many images do I
# need?](../how-to/how-many-images.md) · [Your own keypoints](../how-to/your-own-keypoints.md) ·
# [Deploy the result](deploy.ipynb)
