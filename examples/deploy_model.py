"""Export a model with its uncertainty, and run it without PyTorch.

python examples/deploy_model.py
"""

# %% script
from pathlib import Path

PHOTOGRAPHS = Path(__file__).parent / "photographs"

# %% [markdown]
# # Deploy
#
# Export a model with calibrated covariances to ONNX and run it with numpy and ONNX Runtime alone. You need
# `pip install ./models '.[ultralytics,onnx]'` in a clone to export; the target machine needs neither halopose nor
# PyTorch.

# %%
from pathlib import Path

folder = Path("deployed")

# %% [markdown]
# ## Export
#
# On the command line: `halopose export -o deployed`. For your own model add `--base mine.pt --artifact
# mine.safetensors`. From Python:

# %%
from halopose import UncertainPose
from halopose.deploy.folder import write_folder
from halopose.deploy.onnx_file import build

model = UncertainPose.load_base()  # or load_base("mine.pt", "mine.safetensors")
write_folder(folder, build(model.host, model.artifact), model.artifact)
for file in sorted(folder.iterdir()):
    print(f"{file.name:12} {file.stat().st_size / 2**20:6.1f} MB")

# %% [markdown]
# `predict.py` is the whole runtime in one file: letterbox, suppression, covariances, pruning and drawing. `README.md`
# describes the inputs and outputs of this model.
#
# ## Run
#
# Copy the folder to the target machine, `pip install numpy onnxruntime opencv-python-headless`, and:
#
# ```
# python deployed/predict.py photo.jpg          # draws poses/photo.jpg
# python deployed/predict.py photo.jpg --json   # prints the numbers
# ```
#
# From Python on the target machine:

# %%
import runpy

import numpy as np

runtime = runpy.run_path(str(folder / "predict.py"))  # there: from predict import Model, read_image
photo = PHOTOGRAPHS / "astronaut.jpg"
poses = runtime["Model"](str(folder / "model.onnx")).predict(runtime["read_image"](str(photo)))
x, y = poses.keypoints[0, 0]
print(f"nose at {x:.1f}, {y:.1f} px, covariance {np.round(poses.covariance[0, 0], 1).tolist()}")

# %% [markdown]
# ## Compare with PyTorch

# %%
here = model.predict(photo)[0]
moved = np.abs(poses.keypoints - here.keypoints).max()
changed = np.abs(poses.covariance - here.covariance).max() / here.covariance.max()
print(f"keypoints differ by at most {moved:.1e} px, covariances by {changed:.1e} of the largest")

# %% [markdown]
# Next: [TensorRT, Jetson and OpenVINO](../how-to/export.md) · [half precision and 8
# bits](../how-to/quantise.md) · [in a browser](../how-to/browser.md) · [what the graph
# contains](../reference/exported-model.md)
