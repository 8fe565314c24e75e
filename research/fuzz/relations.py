"""Relations that the protocol must keep, and triangulation from calibrated cameras to every file it writes."""

from __future__ import annotations

import copy
import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic_poses import World, synthesize
from halopose.evaluation.evaluate import evaluate
from halopose.geometry.camera import Camera, look_at
from halopose.matching.matched_poses import match_poses
from halopose.multiview.rig import CalibratedView
from halopose.poses import PoseDistributions
from research.fuzz.damage import ODD, Reader, Wrong, damaged_words, dump, mangle
from research.fuzz.files import run_command

# --- scores -------------------------------------------------------------------------------------------------

RELATIONS = ("shuffled annotations", "shuffled images", "shuffled results", "larger", "mirrored", "transposed")


def scored_world(folder: Path, rng: random.Random) -> None:
    world = World(images=rng.randint(8, 30), persons=rng.randint(30, 80), seed=rng.randrange(2**31))
    truth, results = synthesize(world)
    dump(folder / "world.json", [truth, results, rng.choice(RELATIONS), rng.randrange(2**31)])


def related(truth: Any, results: Any, relation: str, seed: int) -> tuple[Any, Any]:
    truth, results = copy.deepcopy((truth, results))
    if relation.startswith("shuffled"):
        lists = {"annotations": truth["annotations"], "images": truth["images"], "results": results}
        random.Random(seed).shuffle(lists[relation.split()[1]])
        return truth, results
    for entry in [*truth["annotations"], *results]:
        points, box = np.reshape(entry["keypoints"], (-1, 3)), np.array(entry["bbox"])
        spread = np.array(entry.get("covariance", np.zeros((0, 3))))
        if relation == "larger":
            points, box, spread = points * [2, 2, 1], box * 2, spread * 4
            entry["area"] = 4 * entry.get("area", 0)
        elif relation == "mirrored":
            points, box = points * [-1, 1, 1] + [2048, 0, 0], box * [-1, 1, 1, 1] + [2048 - box[2], 0, 0, 0]
            spread = spread * [1, -1, 1]
        else:
            points, box, spread = points[:, [1, 0, 2]], box[[1, 0, 3, 2]], spread[:, ::-1]
        entry.update(keypoints=points.ravel().tolist(), bbox=box.tolist())
        if "covariance" in entry:
            entry["covariance"] = spread.tolist()
    return truth, results


def numbers(truth: Any, results: Any) -> dict[str, float]:
    objects = parse_ground_truth("truth", truth)
    scores = evaluate(match_poses(parse_predictions("results", results, objects), objects)).to_json()
    found = {
        name: scores[name] for name in ("matched_instances", "keypoints", "akp_random", "akp_visibility", "akp_skill")
    }
    for family in ("uncalibrated", "gaussian", "student_t"):
        found |= {f"{family} {name}": scores[family][name] for name in ("ace", "ace_x", "ace_y", "ence", "nll", "akp")}
    return found


def related_scores(folder: Path) -> object:
    truth, results, relation, seed = json.loads((folder / "world.json").read_bytes())
    first, second = numbers(truth, results), numbers(*related(truth, results, relation, seed))
    if relation == "larger":
        second = {name: value - 2 * math.log(2) * name.endswith("nll") for name, value in second.items()}
    elif relation == "transposed":
        second = {
            name.translate(str.maketrans("xy", "yx")) if "ace_" in name else name: value
            for name, value in second.items()
        }
    exact = relation.startswith("shuffled") or relation == "larger"
    far = [
        f"{name}: {value} and {second[name]}"
        for name, value in first.items()
        if not math.isclose(value, second[name], rel_tol=1e-6 if exact else 2e-3, abs_tol=1e-7 if exact else 2e-3)
    ]
    if far:
        raise Wrong(f"{relation}, world {seed}: {'; '.join(far)}")
    return first


# --- scenes -------------------------------------------------------------------------------------------------

LENS = Camera(900.0, 900.0, 479.5, 359.5, 960, 720)
FRAMES, CAMERAS, POINTS = 6, 3, 5


