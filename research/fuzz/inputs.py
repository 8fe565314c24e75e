"""Yaml with anchors, tar archives, addresses, runway data sets, MCAP messages and cards, with their readers."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from mcap_ros2.writer import Writer

from halopose.data.dataset_loading import load_dataset
from halopose.data.files import read_json, write_json
from halopose.data.storage.address import to_place
from halopose.deploy.deployed_model import CARD, MODEL, Deployed
from halopose.deploy.recalibration import LabelledDetections, calibrate, images_seen
from halopose.errors import HaloposeError
from halopose.fitting.feature_cache import MatchStore
from halopose.geometry.camera import Mount
from halopose.keypoints import Keypoints
from halopose.landing.recordings.cameras import camera_text, read_camera
from halopose.landing.recordings.frames import open_frames
from halopose.landing.recordings.ros_messages import definition, header
from halopose.landing.runway_datasets import read_runways
from halopose.multiview.rig import read_calibration
from halopose.poses import GroundTruth, PoseDistributions
from halopose.runtime import predict
from research.fuzz.bases import KEYPOINTS, deployed_folder
from research.fuzz.damage import ODD, Reader, Wrong, damaged_json, damaged_words, dump, mangle, spoil
from research.fuzz.files import LABEL, damaged_picture, pictures, yolo_folder
from research.fuzz.flights import CAMERA, rigs

CANARY = "canary"  # a file that exists only if code was executed

# --- yaml ---------------------------------------------------------------------------------------------------


def yaml_files(folder: Path) -> None:
    yolo_folder(folder)
    (folder / "good-camera.yaml").write_text(camera_text(CAMERA, Mount()))
    rigs(folder)


def yaml_value(rng: random.Random, folder: Path, depth: int = 0) -> str:
    """Flow-style yaml: anchors, aliases, merges, tags, long scalars and deep nesting."""
    choice = rng.random()
    if depth < 4 and choice < 0.3:
        parts = [yaml_value(rng, folder, depth + 1) for _ in range(rng.choice([0, 1, 3, 9]))]
        return "[" + ", ".join(parts) + "]"
    if depth < 4 and choice < 0.45:
        keys = [rng.choice(["a", "<<", "names", "0", "? [x]", "*a", "null", "1.5"]) for _ in range(rng.choice([1, 3]))]
        return "{" + ", ".join(f"{key}: {yaml_value(rng, folder, depth + 1)}" for key in keys) + "}"
    return rng.choice([
        f"&{rng.choice('abc')} [1, 2]", f"*{rng.choice('abc')}", "&a {<<: *a}", "&a [*a]", "&a [&b [*a, *a], *b, *b]",
        f"!!python/object/apply:os.system ['touch {folder / CANARY}']", "!!python/name:os.system", "!!binary aGk=",
        "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!timestamp 2001-13-41", "!!int x", "!!float .", "!a b",
        "2001-02-30", "1:2:3", "0o9", "0x", ".inf", "-.inf", ".nan", "1e999", "~", "=", "<<", "9" * 5000,
        "1" + ":59" * 500,
        "[" * rng.choice([60, 2000]), "'" + "x" * 70_000 + "'", '"\\ud800"', '"\\x00"', "|\n  a\n", "@", "`", "%", "\t",
    ])  # fmt: skip


def damaged_by_anchors(folder: Path, rng: random.Random) -> None:
    """Values of a good file replaced by others, or an alias bomb before it."""
    name = rng.choice(["data.yaml", "camera.yaml", "rig.yml"])
    lines = (folder / f"good-{name}").read_text().splitlines()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        key = lines[place].partition(":")[0] if ":" in lines[place] else lines[place].partition("-")[0] + "-"
        between = ": " if ":" in lines[place] else " "
        lines[place] = f"{key}{between}{yaml_value(rng, folder)}"
    if rng.random() < 0.3:
        first = "x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"
        lines += [first] + [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, rng.choice([3, 9, 30]))]
    (folder / "name").write_text(name)
    (folder / name).write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))


def read_yaml_file(folder: Path) -> object:
    name = (folder / "name").read_text()
    readers: dict[str, Callable[[Path], object]] = {
        "data.yaml": lambda path: [record.read() for record in load_dataset(path, "train").records],
        "camera.yaml": read_camera,
        "rig.yml": read_calibration,
    }
    try:
        return readers[name](folder / name)
    finally:
        if (folder / CANARY).exists():
            (folder / CANARY).unlink()
            raise Wrong("code in the file was run")


# --- tar archives -------------------------------------------------------------------------------------------


def good_members() -> list[tuple[str, bytes]]:
    png = cv2.imencode(".png", np.full((12, 16, 3), 80, np.uint8))[1].tobytes()
    return [(f"{n}{suffix}", data) for n in range(3) for suffix, data in ((".png", png), (".txt", LABEL.encode()))]


def archive_of(members: list[tuple[str, bytes]], rng: random.Random | None = None) -> bytes:
    """A tar archive; with a generator, one in three members is odd."""
    buffer = io.BytesIO()
    kind = tarfile.GNU_FORMAT if rng is not None and rng.random() < 0.5 else tarfile.PAX_FORMAT
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if rng is not None and rng.random() < 0.35:
                odd_member(entry, rng)
            try:
                archive.addfile(entry, io.BytesIO(data.ljust(entry.size, b"\0")[: entry.size]))
            except (ValueError, OverflowError, UnicodeError):  # headers that tarfile cannot write
                archive.addfile(tarfile.TarInfo("odd"))
    return buffer.getvalue()


def odd_member(entry: tarfile.TarInfo, rng: random.Random) -> None:
    action = rng.choice(["name", "kind", "pax", "case"])
    if action == "name":
        entry.name = rng.choice([
            "../" + entry.name, "/" + entry.name, "cam." + entry.name, "images/" + entry.name, "labels/" + entry.name,
            "0.jpg", "0.png", "0.b.txt", "x" * 300 + ".png", "é.png", "\udcff.png", ".png", "a//b.png", "0.txt.png",
        ])  # fmt: skip
    elif action == "kind":
        entry.type = rng.choice([b"1", b"2", b"3", b"5", b"6", b"7", b"S", b"V", b"M", b"Z", b"\0"])
        entry.linkname = "0.png"
    elif action == "pax":
        entry.pax_headers = {rng.choice(["mtime", "size", "path", "GNU.sparse.realsize", "hdrcharset"]): rng.choice(
            ["nan", "-1", "inf", "9" * 30, "x", "BINARY", "../a.png"])}  # fmt: skip
    else:
        entry.name = entry.name.upper()


def tar_folder(folder: Path) -> None:
    content = {"path": ".", "train": "x.tar", "val": "x.tar", "kpt_shape": [2, 3], "names": {0: "thing"}}
    dump(folder / "data.yaml", content)
    (folder / "good-x.tar").write_bytes(archive_of(good_members()))


def damaged_tar(folder: Path, rng: random.Random) -> None:
    """A flipped bit in a header, a cut, two archives in one, odd members, or bytes anywhere."""
    good = bytearray((folder / "good-x.tar").read_bytes())
    action = rng.choice(["header", "header", "cut", "join", "members", "members", "bytes"])
    if action == "header":
        with tarfile.open(fileobj=io.BytesIO(good)) as archive:
            place = rng.choice([entry.offset for entry in archive]) + rng.randrange(512)
        good[place] ^= 1 << rng.randrange(8)
    elif action == "cut":
        del good[rng.randrange(len(good) // 512) * 512 + rng.choice([0, 0, 100]) :]
    elif action == "join":
        good += archive_of([("9" + name, data) for name, data in good_members()])
    elif action == "members":
        good = bytearray(archive_of(good_members(), rng))
    else:
        good = bytearray(spoil(bytes(good), rng))
    (folder / "action").write_text(action)
    (folder / "x.tar").write_bytes(good)


def read_tar(folder: Path) -> object:
    """Check that no sample of an archive with a damaged header is lost silently."""
    samples = [record.read() for record in load_dataset(folder / "data.yaml", "train").records]
    found = [(image.shape, len(objects)) for image, objects in samples]
    if (folder / "action").read_text() in ("header", "cut", "join") and found != [((12, 16, 3), 1)] * 3:
        raise Wrong(f"read {found} of 3 images with a label each")
    return found


# --- addresses ----------------------------------------------------------------------------------------------

PROTOCOLS = ("file", "memory", "reference", "local", "zip", "tar", "simplecache", "filecache", "blockcache", "dir",
             "http", "s3", "gs", "az", "ftp", "sftp", "git", "github", "hf", "data", "jupyter", "libarchive", "dbfs",
             "FILE", "Memory", "x" * 300, "")  # fmt: skip


def address_folder(folder: Path) -> None:
    yolo_folder(folder)
    code = f"__subclasses__()[0].__init__.__globals__['os'].system('touch {folder / CANARY}')"
    template = "{{ ''.__class__.__mro__[1]." + code + " }}"
    dump(folder / "evil.json", {"version": 1, "templates": {"f": template}, "refs": {"a": "{{f}}"}})
    (folder / "x.tar").write_bytes(archive_of(good_members()))


def odd_address(folder: Path, rng: random.Random) -> None:
    rest = rng.choice([str(folder), f"{folder}/evil.json", f"{folder}/x.tar", "a/b", "127.0.0.1:9/a.json",
                       "[", "a@b:c", "%2e%2e/", "a?b#c", "*", "{0..9}.tar", "\0", "a b", "é"])  # fmt: skip
    address = rng.choice(PROTOCOLS) + rng.choice(["://", "://", "://", ":/", ":///", "::"]) + rest
    if rng.random() < 0.4:
        address = rng.choice(PROTOCOLS) + "::" + address
    (folder / "address").write_bytes(address.encode("utf-8", "surrogatepass"))
    (folder / "way").write_text(rng.choice(["yaml", "path", "images", "store"]))


def read_address(folder: Path) -> object:
    address = (folder / "address").read_bytes().decode("utf-8", "surrogatepass")
    way = (folder / "way").read_text()
    try:
        if way == "store":
            return MatchStore(to_place(address)).digest()
        if way == "images":
            return len(load_dataset(folder / "evil.json", "train", images=Path(address)))
        if way == "path":
            return len(load_dataset(Path(address), "train"))
        content = {"path": ".", "train": address, "val": address, "kpt_shape": [2, 3], "names": {0: "thing"}}
        dump(folder / "data.yaml", content)
        return [record.read() for record in load_dataset(folder / "data.yaml", "train").records]
    finally:
        if (folder / CANARY).exists():
            (folder / CANARY).unlink()
            raise Wrong("code in an address was run")


# --- runways and recordings ---------------------------------------------------------------------------------

LARD = "image;width;height;x_A;y_A;x_B;y_B;x_C;y_C;x_D;y_D\na.png;64;48;10;40;50;40;40;10;20;10\n"
LABELME = {
    "shapes": [{"label": "runway", "points": [[10, 40], [50, 40], [40, 10], [20, 10]]}],
    "imageWidth": 64,
    "imageHeight": 48,
}


def read_all(path: Path) -> object:
    return [record.read() for record in read_runways(path).records]


def lard_folder(folder: Path) -> None:
    cv2.imwrite(str(folder / "a.png"), np.full((48, 64, 3), 80, np.uint8))


def damaged_lard(folder: Path, rng: random.Random) -> None:
    content = damaged_words(LARD, rng, ";")
    if rng.random() < 0.1:
        content = content.replace(b"a.png", b"x" * 200_000)
    (folder / "lard.csv").write_bytes(content)


def labelme_folder(folder: Path) -> None:
    (folder / "set").mkdir()
    cv2.imwrite(str(folder / "set" / "a.png"), np.full((48, 64, 3), 80, np.uint8))


def damaged_labelme(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.25:
        (folder / "set" / "a.json").write_bytes(spoil(json.dumps(LABELME).encode(), rng))
    else:
        dump(folder / "set" / "a.json", mangle(LABELME, rng))


def odd_message(folder: Path, rng: random.Random) -> None:
    """Compressed images with odd stamps, formats and bytes."""
    kind = "sensor_msgs/msg/CompressedImage"
    png = cv2.imencode(rng.choice([".png", ".jpg"]), np.full((16, 24, 3), 80, np.uint8))[1].tobytes()
    with (folder / "film.mcap").open("wb") as file:
        writer: Any = Writer(file)
        schema = writer.register_msgdef(rng.choice([kind, kind, "a/msg/CompressedImage"]), definition(kind))
        for number in range(rng.choice([0, 1, 3])):
            message: dict[str, Any] = {"header": header(float(number), "camera"), "format": "png", "data": png}
            if rng.random() < 0.7:
                message["data"] = spoil(png, rng)
            if rng.random() < 0.2:  # the size in the header of a PNG
                message["data"] = png[:16] + rng.randbytes(8) + png[24:]
            if rng.random() < 0.2:
                message["header"]["stamp"] = {"sec": rng.choice([-1, 2**31 - 1]), "nanosec": rng.choice([0, 2**32 - 1])}
            message["format"] = rng.choice(["png", "", "\0", "x" * 1000])
            writer.write_message("/nose", schema, message, log_time=rng.choice([number, 0, 2**63]))
        writer.finish()


def read_film(folder: Path) -> object:
    frames = open_frames(folder / "film.mcap")
    return frames.times, list(frames.images())


# --- deployed folders ---------------------------------------------------------------------------------------


def labelled_detections() -> LabelledDetections:
    """Forty objects with one detection each, which are close to them."""
    rng = np.random.default_rng(0)
    count, corners = 40, rng.uniform(0, 200, (40, 1, 2))
    exact = corners + rng.uniform(0, 50, (count, KEYPOINTS, 2))
    boxes = np.concatenate([corners[:, 0], corners[:, 0] + 50], axis=1)
    spread = np.tile(4 * np.eye(2), (count, KEYPOINTS, 1, 1))
    images, ones = np.arange(count), np.ones(count, dtype=np.int64)
    found = PoseDistributions(
        boxes, np.full(count, 0.9), exact + rng.normal(0, 2, exact.shape), spread, spread, class_ids=ones,
        image_ids=images, visibility=np.ones((count, KEYPOINTS)), dispersion=spread,
    )  # fmt: skip
    truth = GroundTruth(
        images=images,
        image_ids=images,
        class_ids=ones,
        keypoints=exact,
        labelled=np.ones((count, KEYPOINTS), dtype=bool),
        boxes=np.concatenate([corners[:, 0], np.full((count, 2), 50.0)], axis=1),
        area=np.full(count, 2500.0),
        crowd=np.zeros(count, dtype=bool),
        ignore=np.zeros(count, dtype=bool),
        layout=Keypoints.of(KEYPOINTS),
    )
    return LabelledDetections(found, truth, ())


CARDS: list[Any] = [
    None, [], {}, {"images": {"heads": [1, 2], "calibration": [3]}, "settings": {"rule": "youden"}, "base": "a"},
]  # fmt: skip


def card_folder(folder: Path) -> None:
    deployed_folder(folder)
    (folder / f"good-{MODEL}").rename(folder / f"whole-{MODEL}")
    content = read_json(folder / CARD)
    content["images"] = {"heads": [1, 2], "calibration": [3, 4], "evaluation": []}
    content["settings"] = {**(content.get("settings") or {}), "rule": "youden", "region_scales": False}
    write_json(folder / f"good-{CARD}", content)


def damaged_card(folder: Path, rng: random.Random) -> None:
    (folder / MODEL).write_bytes((folder / f"whole-{MODEL}").read_bytes())
    if rng.random() < 0.1:
        (folder / CARD).unlink(missing_ok=True)
    elif rng.random() < 0.2:
        dump(folder / CARD, rng.choice([*CARDS, *ODD]))
    else:
        damaged_json(CARD)(folder, rng)


def read_card_and_calibrate(folder: Path) -> object:
    """Check that a refused folder does not change."""
    before = (folder / MODEL).read_bytes()
    try:
        seen = images_seen(Deployed(folder))
        return seen, calibrate(folder, labelled_detections())
    except HaloposeError:
        if (folder / MODEL).read_bytes() != before:
            raise Wrong("the model was rewritten before the card was refused") from None
        raise


def runtime_folder(folder: Path) -> None:
    pictures(folder)
    deployed_folder(folder)
    (folder / f"good-{MODEL}").rename(folder / MODEL)
    np.save(folder / "good-array.npy", np.zeros((24, 32, 3), np.uint8))


def run_runtime(folder: Path) -> object:
    """The single-file runtime: exit code 0, 1 or 2, whatever the files are."""
    code = predict.main([str(folder / "place"), "--model", str(folder / MODEL), "--json", "--conf", "0.5"])
    if code == 2:
        raise HaloposeError("refused")
    return code


READERS = (
    Reader("yaml with anchors", 1.0, yaml_files, damaged_by_anchors, read_yaml_file),
    Reader("tar archive", 1.0, tar_folder, damaged_tar, read_tar),
    Reader("address", 1.0, address_folder, odd_address, read_address),
    Reader("LARD", 0.6, lard_folder, damaged_lard, lambda f: read_all(f / "lard.csv")),
    Reader("LabelMe", 0.6, labelme_folder, damaged_labelme, lambda f: read_all(f / "set")),
    Reader("messages in MCAP", 0.6, lambda f: None, odd_message, read_film),
    Reader("card", 0.3, card_folder, damaged_card, read_card_and_calibrate),
    Reader("predict.py", 0.4, runtime_folder, damaged_picture, run_runtime),
)  # fmt: skip
