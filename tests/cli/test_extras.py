"""A missing optional dependency is a one-line error that names the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halopose.install_advice import install_command
from tests.helpers.models import ASSETS

BLOCKED = """
import sys
blocked = sys.argv[1].split(",")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in blocked else real(name, *rest)
sys.meta_path.insert(0, Blocker())
from halopose.cli.app import main
status = 0
for words in " ".join(sys.argv[2:]).split(" ; "):
    sys.argv = ["halopose", *words.split()]
    try:
        main()
    except SystemExit as stop:
        status = status or stop.code
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("blocked", "command", "says"),
    [
        ("ultralytics", ["predict", str(ASSETS / "bus.jpg"), "--base", "{base}", "--artifact", "{heads}"],
         install_command("ultralytics")),
        ("halopose_models", ["predict", str(ASSETS / "bus.jpg")], "halopose-models"),
        ("halopose_models", ["land", "simulate", "--no-animation"], "halopose-models"),
        ("matplotlib", ["land", "simulate", "--seed", "1"], install_command("landing")),
        ("pycocotools", ["finetune", "{data}", "--base", "{base}", "-o", "tuned.pt"],
         install_command("studies")),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named(work: Path, tmp_path: Path, blocked: str, command: list[str], says: str) -> None:
    places = {"base": work / "base.pt", "heads": work / "a.safetensors", "data": work / "data.yaml"}
    words = [word.format(**places) for word in command]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, blocked, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr


def test_scoring_needs_no_extra(tmp_path: Path) -> None:
    blocked = "ultralytics,libreyolo,halopose_models,matplotlib,pycocotools,supervision,pandas,torchvision"
    commands = (
        "synthesize -o s --images 30 --persons 60 ; score s/predictions.json s/truth.json -o r --bootstrap 0 ; "
        "recalibrate s/predictions.json s/truth.json -o c.json ; apply c.json s/predictions.json -o applied.json"
    )
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, blocked, commands], capture_output=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "report.html").is_file()
    assert (tmp_path / "applied.json").is_file()
