"""Readers of recorded flights, calibrated cameras and films as JSON."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from mcap_ros2.writer import Writer

from halopose.data.files import write_json
from halopose.data.synthetic_poses import World, synthesize
from halopose.geometry.camera import Camera, Mount, look_at
from halopose.landing.recordings.cameras import camera_text, read_camera
from halopose.landing.recordings.frames import TIMES, open_frames
from halopose.landing.recordings.logs import KINDS
from halopose.landing.recordings.replay import read_measurements, replay, settings_for
from halopose.landing.recordings.ros_messages import definition, header
from halopose.landing.recordings.runway_sites import Site, read_runway, runway_content
from halopose.landing.runway import runway_corners
from halopose.multiview.rig import read_calibration
from halopose.poses import PoseDistributions
from research.fuzz.damage import Reader, damaged_bytes, damaged_json, damaged_words, damaged_yaml, dump
from research.fuzz.files import run_command

CAMERA = Camera(900.0, 900.0, 48.0, 32.0, 96, 64)
SITE = Site("28R", runway_corners(2500.0, 45.0), 37.6135, -122.357, 4.0, float(np.radians(298.0)))
LOGS = {
    "attitude": "time_s,heading_deg,pitch_deg,roll_deg\n0,298,-3,0\n0.5,298,-3,0.5\n1,298,-3,0\n",
    "gnss": "time_s,latitude_deg,longitude_deg,height_m\n0,37.6009,-122.327,164\n1,37.6012,-122.3277,160\n",
    "ils": "time_s,localizer_deg,glide_slope_deg\n0,0.1,0.2\n1,0.1,0.1\n",
    "radio": "time_s,height_m\n0,160\n1,156\n",
    "irs": "time_s,acceleration_x_mps2,acceleration_y_mps2,acceleration_z_mps2\n0,0.1,0,0\n0.5,0,0,0.1\n1,0,0,0\n",
}
SEEN = "time_s\n0\n0.5\n1\n"


def recorded_flight(folder: Path) -> None:
    (folder / "good-camera.yaml").write_text(camera_text(CAMERA, Mount()))
    write_json(folder / "good-runway.json", runway_content(SITE))
    (folder / "frames").mkdir()
    for number in range(3):
        cv2.imwrite(str(folder / f"frames/{number}.png"), np.full((64, 96, 3), 80, np.uint8))


def damaged_flight(folder: Path, rng: random.Random) -> None:
    """Damage one file: camera, runway, a log, or the times of the frames."""
    for name in ("camera.yaml", "runway.json"):
        (folder / name).write_bytes((folder / f"good-{name}").read_bytes())
    for kind, text in LOGS.items():
        (folder / f"{kind}.csv").write_text(text)
    (folder / "frames" / TIMES).write_text(SEEN)
    what = rng.choice(["camera", "runway", "frames", *LOGS, *LOGS])
    if what == "camera":
        damaged_yaml("camera.yaml")(folder, rng)
    elif what == "runway":
        damaged_json("runway.json")(folder, rng)
    elif what == "frames":
        (folder / "frames" / TIMES).write_bytes(damaged_words(SEEN, rng, ","))
    else:
        (folder / f"{what}.csv").write_bytes(damaged_words(LOGS[what], rng, ","))


def read_flight(folder: Path) -> object:
    """Read all inputs of `halopose land replay` and run the filter, without detections."""
    lens, site = read_camera(folder / "camera.yaml"), read_runway(folder / "runway.json")
    logs = {kind: folder / f"{kind}.csv" for kind in KINDS}
    frames = open_frames(folder / "frames")
    settings = settings_for(logs, frames.times)
    measured = read_measurements(logs, site, settings)
    spread = np.zeros((0, 4, 2, 2))
    nothing = PoseDistributions(np.zeros((0, 4)), np.zeros(0), np.zeros((0, 4, 2)), spread, spread)
    return replay(frames.times, [nothing for _ in frames.images()], lens, site, measured, settings)


def opencv_camera(folder: Path) -> None:
    store = cv2.FileStorage(str(folder / "good-camera.yml"), cv2.FILE_STORAGE_WRITE)
    store.write("image_width", 96)
    store.write("image_height", 64)
    store.write("camera_matrix", CAMERA.matrix)
    store.write("distortion_coefficients", np.zeros((1, 5)))
    store.release()


# --- cameras that stand somewhere ---------------------------------------------------------------------------


def rigs(folder: Path) -> None:
    """Two cameras, as Pose2Sim, Qualisys and OpenCV write them."""
    tables, entries, store = [], [], cv2.FileStorage(str(folder / "good-rig.yml"), cv2.FILE_STORAGE_WRITE)
    names = ["left", "right"]
    store.startWriteStruct("names", cv2.FileNode_SEQ)
    for name in names:
        store.write("", name)
    store.endWriteStruct()
    for name, x in zip(names, (-2.0, 2.0), strict=True):
        place = np.array([x, -4.0, 1.5])
        turn = look_at(place, [0.0, 0.0, 1.0])
        vector = cv2.Rodrigues(turn)[0].ravel()
        offset = -turn @ place
        tables.append(
            f"[{name}]\nname = '{name}'\nsize = [96.0, 64.0]\nmatrix = {CAMERA.matrix.tolist()}\n"
            f"distortions = [0.0, 0.0, 0.0, 0.0]\nrotation = {vector.tolist()}\n"
            f"translation = {offset.tolist()}\nfisheye = false\n"
        )
        cells = " ".join(f'r{i + 1}{j + 1}="{turn[i, j]}"' for i in range(3) for j in range(3))
        entries.append(
            f'<camera active="1" serial="{name}"><fov_video left="0" top="0" right="95" bottom="63"/>'
            f'<transform x="{1000 * x}" y="-4000" z="1500" {cells}/><intrinsic focalLengthU="57600" '
            'focalLengthV="57600" centerPointU="3072" centerPointV="2048" radialDistortion1="0" '
            'radialDistortion2="0" radialDistortion3="0" tangentalDistortion1="0" tangentalDistortion2="0"/>'
            "</camera>"
        )
        for key, value in (("K", CAMERA.matrix), ("dist", np.zeros((1, 5))), ("R", vector), ("T", offset)):
            store.write(f"{key}_{name}", value)
    store.release()
    (folder / "good-rig.toml").write_text("\n".join(tables))
    (folder / "good-rig.qca.txt").write_text(f"<calibration><cameras>{''.join(entries)}</cameras></calibration>")


def damaged_rig(folder: Path, rng: random.Random) -> None:
    for path in folder.glob("rig.*"):
        path.unlink()
    name = rng.choice(["rig.toml", "rig.qca.txt", "rig.yml"])
    between = {"rig.toml": " ", "rig.qca.txt": '"', "rig.yml": " "}[name]
    (folder / name).write_bytes(damaged_words((folder / f"good-{name}").read_text(), rng, between))


def recorded_images(folder: Path) -> None:
    """Compressed images in MCAP, as a camera driver records them."""
    kind = "sensor_msgs/msg/CompressedImage"
    coded = cv2.imencode(".png", np.full((16, 24, 3), 80, np.uint8))[1].tobytes()
    with (folder / "good-film.mcap").open("wb") as file:
        writer: Any = Writer(file)
        schema = writer.register_msgdef(kind, definition(kind))
        for second in range(3):
            message = {"header": header(float(second), "camera"), "format": "png", "data": coded}
            writer.write_message("/nose", schema, message, log_time=second * 10**9)
        writer.finish()


def film_results(folder: Path) -> None:
    """Poses of 12 frames of a film, as `halopose predict` writes them."""
    _, results = synthesize(World(images=12, persons=12))
    for number, entry in enumerate(results):
        entry["file_name"] = f"{'left' if number % 2 else 'right'}_{number // 2:06d}"
    dump(folder / "good-films.json", results)
    dump(folder / "good-film.json", [entry | {"file_name": f"film_{n:06d}"} for n, entry in enumerate(results)])
    rigs(folder)


READERS = (
    Reader("flight", 1.0, recorded_flight, damaged_flight, read_flight),
    Reader("camera of OpenCV", 0.6, opencv_camera, damaged_bytes("camera.yml"),
           lambda f: read_camera(f / "camera.yml")),
    Reader("rig of cameras", 0.6, rigs, damaged_rig,
           lambda f: read_calibration(next(f.glob("rig.*")))),
    Reader("images in MCAP", 0.6, recorded_images, damaged_bytes("film.mcap"),
           lambda f: list(open_frames(f / "film.mcap").images())),
    Reader("track", 0.2, film_results, damaged_json("film.json"),
           run_command("--quiet", "track", "@/film.json", "-o", "@/tracks", "--confirm", "1")),
    Reader("triangulate", 0.2, film_results, damaged_json("films.json"),
           run_command("--quiet", "triangulate", "@/good-rig.toml", "@/films.json", "-o", "@/scene")),
)  # fmt: skip
