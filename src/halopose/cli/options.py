"""Options that several commands share, and checks that turn a user's mistake into one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from halopose.errors import HaloposeError

MANY = 100_000  # resamplings or epochs that nobody waits for
SMALLEST, LARGEST = 32, 16384  # input sizes; the smallest is the stride of the coarsest level


class Grouped(TyperCommand):
    """A command whose help lists options by their panel, without rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section for each panel; what names none is under Arguments or Options."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for given in self.get_params(ctx):
            usual = "Arguments" if given.param_type_name == "argument" else "Options"
            record = given.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(given, "rich_help_panel", None) or usual, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def add_command(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add a command whose help groups its options; the summary is the first line of its docstring."""
    summary = (command.__doc__ or "").splitlines()[0]  # in full, where click would shorten it
    app.command(cls=Grouped, short_help=summary)(command)


def finite(value: float) -> float:
    """For an option: neither NaN nor infinite, which a range that begins at 0 may let pass."""
    _demand(math.isfinite(value), "give a finite number", value)
    return value


def positive(value: float | None) -> float | None:
    """For an option: finite and above 0, or left out."""
    if value is not None:
        _demand(0 < value < math.inf, "give a number above 0", value)
    return value


def share(value: float) -> float:
    """For an option: a part of a whole that is not nothing."""
    _demand(0 < value <= 1, "give a number above 0 and up to 1", value)
    return value


def between(value: float) -> float:
    """For an option: neither nothing nor everything."""
    _demand(0 < value < 1, "give a number between 0 and 1, neither of them", value)
    return value


def maybe_between(value: float | None) -> float | None:
    """For an option: neither nothing nor everything, or left out."""
    return None if value is None else between(value)


def several(value: int) -> int:
    """For an option: resamplings that a spread can be taken of, or none."""
    _demand(value != 1, "give 0 for none, or 2 and more", value)
    return value


def _demand(good: bool, advice: str, value: float) -> None:
    if not good:
        raise typer.BadParameter(f"{advice}, got {value}")


def numbers(text: str, option: str) -> list[float]:
    """Positive numbers separated by commas, each larger than the one before."""
    values = floats(text, option)
    if values[0] <= 0 or values[-1] > 1e6 or any(low >= high for low, high in pairwise(values)):
        raise HaloposeError(f"--{option} takes positive numbers in rising order, up to a million, got {text!r}")
    return values


def exponents(text: str, option: str) -> list[float]:
    """Numbers separated by commas, none below 0."""
    values = floats(text, option)
    if min(values) < 0:
        raise HaloposeError(f"--{option} takes numbers from 0 on, got {text!r}")
    return values


def threshold_rule(text: str | None) -> str | None:
    """A rule for pruning thresholds, checked, or left out."""
    from halopose.uncertainty.pruning import risk_guarantee

    try:
        if text is not None:
            risk_guarantee(text)
    except HaloposeError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def floats(text: str, option: str) -> list[float]:
    """Finite numbers separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not (values and all(map(math.isfinite, values))):
        raise HaloposeError(f"--{option} takes numbers separated by commas, got {text!r}")
    return values


def read_config(path: Path, commands: Sequence[str], groups: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Options by command from a yaml file, in the names that they have on the command line.

    A group has its commands, with their options, under its name, such as ``land: {simulate: {rate: 1}}``.
    """
    from halopose.data.bounded_text import read_yaml

    content = read_yaml(path)
    for command, options in content.items():
        if command not in (*commands, *groups) or not isinstance(options, dict):
            raise HaloposeError(f"{path}: {command!r} is no command with options, such as fit: {{epochs: 20}}")
        wrong = next(
            (name for name, given in options.items() if command in groups and not isinstance(given, dict)), None
        )
        if wrong is not None:
            raise HaloposeError(
                f"{path}: {command} has commands of its own: give {command}: {{COMMAND: {{{wrong}: ...}}}}"
            )
    return {command: _underscored(options) for command, options in content.items()}


def _underscored(options: dict[str, Any]) -> dict[str, Any]:
    return {
        str(name).replace("-", "_"): _underscored(value) if isinstance(value, dict) else value
        for name, value in options.items()
    }


def sizes(text: str, option: str = "train-sizes") -> tuple[int, ...]:
    """Input sizes separated by commas."""
    values = numbers(text, option)
    if any(not SMALLEST <= value <= LARGEST or value % 1 for value in values):
        raise HaloposeError(f"--{option} takes whole numbers of pixels from {SMALLEST} to {LARGEST}, got {text!r}")
    return tuple(map(int, values))


def sigmas(text: str | None) -> list[float] | None:
    """Keypoint sigmas separated by commas, if any are given."""
    values = None if text is None else floats(text, "sigmas")
    if values and min(values) <= 0:
        raise HaloposeError(f"--sigmas takes positive numbers, got {text!r}")
    return values


Family = Annotated[Literal["gaussian", "student-t"], typer.Option(help="Law.")]
Predictions = Annotated[Path, typer.Argument(help="COCO keypoint results json with covariances.")]
Truth = Annotated[Path, typer.Argument(help="COCO keypoint ground truth json.")]
Sigmas = Annotated[
    str | None, typer.Option(help="Keypoint sigmas, comma separated; else the category's, COCO's, or 1/K.")
]
Data = Annotated[Path, typer.Argument(help="YOLO data yaml, or COCO keypoint json.")]
Base = Annotated[Path, typer.Option(help="Trained pose model, a .pt checkpoint.")]
Images = Annotated[Path | None, typer.Option(help="Folder of the images of COCO json.")]
Workers = Annotated[
    int | None, typer.Option(min=0, max=MANY, help="Processes: that run the model on a CPU, or read for a GPU.")
]
Batch = Annotated[int | None, typer.Option(min=1, max=MANY, help="Images at once; else 1 on a CPU, 16 on a GPU.")]
Half = Annotated[bool, typer.Option("--half", help="Half precision before the head: faster on a GPU, not bit for bit.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Load a checkpoint that may run code; trusted files only.")]
End2End = Annotated[bool | None, typer.Option(help="Head of a YOLO26 that has both; else as in the checkpoint.")]
Alpha = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="Exponent of the retention weight; 0 switches it off.")
]
ScaleWeight = Annotated[bool, typer.Option(help="Weigh objects by 1 / area.")]
Dof = Annotated[
    float | None,
    typer.Option(callback=positive, help="Train with the loss of a Student-t of so many degrees of freedom."),
]
Epochs = Annotated[int, typer.Option(min=1, max=MANY, help="At most so many epochs.")]
Dispersion = Annotated[Literal["full", "diagonal", "isotropic"], typer.Option(help="Form of the dispersion.")]
Trunk = Annotated[Literal["mirrored", "last-layer"], typer.Option(help="Kind of head.")]
WarmStart = Annotated[bool, typer.Option(help="Start from the pose head's own convolutions.")]
ContextOption = Annotated[
    bool,
    typer.Option(
        "--context", help="Heads with context features: overlapping boxes, and neck features at the keypoints."
    ),
]
Source = Annotated[Literal["matched", "assigned"], typer.Option(help="What to calibrate on.")]
ImageSize = Annotated[int, typer.Option(min=SMALLEST, max=LARGEST, help="Input size.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
NoveltyImages = Annotated[
    int, typer.Option(min=0, help="Training images copied and corrupted to learn what is new; 0 for none.")
]
Alarm = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        callback=positive,
        help="Flag what is unlike the data: so many false alarms on usual images.",
    ),
]
Confidence = Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="Confidence threshold.")]
Iou = Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="IoU threshold of NMS.")]
OtherSize = Annotated[int | None, typer.Option(min=SMALLEST, max=LARGEST, help="Input size; else the artifact's.")]
Train = Annotated[str, typer.Option(help="Training split; several with commas.")]
Val = Annotated[str, typer.Option(help="Validation split, or a second COCO json.")]
ValImages = Annotated[Path | None, typer.Option(help="Folder of the images of a second json.")]
TrainSizes = Annotated[str | None, typer.Option(help="Input sizes to train at; else --imgsz.")]
CalibrationShare = Annotated[
    float, typer.Option(callback=between, help="Part of the validation images, between 0 and 1.")
]
Bootstrap = Annotated[
    int,
    typer.Option(min=0, max=MANY, callback=several, help="Resamplings of images for 95 % intervals; 0 for none."),
]
Visibility = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Prune below this visibility score; 0 for never, else the artifact's."),
]
Uncalibrated = Annotated[bool, typer.Option("--uncalibrated", help="Take heads that nothing has calibrated yet.")]
Rule = Annotated[
    str,
    typer.Option(
        callback=threshold_rule,
        help="How pruning thresholds are chosen: youden, distance, f1, or a promise such as risk:0.05@0.95.",
    ),
]
MaybeRule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        callback=threshold_rule,
        help="How pruning thresholds are chosen, as in recalibrate; else the calibration's, else youden.",
    ),
]
Area = Annotated[
    Literal["annotation", "box"],
    typer.Option(help="Object area in the localization confidence; box, as there is at inference."),
]
MaybeArea = Annotated[
    Literal["annotation", "box"] | None,
    typer.Option("--area", help="Object area in the confidence; else the calibration's, else annotation."),
]
Scalarisation = Annotated[
    Literal["trace", "determinant", "eigenvalue"], typer.Option(help="Size of a covariance in the confidence.")
]
MaybeScalarisation = Annotated[
    Literal["trace", "determinant", "eigenvalue"] | None,
    typer.Option("--scalarisation", help="Size of a covariance; else the calibration's, else trace."),
]
RegionScales = Annotated[
    bool, typer.Option("--region-scales", help="Regions have radii of their own at every object scale.")
]
RuleAsMade = Annotated[
    str | None,
    typer.Option(
        callback=threshold_rule,
        help="How pruning thresholds are chosen, as fit's; else as when the heads were made.",
    ),
]
MaybeRegionScales = Annotated[
    bool | None,
    typer.Option(
        "--region-scales/--no-region-scales",
        help="Regions have radii of their own at every object scale, or not; else as when the heads were made.",
    ),
]
Deployed = Annotated[Path | None, typer.Option("--deployed", help="Folder of `halopose export`, not --base.")]
MaybeBase = Annotated[
    Path | None,
    typer.Option("--base", help="Trained pose model, a .pt checkpoint, or a name of `halopose models`."),
]
MaybeArtifact = Annotated[Path | None, typer.Option("--artifact", help="Artifact made for this base.")]
BaseElseShipped = Annotated[
    Path | None,
    typer.Option("--base", help="A .pt checkpoint, or a name of `halopose models`; else YOLO11n-pose."),
]
ArtifactElseShipped = Annotated[
    Path | None, typer.Option("--artifact", help="Artifact made for the base; else the shipped one.")
]


def given(path: Path | None, option: str) -> Path:
    """A path that is needed where no deployed folder is given."""
    if path is None:
        raise HaloposeError(f"give --{option}, or --deployed with a folder that `halopose export` wrote")
    return path


def named_files(base: Path | None, artifact: Path | None) -> tuple[Path | None, Path | None]:
    """Base and artifact, where a name that `halopose models` lists may stand for them."""
    from halopose.hosts import model_zoo

    found, heads = model_zoo.resolve(base, artifact)
    return None if found is None else Path(found), None if heads is None else Path(heads)


def files_or_shipped(base: Path | None, artifact: Path | None) -> tuple[Path | None, Path | None]:
    """The same for commands that have a model without either; a base of one's own needs heads of its own."""
    from halopose.hosts import model_zoo

    base, artifact = named_files(base, artifact)
    if base is not None and artifact is None and not model_zoo.is_default_base(base):
        raise HaloposeError("the shipped heads are for YOLO11n-pose: give --artifact for your base")
    return base, artifact


def refuse_with_deployed(context: typer.Context, *options: str) -> None:
    """Refuse what a deployed folder would ignore: its base and heads are in it, and its runtime is fixed."""
    taken = [
        option
        for option in ("base", "artifact", *options)
        if getattr(context.get_parameter_source(option), "name", "DEFAULT") != "DEFAULT"
    ]
    if {"base", "artifact"} & set(taken):
        raise HaloposeError("a deployed folder has its base and heads in it: leave --base and --artifact out")
    if taken:
        name = taken[0].replace("_", "-")
        raise HaloposeError(
            f"--{name} does nothing with a deployed folder: leave it out, or use the model it was exported from"
        )
