"""The match store: everything that heads will ever see of a data set, as ``collecting`` wrote it.

In: a folder of safetensors shards with, per assigned cell and per retained detection, the window of features
around it, and what training, calibration and scoring need beside it. Out: those rows, detections and ground truth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halopose.boxes import xyxy_to_xywh
from halopose.data.files import read_json
from halopose.data.storage.address import Address, Place, to_place
from halopose.data.tensors import check_seal, read_content
from halopose.errors import HaloposeError
from halopose.hosts.base import Host
from halopose.hosts.weight_sketch import same_model
from halopose.keypoints import Keypoints
from halopose.poses import GroundTruth, PoseDistributions
from halopose.types import Array
from halopose.uncertainty.context_features import ContextFeatures
from halopose.uncertainty.heads import ProbabilisticHeads

FORMAT = "halopose-matches-2"
MOST_SHARDS, MOST_LEVELS = 1_000_000, 16  # what a manifest may claim without being absurd
NAMED = 5  # of the shards that are missing
SHARDS_AT_ONCE = 64  # whose detections are in memory together, some 40 MB of a 17 keypoint model's


class NoDetectionError(HaloposeError):
    """Nothing was detected in the images asked for."""


_STORED_NAMES = {"context_features": "signals"}  # settings that a manifest stores under another name


@dataclass(frozen=True)
class CollectSettings:
    """How to collect. A view is one image at one input size.

    cells_per_object caps the assigned cells of an object, best scores first. conf, iou and detections are the
    post-processing of the retained detections; without ``detections`` only assigned cells are stored. signals:
    what heads that look beyond their window need (``uncertainty.context_features``), two or three times as
    much disk. half: in half precision, which the host says.
    """

    imgsz: tuple[int, ...] = (640,)
    rectangular: bool = True
    cells_per_object: int = 10
    assigned: bool = True
    conf: float = 0.01
    iou: float = 0.7
    detections: int = 0
    batch: int = 1
    context_features: bool = False
    half: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a manifest has them; half precision only where it was used."""
        content = {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}
        content["imgsz"] = list(self.imgsz)
        return content if self.half else {name: value for name, value in content.items() if name != "half"}


@dataclass(frozen=True)
class CachedCells:
    """Rows of one level: windows (N, C, W, W), inside (N, W, W), and columns by name, (N, ...) each."""

    level: int
    windows: Tensor
    inside: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def nbytes(self) -> int:
        return int(self.windows.nbytes + sum(value.nbytes for value in self.columns.values()))

    def factors(self, heads: ProbabilisticHeads) -> Tensor:
        """Uncalibrated Cholesky factors (N, K, 2, 2) in input pixels, where the heads live."""
        device = next(heads.parameters()).device
        context_features = None
        if heads.settings.context_features:
            context_features = (
                ContextFeatures.of_columns(self.columns, device) if "signal.score" in self.columns else None
            )
        return heads.at_windows(self.level, self.windows.to(device).float(), self.inside.to(device), context_features)

    def of_images(self, images: Array | None) -> CachedCells:
        """The rows of some images (I,), sorted by id, alone, or all of them."""
        if images is None:
            return self
        wanted = among(self.columns["image_id"], torch.from_numpy(images))
        rows = torch.nonzero(wanted).flatten()
        columns = {name: value[rows] for name, value in self.columns.items()}
        return CachedCells(self.level, self.windows[rows], self.inside[rows], columns)


def among(ids: Tensor, chosen: Tensor) -> Tensor:
    """Which ids (N,) are among chosen ones (I,), which are sorted; costs hardly more if many are chosen."""
    if not len(chosen):
        return torch.zeros(ids.shape, dtype=torch.bool)
    return chosen[torch.searchsorted(chosen, ids).clamp(max=len(chosen) - 1)] == ids


