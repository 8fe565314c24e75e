"""Write data sets of rendered runway scenes: YOLO-pose labels, and COCO json with pose, camera and runway.

The same seed gives the same data for any number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from os import SEEK_END
from pathlib import Path
from typing import Any
from zlib import crc32

import cv2
import numpy as np

from halopose.data.files import make_folder, read_json, write_json, write_text
from halopose.data.images import write_image
from halopose.errors import HaloposeError
from halopose.landing.runway_datasets import CORNER_NAMES, OKS_SIGMAS, box_of
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import (
    TRAINING_WEATHERS,
    WEATHERS,
    Runway,
    Scene,
    SceneSettings,
    Weather,
    check_weather,
    corners_in_image,
    labelled_runways,
    sample_scene,
)
from halopose.types import Array

FLIP_INDEX = (1, 0, 3, 2)
_PER_SPLIT = 1_000_000
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"


def write_dataset(
    folder: Path | str,
    counts: Mapping[str, int],
    seed: int = 0,
    weather: Mapping[str, Sequence[Weather]] | None = None,
    settings: SceneSettings | None = None,
    *,
    processes: int = 1,
    quality: int = 95,
) -> Path:
    """Write splits of single frames and return the path of their data.yaml.

    Whole images that exist are kept: an interrupted run resumes, and a split can be extended.

    Args:
        folder: folder of the data set.
        counts: images per split.
        seed: seed of all scenes.
        weather: weathers of a split, taken in turn; default: the weather that the split is named after, else all
            training weathers.
        settings: distribution of the scenes.
        processes: parallel processes.
        quality: JPEG quality; 0 writes PNG.

    Raises:
        HaloposeError: A split exists with another seed, weather, settings or quality.
    """
    folder, settings = Path(folder), settings or SceneSettings()
    suffix = ".jpg" if quality else ".png"
    first = _first_ids(counts)
    kinds_of = {split: _weathers(split, weather or {}) for split in counts}
    for split, kinds in kinds_of.items():  # check all splits before rendering
        _check_drawn(folder, split, _manifest(seed, kinds, settings, quality))
    for split, count in counts.items():
        kinds, seeds = kinds_of[split], split_seeds(seed, split, count)
        place = make_folder(folder / "images" / split)
        write_json(_manifest_path(folder, split), _manifest(seed, kinds, settings, quality))
        tasks = [
            (seeds[i], kinds[i % len(kinds)], settings, place / f"{first[split] + i:012d}{suffix}", quality)
            for i in range(count)
        ]
        scenes = list(_run(tasks, processes))
        for task, scene in zip(tasks, scenes, strict=True):
            write_text(folder / "labels" / split / f"{task[3].stem}.txt", yolo_labels(scene))
        write_json(folder / "annotations" / f"{split}.json", coco_content(scenes, [task[3] for task in tasks]))
    write_text(folder / "data.yaml", _data_yaml(counts))
    return folder / "data.yaml"


def _manifest_path(folder: Path, split: str) -> Path:
    return folder / "drawn" / f"{split}.json"


def _manifest(seed: int, kinds: Sequence[Weather], settings: SceneSettings, quality: int) -> dict[str, Any]:
    """Return everything that a split's images depend on, apart from their number, as json content."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))  # turns tuples into lists
    return {"seed": seed, "weather": list(kinds), "settings": plain, "quality": quality}


def _check_drawn(folder: Path, split: str, wanted: dict[str, Any]) -> None:
    """Raise an error if a split was rendered with other parameters: its images would be kept under wrong labels."""
    images, path = folder / "images" / split, _manifest_path(folder, split)
    if not images.is_dir() or not any(images.iterdir()):
        return
    found = read_json(path) if path.is_file() else None
    if not isinstance(found, dict):
        raise HaloposeError(f"{images} has images that {path} does not describe: delete it, or write to another folder")
    other = [name for name, value in wanted.items() if found.get(name) != value]
    if other:
        raise HaloposeError(f"{images} was rendered with another {other[0]}: delete it, or write to another folder")


def split_seeds(seed: int, split: str, count: int) -> list[int]:
    """Return the seeds of a split's scenes. They depend only on its name, so splits can be added and extended."""
    spawned = (np.random.SeedSequence(seed, spawn_key=(crc32(split.encode()), i)) for i in range(count))
    return [int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)) for sequence in spawned]


