"""The command line: each command takes what it acts on as its argument.

Heavy imports happen inside the commands, so that ``halopose --help`` answers at once. A mistake that the
user can mend is printed as one line, and the exit code is 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halopose.cli import export as cli_export
from halopose.cli import landing as cli_landing
from halopose.cli import models as cli_models
from halopose.cli import studies as cli_studies
from halopose.cli.terminal import finite, floats, numbers, positive, progress, say, several, share, write_scores
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.evaluation.calibration_file import CalibrationFile
    from halopose.poses import GroundTruth, PoseDistributions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Calibrated predictive distributions for the keypoints of pose models.",
)

Predictions = Annotated[Path, typer.Argument(help="COCO keypoint results json with covariances.")]
Truth = Annotated[Path, typer.Argument(help="COCO keypoint ground truth json.")]
Sigmas = Annotated[
    str | None, typer.Option(help="Keypoint sigmas, comma separated; else the category's, COCO's, or 1/K.")
]
Family = Literal["gaussian", "student-t"]
# Of click, or of the copy of click that some versions of Typer carry.
_UsageError: Any = typer.BadParameter.__base__


@app.command()
def score(
    predictions: Predictions,
    truth: Truth,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for metrics and report.")],
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration fitted elsewhere (repeat for both families); else cross-fitted."),
    ] = None,
    overlap: Annotated[
        Literal["refuse", "exclude", "allow"],
        typer.Option(help="What to do with images that a calibration was fitted on."),
    ] = "refuse",
    bootstrap: Annotated[
        int, typer.Option(min=0, callback=several, help="Resamplings of images for 95 % intervals.")
    ] = 200,
    folds: Annotated[int, typer.Option(min=2, help="Folds of images for cross-fitting.")] = 5,
    area: Annotated[
        Literal["annotation", "box"], typer.Option(help="Object area in the localization confidence.")
    ] = "annotation",
    scalarisation: Annotated[
        Literal["trace", "determinant", "eigenvalue"], typer.Option(help="Size of a covariance.")
    ] = "trace",
    rule: Annotated[
        Literal["youden", "distance", "f1"], typer.Option(help="How the pruning threshold is chosen.")
    ] = "youden",
    covariance: Annotated[
        Literal["moment", "paper"], typer.Option(help="Covariance of a Student-t: second moment, or eq. 17.")
    ] = "moment",
    scale_edges: Annotated[str, typer.Option(help="Sides in pixels that part the object scales.")] = "32,96",
    sigmas: Sigmas = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of the random ranking.")] = 0,
) -> None:
    """Score anyone's keypoint covariances: writes metrics.json, metrics.csv and report.html."""
    from halopose.data.coco import make_folder
    from halopose.evaluation.calibration_file import given_by
    from halopose.evaluation.calibrations import cross_fitted
    from halopose.evaluation.protocol import Protocol, evaluate, match_poses

    edges = tuple(side**2 for side in numbers(scale_edges, "scale-edges"))
    given = _sigmas(sigmas)
    protocol = Protocol(
        area=area,
        scalarisation=scalarisation,
        threshold_rule=rule,
        covariance=covariance,
        scale_edges=edges,
        folds=folds,
        bootstrap=bootstrap,
        seed=seed,
    )
    detections, objects, files = _scoring_input(predictions, truth, calibration or [], overlap, given)
    make_folder(output)
    matched = match_poses(detections, objects, protocol)
    regimes = None
    if files and len(matched):
        regimes = cross_fitted(matched, protocol, given_by(files))
    with progress() as step:
        metrics = evaluate(matched, regimes, protocol, lambda *count: step("resampling images", *count))
    write_scores(metrics, output, predictions.name)


@app.command()
def recalibrate(
    predictions: Predictions,
    truth: Truth,
    output: Annotated[Path, typer.Option("--output", "-o", help="Calibration json to write.")],
    family: Annotated[Family, typer.Option(help="Law to calibrate.")] = "gaussian",
    fraction: Annotated[
        float, typer.Option(callback=share, help="Share of the images to use; leave the rest for scoring.")
    ] = 1.0,
    sigmas: Sigmas = None,
) -> None:
    """Fit a calibration and a pruning threshold on a prediction file."""
    from halopose.data.coco import read_ground_truth, read_predictions
    from halopose.evaluation.calibration_file import CalibrationFile, part_of_images
    from halopose.evaluation.protocol import Protocol, match_poses

    objects = read_ground_truth(truth, _sigmas(sigmas))
    detections = read_predictions(predictions, objects)
    images = part_of_images(objects, fraction)
    protocol = Protocol()
    matched = match_poses(*_only_images(detections, objects, images), protocol)
    if not len(matched):
        raise HaloposeError("no detection matches an annotated object: check that images and pixels agree")
    file = CalibrationFile.fit(matched, images, family, protocol)
    file.save(output)
    say(f"{family} calibration on {len(matched)} instances of {len(images)} images -> {output}")


