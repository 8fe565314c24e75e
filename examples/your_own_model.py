"""Fit heads for your own model, save and load them, and predict.

python examples/your_own_model.py [folder]

The model here is a runway detector with four keypoints, and its data are rendered first. For your model, set `base` to
its checkpoint and `data` to the data.yaml it was trained with. The example uses far too few images for good heads or an
out-of-distribution model (`novelty_images`), so that it runs in half a minute. The command
`halopose fit data.yaml --base mine.pt` does the same.
"""

import sys
from pathlib import Path

from halopose import FitSettings, UncertainPose, fit
from halopose.data.dataset_loading import load_dataset
from halopose.fitting.settings import TrainSettings
from halopose.hosts.loading import load_host
from halopose.landing.shipped_detectors import runway_detector
from halopose.landing.world.dataset_writer import write_dataset

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "your-own-model")
data = write_dataset(folder / "data", {"train": 40, "val": 40}, seed=5)
base = runway_detector()

training = TrainSettings(epochs=12, batch=32)  # small batches, because there are few cells
settings = FitSettings(training, imgsz=320, train_sizes=(320,), calibration_share=0.5, novelty_images=0)
artifact, scores = fit(
    load_host(base), load_dataset(data, "train"), load_dataset(data, "val"), folder / "work", settings
)
artifact.save(folder / "heads.safetensors")
print(f"calibration error on held-out images: {scores.gaussian.ace:.3f}")

model = UncertainPose.load(base, folder / "heads.safetensors")
for image, poses in model.stream(folder / "data" / "images" / "val"):
    if len(poses):
        print(f"{image.name}: near left corner at {poses.keypoints[0, 0].round(1)}, covariance")
        print(poses.covariance[0, 0].round(2))
        break