def _first_ids(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the number of each split's first image. File names are numbers, which halopose uses as image ids."""
    ids = {split: (crc32(split.encode()) % 100_000 + 1) * _PER_SPLIT for split in counts}
    if len(set(ids.values())) < len(ids):
        raise HaloposeError(f"two of the splits {', '.join(ids)} would share image numbers: rename one")
    if any(not 0 < count <= _PER_SPLIT for count in counts.values()):
        raise HaloposeError(f"a split holds 1 to {_PER_SPLIT} images, got {dict(counts)}")
    return ids


def _weathers(split: str, given: Mapping[str, Sequence[Weather]]) -> Sequence[Weather]:
    named: Sequence[Weather] = [kind for kind in WEATHERS if kind == split] or TRAINING_WEATHERS
    kinds = given.get(split, named)
    for kind in kinds:
        check_weather(kind)
    if not kinds:
        raise HaloposeError(f"split {split!r} has no weather: name at least one")
    if "fog" in kinds and split.startswith("train"):
        raise HaloposeError(
            f"split {split!r} must not contain fog: fog is reserved as the shift that models have not seen"
        )
    return kinds


_Task = tuple[int, Weather, SceneSettings, Path, int]


def _run(tasks: Sequence[_Task], processes: int) -> Iterator[Scene]:
    if processes <= 1:
        yield from map(_make, tasks)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), cv2.setNumThreads, (1,)) as pool:
        yield from pool.map(_make, tasks, chunksize=max(1, min(16, len(tasks) // (4 * processes))))


def _make(task: _Task) -> Scene:
    """Render the scene of a task unless a complete image exists, and return the scene."""
    seed, weather, settings, path, quality = task
    scene = sample_scene(seed, weather, settings)
    if not _is_whole(path):
        write_image(path, render_scene(scene), quality or None)
    return scene


def _is_whole(path: Path) -> bool:
    """Return whether a JPEG or PNG file exists and ends as its format demands."""
    end = _JPEG_END if path.suffix == ".jpg" else _PNG_END
    if not path.is_file() or path.stat().st_size < len(end):
        return False
    with path.open("rb") as file:
        file.seek(-len(end), SEEK_END)
        return file.read() == end


# --- labels -----------------------------------------------------------------------------------------------


def yolo_labels(scene: Scene) -> str:
    """Return a line per labelled runway: class, box centre and size, then x, y, v of each corner, relative to the
    image.

    v is 2 for a visible corner and 1 for one hidden by fog.
    """
    size = np.array([scene.camera.width, scene.camera.height], dtype=float)
    lines = []
    for corners, visible, box in _objects(scene):
        shares = np.concatenate([(box[:2] + box[2:]) / 2 / size, (box[2:] - box[:2]) / size])
        points = np.column_stack([corners / size, 1 + visible]).tolist()
        numbers = [f"{share:.7f}" for share in shares] + [f"{x:.7f} {y:.7f} {v:.0f}" for x, y, v in points]
        lines.append(f"0 {' '.join(numbers)}\n")
    return "".join(lines)


def _objects(scene: Scene) -> Iterator[tuple[Array, Array, Array]]:
    for runway in labelled_runways(scene):
        corners, visible = corners_in_image(scene, runway)
        inside = np.clip(corners, 0, [scene.camera.width, scene.camera.height])  # labels may not leave the image
        yield inside, visible, box_of(inside, scene.camera.width, scene.camera.height)


def coco_content(scenes: Sequence[Scene], paths: Sequence[Path]) -> dict[str, Any]:
    """Return COCO json of scenes, with the true pose, camera and runways of each image."""
    annotations: list[dict[str, Any]] = []
    for scene, path in zip(scenes, paths, strict=True):
        for corners, visible, (left, top, right, bottom) in _objects(scene):
            keypoints = np.column_stack([corners, 1 + visible.astype(int)])
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": int(path.stem),
                    "category_id": 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                    "num_keypoints": len(keypoints),
                    "keypoints": keypoints.ravel().tolist(),
                }
            )
    category = {"id": 1, "name": "runway", "keypoints": list(CORNER_NAMES), "sigmas": list(OKS_SIGMAS)}
    images = [image_entry(scene, path) for scene, path in zip(scenes, paths, strict=True)]
    return {"images": images, "annotations": annotations, "categories": [category]}


def image_entry(scene: Scene, path: Path) -> dict[str, Any]:
    """Return the COCO entry of an image with everything that a pose estimate is compared with."""
    camera, mount = scene.camera, scene.mount
    rotation, eye = scene.camera_pose()
    return {
        "id": int(path.stem),
        "file_name": path.name,
        "width": camera.width,
        "height": camera.height,
        "seed": scene.seed,
        "weather": scene.weather,
        "visibility": scene.visibility,
        "position": scene.position.tolist(),
        "attitude": scene.attitude.tolist(),
        "camera_rotation": rotation.tolist(),
        "camera_position": eye.tolist(),
        "camera": {name: getattr(camera, name) for name in ("fx", "fy", "cx", "cy", "distortion")},
        "mount": {"rotation": mount.rotation.tolist(), "lever_arm": mount.lever_arm.tolist()},
        "runways": [_runway_entry(runway) for runway in scene.runways],
    }


def _runway_entry(runway: Runway) -> dict[str, Any]:
    return {
        "length": runway.length,
        "width": runway.width,
        "designator": runway.designator,
        "threshold": list(runway.threshold),
        "before": list(runway.before),
        "counted": runway.counted,
    }


def _data_yaml(counts: Mapping[str, int]) -> str:
    """Return a data.yaml without ``path``: trainers then use the folder of the yaml file."""
    splits = "".join(f"{split}: images/{split}\n" for split in counts)
    names = "\n".join(f"    - {name}" for name in CORNER_NAMES)
    return (
        f"{splits}kpt_shape: [4, 3]\nflip_idx: {list(FLIP_INDEX)}\nkpt_oks_sigmas: {list(OKS_SIGMAS)}\n"
        f"names:\n  0: runway\nkpt_names:\n  0:\n{names}\n"
    )
