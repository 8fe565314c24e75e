"""Draw the picture of the README: two people and the ellipses of their keypoints.

    python -m research.people -o docs/images/people.jpg

The photographs are in the public domain (examples/photographs/README.md). The model is the published YOLO11n-pose.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np

from halopose import UncertainPose
from halopose.data.images import read_image, write_image

PHOTOGRAPHS = Path(__file__).parents[1] / "examples" / "photographs"
SIZE = 800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images/people.jpg"))
    output = parser.parse_args().output
    model = UncertainPose.load_base()
    pictures = []
    for name in ("astronaut.jpg", "photographer.jpg"):
        photo = cv2.resize(read_image(PHOTOGRAPHS / name), (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
        pictures.append(model.predict(photo)[0].plot(photo, names=model.artifact.layout.names))
    gap = np.full((SIZE, 16, 3), 255, dtype=np.uint8)
    write_image(output, np.hstack([pictures[0], gap, pictures[1]]), quality=90)
    print(f"-> {output}")


if __name__ == "__main__":
    main()
