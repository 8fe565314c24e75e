"""Options shared by several commands, and checks that turn user errors into one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from halopose.cli.option_groups import MANY_OPTIONS, option_group
from halopose.errors import HaloposeError

MANY = 100_000  # largest number of resamplings or epochs
SMALLEST, LARGEST = 32, 16384  # range of input sizes; the smallest is the stride of the coarsest level


class Program(TyperGroup):
    """Group of all commands; ``--config`` may stand before or after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move ``--config`` to the front."""
        moved: list[str] = []
        rest: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                rest += [word, *words]
            elif word == "--config":
                moved += [word, *islice(words, 1)]
            else:
                (moved if word.startswith("--config=") else rest).append(word)
        return super().parse_args(ctx, [*moved, *rest])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group of commands, in the order in which they were added."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else "Plug-ins"
                panels.setdefault(title, []).append((name, command.get_short_help_str(limit=1000)))
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


class PanelCommand(TyperCommand):
    """A command whose help groups options if it has many."""

    def panel_of(self, parameter: Any) -> str:
        """Return the title above a parameter in the help."""
        if parameter.param_type_name == "argument":
            return "Arguments"
        options = [each for each in self.params if each.param_type_name == "option"]
        if len(options) <= MANY_OPTIONS:
            return "Options"
        return option_group(str(self.name), str(parameter.name)) or "Options"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(self.panel_of(parameter), []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def add_command(app: typer.Typer, command: Callable[..., None], panel: str | None = None) -> None:
    """Add a command to the command line; its summary is the first line of its docstring.

    Args:
        app: The Typer application.
        command: Function of the command.
        panel: Group of commands in ``halopose --help``.
    """
    # The full text, which click would shorten. `python -OO` drops docstrings.
    summary = (command.__doc__ or "").partition("\n")[0]
    app.command(cls=PanelCommand, short_help=summary, rich_help_panel=panel)(command)


def finite(value: float) -> float:
    """Check an option: neither NaN nor infinite."""
    _demand(math.isfinite(value), "give a finite number", value)
    return value


def positive(value: float | None) -> float | None:
    """Check an option: finite and above 0, or not given."""
    if value is not None:
        _demand(0 < value < math.inf, "give a number above 0", value)
    return value


def share(value: float) -> float:
    """Check an option: above 0, at most 1."""
    _demand(0 < value <= 1, "give a number above 0 and up to 1", value)
    return value


def between(value: float) -> float:
    """Check an option: above 0 and below 1."""
    _demand(0 < value < 1, "give a number between 0 and 1, neither of them", value)
    return value


def maybe_between(value: float | None) -> float | None:
    """Check an option: above 0 and below 1, or not given."""
    return None if value is None else between(value)


def several(value: int) -> int:
    """Check an option: 0, or at least 2 resamplings."""
    _demand(value != 1, "give 0 for none, or 2 and more", value)
    return value


def _demand(good: bool, advice: str, value: float) -> None:
    if not good:
        raise typer.BadParameter(f"{advice}, got {value}")


def numbers(text: str, option: str) -> list[float]:
    """Parse positive numbers separated by commas, in rising order."""
    values = floats(text, option)
    if values[0] <= 0 or values[-1] > 1e6 or any(low >= high for low, high in pairwise(values)):
        raise HaloposeError(f"--{option} takes positive numbers in rising order, up to a million, got {text!r}")
    return values


def exponents(text: str, option: str) -> list[float]:
    """Parse numbers separated by commas, none below 0."""
    values = floats(text, option)
    if min(values) < 0:
        raise HaloposeError(f"--{option} takes numbers from 0 on, got {text!r}")
    return values


def threshold_rule(text: str | None) -> str | None:
    """Check a rule for pruning thresholds; None if not given."""
    from halopose.uncertainty.pruning import risk_guarantee

    try:
        if text is not None:
            risk_guarantee(text)
    except HaloposeError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def floats(text: str, option: str) -> list[float]:
    """Parse finite numbers separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not (values and all(map(math.isfinite, values))):
        raise HaloposeError(f"--{option} takes numbers separated by commas, got {text!r}")
    return values