@app.command()
def apply(
    calibration: Annotated[Path, typer.Argument(help="Calibration json from `halopose recalibrate`.")],
    predictions: Predictions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Prediction json to write.")],
) -> None:
    """Apply a calibration to a prediction file; keypoints, boxes and scores stay as they are."""
    from halopose.evaluation.calibration_file import CalibrationFile, apply_to_file

    file = CalibrationFile.load(calibration)
    count = apply_to_file(file, predictions, output)
    say(f"{file.family} calibration applied to {count} detections -> {output}")


@app.command()
def synthesize(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for truth.json, predictions.json.")],
    images: Annotated[int, typer.Option(min=2, help="Number of images.")] = 600,
    persons: Annotated[int, typer.Option(min=2, help="Number of persons.")] = 1500,
    dof: Annotated[float, typer.Option(callback=positive, help="Degrees of freedom of the residuals.")] = 4.0,
    gaussian: Annotated[bool, typer.Option("--gaussian", help="Gaussian residuals instead.")] = False,
    overconfidence: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="True over reported deviation.")
    ] = 1.25,
    seed: cli_models.Seed = 0,
) -> None:
    """Make poses whose true distribution is known, to try the protocol out."""
    from halopose.data.coco import write_json
    from halopose.data.synthetic import World, synthesize

    world = World(
        images=images,
        persons=persons,
        dof=None if gaussian else dof,
        overconfidence=overconfidence,
        seed=seed,
    )
    truth, entries = synthesize(world)
    write_json(output / "truth.json", truth)
    write_json(output / "predictions.json", entries)
    say(f"{persons} persons in {images} images -> {output / 'truth.json'}, {output / 'predictions.json'}")


for command in (
    cli_models.fit,
    cli_models.collect,
    cli_models.train,
    cli_models.calibrate,
    cli_models.evaluate,
    cli_models.predict,
    cli_export.export,
    cli_landing.land,
    cli_studies.ablate,
    cli_studies.finetune,
    cli_studies.analyse,
):
    app.command()(command)


def main() -> None:
    """Run a command; a user's mistake becomes one line and exit code 2."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except HaloposeError as error:
        message = str(error)
    except _UsageError as error:
        message = f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'halopose'} --help)"
    sys.stderr.write(f"halopose: {' '.join(message.split())}\n")
    sys.exit(2)


def _sigmas(text: str | None) -> list[float] | None:
    values = None if text is None else floats(text, "sigmas")
    if values and min(values) <= 0:
        raise HaloposeError(f"--sigmas takes positive numbers, got {text!r}")
    return values


def _scoring_input(
    predictions: Path, truth: Path, calibrations: list[Path], overlap: str, sigmas: list[float] | None
) -> tuple[PoseDistributions, GroundTruth, list[CalibrationFile]]:
    """Read what scoring needs and settle what happens to images that a calibration has seen."""
    from halopose.data.coco import parse_predictions, read_ground_truth, read_json
    from halopose.evaluation.calibration_file import CalibrationFile, images_seen, without_images

    objects = read_ground_truth(truth, sigmas)
    content = read_json(predictions)
    detections = parse_predictions(predictions, content, objects)
    files = [CalibrationFile.load(path) for path in calibrations]
    for path, file in zip(calibrations, files, strict=True):
        if len(file.names) != objects.keypoint_count:
            raise HaloposeError(
                f"{path} is for {len(file.names)} keypoints, the ground truth has {objects.keypoint_count}"
            )
    if len({file.family for file in files}) < len(files):
        raise HaloposeError("give at most one calibration of each family")
    seen = set(images_seen(content, files).tolist()) & set(objects.images.tolist())
    if seen and overlap == "refuse":
        raise HaloposeError(
            f"{len(seen)} of {len(objects.images)} images were used to fit the calibration: score other "
            "images, or say --overlap exclude (leave them out) or --overlap allow"
        )
    if seen and overlap == "exclude":
        if len(seen) == len(objects.images):
            raise HaloposeError("every image was used to fit the calibration: nothing is left to score")
        import numpy as np

        detections, objects = without_images(detections, objects, np.array(sorted(seen)))
    return detections, objects, files


def _only_images(
    detections: PoseDistributions, objects: GroundTruth, images: Any
) -> tuple[PoseDistributions, GroundTruth]:
    import numpy as np

    from halopose.evaluation.calibration_file import without_images

    return without_images(detections, objects, np.setdiff1d(objects.images, images))


if __name__ == "__main__":
    main()
