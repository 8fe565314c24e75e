"""Coverage-guided cases for every reader of one file: inputs that reach new branches are changed further.

    pip install -e '.[fuzz]'
    python -m research.fuzz.guided --seconds 20 --seed 0

Each target runs in a separate process, in which atheris (libFuzzer) records the branches of halopose that a case takes.
Half of the changes are those of ``research.fuzz.damage`` (values of json, words of lines), half libFuzzer's (bytes).
Checksums are made right again. Prints a table of targets, and every fault once with the name of a file that shows it.
Exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Target: reader of `python -m research.fuzz`, file in its folder, kind of content.
TARGETS = {
    "ground truth": ("ground truth", "truth.json", "json"),
    "ids by name": ("ids by name", "truth.json", "json"),
    "predictions": ("predictions", "results.json", "json"),
    "COCO data": ("COCO data", "truth.json", "json"),
    "calibration": ("calibration", "calibration.json", "calibration"),
    "metrics": ("metrics", "metrics.json", "json"),
    "artifact": ("artifact", "heads.safetensors", "bytes"),
    "feature cache": ("store", "manifest.json", "json"),
    "base": ("base, safetensors", "base.safetensors", "bytes"),
    "data yaml": ("YOLO data", "data.yaml", "words"),
    "labels": ("YOLO data", "labels/train/0.txt", "words"),
    "config": ("config", "config.yaml", "words"),
    "tar archive": ("tar archive", "x.tar", "tar"),
    "jpeg": ("pictures, films", "place/picture.jpg", "bytes"),
    "png": ("pictures, films", "place/picture.png", "bytes"),
    "tiff": ("pictures, films", "place/picture.tif", "bytes"),
    "webp": ("pictures, films", "place/picture.webp", "bytes"),
    "bmp": ("pictures, films", "place/picture.bmp", "bytes"),
    "log of predict": ("stopped predict", ".predictions.jsonl", "log"),
    "camera of ROS": ("flight", "camera.yaml", "words"),
    "runway": ("flight", "runway.json", "json"),
    "attitudes": ("flight", "attitude.csv", "words"),
    "positions": ("flight", "gnss.csv", "words"),
    "camera of OpenCV": ("camera of OpenCV", "camera.yml", "words"),
    "rig, toml": ("rig of cameras", "rig.toml", "words"),
    "rig, xml": ("rig of cameras", "rig.qca.txt", "words"),
    "mcap": ("images in MCAP", "film.mcap", "bytes"),
    "LARD": ("LARD", "lard.csv", "words"),
    "LabelMe": ("LabelMe", "set/a.json", "json"),
    "card": ("card", "card.json", "json"),
    "deployed model": ("deployed folder", "model.onnx", "bytes"),
    "tracks": ("track", "film.json", "json"),
    "scene": ("scene", "scene.json", "json"),
}
LARGEST = 2**21  # bytes of a case


def child(target: str, folder: Path, seconds: int, seed: int) -> None:
    """Run one target; counts and faults go to files in the folder."""
    import atheris

    from halopose.errors import HaloposeError
    from research.fuzz.damage import Wrong
    from research.fuzz.running import READERS, limit_memory

    name, file, kind = TARGETS[target]
    reader, place = READERS[name], folder / "case"
    place.mkdir()
    seeds = corpus(reader, place, file, folder / "corpus")
    counts = {"read": 0, "refused": 0, "faults": 0, "slowest": 0.0}
    known: set[str] = set()
    limit_memory()
    printed = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(printed, stream)

    def one(data: bytes) -> None:
        (place / file).write_bytes(data)
        began = time.monotonic()
        try:
            reader.read(place)
            counts["read"] += 1
        except HaloposeError:
            counts["refused"] += 1
        except (Exception, Wrong) as error:  # noqa: BLE001, whatever it is, it is what is looked for
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            told = f"{type(error).__name__} {where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else "?"
            if told not in known:
                known.add(told)
                counts["faults"] += 1
                (folder / f"fault-{len(known)}").write_bytes(data)
                (folder / f"fault-{len(known)}.txt").write_text(f"{told}: {str(error)[:200]}")
        counts["slowest"] = max(counts["slowest"], time.monotonic() - began)
        (folder / "counts.json").write_text(json.dumps(counts))

    def changed(data: bytes, largest: int, number: int) -> bytes:
        rng = random.Random(f"{seed} {number}")
        new = structured(data, kind, rng) if rng.random() < 0.5 else None
        new = atheris.Mutate(data, min(largest, LARGEST)) if new is None else new
        return sealed(new, kind)[:largest]

    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed + 1}",
        "-timeout=20",
        "-rss_limit_mb=4096",
        "-close_fd_mask=1",
    ]
    words = [sys.argv[0], *options, f"-max_len={LARGEST}", f"-artifact_prefix={folder}/crash-", str(seeds)]
    atheris.Setup(words, one, custom_mutator=changed)
    atheris.Fuzz()


def corpus(reader: Any, place: Path, file: str, seeds: Path) -> Path:
    """Write the valid files; the file to change is the first case."""
    reader.prepare(place)
    for number in range(3):  # makes the other files, which some readers have only after damage
        reader.damage(place, random.Random(number))
    for path in [place / file, *(place / "place").glob("*")]:  # some are named pipes
        path.unlink(missing_ok=True)
    for good in [*place.glob("good-*"), *place.glob("whole-*")]:
        folder = place / "place" if "picture" in good.name or "good-film.avi" in good.name else place
        (folder / good.name.partition("-")[2]).write_bytes(good.read_bytes())
    target = place / file
    if file.startswith("place/"):
        for other in target.parent.iterdir():
            other.unlink()
        target.write_bytes((place / f"good-{target.name}").read_bytes())
    if file.startswith("rig."):
        for other in place.glob("rig.*"):
            if other != target:
                other.unlink()
    from research.fuzz import files, flights, inputs

    texts = {"labels/train/0.txt": files.LABEL, "lard.csv": inputs.LARD, "set/a.json": json.dumps(inputs.LABELME)}
    texts |= {f"{kind}.csv": text for kind, text in flights.LOGS.items()}
    for name, text in texts.items():
        if (place / name).parent.is_dir() and (name == file or (place / name).exists()):
            (place / name).write_text(text)
    seeds.mkdir()
    (seeds / "good").write_bytes(target.read_bytes())
    return seeds


def structured(data: bytes, kind: str, rng: random.Random) -> bytes | None:
    """Change values of JSON or words of lines; None if the content is of another kind."""
    from research.fuzz.damage import damaged_words, mangle, spoil

    try:
        if kind in ("json", "calibration"):
            return json.dumps(mangle(json.loads(data), rng)).encode("utf-8", "surrogatepass")
        if kind == "words":
            return damaged_words(data.decode(), rng, rng.choice([" ", ",", ";", ":", '"']))
    except (ValueError, RecursionError, IndexError):
        return None
    return spoil(data, rng) if kind in ("tar", "log") and data else None


def sealed(data: bytes, kind: str) -> bytes:
    """Content with valid checksums, so that the code behind the check is reached."""
    seals: dict[str, Callable[[bytes], bytes]] = {"calibration": _calibration, "log": _log, "tar": _tar}
    try:
        return seals[kind](data) if kind in seals else data
    except (ValueError, RecursionError):
        return data


def _calibration(data: bytes) -> bytes:
    from halopose.calibration.calibration_file import _checksum

    content = json.loads(data)
    if isinstance(content, dict):
        content["checksum"] = _checksum(content)
    return json.dumps(content).encode("utf-8", "surrogatepass")


def _log(data: bytes) -> bytes:
    bodies = [line.partition(b" ")[2] for line in data.split(b"\n")]
    return b"\n".join(b"%08x %b" % (zlib.crc32(body), body) for body in bodies if body) + b"\n"


def _tar(data: bytes) -> bytes:
    content = bytearray(data)
    for place in range(0, len(content) - 511, 512):
        if content[place + 257 : place + 262] == b"ustar":
            content[place + 148 : place + 156] = b" " * 8
            content[place + 148 : place + 156] = b"%06o\0 " % sum(content[place : place + 512])
    return bytes(content)


def run(target: str, folder: Path, seconds: int, seed: int) -> str:
    """Run one target in a separate process with a time limit; return the output of libFuzzer."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(target, folder, seconds, seed))
    process.start()
    process.join(2 * seconds + 60)
    if process.is_alive():
        (folder / "crash-hang").write_text("ended after waiting")
        process.kill()
    process.join()
    return (folder / "log").read_text(errors="replace") if (folder / "log").is_file() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20, help="For each target.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*TARGETS], metavar="TARGET", help="These targets alone.")
    given = parser.parse_args()
    import atheris

    with atheris.instrument_imports(include=["halopose"], enable_loader_override=False):
        import research.fuzz.running  # noqa: F401  and with it all readers
    kept = Path(tempfile.mkdtemp(prefix="halopose-guided-"))
    print(f"seed {given.seed}")
    print(
        f"{'target':18}"
        + "".join(f"{word:>9}" for word in ("cases", "read", "refused", "faults", "branches", "slowest"))
    )
    cases = faults = 0
    for number, target in enumerate(given.only or TARGETS):
        folder = kept / str(number)
        folder.mkdir()
        printed = run(target, folder, given.seconds, given.seed)
        found = json.loads((folder / "counts.json").read_text()) if (folder / "counts.json").is_file() else {}
        crashes = sorted(folder.glob("crash-*"))
        bad = found.get("faults", 0) + len(crashes) + (not found)
        covered = re.findall(r"cov: (\d+)", printed)
        count = found.get("read", 0) + found.get("refused", 0)
        cases, faults = cases + count, faults + bad
        branches, slowest = int(covered[-1]) if covered else 0, f"{found.get('slowest', 0):.1f} s"
        row = (count, found.get("read", 0), found.get("refused", 0), bad, branches, slowest)
        print(f"{target:18}" + "".join(f"{cell:>9}" for cell in row), flush=True)
        for path in [*folder.glob("fault-*.txt"), *crashes]:
            print(
                f"    {path.with_suffix('')}: {path.read_text() if path.suffix == '.txt' else 'crash, hang or memory'}"
            )
        if not found:
            print(printed[-2000:])
    print(f"{'all':18}{cases:9}{'':18}{faults:9}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
