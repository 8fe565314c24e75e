"""Documentation: commands parse, links resolve, and snippets run."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from typer.main import get_command

import halopose
from halopose.cli.app import app
from halopose.geometry.camera import Camera, look_at, project_points
from halopose.poses import PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.approaches import CORNERS
from tests.helpers.models import ASSETS, artifact_for, host_of
from tests.helpers.values import read_picture

ROOT = Path(__file__).parent.parent
PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", "models/*.md")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for place in PLACES
    for path in sorted(ROOT.glob(place))
    if "node_modules" not in path.parts
}
COMMANDS: dict[str, Any] = vars(get_command(app))["commands"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block in a language."""
    return [
        (page, text) for page, content in PAGES.items() for kind, text in FENCE.findall(content) if kind == language
    ]


def lines(beginning: str) -> list[tuple[str, list[str]]]:
    """(page, words) of every console line that begins so, without its comment."""
    shown = [(page, line) for page, text in blocks("console") for line in text.splitlines()]
    return [(page, shlex.split(line, comments=True)) for page, line in shown if line.startswith(beginning)]


def inline() -> Iterator[tuple[str, str]]:
    """(page, text) of code within sentences."""
    for page, content in PAGES.items():
        for text in re.findall(r"`([^`]+)`", FENCE.sub("", content)):
            yield page, " ".join(text.split())


def commands_of(group: Any) -> list[Any]:
    """The commands of a group; none of a command."""
    return list(vars(group).get("commands", {}).values())


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(("page", "words"), lines("halopose "))
def test_commands_are_complete_and_valid(page: str, words: list[str]) -> None:
    _, name, *arguments = words
    command = COMMANDS[name]
    if arguments and commands_of(command):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)


def test_commands_within_sentences_have_their_options() -> None:
    seen = 0
    for page, text in inline():
        if match := re.match(r"(?:.* )?halopose (?!import)(\w+)(.*)", text):
            name, rest = match.groups()
            assert name in COMMANDS, f"{page}: {text}"
            command = COMMANDS[name]
            if commands_of(command) and rest.split() and rest.split()[0] in command.commands:
                command = command.commands[rest.split()[0]]
            assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= options_of(command), f"{page}: {text}"
            seen += 1
    assert seen > 10


def test_options_within_sentences_exist_somewhere() -> None:
    known = set().union(
        *(options_of(command) for group in COMMANDS.values() for command in (group, *commands_of(group)))
    )
    known |= {"--help", "--debug"}
    known |= set(
        re.findall(
            r'"(--[\w-]+)"',
            "".join(path.read_text() for room in ("research", "benchmarks") for path in ROOT.glob(f"{room}/**/*.py")),
        )
    )
    for page, text in inline():
        if text.startswith("--"):
            assert text.split()[0] in known, f"{page}: {text}"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        *lines("python -m "),
        *((page, shlex.split(text)) for page, text in inline() if text.startswith("python -m ")),
    ],
)
def test_research_commands_exist_with_their_options(page: str, words: list[str]) -> None:
    place = ROOT / words[2].replace(".", "/")
    files = sorted(place.glob("*.py")) if (place / "__main__.py").is_file() else [place.with_suffix(".py")]
    source = "".join(file.read_text() for file in files)
    if "research.shipped_data" in source:  # which has the options of all scripts about the shipped heads
        source += (ROOT / "research" / "shipped_data.py").read_text()
    for option in (word for word in words if word.startswith("-") and word != "-m"):
        assert f'"{option}"' in source


def test_targets_of_make_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = [words[1] for _, words in lines("make ")] + [t.split()[1] for _, t in inline() if t.startswith("make ")]
    assert shown
    assert set(shown) <= set(targets)


