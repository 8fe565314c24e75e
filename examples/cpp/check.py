"""Build the C++ program, run it on photographs, and compare its output with that of predict.py in the same runtime.

make cpp                                      from a clean clone: exports YOLO11n-pose, builds with OpenVINO
python examples/cpp/check.py MODEL.onnx PHOTOS     for another end2end graph, or other photographs
python examples/cpp/check.py MODEL.onnx PHOTOS --onnxruntime FOLDER     with ONNX Runtime's release archive
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

from halopose.deploy.runtimes import openvino_run
from halopose.runtime.predict import Model

HERE = Path(__file__).parent
LIMIT = 1e-4  # pixels, and shares of the trace of a covariance


def build(folder: Path, onnxruntime: Path | None = None) -> Path:
    """Build the program and return it."""
    if onnxruntime is None:
        import openvino

        runtime = f"-DOpenVINO_DIR={Path(openvino.__file__).parent / 'cmake'}"
    else:
        runtime = f"-DONNXRUNTIME_ROOT={onnxruntime.resolve()}"
    for command in (["cmake", "-S", str(HERE), "-B", str(folder), runtime], ["cmake", "--build", str(folder)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "pose"


def compare(program: Path, model: Path, photographs: list[Path], imgsz: int, onnxruntime: bool) -> tuple[float, int]:
    """Largest difference from predict.py, and the number of detections. Keypoints that are kept must be the same.

    Args:
        program: The C++ program.
        model: An end2end graph.
        photographs: Image files.
        imgsz: Input size.
        onnxruntime: Whether the program runs in ONNX Runtime rather than OpenVINO.
    """
    own = Model(str(model))
    python = own if onnxruntime else Model("", openvino_run(model), own.facts)
    fixed = own.facts.fixed or {}
    worst, count = 0.0, 0
    for path in photographs:
        image = cv2.imread(str(path))
        assert image is not None, path
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "photo.ppm"
            cv2.imwrite(str(source), image)
            said = subprocess.run([program, model, source, str(imgsz)], check=True, capture_output=True, text=True)
        found = json.loads(said.stdout)
        wanted = python.predict(image, fixed["conf"], fixed["iou"], fixed["family"], imgsz).to_json()
        assert [entry["keep"] for entry in found] == [entry["keep"] for entry in wanted], path
        count += len(found)
        for ours, theirs in zip(found, wanted, strict=True):
            covariance = np.array(theirs["covariance"])
            trace = covariance[:, :1] + covariance[:, 2:]
            worst = max(
                worst,
                np.abs(np.array(ours["bbox"]) - theirs["bbox"]).max(),
                np.abs(np.array(ours["keypoints"]) - theirs["keypoints"]).max(),
                abs(ours["score"] - theirs["score"]),
                (np.abs(np.array(ours["covariance"]) - covariance) / trace).max(),
            )
    return float(worst), count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="end2end graph")
    parser.add_argument("photographs", type=Path, nargs="?", default=HERE.parent / "photographs", help="folder")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--count", type=int, default=12, help="number of photographs")
    parser.add_argument("--onnxruntime", type=Path, help="folder with include and lib; default: OpenVINO's wheel")
    options = parser.parse_args()
    found = sorted(path for path in options.photographs.rglob("*") if path.suffix in (".jpg", ".png", ".webp"))
    found = found[:: max(len(found) // options.count, 1)][: options.count]
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), options.onnxruntime)
        worst, count = compare(program, options.model, found, options.imgsz, options.onnxruntime is not None)
    print(f"{len(found)} photographs, {count} detections: the largest difference is {worst:.2g} (limit {LIMIT:g})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
