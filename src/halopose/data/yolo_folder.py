"""A data set as a YOLO folder, which the frameworks' own trainers read.

In: a data set of any format and the model to be trained. Out: images, labels and a data yaml in a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from halopose.data.coco import make_folder, write_text
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.images import read_image
from halopose.errors import HaloposeError
from halopose.hosts.base import Host
from halopose.poses import Array


def write_yolo(dataset: Dataset, folder: Path, host: Host, dimensions: int) -> Path:
    """Links to the images, labels of our own and a yaml; its path. dimensions: 3 with visibility, else 2.

    The user's own folder stays as it is (a framework would write a cache there). Crowds are no targets.
    Labelled keypoints outside of the image count as unlabelled: frameworks drop the whole image otherwise.
    """
    if len(dataset.names) != host.keypoint_count:
        raise HaloposeError(f"the data have {len(dataset.names)} keypoints, the model {host.keypoint_count}")
    images, labels = make_folder(folder / "images"), make_folder(folder / "labels")
    for link in images.iterdir():
        if link.is_symlink():  # of another data set, perhaps
            link.unlink()
    for record in dataset.records:
        link = images / f"{record.image_id:015d}{record.path.suffix.lower()}"
        _link(link, record.path.resolve())
        rows = label_rows(_relative(record), dimensions)
        text = "\n".join(" ".join(f"{value:.9g}" for value in row) for row in rows)
        write_text((labels / link.name).with_suffix(".txt"), text)
    content = {
        "path": str(folder.resolve()),
        "train": str(images.resolve()),
        "val": str(images.resolve()),  # frameworks want one; training here never reads it
        "kpt_shape": [host.keypoint_count, dimensions],
        "kpt_oks_sigmas": [float(sigma) for sigma in host.sigmas],
        "kpt_names": {number: list(dataset.names) for number in range(len(host.class_names))},
        "names": dict(enumerate(host.class_names)),
        "nc": len(host.class_names),
        "channels": 3,
    }
    flip = mirrored_order(dataset.names)
    if flip is not None:
        content["flip_idx"] = flip
    path = folder / "data.yaml"
    write_text(path, yaml.safe_dump(content))
    return path


def _link(link: Path, target: Path) -> None:
    try:
        link.symlink_to(target)
    except OSError as error:
        raise HaloposeError(f"cannot link {link} to an image: {error.strerror or error}") from None


def _relative(record: Record) -> Objects:
    """The objects that are no crowds, in shares of the image's sides."""
    objects = record.objects.select(~record.objects.crowd)
    if record.relative or not len(objects):
        return objects
    height, width = read_image(record.path).shape[:2]
    size = np.array([width, height], dtype=float)
    return Objects(
        objects.boxes / np.tile(size, 2),
        objects.class_ids,
        objects.keypoints / size,
        objects.labelled,
        objects.area,
        objects.crowd,
    )


def label_rows(objects: Objects, dimensions: int) -> Array:
    """Label rows (M, 5 + K * dimensions): class, box centre and size, keypoints."""
    boxes = objects.boxes.clip(0, 1)
    centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    points = objects.keypoints
    seen = objects.labelled & ((points >= 0) & (points <= 1)).all(-1)
    if dimensions == 3:
        points = np.concatenate([np.where(seen[..., None], points, 0.0), 2.0 * seen[..., None]], axis=2)
    else:
        points = np.where(seen[..., None], points, -0.005)  # a negative coordinate says unlabelled
    flat = points.reshape(len(points), points.shape[1] * dimensions)
    rows = np.concatenate([objects.class_ids[:, None], centre, size, flat], axis=1)
    return np.asarray(rows[(size > 0).all(1)])


def mirrored_order(names: Sequence[str]) -> list[int] | None:
    """Which keypoint each becomes in the mirror, from "left" and "right" in the names; None if none has either."""
    swapped = [
        name.replace("left", "\0").replace("right", "left").replace("\0", "right")
        for name in map(str.lower, names)
    ]
    lower = [name.lower() for name in names]
    if swapped == lower or set(swapped) != set(lower):
        return None
    return [lower.index(name) for name in swapped]


__all__ = ["label_rows", "mirrored_order", "write_yolo"]
