"""Readers of files from other pose tools."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.files import read_json
from halopose.data.formats.pose_table import PoseTable
from halopose.data.formats.reading import read_results, read_table, write_table
from research.fuzz.damage import Reader, damaged_bytes, dump, mangle, spoil

SIZE = (640, 480)
CELLS = ["", "nan", "inf", "1e400", "x", "-1", '"', "٣", "1,2", "x" * 200_000]


def poses(covariance: bool = True) -> PoseTable:
    """Twelve poses of two individuals, some keypoints missing."""
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 400, (12, 4, 2))
    points[3, 1] = np.nan
    scores = np.where(np.isnan(points[..., 0]), 0.0, rng.uniform(0, 1, (12, 4)))
    return PoseTable(
        names=("nose", "left_ear", "right_ear", "tail"),
        keypoints=points,
        scores=scores,
        frames=np.repeat(np.arange(6), 2),
        tracks=np.tile([0, 1], 6),
        individuals=("a", "b"),
        covariance=np.tile(4 * np.eye(2), (12, 4, 1, 1)) if covariance else None,
        size=SIZE,
    )


def text_file(kind: str, name: str) -> Any:
    """Function that writes the valid file."""

    def prepare(folder: Path) -> None:
        write_table(poses(), folder / f"good-{name}", kind)  # type: ignore[arg-type]

    return prepare


def damaged_csv(name: str) -> Any:
    """Damage bytes or words of a CSV file."""

    def damage(folder: Path, rng: random.Random) -> None:
        lines = (folder / f"good-{name}").read_text().splitlines()
        if rng.random() < 0.3:
            (folder / name).write_bytes(spoil("\n".join(lines).encode(), rng))
            return
        for _ in range(rng.randint(1, 3)):
            row = rng.randrange(len(lines))
            cells = lines[row].split(",")
            cells[rng.randrange(len(cells))] = rng.choice(
                ["", "nan", "inf", "1e400", "x", "-1", '"', "٣", "1,2", "x" * 200_000]
            )
            lines[row] = ",".join(cells[: rng.choice([len(cells), len(cells), 1])])
            if rng.random() < 0.2:
                lines.pop(rng.randrange(len(lines)))
            if not lines:
                break
        (folder / name).write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))

    return damage


def damaged_landmarks(name: str) -> Any:
    """Json with a few values changed."""

    def damage(folder: Path, rng: random.Random) -> None:
        dump(folder / name, mangle(json.loads((folder / f"good-{name}").read_bytes()), rng))

    return damage


def openpose_frame(folder: Path) -> None:
    write_table(poses(), folder / "op", "openpose")
    first = sorted((folder / "op").glob("*.json"))[0]
    (folder / "good-openpose.json").write_bytes(first.read_bytes())


def hdf5_files(folder: Path) -> None:
    """One file as pandas writes it for DeepLabCut, and one of SLEAP."""
    import h5py

    table = poses(covariance=False)
    with h5py.File(folder / "good-dlc.h5", "w") as file:
        group = file.create_group("df_with_missing")
        levels = [["s"], list(table.names), ["x", "y", "likelihood"]]
        places = np.stack(np.meshgrid([0], range(4), range(3), indexing="ij"), -1).reshape(-1, 3)
        for number, names in enumerate(levels):
            group[f"block0_items_level{number}"] = np.array(names, dtype="S")
            group[f"block0_items_label{number}"] = places[:, number].astype(np.int8)
        group["axis1"] = np.arange(12)
        group["block0_values"] = np.concatenate([table.keypoints, table.scores[..., None]], axis=2).reshape(12, 12)
    write_slp(table, folder / "good-poses.slp")


def write_slp(table: PoseTable, path: Path) -> None:
    """A file of SLEAP's layout with predicted instances."""
    import h5py

    count, keypoints = table.scores.shape
    with h5py.File(path, "w") as file:
        nodes = [{"name": name} for name in table.names]
        skeleton = {"nodes": [{"id": k} for k in range(keypoints)], "links": [{"source": 0, "target": 1}]}
        metadata = file.create_group("metadata")
        metadata.attrs["json"] = json.dumps({"nodes": nodes, "skeletons": [skeleton]})
        metadata.attrs["format_id"] = 1.2
        frames = [(n, 0, n, 0, 0) for n in np.unique(table.frames).tolist()]
        keys = ("frame_id", "video", "frame_idx", "instance_id_start", "instance_id_end")
        file["frames"] = np.array(frames, dtype=[(key, np.int64) for key in keys])
        instances = [
            (n, 1, int(table.frames[n]), int(table.tracks[n]), 0.5, n * keypoints, (n + 1) * keypoints)
            for n in range(count)
        ]
        kinds: list[Any] = [("instance_id", np.int64), ("instance_type", np.uint8), ("frame_id", np.int64)]
        kinds += [("track", np.int32), ("score", np.float32), ("point_id_start", np.int64), ("point_id_end", np.int64)]
        file["instances"] = np.array(instances, dtype=kinds)
        point: list[Any] = [("x", float), ("y", float), ("visible", bool), ("score", float)]
        rows = [
            (*table.keypoints[n, k].tolist(), not table.missing[n, k], float(table.scores[n, k]))
            for n in range(count) for k in range(keypoints)
        ]  # fmt: skip
        file["pred_points"] = np.array(rows, dtype=point)
        file["points"] = np.zeros(0, dtype=point[:3])


def read_any(name: str) -> Any:
    """Function that reads the damaged file as the commands do."""

    def read(folder: Path) -> None:
        read_table(folder / name, size=SIZE)
        read_results(folder / name, size=SIZE)

    return read


def read_landmarks(name: str) -> Any:
    """Function that reads damaged JSON, which may be valid JSON of another kind."""

    def read(folder: Path) -> None:
        read_json(folder / name)
        read_table(folder / name, size=SIZE)

    return read


READERS = [
    Reader("deeplabcut csv", 0.3, text_file("deeplabcut", "dlc.csv"), damaged_csv("dlc.csv"), read_any("dlc.csv")),
    Reader("sleap csv", 0.3, text_file("sleap", "sleap.csv"), damaged_csv("sleap.csv"), read_any("sleap.csv")),
    Reader("deeplabcut h5", 0.3, hdf5_files, damaged_bytes("dlc.h5"), read_any("dlc.h5")),
    Reader("slp", 0.3, hdf5_files, damaged_bytes("poses.slp"), read_any("poses.slp")),
    Reader("mmpose", 0.3, text_file("mmpose", "mm.json"), damaged_landmarks("mm.json"), read_landmarks("mm.json")),
    Reader("mediapipe", 0.3, text_file("mediapipe", "m.json"), damaged_landmarks("m.json"), read_landmarks("m.json")),
    Reader(
        "openpose", 0.3, openpose_frame, damaged_landmarks("openpose.json"), read_landmarks("openpose.json")
    ),
]  # fmt: skip