def test_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", project, re.MULTILINE))
    shown = [match for content in PAGES.values() for match in re.findall(r"'(?:halopose|\.)\[([\w,]+)\]'", content)]
    assert shown
    assert {extra for match in shown for extra in match.split(",")} <= extras


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    content = FENCE.sub("", PAGES[page])
    for target in re.findall(r"\]\(([^)\s]+)\)", content):
        place, _, anchor = target.partition("#")
        if place.startswith("http"):
            continue
        path = (ROOT / page).parent / place if place else ROOT / page
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_that_are_named_exist(page: str) -> None:
    for text in (text for where, text in inline() if where == page):
        if re.fullmatch(r"(tests|research|docs|src|benchmarks|examples|models)/[\w./-]*", text):
            assert (ROOT / text).exists(), text
        if match := re.fullmatch(r"halopose\.([\w.]+)", text):
            parts = match.group(1).split(".")
            path = ROOT / "src/halopose"
            while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").is_file()):
                path /= parts.pop(0)
            module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert all(re.search(rf"\b{part}\b", module.read_text()) for part in parts), text


def numbers_in(text: str) -> Iterator[int]:
    """Equation numbers of ``eq. 4``, ``eqs. 25, 26`` or ``eqs. 16 to 18``."""
    for match in re.findall(r"\beqs?\. (\d+(?:(?:, | to )\d+)*)", text):
        yield from expand(match)


def expand(text: str) -> Iterator[int]:
    for part in text.split(", "):
        first, _, last = part.partition(" to ")
        yield from range(int(first), int(last or first) + 1)


def equations_in_docstrings() -> Iterator[tuple[int, str]]:
    """(number, dotted name) wherever the docstring of something public names an equation."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                for number in numbers_in(ast.get_docstring(node) or ""):
                    yield number, f"{module}.{node.name}"


def test_the_table_of_equations_agrees_with_the_docstrings() -> None:
    rows = re.findall(r"^\| ([\d, to]+) \|.*\| (.*) \|$", PAGES["docs/reference/equations.md"], re.MULTILINE)
    table = {number: cell for numbers, cell in rows for number in expand(numbers)}
    assert list(table) == list(range(1, 74))  # all of the paper, in order
    told = list(equations_in_docstrings())
    assert len(told) > 20
    for number, name in told:
        assert f"`{name}`" in table[number], f"equation {number}: {name}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """In a separate process, as `make docs` does; every link, anchor and name of the reference is checked."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "reference" / "api" / "calibration.html").read_text(encoding="utf-8")
    assert 'id="halopose.calibration.calibrators.StudentTCalibration"' in reference


def test_the_reference_has_every_package_and_every_public_name() -> None:
    packages = {path.parent.name for path in ROOT.glob("src/halopose/*/__init__.py")} - {"cli"}
    assert packages <= {path.stem for path in ROOT.glob("docs/reference/api/*.md")}
    names = set(re.findall(r"\[`(\w+)`\]\[halopose\.", PAGES["docs/reference/api/index.md"]))
    assert names == set(halopose.__all__) - {"__version__"}


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader of the snippets has: files, a model for them, and the arrays that they name."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ASSETS / "bus.jpg", "photo.jpg")
    photograph = read_picture("photo.jpg")
    video = cv2.VideoWriter("video.mp4", cv2.VideoWriter.fourcc(*"mp4v"), 5.0, photograph.shape[1::-1])
    for _ in range(2):
        video.write(photograph)
    video.release()
    model = UncertainPose(host_of("11"), artifact_for(host_of("11")))
    monkeypatch.setattr(UncertainPose, "load", lambda *given, **options: model)
    generator = torch.Generator().manual_seed(0)
    residuals = torch.randn(200, 17, 2, generator=generator, dtype=torch.float64)
    position = np.array([[-1500.0, 5.0, 78.6]])
    rotation = look_at(position, [300.0, 0.0, 0.0])
    seen = project_points(Camera.from_fov(640, 384, np.radians(30)), rotation, position, CORNERS)
    spread = np.tile(0.3 * np.eye(2), (1, 4, 1, 1))
    return {
        "residuals": residuals,
        "covariances": torch.eye(2, dtype=torch.float64).expand(200, 17, 2, 2),
        "new_covariances": torch.eye(2, dtype=torch.float64).expand(3, 17, 2, 2),
        "r": residuals[:3],
        "poses": PoseDistributions(np.zeros((1, 4)), np.ones(1), seen, spread, spread),
        "rotation": rotation,
    }


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_snippets_run(page: str, text: str, surroundings: dict[str, Any]) -> None:
    exec(compile(text, page, "exec"), surroundings)
