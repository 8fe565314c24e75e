"""Write a YOLO data set of parts of photographs, labelled with the poses that model.onnx finds, plus noise."""

import sys
from pathlib import Path

import cv2
import numpy as np

from halopose.hosts.loading import load_host

source, target = map(Path, sys.argv[1:])
host, generator = load_host("model.onnx"), np.random.default_rng(0)
photographs = [cv2.imread(str(path)) for path in sorted(source.glob("*.jpg"))]
for split, count in (("train", 24), ("val", 16)):
    for name in ("images", "labels"):
        (target / name / split).mkdir(parents=True)
    for number in range(count):
        image = photographs[number % len(photographs)]
        side = int(min(image.shape[:2]) * generator.uniform(0.8, 1))
        top, left = (int(generator.integers(0, size - side + 1)) for size in image.shape[:2])
        image = np.clip(image[top : top + side, left : left + side] * generator.uniform(0.7, 1.2), 0, 255).astype(
            np.uint8
        )
        batch, boxes = host.preprocess([image], 640, True)
        found = host.select(host.forward(batch), conf=0.3, iou=0.7, letterboxes=boxes)[0]
        found = host.to_original(found, boxes[0], (640, 640))
        lines = []
        for box, points in zip(found.boxes.numpy() / side, found.keypoints.numpy() / side, strict=True):
            noisy = np.clip(points + generator.normal(0, 0.01, points.shape), 0, 1)
            values = [*(box[:2] + box[2:]) / 2, *(box[2:] - box[:2]), *np.c_[noisy, np.full(len(noisy), 2)].ravel()]
            lines.append("0 " + " ".join(f"{value:.6f}" for value in values))
        cv2.imwrite(str(target / "images" / split / f"{number}.png"), image)
        (target / "labels" / split / f"{number}.txt").write_text("\n".join(lines))
(target / "data.yaml").write_text(
    f"path: {target.resolve()}\ntrain: images/train\nval: images/val\nnames: [person]\nkpt_shape: [17, 3]\n"
)
