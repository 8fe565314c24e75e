"""Pose files of any tool: recognise the format, read it, write it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from halopose.data.coco import Annotated, parse_ground_truth, read_annotated, read_numbering
from halopose.data.files import check_regular, read_json, write_json, write_text
from halopose.data.formats.deeplabcut import (
    is_deeplabcut_csv,
    read_deeplabcut_csv,
    read_deeplabcut_h5,
    write_deeplabcut_csv,
)
from halopose.data.formats.landmark_json import (
    default_names,
    is_mediapipe,
    is_mmpose,
    is_openpose,
    read_mediapipe,
    read_mmpose,
    read_openpose,
    write_mediapipe,
    write_mmpose,
    write_openpose,
)
from halopose.data.formats.pose_table import PoseTable
from halopose.data.formats.sleap import is_sleap_csv, read_sleap_csv, read_slp, write_sleap_csv
from halopose.data.storage.address import to_place
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from collections.abc import Iterator

Format = Literal["auto", "coco", "deeplabcut", "lightning-pose", "anipose", "sleap", "mediapipe", "mmpose", "openpose"]

FORMATS: tuple[Format, ...] = get_args(Format)
_CSV_LIKE = ("deeplabcut", "lightning-pose", "anipose")
_READ_ALL = """
import sys, h5py
def read(name, item):
    dict(item.attrs)
    if isinstance(item, h5py.Dataset):
        item[()]
with h5py.File(sys.argv[1], "r") as file:
    file.visititems(read)
"""
_LARGEST_TEXT = 1 << 30  # bytes of a csv file
_HEAD = 1 << 16


def read_table(path: Path | str, format: Format = "auto", size: tuple[int, int] | None = None) -> PoseTable:
    """Read keypoints of another tool.

    Args:
        path: A file, or a folder of OpenPose's json files, one for each frame.
        format: Name of the format; "auto" recognises it by its content.
        size: Width and height of the images, which MediaPipe's landmarks need.

    Raises:
        HaloposeError: The file is damaged, or of no known format.
    """
    return _read(Path(path), format, size)[0]


def read_results(
    path: Path | str,
    format: Format = "auto",
    size: tuple[int, int] | None = None,
    truth: Path | str | None = None,
) -> list[dict[str, Any]]:
    """Read predictions of any tool as COCO results; a file of COCO results is returned as parsed.

    Args:
        path: File or folder as in ``read_table``.
        format: Name of the format.
        size: Width and height of the images, which MediaPipe's landmarks need.
        truth: Ground truth in COCO's format; images are numbered as there, by their names, if the predictions name
            them.
    """
    found = read_foreign(path, format, size)
    if found is None:
        return read_json(path)
    table = found[0]
    entries = table.to_entries()
    for entry in entries:  # named as frames of a film, which `halopose track` needs
        entry.setdefault("file_name", f"{Path(path).stem}_{entry['image_id']:06d}")
    if truth is not None and table.images and not _is_foreign(truth):
        images = read_numbering(truth).images
        by_name = {Path(name).name: name for name in table.images.values()}
        if len(by_name) == len(table.images) and set(by_name) <= set(images):
            for entry in entries:
                entry["image_id"] = images[Path(entry["file_name"]).name]
    return entries


def read_labels(path: Path | str, sigmas: Sequence[float] | None = None) -> Annotated:
    """Read COCO ground truth, or labels of another tool."""
    if not _is_foreign(path):
        return read_annotated(path, sigmas)
    content = read_table(path).to_truth()
    truth = parse_ground_truth(path, content, sigmas)
    names = tuple(image["file_name"] for image in content["images"])
    return Annotated(truth, truth.images, names, truth.class_ids[:1])


def write_table(table: PoseTable, path: Path | str, format: Format = "auto") -> Format:
    """Write keypoints, with their covariances if there are any, in the format of a tool.

    Args:
        table: The poses.
        path: File to write; for OpenPose, a folder for one file per frame.
        format: Name of the format; "auto" takes DeepLabCut's for ``.csv`` and COCO results for ``.json``.

    Returns:
        The format written.
    """
    path = Path(path)
    if format == "auto":
        known: dict[str, Format] = {".csv": "deeplabcut", ".json": "coco"}
        if path.suffix not in known:
            raise HaloposeError(f"cannot choose a format for {path.name}: give --to, one of {', '.join(FORMATS[1:])}")
        format = known[path.suffix]
    if format in _CSV_LIKE or format == "sleap":
        if path.suffix != ".csv":
            raise HaloposeError(f"{format} is written as csv: name the file {path.stem}.csv")
        write_text(path, write_sleap_csv(table) if format == "sleap" else write_deeplabcut_csv(table))
    elif format == "openpose":
        for frame, content in write_openpose(table).items():
            write_json(path / f"{path.name}_{frame:012d}_keypoints.json", content)
    else:
        whole: Any
        if format == "coco":
            whole = table.to_entries()
        else:
            whole = write_mmpose(table) if format == "mmpose" else write_mediapipe(table)
        write_json(path, whole)
    return format


def read_foreign(
    path: Path | str, format: Format = "auto", size: tuple[int, int] | None = None
) -> tuple[PoseTable, Format] | None:
    """Read table and format of a file of another tool; None for COCO results."""
    if format == "coco" or (format == "auto" and not _is_foreign(path)):
        return None
    return _read(Path(path), format, size)


def results_as(entries: Sequence[dict[str, Any]], like: PoseTable | None) -> PoseTable:
    """Convert COCO results to a table with the names of another table; default: COCO's or numbered names."""
    if not entries:
        raise HaloposeError("there are no detections to write")
    count = len(entries[0]["keypoints"]) // 3
    names = default_names(count) if like is None else like.names
    return PoseTable.from_entries(entries, names, like)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Parse width and height from text such as 1280x720."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip())
    if not found or not all(int(side) for side in found.groups()):
        raise HaloposeError(f"a size is WIDTHxHEIGHT in pixels, such as 1280x720, got {text!r}")
    return int(found[1]), int(found[2])