class MatchStore:
    """A collected data set on disk: its keypoints, the ids (I,) of its images, and how it was collected."""

    def __init__(self, folder: Place | str) -> None:
        self.folder = to_place(folder)
        manifest = read_json(self.folder / "manifest.json")
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise HaloposeError(f"{self.folder} is not a match store: collect it again")
        self.manifest: dict[str, Any] = manifest
        try:
            self.layout = Keypoints.from_json(manifest["layout"])
            self.settings = _settings(manifest["settings"])
            self.images = np.array([_whole(value) for value in manifest["images"]], dtype=np.int64)
            if not 0 <= _whole(manifest["shards"]) <= MOST_SHARDS:
                raise ValueError("an absurd number of parts")
            if not 1 <= _whole(manifest["levels"]) <= MOST_LEVELS or len(manifest["strides"]) != manifest["levels"]:
                raise ValueError("levels and strides that do not fit")
            if not isinstance(manifest["base"], list) or not all(isinstance(name, str) for name in manifest["base"]):
                raise ValueError("bases without names")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise HaloposeError(f"{self.folder} has a damaged manifest: collect it again") from None
        self._checked: set[Place] = set()
        self._some: list[Place] | None = None  # the shards of a part
        if missing := missing_shards(self.folder):
            raise HaloposeError(
                f"{self.folder} is not complete (of {manifest['shards']} shards {missing}): "
                "run the same collect again, it resumes"
            )

    def _paths(self) -> list[Place]:
        if self._some is not None:
            return self._some
        return [shard_path(self.folder, number) for number in range(self.manifest["shards"])]

    def parts(self, shards: int) -> Iterator[MatchStore]:
        """The store in parts of so many shards, each with its own images; whole if images have several sizes."""
        paths = self._paths()
        if len(self.settings.imgsz) > 1:
            shards = len(paths)
        for begin in range(0, len(paths), shards):
            part = copy(self)
            part._some = paths[begin : begin + shards]
            yield part

    def digest(self) -> str:
        """All that could be learnt from it, in a few characters: base, settings, every view."""
        parts = [self.manifest[name] for name in ("base", "settings", "layout", "images")]
        parts.append([shard_metadata(path)["views"] for path in self._paths()])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _sound(self) -> Iterator[Place]:
        """The shards, each refused where it is not as it was written; checked once."""
        for path in self._paths():
            if path not in self._checked:
                try:
                    check_seal(path)
                except HaloposeError as error:
                    raise HaloposeError(f"{error}; remove it and run the same collect again") from None
                self._checked.add(path)
            yield path

    def check(self, host: Host) -> None:
        """Refuse a base that this store was not collected with."""
        if not same_model(self.manifest["base"], host.fingerprints):
            raise HaloposeError(f"{self.folder} was collected with another base: collect it again")

    def shards(self, kind: str) -> Iterator[list[CachedCells]]:
        """Cells by level of each shard in turn, ``assigned`` or ``detected``, memory-mapped."""
        for path in self._sound():
            yield read_shard(path, kind, self.manifest["levels"])

    def cells(self, kind: str) -> Iterator[CachedCells]:
        """All rows, level by level within each shard."""
        for shard in self.shards(kind):
            yield from shard

    def skipped(self) -> list[str]:
        """Files that could not be read."""
        return [line for path in self._paths() for line in shard_metadata(path)["skipped"]]

    def detections(
        self, covariance_of: Callable[[CachedCells], Array], images: Array | None = None
    ) -> tuple[PoseDistributions, Array]:
        """Retained detections, of some images or all, and the level (N,) of each; best scores of an image first.

        covariance_of: covariances (n, K, 2, 2) of rows, in original pixels.
        """
        wanted = None if images is None else np.sort(images)
        parts = [cells for cells in (part.of_images(wanted) for part in self.cells("detected")) if len(cells)]
        if not parts:
            raise NoDetectionError("no detection in these images: check that the base detects anything there")
        poses = PoseDistributions.concatenate([stored_poses(cells, covariance_of(cells)) for cells in parts])
        level = np.concatenate([np.full(len(cells), cells.level) for cells in parts])
        assert poses.image_ids is not None
        order = np.lexsort((-poses.scores, poses.image_ids))
        return poses[order], level[order]

    def image_vectors(self) -> tuple[Array, Array]:
        """Ids (I,) of the images and what novelty compares of them as a whole (I, D)."""
        tables = [read_table(path, "image.0") for path in self._sound()]
        parts = [table for table in tables if table]
        if not parts or any("vector" not in table for table in parts):
            kind = HaloposeError if parts else NoDetectionError
            raise kind(f"{self.folder} holds no vectors of images: collect it again, with --detections")
        return tuple(np.concatenate([part[name] for part in parts]) for name in ("image_id", "vector"))  # type: ignore

    def ground_truth(self, images: Array | None = None) -> GroundTruth:
        """The annotated objects of the collected images, or of some of them, in original pixels."""
        tables = [read_table(path, "truth") for path in self._sound()]
        parts = [table for table in tables if table]  # a shard of a second size, or of no readable image, has none
        if not parts:
            raise HaloposeError(f"{self.folder} holds no readable image: check the data")
        shared = set.intersection(*(set(part) for part in parts))
        table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name in shared}
        seen = np.unique(np.concatenate([read_table(path, "views")["image_id"] for path in self._paths()]))
        labelled, crowd = table["labelled"].astype(bool), table["crowd"].astype(bool)
        truth = GroundTruth(
            images=seen,
            image_ids=table["image_id"],
            class_ids=table["class_id"] + 1,
            keypoints=table["keypoints"],
            labelled=labelled,
            boxes=xyxy_to_xywh(table["boxes"]),
            area=table["area"],
            crowd=crowd,
            ignore=crowd | ~labelled.any(1),
            layout=self.layout,
            occluded=table["occluded"].astype(bool) if "occluded" in table else None,
            truncated=table["truncated"].astype(bool) if "truncated" in table else None,
        )
        return truth if images is None else truth.select_images(images)