def scene_files(folder: Path) -> None:
    """Three cameras around a person who walks, with the predictions of six frames."""
    rng = np.random.default_rng(0)
    body = rng.normal([0.0, 0.0, 1.0], [0.25, 0.25, 0.45], (POINTS, 3))
    entries, tables = [], []
    for number in range(CAMERAS):
        angle = 2 * np.pi * (number + 0.3) / CAMERAS
        position = np.array([4 * np.cos(angle), 4 * np.sin(angle), 1.8])
        view = CalibratedView(f"cam{number}", LENS, look_at(position, [0.0, 0.0, 1.0]), position)
        turn = np.asarray(cv2.Rodrigues(view.rotation)[0]).ravel().tolist()
        tables.append(
            f'[cam_{number}]\nname = "{view.name}"\nsize = [960.0, 720.0]\nmatrix = {LENS.matrix.tolist()}\n'
            f"distortions = [0.0, 0.0, 0.0, 0.0]\nrotation = {turn}\n"
            f"translation = {(-view.rotation @ position).tolist()}\n"
        )
        for frame in range(FRAMES):
            seen = view.project(body + np.array([0.05 * frame, 0.0, 0.0]))[None] + rng.normal(0, 1, (1, POINTS, 2))
            spread = np.tile(4 * np.eye(2), (1, POINTS, 1, 1))
            poses = PoseDistributions(
                np.concatenate([seen.min(1), seen.max(1)], axis=1), np.full(1, 0.9), seen, spread, spread,
                visibility=np.ones((1, POINTS)),
            )  # fmt: skip
            entries += [
                {**entry, "image_id": frame, "file_name": f"cam{number}_{frame:06d}"} for entry in poses.to_json()
            ]
    dump(folder / "good-scene.json", entries)
    (folder / "good-scene.toml").write_text("\n".join(tables))


def damaged_scene(folder: Path, rng: random.Random) -> None:
    """Damage mostly a single number, so that the scene is still built and written."""
    entries = json.loads((folder / "good-scene.json").read_bytes())
    (folder / "scene.toml").write_bytes((folder / "good-scene.toml").read_bytes())
    action = rng.choice(["number", "number", "number", "entries", "values", "rig"])
    if action == "number":
        for _ in range(rng.choice([1, 3, 20])):
            entry = rng.choice(entries)
            key = rng.choice(["keypoints", "covariance", "bbox", "score"])
            odd = rng.choice([0, -1, 1e-300, 1e9, 1e155, 1e308, -1e308, 0.5, 2**63, *rng.sample(ODD, 1)])
            place = entry[key] if key != "covariance" else rng.choice(entry[key])
            if isinstance(place, list) and place:
                place[rng.randrange(len(place))] = odd
            else:
                entry[key] = odd
    elif action == "entries":
        rng.shuffle(entries)
        entries = entries[: rng.randrange(len(entries))] + entries[: rng.choice([0, 1, 5])]
        for entry in rng.sample(entries, min(2, len(entries))):
            entry["file_name"] = f"cam{rng.choice([0, 1, 2, 9])}_{rng.choice([0, 3, 7, 400, 999999]):06d}"
    elif action == "values":
        entries = mangle(entries, rng)
    else:
        (folder / "scene.toml").write_bytes(damaged_words((folder / "good-scene.toml").read_text(), rng, " "))
    dump(folder / "scene.json", entries)


def read_scene(folder: Path) -> object:
    """Run the whole command and read its output."""
    printed = run_command("--quiet", "triangulate", "@/scene.toml", "@/scene.json", "-o", "@/scene", "--rate", "30")(
        folder
    )
    with (folder / "scene" / "scene.csv").open() as file:
        rows = list(csv.reader(file))
    if any(len(row) != len(rows[0]) for row in rows):
        raise Wrong("rows of scene.csv differ in length")
    for path in folder.glob("scene/*.c3d"):
        if path.read_bytes()[1:2] != b"\x50" or path.stat().st_size % 512:
            raise Wrong(f"{path.name} is no whole C3D file")
    return printed


READERS = (
    Reader("metamorphic scores", 0.3, lambda f: None, scored_world, related_scores),
    Reader("scene", 0.4, scene_files, damaged_scene, read_scene),
)  # fmt: skip
