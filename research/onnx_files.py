"""Parity of an exported model, or of heads added to an ONNX file, with the same heads in PyTorch, on photographs.

python -m research.onnx_files model.onnx photographs --artifact heads.safetensors
python -m research.onnx_files yolo11n-pose.pt photographs --runtime openvino
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from halopose.data.images import read_source
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.deploy.exporting import export_model
from halopose.deploy.onnx_file import write_model
from halopose.deploy.runtimes import open_exported
from halopose.prediction.uncertain_pose import UncertainPose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="ONNX file, or checkpoint")
    parser.add_argument("source", type=Path, help="folder of photographs")
    parser.add_argument("--artifact", type=Path, help="artifact for the file; default: the shipped heads")
    parser.add_argument("--runtime", choices=("onnx", "openvino"), default="onnx", help="where the export runs")
    parser.add_argument("--count", type=int, default=64, help="photographs")
    options = parser.parse_args()
    pose = UncertainPose.load_base(options.model, options.artifact)
    paths = sorted(path for path in options.source.iterdir() if path.is_file())
    images = [image for path in paths[:: max(len(paths) // options.count, 1)] for image in read_source(path)]
    images = images[: options.count]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_model(export_model(pose.host, pose.artifact), path)
        print_parity(pose, open_exported(path, options.runtime), [image.pixels for image in images])


def print_parity(pose: UncertainPose, deployed: Deployed, images: list[np.ndarray]) -> None:
    """Largest differences of boxes and keypoints in pixels, and of covariances as a share of their trace."""
    worst, count, missing = np.zeros(3), 0, 0
    for image in images:
        deployed_poses = deployed.predict(image, Detecting(), "gaussian")
        own = pose.predict(image, family="gaussian")[0]
        missing += abs(len(own) - len(deployed_poses))
        if len(own) != len(deployed_poses) or not len(own):
            continue
        count += len(own)
        trace = np.trace(own.covariance, axis1=2, axis2=3)[..., None, None]
        parts = (
            np.abs(own.boxes - deployed_poses.boxes).max(),
            np.abs(own.keypoints - deployed_poses.keypoints).max(),
            (np.abs(own.covariance - deployed_poses.covariance) / trace).max(),
        )
        worst = np.maximum(worst, parts)
    print(f"{len(images)} photographs, {count} detections, {missing} found by one only")
    print(f"boxes {worst[0]:.2g} px, keypoints {worst[1]:.2g} px, covariances {worst[2]:.2g} of the trace")


if __name__ == "__main__":
    main()
