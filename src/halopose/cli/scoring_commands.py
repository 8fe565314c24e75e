"""Commands that need no model: score, recalibrate, apply, synthesize."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halopose.cli.options import (
    Area,
    Bootstrap,
    Family,
    FileFormat,
    Match,
    MaybeArea,
    MaybeRule,
    MaybeScalarisation,
    PixelSize,
    Predictions,
    RegionScales,
    Rule,
    Scalarisation,
    Seed,
    Sigmas,
    Truth,
    finite,
    maybe_between,
    numbers,
    positive,
    share,
)
from halopose.cli.options import sigmas as parse_sigmas
from halopose.cli.terminal import progress, say, write_scores
from halopose.errors import HaloposeError
from halopose.family import DEFAULT_FAMILY

if TYPE_CHECKING:
    from halopose.calibration.calibration_file import CalibrationFile
    from halopose.data.coco import Annotated as LabelledImages
    from halopose.poses import GroundTruth, PoseDistributions


def score(
    predictions: Predictions,
    truth: Truth,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for metrics and report.")],
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration file (repeat for both families); default: cross-fitted."),
    ] = None,
    overlap: Annotated[
        Literal["refuse", "exclude", "allow"],
        typer.Option(help="What to do with images that a calibration was fitted on."),
    ] = "refuse",
    bootstrap: Bootstrap = 200,
    folds: Annotated[int, typer.Option(min=2, max=1000, help="Folds of images for cross-fitting.")] = 5,
    match: Match = "oks",
    area: MaybeArea = None,
    scalarisation: MaybeScalarisation = None,
    rule: MaybeRule = None,
    region_scales: RegionScales = False,
    visibility: Annotated[bool, typer.Option("--visibility", help="Prune by the visibility score as well.")] = False,
    covariance: Annotated[
        Literal["auto", "moment", "paper"],
        typer.Option(help="Covariance of a Student-t: eq. 17 (paper), second moment, or eq. 17 unless nu is near 2."),
    ] = "auto",
    scale_edges: Annotated[str, typer.Option(help="Side lengths in pixels between the object scales.")] = "32,96",
    sigmas: Sigmas = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap and of the random ranking.")] = 0,
    file_format: FileFormat = "auto",
    size: PixelSize = None,
) -> None:
    """Evaluate keypoint covariances of any program: metrics.json, metrics.csv and report.html.

    Example: halopose score predictions.json truth.json -o report
    """
    from halopose.calibration.calibration_file import Pruning, file_that_prunes, known_calibrations
    from halopose.calibration.dispersion_model import cross_fitted_dispersions
    from halopose.data.coco import states_covariance
    from halopose.data.files import make_folder
    from halopose.data.formats.reading import parse_size, read_labels, read_results
    from halopose.evaluation.evaluate import evaluate_predictions
    from halopose.protocol import Protocol
    from halopose.reports.verdict import better_family
    from halopose.types import named

    edges = tuple(side**2 for side in numbers(scale_edges, "scale-edges"))
    given = parse_sigmas(sigmas)
    annotated = read_labels(truth, given)
    content = read_results(predictions, file_format, parse_size(size), truth)
    detections, objects, files = _scoring_input(predictions, content, annotated, calibration or [], overlap)
    pruner = file_that_prunes(files)
    fitted = Pruning() if pruner is None else pruner.pruning
    protocol = Protocol(
        match=match,
        area=area or (Protocol.area if pruner is None else fitted.area),
        scalarisation=scalarisation or fitted.scalarisation,
        threshold_rule=rule or fitted.rule or "youden",
        gamma_ks=fitted.gamma_ks,
        visibility=visibility,
        covariance=covariance,
        scale_edges=edges,
        folds=folds,
        bootstrap=bootstrap,
        seed=seed,
        region_scales=region_scales,
    )
    if pruner is not None:
        fitted.check(protocol, objects.layout)
    make_folder(output)
    if not states_covariance(content) and not files:
        say("the predictions have no covariances: dispersions are modelled from scores, each fold from the others")
        detections = cross_fitted_dispersions(detections, objects, protocol)
    known = known_calibrations(files, objects.layout, protocol)
    with progress() as step:
        scores = evaluate_predictions(detections, objects, protocol, named(step, "resampling images"), **known)
    family = better_family(scores) if not files else None
    following = f"halopose recalibrate {predictions} {truth} --family {family} -o calibration.json" if family else None
    write_scores(scores, output, predictions.name, following)


def recalibrate(
    predictions: Predictions,
    truth: Truth,
    output: Annotated[Path, typer.Option("--output", "-o", help="Calibration json to write.")],
    family: Family = DEFAULT_FAMILY,
    fraction: Annotated[
        float, typer.Option(callback=share, help="Share of the images to use; keep the rest for scoring.")
    ] = 1.0,
    match: Match = "oks",
    area: Area = "box",
    scalarisation: Scalarisation = "trace",
    rule: Rule = "youden",
    region_scales: RegionScales = False,
    features: Annotated[
        str | None,
        typer.Option(
            help="What the dispersion depends on: score, visibility, size, stated, neighbours, posture. Default: "
            "nothing, and all but stated for predictions without covariances."
        ),
    ] = None,
    ignore_covariance: Annotated[
        bool, typer.Option("--ignore-covariance", help="Model the dispersion from scores alone.")
    ] = False,
    sigmas: Sigmas = None,
    file_format: FileFormat = "auto",
    size: PixelSize = None,
) -> None:
    """Fit a calibration, a pruning threshold, regions and the correlation of keypoints on a prediction file.

    Predictions without covariances get a model of their dispersion from scores, size and posture.

    Example: halopose recalibrate predictions.json truth.json -o calibration.json
    """
    from halopose.calibration.calibrate import warn_of_few
    from halopose.calibration.calibration_file import only_images
    from halopose.calibration.dispersion_features import parse_features
    from halopose.calibration.feature_recalibration import recalibrate_predictions
    from halopose.data.coco import parse_predictions, states_covariance
    from halopose.data.files import check_target
    from halopose.data.formats.reading import parse_size, read_labels, read_results
    from halopose.data.splits import part_of_images
    from halopose.protocol import Protocol

    check_target(output)
    chosen = parse_features(features) if features is not None else ()
    annotated = read_labels(truth, parse_sigmas(sigmas))
    objects, content = annotated.truth, read_results(predictions, file_format, parse_size(size), truth)
    detections = parse_predictions(predictions, content, objects, annotated.classes, constants=True)
    stated = states_covariance(content) and not ignore_covariance
    images = part_of_images(objects.images, fraction)
    protocol = Protocol(
        match=match, area=area, scalarisation=scalarisation, threshold_rule=rule, region_scales=region_scales
    )
    found = recalibrate_predictions(
        *only_images(detections, objects, images), images, family, protocol, chosen, stated=stated
    )
    warn_of_few(found.matched, len(images))
    found.file.save(output)
    if found.gain is not None:
        verdict = "used" if found.gain.certain else "not used: temperatures are enough"
        say(f"features gain {found.gain.nats:.4f} +- {found.gain.error:.4f} nats per keypoint, {verdict}")
    kind = "covariances" if found.file.dispersion is None else f"{', '.join(found.file.dispersion.features)}"
    say(f"{family} calibration of {kind} on {len(found.matched)} instances of {len(images)} images -> {output}")


def apply(
    calibration: Annotated[Path, typer.Argument(help="Calibration json from `halopose recalibrate`.")],
    predictions: Predictions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Prediction json, or csv, to write.")],
    joint: Annotated[bool, typer.Option("--joint", help="Also write the correlation of keypoints.")] = False,
    region: Annotated[
        float | None, typer.Option(callback=maybe_between, help="Also write regions of this probability.")
    ] = None,
    file_format: FileFormat = "auto",
    size: PixelSize = None,
) -> None:
    """Apply a calibration to a prediction file; keypoints, boxes and scores do not change.

    `keep` is recomputed if the calibration was made with --area box or without covariances. A file of another tool
    becomes COCO results, or its own format with covariances if the output is named like it.

    Example: halopose apply calibration.json predictions.json -o calibrated.json
    """
    from halopose.calibration.calibration_file import CalibrationFile, apply_to_entries
    from halopose.data.files import check_target, write_json
    from halopose.data.formats.reading import parse_size, read_foreign, read_results, results_as, write_table

    check_target(output)
    file, pixels = CalibrationFile.load(calibration), parse_size(size)
    foreign = read_foreign(predictions, file_format, pixels)
    content = read_results(predictions, file_format, pixels)
    entries = apply_to_entries(file, content, predictions, joint=joint, region=region)
    count = len(entries)
    if foreign is not None and (output.suffix == predictions.suffix == ".csv" or not output.suffix):
        write_table(results_as(entries, foreign[0]), output, foreign[1])
    else:
        write_json(output, entries)
    say(f"{file.family} calibration applied to {count} detections -> {output}")


def sigmas(
    labels: Annotated[
        list[Path], typer.Argument(help="COCO ground truth, or labels of another tool; several annotators.")
    ],
    predictions: Annotated[
        Path | None, typer.Option(help="Predictions of a model for these images; else labels are repeated.")
    ] = None,
    file_format: FileFormat = "auto",
    size: PixelSize = None,
) -> None:
    """Estimate OKS sigmas of custom keypoints from repeated labels, or from a model's residuals.

    Example: halopose sigmas annotator1.json annotator2.json
    """
    from halopose.calibration.oks_sigmas import sigmas_from_repeats, sigmas_from_residuals
    from halopose.data.coco import parse_predictions
    from halopose.data.formats.reading import parse_size, read_labels, read_results

    read = [read_labels(path) for path in labels]
    if predictions is None:
        found = sigmas_from_repeats(read)
    else:
        if len(read) > 1:
            raise HaloposeError("give one label file with --predictions")
        content = read_results(predictions, file_format, parse_size(size), labels[0])
        detections = parse_predictions(predictions, content, read[0].truth, read[0].classes, constants=True)
        found = sigmas_from_residuals(detections, read[0].truth)
    for name, value, error, count in zip(found.names, found.sigmas, found.error, found.samples, strict=True):
        say(f"{name:20} {value:.4f} +- {error:.4f}  ({count} samples)", always=True)
    say(f"--sigmas {','.join(f'{value:.4f}' for value in found.sigmas)}", always=True)
    if found.source == "repeats":
        say("from repeated labels: the spread of annotators")
    else:
        say("from residuals of the best-scored quarter: label noise and model error of easy keypoints together")


def leaderboard(
    truth: Truth,
    predictions: Annotated[
        list[str], typer.Argument(help="NAME=FILE of each method; FILE is a prediction file or rows of an earlier run.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Markdown page to write.")] = Path("leaderboard.md"),
    rows: Annotated[Path | None, typer.Option(help="Json of all rows to write, for others to add to.")] = None,
    cost: Annotated[
        str | None, typer.Option(help="Passes of the model per image, one for each method, comma separated.")
    ] = None,
    sigmas: Sigmas = None,
    file_format: FileFormat = "auto",
    size: PixelSize = None,
) -> None:
    """Compare methods by the calibration of their covariances: one row from each prediction file.

    A file without covariances is scored by a dispersion model of its scores.

    Example: halopose leaderboard truth.json heads=a.json scores=b.json -o leaderboard.md
    """
    from halopose.calibration.dispersion_model import cross_fitted_dispersions, match_predicted
    from halopose.data.coco import parse_predictions, states_covariance
    from halopose.data.files import check_target, write_text
    from halopose.data.formats.reading import parse_size, read_labels, read_results
    from halopose.evaluation.leaderboard import FORMAT, leaderboard_row, leaderboard_table, read_rows, write_rows
    from halopose.protocol import Protocol

    check_target(output)
    costs = [""] * len(predictions) if cost is None else [part.strip() for part in cost.split(",")]
    if len(costs) != len(predictions):
        raise HaloposeError(f"--cost takes {len(predictions)} values with commas, one for each method")
    annotated, protocol, found = read_labels(truth, parse_sigmas(sigmas)), Protocol(), []
    for given, price in zip(predictions, costs, strict=True):
        name, _, file = given.rpartition("=")
        content: Any = read_results(file, file_format, parse_size(size), truth)
        if isinstance(content, dict) and content.get("format") == FORMAT:
            found += read_rows(file)
            continue
        if not name:
            raise HaloposeError(f"give NAME=FILE, as in heads={given}")
        poses = parse_predictions(file, content, annotated.truth, annotated.classes, constants=True)
        if not states_covariance(content):
            poses = cross_fitted_dispersions(poses, annotated.truth, protocol)
        found.append(leaderboard_row(name, price, match_predicted(poses, annotated.truth, protocol), protocol))
        say(f"{name}: AKP {found[-1].akp:.3f}, ACE {found[-1].ace:.4f}")
    write_text(output, leaderboard_table(found) + "\n")
    if rows is not None:
        write_rows(rows, found)
    say(f"{len(found)} rows -> {output}")


def convert(
    source: Annotated[Path, typer.Argument(help="File of another tool, or folder of OpenPose's json files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; a folder for OpenPose.")],
    to: Annotated[
        Literal["auto", "coco", "deeplabcut", "lightning-pose", "anipose", "sleap", "mediapipe", "mmpose", "openpose"],
        typer.Option(help="Format to write; auto takes COCO results for .json and DeepLabCut's for .csv."),
    ] = "auto",
    labels: Annotated[
        bool, typer.Option("--labels", help="The keypoints are labels: write COCO ground truth.")
    ] = False,
    file_format: FileFormat = "auto",
    size: PixelSize = None,
) -> None:
    """Convert keypoints between DeepLabCut, Lightning Pose, SLEAP, MediaPipe, MMPose, OpenPose and COCO.

    Example: halopose convert hands.csv -o hands.json --size 640x480
    """
    from dataclasses import replace

    from halopose.data.coco import parse_predictions
    from halopose.data.files import write_json
    from halopose.data.formats.reading import parse_size, read_foreign, read_results, results_as, write_table

    pixels = parse_size(size)
    foreign = read_foreign(source, file_format, pixels)
    if foreign is None:
        content = read_results(source, "coco")
        parse_predictions(source, content, None, constants=True)
        table = results_as(content, None)
    else:
        table = foreign[0]
    if pixels is not None:
        table = replace(table, size=pixels)
    if labels:
        write_json(output, table.to_truth())
    else:
        write_table(table, output, to)
    say(f"{len(table.frames)} poses of {len(table.names)} keypoints -> {output}")


def synthesize(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for truth.json, predictions.json.")],
    images: Annotated[int, typer.Option(min=2, max=1_000_000, help="Number of images.")] = 600,
    persons: Annotated[int, typer.Option(min=2, max=1_000_000, help="Number of persons.")] = 1500,
    dof: Annotated[float, typer.Option(callback=positive, help="Degrees of freedom of the residuals.")] = 4.0,
    gaussian: Annotated[bool, typer.Option("--gaussian", help="Gaussian residuals instead.")] = False,
    overconfidence: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="True standard deviation over the reported one.")
    ] = 1.25,
    seed: Seed = 0,
) -> None:
    """Generate poses with a known distribution of errors, to try the protocol.

    Example: halopose synthesize -o synthetic
    """
    from halopose.data.files import check_target, write_json
    from halopose.data.synthetic_poses import World, synthesize

    check_target(output / "truth.json")
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


def _scoring_input(
    predictions: Path, content: list[dict[str, Any]], annotated: LabelledImages, calibrations: list[Path], overlap: str
) -> tuple[PoseDistributions, GroundTruth, list[CalibrationFile]]:
    """Check the input of scoring, and remove images that a calibration has seen as ``overlap`` says."""
    import numpy as np

    from halopose.calibration.calibration_file import CalibrationFile, images_seen, only_images
    from halopose.calibration.feature_recalibration import with_dispersions
    from halopose.data.coco import parse_predictions

    objects = annotated.truth
    files = [CalibrationFile.load(path) for path in calibrations]
    # Without a calibration of score-only predictions, ``score`` models the dispersion itself.
    constants = all(file.needs_no_covariance for file in files)
    detections = parse_predictions(predictions, content, objects, annotated.classes, constants=constants)
    for path, file in zip(calibrations, files, strict=True):
        if len(file.names) != objects.keypoint_count:
            raise HaloposeError(
                f"{path} is for {len(file.names)} keypoints, the ground truth has {objects.keypoint_count}"
            )
    for path, file in zip(calibrations, files, strict=True):
        if file.names != objects.layout.names and set(file.names) == set(objects.layout.names):
            raise HaloposeError(f"{path} has its keypoints in another order than the ground truth: fit it again")
    if len({file.family for file in files}) < len(files):
        raise HaloposeError("give at most one calibration of each family")
    seen = set(images_seen(content, files).tolist()) & set(objects.images.tolist())
    if seen and overlap == "refuse":
        raise HaloposeError(
            f"{len(seen)} of {len(objects.images)} images were used to fit the calibration: score other "
            "images, or give --overlap exclude (leave them out) or --overlap allow"
        )
    if seen and overlap == "exclude":
        if len(seen) == len(objects.images):
            raise HaloposeError("every image was used to fit the calibration: nothing is left to score")
        left = np.setdiff1d(objects.images, np.array(sorted(seen)))
        detections, objects = only_images(detections, objects, left)
    return with_dispersions(detections, files), objects, files