def read_config(path: Path, commands: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read options by command from a yaml file, in the names that they have on the command line.

    Args:
        path: The yaml file.
        commands: Commands of the program by name.

    Returns:
        Values by command and parameter.

    Raises:
        HaloposeError: A command or an option is unknown.
    """
    from halopose.data.bounded_text import read_yaml

    return {name: _options(path, name, options, commands) for name, options in read_yaml(path).items()}


def _options(path: Path, name: object, options: Any, commands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked options of one command; a group has its commands under its name."""
    if name not in commands or not isinstance(options, dict):
        advice = _nearest(str(name), commands)
        raise HaloposeError(f"{path}: {name!r} is no command with options, such as fit: {{epochs: 20}}{advice}")
    command = commands[str(name)]
    inner = getattr(command, "commands", None)
    if inner is not None:
        return {str(key): _options(path, key, value, inner) for key, value in options.items()}
    known = _parameters(command)
    for option in options:
        if _plain(option) not in known:
            raise HaloposeError(f"{path}: {name} has no option {option!r}{_nearest(_plain(option), known)}")
    return {known[_plain(option)]: value for option, value in options.items()}


def _parameters(command: Any) -> dict[str, str]:
    """Return the names of a command's parameters by what may stand for them in a configuration file."""
    names: dict[str, str] = {}
    for parameter in command.params:
        if parameter.name not in ("help", "config"):
            names |= {_plain(word): parameter.name for word in (parameter.name, *parameter.opts)}
    return names


def _plain(option: object) -> str:
    return str(option).lstrip("-").replace("-", "_")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return advice that names the most similar known word."""
    found = get_close_matches(name, list(known), 1, 0.5)
    return f": did you mean {found[0].replace('_', '-')!r}?" if found else ""


def sizes(text: str, option: str = "train-sizes") -> tuple[int, ...]:
    """Parse input sizes separated by commas."""
    values = numbers(text, option)
    if any(not SMALLEST <= value <= LARGEST or value % 1 for value in values):
        raise HaloposeError(f"--{option} takes whole numbers of pixels from {SMALLEST} to {LARGEST}, got {text!r}")
    return tuple(map(int, values))


def sigmas(text: str | None) -> list[float] | None:
    """Parse keypoint sigmas separated by commas, if given."""
    values = None if text is None else floats(text, "sigmas")
    if values and min(values) <= 0:
        raise HaloposeError(f"--sigmas takes positive numbers, got {text!r}")
    return values


def class_numbers(text: str | None) -> tuple[int, ...] | None:
    """Parse class numbers separated by commas, if given."""
    if text is None:
        return None
    words = [word.strip() for word in text.replace(" ", ",").split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise HaloposeError(f"--classes takes class numbers from 0 on, separated by commas, got {text!r}")
    return tuple(map(int, words))


Classes = Annotated[str | None, typer.Option(help="Keep these classes: numbers from 0, separated by commas.")]
MaxDet = Annotated[
    int | None,
    typer.Option(min=1, max=MANY, help="Largest number of detections per image; the most confident are kept."),
]
VidStride = Annotated[int, typer.Option(min=1, max=MANY, help="Use every n-th frame of films and streams.")]
Family = Annotated[Literal["gaussian", "student-t"], typer.Option(help="Output distribution.")]
Predictions = Annotated[Path, typer.Argument(help="COCO keypoint results json, or keypoints of another tool.")]
Truth = Annotated[Path, typer.Argument(help="COCO keypoint ground truth json, or labels of another tool.")]
FileFormat = Annotated[
    Literal["auto", "coco", "deeplabcut", "lightning-pose", "anipose", "sleap", "mediapipe", "mmpose", "openpose"],
    typer.Option("--format", help="Tool that wrote the predictions; auto recognises it."),
]
PixelSize = Annotated[
    str | None, typer.Option("--size", help="Size of the images, such as 1280x720, which MediaPipe's landmarks need.")
]
Sigmas = Annotated[
    str | None, typer.Option(help="Keypoint sigmas, separated by commas; default: the category's, COCO's, or 1/K.")
]
Data = Annotated[Path, typer.Argument(help="YOLO data yaml, or COCO keypoint json.")]
Base = Annotated[Path, typer.Option(help="Trained pose model: a .pt checkpoint or an ONNX file.")]
Images = Annotated[Path | None, typer.Option(help="Folder of the images of COCO json.")]
Workers = Annotated[
    int | None,
    typer.Option(min=0, max=MANY, help="Number of processes: they run the model on a CPU, or read images for a GPU."),
]
Batch = Annotated[int | None, typer.Option(min=1, max=MANY, help="Images per batch; default: 1 on a CPU, 16 on a GPU.")]
Half = Annotated[
    bool, typer.Option("--half", help="Half precision before the head: faster on a GPU, keypoints change slightly.")
]
RuntimeOption = Annotated[
    Literal["auto", "torch", "onnx", "openvino"] | None,
    typer.Option(
        "--runtime",
        help="What runs the model: torch, or onnx, openvino or auto with a cached export; default: torch, unless "
        "HALOPOSE_RUNTIME or your settings say otherwise.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Allow a checkpoint to run code; for trusted files only.")]
End2End = Annotated[
    bool | None, typer.Option(help="Head of a YOLO26 checkpoint that has both; default: the checkpoint's.")
]
Alpha = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="Exponent of the retention weight; 0 disables it.")
]
ScaleWeight = Annotated[bool, typer.Option(help="Weight objects by 1 / area.")]
Dof = Annotated[
    float | None,
    typer.Option(callback=positive, help="Train with the Student-t likelihood at these degrees of freedom."),
]
Epochs = Annotated[int, typer.Option(min=1, max=MANY, help="Largest number of epochs.")]
Dispersion = Annotated[Literal["full", "diagonal", "isotropic"], typer.Option(help="Form of the dispersion.")]
Trunk = Annotated[Literal["mirrored", "last-layer"], typer.Option(help="Kind of head.")]
WarmStart = Annotated[bool, typer.Option(help="Start from the weights of the pose head.")]
ContextOption = Annotated[
    bool,
    typer.Option(
        "--context", help="Heads with context features: overlapping boxes, and neck features at the keypoints."
    ),
]
Source = Annotated[
    Literal["matched", "assigned"],
    typer.Option(help="Calibration data: matched detections, or assigned cells as in the paper."),
]
ImageSize = Annotated[int, typer.Option(min=SMALLEST, max=LARGEST, help="Input size.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")]
NoveltyImages = Annotated[
    int, typer.Option(min=0, help="Training images for the out-of-distribution model; 0 for none.")
]
Alarm = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        callback=positive,
        help="Flag out-of-distribution detections at this false-alarm rate, such as 0.05.",
    ),
]
Monitor = Annotated[
    float | None,
    typer.Option(
        "--monitor",
        callback=maybe_between,
        help="Warn when images stop being like those of the calibration, with at most this false-alarm probability "
        "over the whole run, such as 0.01.",
    ),
]
Confidence = Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="Confidence threshold.")]
Iou = Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="IoU threshold of NMS.")]
OtherSize = Annotated[int | None, typer.Option(min=SMALLEST, max=LARGEST, help="Input size; default: the artifact's.")]
Train = Annotated[str, typer.Option(help="Training split; several separated by commas.")]
Val = Annotated[str, typer.Option(help="Validation split, or a second COCO json.")]
ValImages = Annotated[Path | None, typer.Option(help="Image folder of the second json.")]
TrainSizes = Annotated[str | None, typer.Option(help="Input sizes for training; default: --imgsz.")]
CalibrationShare = Annotated[
    float, typer.Option(callback=between, help="Share of the validation images, between 0 and 1.")
]
Bootstrap = Annotated[
    int,
    typer.Option(
        min=0, max=MANY, callback=several, help="Bootstrap resamplings of images for 95 % intervals; 0 for none."
    ),
]
Visibility = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Prune below this visibility score; 0 for never; default: the artifact's."),
]
Uncalibrated = Annotated[bool, typer.Option("--uncalibrated", help="Accept heads that are not calibrated.")]
Rule = Annotated[
    str,
    typer.Option(
        callback=threshold_rule,
        help="How pruning thresholds are chosen: youden, distance, f1, or a guarantee such as risk:0.05@0.95.",
    ),
]
MaybeRule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        callback=threshold_rule,
        help="How pruning thresholds are chosen, as in recalibrate; default: the calibration's, else youden.",
    ),
]
Preset = Annotated[
    Literal["paper", "best"] | None,
    typer.Option("--preset", help="Settings of the paper, or of the shipped heads; options given change them."),
]
Area = Annotated[
    Literal["annotation", "box"], typer.Option("--area", help="Object area in the confidence; box as at inference.")
]
MaybeArea = Annotated[
    Literal["annotation", "box"] | None,
    typer.Option("--area", help="Object area in the confidence; default: the calibration's, else box."),
]
Scalarisation = Annotated[
    Literal["trace", "determinant", "eigenvalue"], typer.Option(help="Scalar size of a covariance in the confidence.")
]
MaybeScalarisation = Annotated[
    Literal["trace", "determinant", "eigenvalue"] | None,
    typer.Option("--scalarisation", help="Scalar size of a covariance; default: the calibration's, else trace."),
]
RegionScales = Annotated[bool, typer.Option("--region-scales", help="Separate radii of regions for each object scale.")]
Match = Annotated[
    Literal["oks", "box"],
    typer.Option(help="Which detections are true positives: by OKS, as in COCO, or by the IoU of boxes."),
]
FitMatch = Annotated[
    Literal["oks", "box", "both"],
    typer.Option("--match", help="Detections that calibration is right for: matched by OKS, by box, or by both."),
]
MatchAsMade = Annotated[
    Literal["oks", "box", "both"] | None,
    typer.Option("--match", help="Detections that calibration is right for; else as when the heads were made."),
]
RuleAsMade = Annotated[
    str | None,
    typer.Option(
        callback=threshold_rule,
        help="How pruning thresholds are chosen, as in fit; default: as when the heads were made.",
    ),
]
MaybeRegionScales = Annotated[
    bool | None,
    typer.Option(
        "--region-scales/--no-region-scales",
        help="Separate radii of regions for each object scale; default: as when the heads were made.",
    ),
]
Deployed = Annotated[Path | None, typer.Option("--deployed", help="Folder of `halopose export`, instead of --base.")]
MaybeBase = Annotated[
    Path | None,
    typer.Option("--base", help="Trained pose model: a .pt checkpoint, an ONNX file, or a name of `halopose models`."),
]
MaybeArtifact = Annotated[Path | None, typer.Option("--artifact", help="Artifact made for this base model.")]
BaseElseShipped = Annotated[
    Path | None,
    typer.Option(
        "--base", help="A .pt checkpoint, an ONNX file, or a name of `halopose models`; default: YOLO11n-pose."
    ),
]
ArtifactElseShipped = Annotated[
    Path | None, typer.Option("--artifact", help="Artifact made for the base model; default: the shipped one.")
]


def given_options(command: typer.Context) -> set[str]:
    """Names of the parameters that the user gave."""
    sources = {name: command.get_parameter_source(name) for name in command.params}
    return {name for name, source in sources.items() if getattr(source, "name", "DEFAULT") != "DEFAULT"}


def refuse_with_deployed(context: typer.Context, *options: str) -> None:
    """Raise an error for options that an exported folder would ignore."""
    taken = [
        option
        for option in ("base", "artifact", *options)
        if getattr(context.get_parameter_source(option), "name", "DEFAULT") != "DEFAULT"
    ]
    if {"base", "artifact"} & set(taken):
        raise HaloposeError("an exported folder contains its base model and heads: leave --base and --artifact out")
    if taken:
        name = taken[0].replace("_", "-")
        raise HaloposeError(
            f"--{name} has no effect with an exported folder: leave it out, or use the model it was exported from"
        )


def required_files(base: Path | None, artifact: Path | None) -> tuple[Path, Path]:
    """Return the files of a model that has no default; raise an error for a missing one.

    Args:
        base: ``--base``: a path or a name.
        artifact: ``--artifact``: a path or a name; the name of a base model implies it.
    """
    from halopose.hosts import model_zoo

    for name, value in (("base", base or artifact), ("artifact", artifact or base)):
        if value is None:
            raise HaloposeError(f"give --{name}, or --deployed with a folder that `halopose export` wrote")
    if base is None:
        found = model_zoo.resolve(None, artifact)[0]
        if found is None:
            raise HaloposeError("give --base, or --deployed with a folder that `halopose export` wrote")
    return model_zoo.model_files(base, artifact)
