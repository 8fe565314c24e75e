"""Test every optional dependency group alone: its commands work, other commands say in one line what is missing.

    python -m research.extras -o build/extras
    python -m research.extras -o build/extras --only onnx,ray

Each extra gets a virtual environment, which is deleted afterwards. Prints a table and fails if an answer is not the
expected one. Finished extras are kept in ``results.json`` and not tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tests.helpers.models import host_of, pose_model, write_scenes

from halopose.data.files import read_json, write_text
from halopose.data.films import FilmWriter
from halopose.data.images import read_image
from halopose.install_advice import install_command
from research.fuzz.formats import hdf5_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PHOTOGRAPH = ROOT / "examples" / "photographs" / "astronaut.jpg"


@dataclass(frozen=True)
class Try:
    """A command and the expected outcome.

    Attributes:
        command: words of the command; names in braces are inputs from ``make_inputs``.
        needs: empty if the command must work, else the text that its one-line error must contain.
    """

    command: str
    needs: str = ""


@dataclass(frozen=True)
class Room:
    """Commands for one extra.

    Attributes:
        alone: commands with this extra only.
        company: other extras, separated by commas, that are installed for ``together``.
        together: commands with this extra and those of ``company``.
    """

    alone: tuple[Try, ...]
    company: str = ""
    together: tuple[Try, ...] = ()


@dataclass(frozen=True)
class Answer:
    extra: str
    command: str
    answer: str
    right: bool


FIT = "halopose fit {{data}} --base {{{base}}} -o mine.safetensors --imgsz 64 --epochs 1 --calibration-share 0.5"
PREDICT = "halopose predict {photo} --base {base} --artifact {heads} -o poses"
COLLECT = "halopose collect file://{data} --base {base} --sizes 64 -o file://{here}/store"
LAND = "halopose land simulate --rate 0.2 --no-animation -o landing"
ULTRALYTICS, YOLONAS, ONNX = install_command("ultralytics"), install_command("yolonas"), install_command("onnx")
ROOMS = {
    "": Room(
        (
            Try("halopose synthesize -o s --images 30 --persons 60"),
            Try("halopose score s/predictions.json s/truth.json -o report --bootstrap 0"),
            Try("halopose recalibrate s/predictions.json s/truth.json -o c.json"),
            Try("halopose apply c.json s/predictions.json -o applied.json"),
            Try("halopose world -o world --images 2"),
            Try(PREDICT, ULTRALYTICS),
            Try("halopose predict {photo}", "halopose-models"),
            Try("halopose predict {photo} --deployed {deployed}", ONNX),
            Try("halopose plot report -o figure.pdf", install_command("plot")),
        )
    ),
    "ultralytics": Room(
        (
            Try(FIT.format(base="base")),
            Try("halopose predict {photo} --base {base} --artifact mine.safetensors -o poses"),
            Try("halopose evaluate {data} --base {base} --artifact mine.safetensors --split val -o report"),
            Try("halopose track {film} --base {base} --artifact mine.safetensors -o tracks"),
            Try("halopose analyse {data} --base {base} -o analysis --imgsz 64"),
            Try(FIT.format(base="base") + " --engine ray", install_command("ray")),
            Try("halopose predict {photo} --base {nas} --artifact mine.safetensors", YOLONAS),
            Try("halopose finetune {data} --base {base} -o tuned.pt", install_command("studies")),
        )
    ),
    "models": Room(
        (Try("halopose models"), Try("halopose predict {photo}", ULTRALYTICS), Try(LAND, ULTRALYTICS)),
        "ultralytics",
        (Try("halopose predict {photo}"), Try(LAND), Try("halopose export -o deployed", ONNX)),
    ),
    "yolonas": Room(
        (
            Try(FIT.format(base="nas").replace("{data}", "{nas_data}")),
            Try("halopose predict {photo} --base {nas} --artifact mine.safetensors -o poses"),
            Try(PREDICT, ULTRALYTICS),
        )
    ),
    "plot": Room(
        (
            Try("halopose synthesize -o s --images 30 --persons 60"),
            Try("halopose score s/predictions.json s/truth.json -o report --bootstrap 0"),
            Try("halopose plot report -o figure.pdf"),
            Try(PREDICT, ULTRALYTICS),
        )
    ),
    "landing": Room(
        (Try("halopose world -o world --images 2"), Try(LAND, "halopose-models")),
        "models,ultralytics",
        (
            Try("halopose land simulate --rate 0.2 -o landing"),
            Try(LAND + " --write csv,mcap", install_command("recordings")),
        ),
    ),
    "recordings": Room(
        (Try(LAND + " --write csv,mcap", "halopose-models"), Try(LAND + " --write rerun", install_command("rerun"))),
        "models,ultralytics",
        (
            Try(LAND + " --record there --write csv,mcap"),
            Try(
                "halopose land replay --frames there/video.mp4 --camera there/camera.yaml --runway there/runway.json "
                "--attitude there/attitude.csv --no-animation --write csv,mcap -o again"
            ),
        ),
    ),
    "rerun": Room(
        (Try(LAND + " --write rerun", install_command("recordings")),),
        "models,ultralytics,recordings",
        (Try(LAND + " --write rerun"),),
    ),
    "studies": Room(
        (Try("halopose finetune {data} --base {base} -o tuned.pt", ULTRALYTICS),),
        "ultralytics",
        (
            Try(
                "halopose finetune {data} --base {base} -o tuned.pt --epochs 1 --imgsz 64 --batch 4 --no-control "
                "--no-heads --bootstrap 2"
            ),
        ),
    ),
    "onnx": Room(
        (
            Try("halopose predict {photo} --deployed {deployed} -o poses"),
            Try("halopose export", "halopose-models"),
        ),
        "ultralytics",
        (Try("halopose export --base {base} --artifact {heads} -o deployed"),),
    ),
    "ray": Room(
        (Try(FIT.format(base="base") + " --engine ray", ULTRALYTICS),),
        "ultralytics",
        (Try(FIT.format(base="base") + " --engine ray"),),
    ),
    "cloud": Room(
        (Try(COLLECT, ULTRALYTICS),),
        "ultralytics",
        (Try(COLLECT),),
    ),
    "hdf5": Room((Try("halopose convert {slp} -o poses.json"),)),
    "fuzz": Room((Try("python -c 'import atheris, halopose'"), Try(PREDICT, ULTRALYTICS))),
    "dev": Room(
        (
            Try("python -m ruff check {root}/src"),
            Try("python -m pytest {root}/tests/calibration/test_split_student_t.py -p no:cacheprovider"),
            Try(PREDICT, ULTRALYTICS),
        )
    ),
    "docs": Room((Try("mkdocs build --strict -f {root}/mkdocs.yml -d {here}/site"), Try(PREDICT, ULTRALYTICS))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/extras"))
    parser.add_argument("--only", help="extras, with commas; else all of pyproject.toml")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    extras = ["", *tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]]
    if missing := set(extras) ^ set(ROOMS):
        sys.exit(f"pyproject.toml and this file differ by {', '.join(missing)}")
    wanted = extras if arguments.only is None else arguments.only.split(",")
    results = output / "results.json"
    done: dict[str, list[dict[str, object]]] = read_json(results) if results.is_file() else {}
    output.mkdir(parents=True, exist_ok=True)
    built: dict[str, Path] = {}
    for extra in wanted:
        if extra in done and all(answer["right"] for answer in done[extra]):
            continue
        built = built or wheels(output / "wheels")
        inputs = make_inputs(output / "inputs")
        done[extra] = [asdict(answer) for answer in answers(extra, inputs, built)]
        write_text(results, json.dumps(done, indent=1))
        print(table(done[extra]), flush=True)
    print("\nextra | command | answer\n---|---|---")
    print("\n".join(table(done[extra]) for extra in wanted))
    if not all(answer["right"] for extra in wanted for answer in done[extra]):
        sys.exit(1)


def table(rows: list[dict[str, object]]) -> str:
    return "\n".join(
        f"{row['extra'] or '(none)'} | {row['command']} | {row['answer']}{'' if row['right'] else '  <-- WRONG'}"
        for row in rows
    )


def answers(extra: str, inputs: dict[str, str], wheel: dict[str, Path]) -> Iterator[Answer]:
    """Output of every command in a temporary environment."""
    room = ROOMS[extra]
    with tempfile.TemporaryDirectory(prefix="halopose-extra-") as name:
        folder = Path(name)
        here = folder / "here"
        here.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        for extras, tries in ((extra, room.alone), (",".join((extra, room.company)), room.together)):
            if not tries:
                continue
            install(folder / "env", extras, wheel)
            for one in tries:
                yield asked(extras, one, folder / "env", here, inputs)


def install(environment: Path, extras: str, wheel: dict[str, Path]) -> None:
    """Install halopose with extras from its wheel, and the weights from theirs if ``models`` is among the extras."""
    names = [str(wheel["models"])] if "models" in extras.split(",") else []
    command = [str(programs(environment) / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    command += ["--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), *names]
    done = subprocess.run([*command, f"{wheel['halopose']}[{extras}]" if extras else str(wheel["halopose"])])
    if done.returncode:
        sys.exit(f"cannot install {extras}")


def asked(extras: str, one: Try, environment: Path, here: Path, inputs: dict[str, str]) -> Answer:
    """Run one command and compare its outcome with the expected one."""
    words = shlex.split(one.command.format(**inputs, here=here))
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = {**kept, "PATH": f"{programs(environment)}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=here, env=variables, capture_output=True, text=True, check=False)
    printed = done.stderr.strip() or done.stdout.strip()
    if not one.needs:
        right = done.returncode == 0
        answer = "works" if right else printed[-2000:]
    else:
        right = done.returncode == 2 and printed.count("\n") == 0 and one.needs in printed
        answer = printed[-2000:] if done.returncode else "works"
    return Answer(extras, one.command.replace("{", "").replace("}", ""), answer, right)


def programs(environment: Path) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin")


def wheels(folder: Path) -> dict[str, Path]:
    """Build both distributions of this checkout."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, out in ((ROOT, "halopose"), (ROOT / "models", "models")):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / out)]
        subprocess.run([*command, str(source)], check=True)
    return {name: next((folder / name).glob("*.whl")) for name in ("halopose", "models")}


