"""YOLO datasets: read a data yaml with label files, and write any dataset as one for a framework's trainer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import numpy as np
import yaml

from halopose.data.annotation_checks import Faults
from halopose.data.bounded_text import read_yaml
from halopose.data.dataset import Dataset, Objects, Record, image_id
from halopose.data.files import make_folder, write_text
from halopose.data.images import read_image
from halopose.data.storage.address import Address, Place, beside, read_many, to_place
from halopose.data.storage.archive import Member, Stored, find_archives, is_archive, read_samples
from halopose.data.suffixes import IMAGE_SUFFIXES
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.types import Array

NO_SPLITS = {"path", "names", "nc", "download", "kpt_shape", "kpt_names", "kpt_oks_sigmas", "flip_idx"}
LONGEST_NAME = 255  # bytes of one part of a path, wherever
FARTHEST_BOX, FARTHEST_POINT = 1.05, 3.0  # largest coordinates as shares of the image's sides


def read_yolo(path: Place, split: str, otherwise: Keypoints | None = None) -> Dataset:
    """Read a split of a YOLO data yaml: folders or lists of images, local or remote, or tar archives.

    Args:
        path: The yaml.
        split: Name of the split.
        otherwise: Keypoints of the model, for properties that the yaml does not state.
    """
    content = read_yaml(path)
    shape = content.get("kpt_shape")
    whole = isinstance(shape, list) and len(shape) == 2 and all(type(value) is int for value in shape)
    if not isinstance(shape, list) or not whole or shape[0] < 1 or shape[1] not in (2, 3):
        raise HaloposeError(f"{path} has no kpt_shape like [17, 3]: give the yaml of a pose data set")
    if split not in content:
        known = ", ".join(key for key, value in content.items() if isinstance(value, str) and key != "path")
        raise HaloposeError(f"{path} has no split {split!r}: it has {known or 'none'}")
    count, dimensions = int(shape[0]), int(shape[1])
    layout = Keypoints.of(
        count,
        names=_names(content, count),
        sigmas=_sigmas(content.get("kpt_oks_sigmas"), count, path),
        mirror=_mirror(content.get("flip_idx"), count),
        otherwise=otherwise,
    )
    _check_name(content.get("path"), path)
    root = _root(path, content)
    samples = _samples(root, content[split], path)
    shared = _shared_ids(root, content, path)
    faults = Faults(str(path))
    records = tuple(
        Record(
            image,
            image_id(_below(image, root)) if image_id(image.name) in shared else image_id(image.name),
            _read_labels(name, text, count, dimensions, faults),
            relative=True,
            area_factor=layout.area_factor,
        )
        for image, name, text in _with_labels(samples)
    )
    faults.judge()
    return Dataset(records, layout, f"{layout.area_factor:g} x box")


def _root(path: Place, content: dict[str, Any]) -> Place:
    """Return the folder of the splits."""
    try:
        named = beside(path, str(content.get("path") or "."))
        return named.resolve() if isinstance(named, Path) else named
    except HaloposeError:
        raise
    except (OSError, UnicodeError, RuntimeError, ValueError):  # a name that no file system allows
        raise HaloposeError(f"{path}: its path is no valid folder name: correct it") from None


def _shared_ids(root: Place, content: dict[str, Any], path: Place) -> set[int]:
    """Return ids that several files of the dataset have by their names, in any split. These files get ids by path.

    Images of archives do not count: their names are distinct, as in WebDataset.
    """
    files: set[Stored] = set()
    for key in content.keys() - NO_SPLITS:
        with suppress(HaloposeError):  # an unused split may be missing
            files |= {image for image, _ in _samples(root, content[key], path, archives=False)}
    counts = Counter(image_id(file.name) for file in files)
    return {identity for identity, count in counts.items() if count > 1}


def _below(file: Stored, root: Place) -> str:
    """Return the path of a file in the dataset, which does not depend on where the dataset is.

    It has at least one folder, so that its id is a hash.
    """
    if isinstance(file, Member):
        return file.file
    if isinstance(file, Address):
        return file.below(root) if isinstance(root, Address) else str(file)
    below = Path(os.path.relpath(file, str(root))).as_posix()
    return below if "/" in below else f"images/{below}"


def _mirror(given: Any, count: int) -> list[int] | None:
    """Return ``flip_idx`` if it is a permutation other than the identity, which frameworks write without symmetry."""
    whole = isinstance(given, list) and all(type(k) is int for k in given)
    return given if whole and sorted(given) == list(range(count)) and given != list(range(count)) else None


def _sigmas(given: Any, count: int, path: Place) -> Array | None:
    if given is None:
        return None
    numbers = isinstance(given, list) and all(isinstance(value, (int, float)) and value > 0 for value in given)
    if not numbers or len(given) != count:
        raise HaloposeError(f"{path}: kpt_oks_sigmas needs {count} positive numbers, got {given}")
    return np.asarray(given, dtype=float)


def _names(content: dict[str, Any], count: int) -> list[str] | None:
    named = content.get("kpt_names")
    first = next(iter(named.values()), None) if isinstance(named, dict) else named
    return [str(name) for name in first] if isinstance(first, list) and len(first) == count else None


# An image, and the text of its labels if both are in an archive.
Sample = tuple[Stored, Optional[str]]


def _samples(root: Place, entry: Any, path: Place, archives: bool = True) -> list[Sample]:
    """Find the images of a split, those in archives only if ``archives`` is true."""
    found: list[Sample] = []
    for item in entry if isinstance(entry, list) else [entry]:
        _check_name(item, path)
        place = to_place(str(item))
        place = place if isinstance(place, Address) else root / str(item)
        if is_archive(place):
            shards = find_archives(place) if archives else []
            found += [sample for shard in shards for sample in read_samples(shard, IMAGE_SUFFIXES)]
        else:
            found += [(image, None) for image in _image_files(place, path)]
    if not found and archives:
        raise HaloposeError(f"{path}: no images in {root / str(entry)}")
    return found if any(isinstance(image, Member) for image, _ in found) else sorted(found, key=_order)


def _check_name(name: Any, path: Place) -> None:
    """Raise a HaloposeError for a name that no folder or file can have."""
    parts = str(name).replace("\\", "/").split("/")
    if "\0" in str(name) or any(len(part.encode("utf-8", "replace")) > LONGEST_NAME for part in parts):
        raise HaloposeError(f"{path}: {str(name)[:40]!r} is not a valid folder name: correct it")


def _order(sample: Sample) -> Any:
    return sample[0] if isinstance(sample[0], Path) else Path(str(sample[0]))


def _image_files(place: Place, path: Place) -> Sequence[Path | Address]:
    if place.is_dir():
        if str(place).removeprefix("file:").strip("/") == "":
            raise HaloposeError(f"{path}: {place} is the root of the file system: name the folder of the images")
        if isinstance(place, Address):
            return [file for file in place.files() if file.suffix.lower() in IMAGE_SUFFIXES]
        return [file for file in place.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES]
    if place.suffix == ".txt" and place.is_file():
        lines = [line.strip() for line in place.read_bytes().decode().splitlines() if line.strip()]
        if isinstance(place, Address):
            return [named for named in (beside(place, line) for line in lines) if isinstance(named, Address)]
        return [(place.parent / line).resolve() for line in lines]
    raise HaloposeError(f"{path}: there is no folder {place}")


def _with_labels(samples: Sequence[Sample]) -> Iterator[tuple[Stored, str, str]]:
    """Yield each image with the name and the text of its labels; the text is empty without labels."""
    addresses = [_labels_of(image) for image, _ in samples if isinstance(image, Address)]
    known = read_many([one for one in addresses if isinstance(one, Address)]) if addresses else {}
    for image, text in samples:
        if isinstance(image, Member):
            yield image, f"labels of {image}", text or ""
        elif isinstance(image, Address):
            labels = _labels_of(image)
            yield image, str(labels), _decoded(known.get(str(labels), b""), str(labels))
        else:
            labels = _labels_of(image)
            if Path(str(labels)).is_fifo():  # reading a named pipe would block
                raise HaloposeError(f"cannot read labels {labels}: it is not a regular file")
            try:
                yield image, str(labels), _decoded(labels.read_bytes(), str(labels))
            except FileNotFoundError:
                yield image, str(labels), ""
            except OSError as error:
                raise HaloposeError(f"cannot read labels {labels}: {error}") from None


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise HaloposeError(f"cannot read labels {name}: {error}") from None


def _labels_of(image: Path | Address) -> Path | Address:
    """Return the label file of an image by YOLO's convention."""
    parts = list(image.parts)
    for index in reversed(range(len(parts) - 1)):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    if isinstance(image, Address):
        return Address(parts[0] + "/".join(parts[1:])).with_suffix(".txt")
    return Path(*parts).with_suffix(".txt")