def _is_foreign(given: Path | str) -> bool:
    """Return whether a file is not COCO json, by its beginning; remote files are always COCO json."""
    path = to_place(given)
    if not isinstance(path, Path):
        return False
    if path.is_dir():
        return True
    if path.suffix != ".json":
        return path.suffix in (".csv", ".h5", ".hdf5", ".slp")
    check_regular(path)
    with path.open("rb") as stream:
        head = stream.read(_HEAD).decode("utf-8", "replace")
    if '"image_id"' in head or '"annotations"' in head or '"images"' in head:
        return False
    return any(f'"{key}"' in head for key in _MARKS)


_MARKS = (
    "people",
    "instance_info",
    "instances",
    "keypoint_scores",
    "landmarks",
    "landmark",
    "poseLandmarks",
    "pose_landmarks",
)


def _read(path: Path, format: Format, size: tuple[int, int] | None) -> tuple[PoseTable, Format]:
    if path.is_dir():
        return _read_openpose_folder(path), "openpose"
    check_regular(path)
    suffix = path.suffix.lower()
    if suffix in (".h5", ".hdf5", ".slp"):
        with _hdf5(path) as file:
            if suffix == ".slp" or format == "sleap":
                return read_slp(path, file), "sleap"
            return read_deeplabcut_h5(path, file), "deeplabcut"
    if suffix == ".csv":
        text = _text_of(path)
        try:
            if is_sleap_csv(text[:_HEAD]):
                return read_sleap_csv(path, text), "sleap"
            if is_deeplabcut_csv(text[:_HEAD]) or format in _CSV_LIKE:
                return read_deeplabcut_csv(path, text), "deeplabcut"
        except csv.Error as error:
            raise HaloposeError(f"{path} is not csv: {error}") from None
        raise HaloposeError(f"{path} is csv of an unknown tool: expected DeepLabCut's, Lightning Pose's or SLEAP's")
    content = read_json(path)
    if is_openpose(content):
        return read_openpose(path, [(0, str(path), content)]), "openpose"
    if is_mmpose(content):
        return read_mmpose(path, content), "mmpose"
    if is_mediapipe(content):
        return read_mediapipe(path, content, size), "mediapipe"
    raise HaloposeError(f"{path} is of no known format: expected {', '.join(FORMATS[1:])}")


def _read_openpose_folder(folder: Path) -> PoseTable:
    """Read the json files of a folder, one per frame, numbered by the last number in their names."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise HaloposeError(f"{folder} holds no json files: give the folder of OpenPose's output")
    frames = []
    for place, path in enumerate(paths):
        found = re.findall(r"\d+", path.stem)
        frames.append((int(found[-1]) if found and len(found[-1]) < 16 else place, str(path), read_json(path)))
    if len({number for number, _, _ in frames}) < len(frames):
        frames = [(place, name, content) for place, (_, name, content) in enumerate(frames)]
    return read_openpose(folder, frames)


def _text_of(path: Path) -> str:
    if path.stat().st_size > _LARGEST_TEXT:
        raise HaloposeError(f"{path} is larger than 1 GiB: divide it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise HaloposeError(f"{path} is not text: expected csv in UTF-8") from None
    if not text.strip():
        raise HaloposeError(f"{path} is empty: write it again")
    return text


def _check_hdf5(path: Path) -> None:
    """Read the whole file in another process first: a damaged file can make the HDF5 library loop without end."""
    seconds = 10 + path.stat().st_size / 50_000_000
    command = [sys.executable, "-c", _READ_ALL, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise HaloposeError(f"cannot read {path} as HDF5: reading does not end; save it again") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise HaloposeError(f"cannot read {path} as HDF5: {reason or 'the file is damaged'}")


@contextmanager
def _hdf5(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise HaloposeError(f"{path.suffix} files need h5py: pip install 'halopose[hdf5]'") from None
    _check_hdf5(path)
    try:
        with h5py.File(path, "r") as file:
            yield file
    except HaloposeError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise HaloposeError(
            f"cannot read {path} as HDF5: {str(error).splitlines()[0] if str(error) else error}"
        ) from None