def make_inputs(folder: Path) -> dict[str, str]:
    """Make labelled images, models with random weights, heads and an exported model, unless they exist."""
    places = {
        "data": folder / "data" / "data.yaml",
        "base": folder / "base.pt",
        "nas": folder / "nas.pth",
        "nas_data": folder / "nas_data" / "data.yaml",
        "heads": folder / "heads.safetensors",
        "film": folder / "film.mp4",
        "deployed": folder / "deployed",
        "slp": folder / "good-poses.slp",
        "photo": PHOTOGRAPH,
        "root": ROOT,
    }
    if not places["slp"].is_file():
        folder.mkdir(parents=True, exist_ok=True)
        hdf5_files(folder)
    if not places["nas_data"].is_file():
        write_scenes(folder / "nas_data", host_of("nas"), {"train": 14, "val": 10})
    if not (places["deployed"] / "model.onnx").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_scenes(folder / "data", host_of("11"), {"train": 14, "val": 10})
        torch.save({"model": pose_model("11")}, places["base"])
        torch.save({"net": pose_model("nas").state_dict()}, places["nas"])
        write_film(places["film"])
        mine = [sys.executable, "-m", "halopose"]
        fit = shlex.split(FIT.format(base="base").format(**places).replace("mine.safetensors", "{heads}"))
        subprocess.run([*mine, *(word.format(**places) for word in fit[1:])], check=True)
        base = ["--base", str(places["base"]), "--artifact", str(places["heads"])]
        subprocess.run([*mine, "export", *base, "-o", str(places["deployed"])], check=True)
    return {name: str(path) for name, path in places.items()}


def write_film(path: Path) -> None:
    """Write a film of six identical frames."""
    picture = read_image(PHOTOGRAPH)
    with FilmWriter(path, 10.0) as film:
        for _ in range(6):
            film.write(picture)


if __name__ == "__main__":
    main()