def _read_labels(file: str, text: str, count: int, dimensions: int, faults: Faults) -> Objects:
    """Parse the text of a label file; an empty text means no objects."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    width = 5 + count * dimensions
    for number, row in enumerate(rows):
        if len(row) != width:
            raise HaloposeError(
                f"{file}, line {number + 1}: {len(row)} numbers, but {count} keypoints with {dimensions} values each "
                f"need {width}"
            )
    try:
        values = np.array(rows, dtype=float).reshape(-1, width)
    except ValueError:
        raise HaloposeError(f"{file} has an entry that is not a number: correct the labels") from None
    if not np.isfinite(values).all():
        raise HaloposeError(f"{file} has a number that is not finite: correct the labels")
    values = values[_sound(values, count, dimensions, file, faults)]
    centre, size = values[:, 1:3], values[:, 3:5]
    keypoints = values[:, 5:].reshape(-1, count, dimensions)
    labelled = keypoints[..., 2] > 0 if dimensions == 3 else (keypoints != 0).any(-1)
    return Objects(
        boxes=np.concatenate([centre - size / 2, centre + size / 2], axis=1),
        class_ids=values[:, 0].astype(np.int64),
        keypoints=keypoints[..., :2],
        labelled=labelled,
        area=np.ones(len(values)),
        crowd=np.zeros(len(values), dtype=bool),
        occluded=keypoints[..., 2] == 1 if dimensions == 3 else None,
    )


def _sound(values: Array, count: int, dimensions: int, file: str, faults: Faults) -> Array:
    """Return which rows (M,) are valid, and report the others with the reason."""
    points = np.abs(values[:, 5:].reshape(-1, count, dimensions)[..., :2]).max((1, 2), initial=0)
    bad = {
        "coordinates far beyond the image, as of labels in pixels": (
            (np.abs(values[:, 1:5]) > FARTHEST_BOX).any(1) | (points > FARTHEST_POINT)
        ),
        "a box without width or height": (values[:, 3:5] <= 0).any(1),
        "a class that is not a whole number from 0 on": (values[:, 0] < 0) | (values[:, 0] % 1 != 0),
    }
    sound = np.ones(len(values), dtype=bool)
    for reason, rows in bad.items():
        for number in np.flatnonzero(rows & sound):
            faults.add(reason, f"{file}, line {number + 1}")
        sound &= ~rows
    faults.seen(len(values))
    return sound


def write_yolo(dataset: Dataset, folder: Path, class_names: Sequence[str], dimensions: int) -> Path:
    """Write links to the images, label files and a yaml for the trainer of a framework.

    The user's folder stays unchanged, because frameworks write a cache next to the labels. Crowds are left out.
    Labelled keypoints outside the image become unlabelled, because frameworks drop the whole image otherwise.

    Args:
        dataset: Annotated images.
        folder: Folder to write.
        class_names: Names of the classes.
        dimensions: Values per keypoint: 3 with visibility, else 2.

    Returns:
        Path of the yaml.
    """
    images, labels = make_folder(folder / "images"), make_folder(folder / "labels")
    for link in images.iterdir():
        if link.is_symlink():  # may belong to another data set
            link.unlink()
    for record in dataset.records:
        link = images / f"{record.image_id:015d}{record.path.suffix.lower()}"
        _link(link, local_image(record).resolve())
        rows = label_rows(_relative(record), dimensions)
        text = "\n".join(" ".join(f"{value:.9g}" for value in row) for row in rows)
        write_text((labels / link.name).with_suffix(".txt"), text)
    content = {
        "path": str(folder.resolve()),
        "train": str(images.resolve()),
        "val": str(images.resolve()),  # required by frameworks, but not read by training here
        "kpt_shape": [len(dataset.layout), dimensions],
        "kpt_oks_sigmas": list(dataset.layout.sigmas),
        "kpt_names": {number: list(dataset.layout.names) for number in range(len(class_names))},
        "names": dict(enumerate(class_names)),
        "nc": len(class_names),
        "channels": 3,
    }
    if dataset.layout.mirror is not None:
        content["flip_idx"] = list(dataset.layout.mirror)
    path = folder / "data.yaml"
    write_text(path, yaml.safe_dump(content))
    return path


def local_image(record: Record) -> Path:
    """Return the local file of an image, which frameworks read themselves."""
    if not isinstance(record.path, Path):
        raise HaloposeError(f"{record.path} is not a local file, which training needs: copy the images to this machine")
    return record.path


def _link(link: Path, target: Path) -> None:
    try:
        link.symlink_to(target)
    except OSError as error:
        raise HaloposeError(f"cannot link {link} to an image: {error.strerror or error}") from None


def _relative(record: Record) -> Objects:
    """Return the objects without crowds, in shares of the image's sides."""
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
    """Return label rows (M, 5 + K * dimensions): class, box centre and size, keypoints."""
    boxes = objects.boxes.clip(0, 1)
    centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    points = objects.keypoints
    seen = objects.labelled & ((points >= 0) & (points <= 1)).all(-1)
    if dimensions == 3:
        points = np.concatenate([np.where(seen[..., None], points, 0.0), 2.0 * seen[..., None]], axis=2)
    else:
        points = np.where(seen[..., None], points, -0.005)  # a negative coordinate means unlabelled
    flat = points.reshape(len(points), points.shape[1] * dimensions)
    rows = np.concatenate([objects.class_ids[:, None], centre, size, flat], axis=1)
    return np.asarray(rows[(size > 0).all(1)])
