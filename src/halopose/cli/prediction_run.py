"""A prediction over many files: results as they come, bad files listed and passed over, a rerun that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halopose.cli.terminal import progress, say
from halopose.data.coco import Numbering
from halopose.data.dataset import image_id, image_ids
from halopose.data.films import FilmWriter, film_facts
from halopose.data.images import NamedImage, write_image
from halopose.data.sources import Source
from halopose.data.storage.prediction_log import PredictionLog
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.types import Array, Progress


@dataclass(frozen=True)
class Drawing:
    """What pictures show."""

    probability: float
    pruned: bool
    boxes: bool
    legend: bool
    alarm: float | None = None


class _Run:
    def __init__(
        self,
        model: Predictor,
        folder: Path,
        drawing: Drawing | None,
        ids: Numbering | None,
        joint: bool,
        alarm: float | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.folder, self.drawing, self.ids, self.options = model, folder, drawing, ids, options
        self.joint, self.alarm = joint, alarm
        told = (asdict(each) if each else None for each in (ids, drawing))
        settings = [*model.identity(), model.family, options, *told, joint, alarm]
        self.log = PredictionLog(folder, settings)
        self.numbers: dict[str, int] = {}

    def source(self, source: Source, step: Progress) -> None:
        """Everything about one source; an error leaves nothing of it behind."""
        if source.is_film or source.stream is not None:
            self._film(source, step)
            return
        for image in _read(source):
            poses = self._poses(image, source.file_name)
            picture = self._picture(image.pixels, poses)
            if picture is not None:
                target = self.folder / f"{image.name}.jpg"
                if image.path is not None and target.resolve() == image.path.resolve():
                    raise HaloposeError(f"the picture of {image.path} would take its place: choose another --output")
                write_image(target, picture)
            say(f"{image.name}: {_counts(poses, self.alarm)}")
        self.log.done(source.file_name)

    def _film(self, source: Source, step: Progress) -> None:
        rate, count = film_facts(source.path) if source.path is not None else (25.0, 0)
        began = time.monotonic()
        number = 0
        with FilmWriter(self.folder / f"{source.name}.mp4", rate) as film:
            for number, image in enumerate(_read(source), 1):
                poses = self._poses(image, source.file_name)
                picture = self._picture(image.pixels, poses)
                if picture is not None:
                    film.write(picture)
                pace = 1000 * (time.monotonic() - began) / number
                step(f"{source.name} ({pace:.0f} ms a frame)", number, max(count, number))
        self.log.done(source.file_name)
        pace = 1000 * (time.monotonic() - began) / max(number, 1)
        say(f"{source.name}: {number} frames, {pace:.0f} ms a frame")

    def _poses(self, image: NamedImage, file_name: str) -> PoseDistributions:
        """Predict, and log what was found."""
        try:
            poses = self.model.predict(image.pixels, **self.options)[0]
        except HaloposeError as error:
            raise _Unusable(f"{file_name}: {error}") from None
        name = file_name if image.path is not None else image.name
        if self.ids is not None and name not in self.ids.images:
            raise HaloposeError(f"the truth knows no image called {name}: leave --truth off, or give the right one")
        identity = self.numbers.get(name, image_id(name)) if self.ids is None else self.ids.images[name]
        of_image: dict[str, Any] = {"image_id": identity, "file_name": name}
        if self.alarm is not None and poses.image_novelty is not None:
            of_image["image_novelty"] = float(poses.image_novelty[0])
        entries = [{**entry, **of_image} for entry in poses.to_json(self.joint)]
        if self.ids is not None:
            for entry in entries:
                entry["category_id"] = self.ids.category(entry["category_id"])
        if self.alarm is not None:
            for entry, usual in zip(entries, poses.in_distribution(self.alarm).tolist(), strict=True):
                entry["in_distribution"] = usual
        self.log.add(file_name, entries)
        return poses

    def _picture(self, pixels: Array, poses: PoseDistributions) -> Array | None:
        if self.drawing is None:
            return None
        layout = self.model.layout
        return poses.plot(
            pixels,
            probability=self.drawing.probability,
            show_pruned=self.drawing.pruned,
            boxes=self.drawing.boxes,
            legend=self.drawing.legend,
            names=layout.names,
            limbs=layout.limbs,
            alarm=self.drawing.alarm,
        )


class _Unusable(HaloposeError):
    """A file that cannot be read or predicted; the others may still."""


def _read(source: Source) -> Iterator[NamedImage]:
    """The images of a source; what goes wrong with reading concerns this source alone."""
    images = source.images()
    while True:
        try:
            image = next(images)
        except StopIteration:
            return
        except HaloposeError as error:
            raise _Unusable(str(error)) from None
        yield image


def predict_sources(
    model: Predictor,
    sources: Sequence[Source],
    folder: Path,
    drawing: Drawing | None,
    ids: Numbering | None,
    *,
    joint: bool = False,
    alarm: float | None = None,
    **options: Any,
) -> list[str]:
    """Predict every source into the folder; lines about those that could not be read.

    joint: write how keypoints err together, too. alarm: say of every detection and every image whether it is like
    the data, at that rate of false alarms.
    """
    one = _Run(model, folder, drawing, ids, joint, alarm, options)
    names = [source.file_name for source in sources]
    one.numbers = dict(zip(names, image_ids(names), strict=True))
    left = [source for source in sources if source.file_name not in one.log.finished]
    if len(left) < len(sources):
        say(f"{len(sources) - len(left)} of {len(sources)} were done before: going on")
    skipped: list[str] = []
    complete = False
    try:
        with progress() as step:
            for number, source in enumerate(left):
                step("predicting", number, len(left))
                try:
                    one.source(source, step)
                except _Unusable as error:
                    skipped.append(f"{error}")
                    say(f"skipped: {error}")
            step("predicting", len(left), len(left))
        complete = True
    except KeyboardInterrupt:
        say(f"stopped: what is done is kept in {folder}, and the same command goes on")
        raise
    finally:
        done = _closed(one.log, complete)
    say(f"{done} of {len(sources)} -> {folder}")
    if skipped:
        say(f"{len(skipped)} could not be read")
    return skipped


def _closed(log: PredictionLog, complete: bool) -> int:
    """Write predictions.json; what a full disk refuses now was refused before, and is known by then."""
    try:
        return log.close(complete)
    except HaloposeError:
        if complete:
            raise
        return 0


def _counts(poses: PoseDistributions, alarm: float | None) -> str:
    keep = np.asarray(poses.keep)
    text = f"{len(keep)} detections, {int(keep.sum())} of {keep.size} keypoints kept"
    if alarm is None:
        return text
    text += f", {int((~poses.in_distribution(alarm)).sum())} unlike the data"
    image = poses.image_novelty
    return f"{text}; so is the image, p = {image[0]:.3f}" if image is not None and image[0] <= alarm else text