def _settings(content: Any) -> CollectSettings:
    """Settings from a manifest; a TypeError or ValueError if they are not that."""
    if not isinstance(content, dict):
        raise TypeError("no settings")
    names = {stored: name for name, stored in _STORED_NAMES.items()}
    given = {names.get(str(name), str(name)): value for name, value in content.items()}
    settings = CollectSettings(**{**given, "imgsz": tuple(_whole(size) for size in content["imgsz"])})
    for name in ("cells_per_object", "detections", "batch"):
        _whole(getattr(settings, name))
    if not 0 <= float(settings.conf) <= 1 or not 0 <= float(settings.iou) <= 1:
        raise ValueError("thresholds out of range")
    return settings


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a whole number")
    return value


def stored_poses(cells: CachedCells, covariance: Array) -> PoseDistributions:
    """Stored detections with the given covariances (n, K, 2, 2)."""
    columns = cells.columns
    return PoseDistributions(
        boxes=columns["box"].double().numpy(),
        scores=columns["score"].double().numpy(),
        keypoints=columns["keypoints"].double().numpy(),
        covariance=covariance,
        scale=covariance,
        visibility=columns["visibility"].double().numpy() if "visibility" in columns else None,
        class_ids=columns["class_id"].numpy() + 1,
        image_ids=columns["image_id"].numpy(),
    )


def shard_path(folder: Place, number: int) -> Place:
    return folder / f"shard-{number:05d}.safetensors"


def known_shards(folder: Place) -> set[str]:
    """Names of the shards that are there; one look at the folder, however many they are."""
    found = folder.files() if isinstance(folder, Address) else folder.glob("shard-*.safetensors")
    return {path.name for path in found}


def missing_shards(folder: Place | str) -> str:
    """Which shards of a store are missing, in words; empty if none."""
    folder = to_place(folder)
    count, known = read_json(folder / "manifest.json")["shards"], known_shards(folder)
    paths = (shard_path(folder, number) for number in range(count))
    missing = [path.stem for path in paths if path.name not in known]
    named, more = ", ".join(missing[:NAMED]), len(missing) - NAMED
    return f"{len(missing)} missing: {named}{f' and {more} more' * (more > 0)}" if missing else ""


def _opened(path: Place, framework: str) -> Any:
    """A shard, memory-mapped; one at an address is copied here first."""
    try:
        return safe_open(path.local() if isinstance(path, Address) else path, framework=framework)
    except (SafetensorError, OSError):
        raise HaloposeError(f"{path} is damaged: remove it and run the same collect again") from None


def read_shard(path: Place, kind: str, levels: int) -> list[CachedCells]:
    """Memory-mapped cells by level."""
    with _opened(path, "pt") as file:
        names = list(file.keys())
        result = []
        for level in range(levels):
            prefix = f"{kind}.{level}."
            columns = {name[len(prefix) :]: file.get_tensor(name) for name in names if name.startswith(prefix)}
            if columns:
                result.append(CachedCells(level, columns.pop("windows"), columns.pop("inside"), columns))
        return result


def read_table(path: Place, kind: str) -> dict[str, Array]:
    with _opened(path, "np") as file:
        prefix = f"{kind}."
        return {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


def shard_metadata(path: Place) -> dict[str, Any]:
    """What a shard says of itself: the views it holds and the files that could not be read."""
    try:
        content = read_content(path)
    except HaloposeError:
        content = None
    if not isinstance(content, dict) or not all(isinstance(content.get(k), list) for k in ("skipped", "views")):
        raise HaloposeError(f"{path} is damaged: remove it and run the same collect again")
    return content
