"""Feature cache: the stored output of the frozen model on a data set, written by ``collecting``.

A cache is a folder of safetensors shards. For each label-assigned cell and each retained detection they hold the
feature window around it, and the columns that training, calibration and evaluation need. They also hold the ground
truth.
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
MOST_SHARDS, MOST_LEVELS = 1_000_000, 16  # limits of a valid manifest
NAMED = 5  # missing shards listed by name
SHARDS_AT_ONCE = 64  # shards whose detections are in memory at a time: about 40 MB with 17 keypoints


class NoDetectionError(HaloposeError):
    """The given images have no detection."""


_STORED_NAMES = {"context_features": "signals"}  # settings that a manifest stores under another name


@dataclass(frozen=True)
class CollectSettings:
    """Settings of the collection of a feature cache.

    Attributes:
        imgsz: Input sizes; every image is collected at each of them.
        rectangular: Use rectangular inputs instead of square ones.
        cells_per_object: Largest number of assigned cells per object, highest scores first.
        assigned: Store label-assigned cells.
        conf: Lowest score of retained detections.
        iou: IoU threshold of non-maximum suppression.
        detections: Largest number of retained detections per image; 0: only assigned cells are stored.
        batch: Images per forward pass.
        context_features: Store context features (``uncertainty.context_features``). The cache becomes two to three
            times as large.
        half: The model runs in half precision; set from the host.
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
        """Settings as JSON values of the manifest; ``half`` only if it is set."""
        content = {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}
        content["imgsz"] = list(self.imgsz)
        return content if self.half else {name: value for name, value in content.items() if name != "half"}


@dataclass(frozen=True)
class CachedCells:
    """Cached rows of one feature level.

    Attributes:
        level: Index of the feature level.
        windows: Feature windows (N, C, W, W).
        inside: Whether each position of a window lies on the feature map (N, W, W).
        columns: Further columns by name, (N, ...) each.
    """

    level: int
    windows: Tensor
    inside: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.windows.nbytes + sum(value.nbytes for value in self.columns.values()))

    def factors(self, heads: ProbabilisticHeads) -> Tensor:
        """Return uncalibrated Cholesky factors (N, K, 2, 2) in input pixels, on the device of the heads."""
        device = next(heads.parameters()).device
        context_features = None
        if heads.settings.context_features:
            context_features = (
                ContextFeatures.of_columns(self.columns, device) if "signal.score" in self.columns else None
            )
        return heads.at_windows(self.level, self.windows.to(device).float(), self.inside.to(device), context_features)

    def of_images(self, images: Array | None) -> CachedCells:
        """Return the rows of some images.

        Args:
            images: Sorted image ids (I,); None: all rows.
        """
        if images is None:
            return self
        wanted = among(self.columns["image_id"], torch.from_numpy(images))
        rows = torch.nonzero(wanted).flatten()
        columns = {name: value[rows] for name, value in self.columns.items()}
        return CachedCells(self.level, self.windows[rows], self.inside[rows], columns)


def among(ids: Tensor, chosen: Tensor) -> Tensor:
    """Return which ids (N,) are among chosen ids (I,), which must be sorted."""
    if not len(chosen):
        return torch.zeros(ids.shape, dtype=torch.bool)
    return chosen[torch.searchsorted(chosen, ids).clamp(max=len(chosen) - 1)] == ids


class MatchStore:
    """Feature cache of a data set on disk.

    Attributes:
        folder: Folder of the cache.
        manifest: Content of ``manifest.json``.
        layout: Keypoints of the data set.
        settings: Settings of the collection.
        images: Image ids (I,).

    Args:
        folder: Folder of the cache.

    Raises:
        HaloposeError: The folder is no feature cache, or the cache is damaged or not complete.
    """

    def __init__(self, folder: Place | str) -> None:
        self.folder = to_place(folder)
        manifest = read_json(self.folder / "manifest.json")
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise HaloposeError(f"{self.folder} is not a feature cache: run `halopose collect` again")
        self.manifest: dict[str, Any] = manifest
        try:
            self.layout = Keypoints.from_json(manifest["layout"])
            self.settings = _settings(manifest["settings"])
            self.images = np.array([_whole(value) for value in manifest["images"]], dtype=np.int64)
            if not 0 <= _whole(manifest["shards"]) <= MOST_SHARDS:
                raise ValueError("number of shards out of range")
            if not 1 <= _whole(manifest["levels"]) <= MOST_LEVELS or len(manifest["strides"]) != manifest["levels"]:
                raise ValueError("levels and strides differ in number")
            if not isinstance(manifest["base"], list) or not all(isinstance(name, str) for name in manifest["base"]):
                raise ValueError("fingerprints of the base model are not strings")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise HaloposeError(f"{self.folder} has a damaged manifest: collect it again") from None
        self._checked: set[Place] = set()
        self._some: list[Place] | None = None  # the shards of a part
        if missing := missing_shards(self.folder):
            raise HaloposeError(
                f"{self.folder} is not complete (of {manifest['shards']} shards {missing}): "
                "run the same `halopose collect` again to resume"
            )

    def _paths(self) -> list[Place]:
        if self._some is not None:
            return self._some
        return [shard_path(self.folder, number) for number in range(self.manifest["shards"])]

    def parts(self, shards: int) -> Iterator[MatchStore]:
        """Yield the cache in parts of a number of shards, each with separate images.

        With several input sizes an image is in several shards, so the whole cache is one part.

        Args:
            shards: Shards per part.
        """
        paths = self._paths()
        if len(self.settings.imgsz) > 1:
            shards = len(paths)
        for begin in range(0, len(paths), shards):
            part = copy(self)
            part._some = paths[begin : begin + shards]
            yield part

    def digest(self) -> str:
        """Return a hash of everything that training results depend on: base model, settings and all images."""
        parts = [self.manifest[name] for name in ("base", "settings", "layout", "images")]
        parts.append([shard_metadata(path)["views"] for path in self._paths()])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _sound(self) -> Iterator[Place]:
        """Yield the shards after their checksums are verified; each is verified once."""
        for path in self._paths():
            if path not in self._checked:
                try:
                    check_seal(path)
                except HaloposeError as error:
                    raise HaloposeError(f"{error}; remove it and run the same `halopose collect` again") from None
                self._checked.add(path)
            yield path

    def check(self, host: Host) -> None:
        """Raise a HaloposeError unless the cache was collected with the host's model."""
        if not same_model(self.manifest["base"], host.fingerprints):
            raise HaloposeError(
                f"{self.folder} was collected with another base model: run `halopose collect` again with this one"
            )

    def shards(self, kind: str) -> Iterator[list[CachedCells]]:
        """Yield the memory-mapped cells by level of each shard.

        Args:
            kind: ``"assigned"`` or ``"detected"``.
        """
        for path in self._sound():
            yield read_shard(path, kind, self.manifest["levels"])

    def cells(self, kind: str) -> Iterator[CachedCells]:
        """Yield all rows, shard by shard and level by level."""
        for shard in self.shards(kind):
            yield from shard

    def skipped(self) -> list[str]:
        """Return messages about images that could not be read."""
        return [line for path in self._paths() for line in shard_metadata(path)["skipped"]]

    def detections(
        self, covariance_of: Callable[[CachedCells], Array], images: Array | None = None
    ) -> tuple[PoseDistributions, Array]:
        """Return retained detections, sorted by image and descending score.

        Args:
            covariance_of: Computes covariances (n, K, 2, 2) of rows, in original pixels.
            images: Image ids; default: all images.

        Returns:
            The detections, and the feature level (N,) of each.

        Raises:
            NoDetectionError: The images have no detection.
        """
        wanted = None if images is None else np.sort(images)
        parts = [cells for cells in (part.of_images(wanted) for part in self.cells("detected")) if len(cells)]
        if not parts:
            raise NoDetectionError("no detection in these images: check that the base model detects objects there")
        poses = PoseDistributions.concatenate([stored_poses(cells, covariance_of(cells)) for cells in parts])
        level = np.concatenate([np.full(len(cells), cells.level) for cells in parts])
        assert poses.image_ids is not None
        order = np.lexsort((-poses.scores, poses.image_ids))
        return poses[order], level[order]

    def image_vectors(self) -> tuple[Array, Array]:
        """Return image ids (I,) and the pooled feature vectors (I, D) of the images, for out-of-distribution scores."""
        tables = [read_table(path, "image.0") for path in self._sound()]
        parts = [table for table in tables if table]
        if not parts or any("vector" not in table for table in parts):
            kind = HaloposeError if parts else NoDetectionError
            raise kind(f"{self.folder} holds no image vectors: collect it again with --detections")
        return tuple(np.concatenate([part[name] for part in parts]) for name in ("image_id", "vector"))  # type: ignore

    def ground_truth(self, images: Array | None = None) -> GroundTruth:
        """Return the annotated objects of the collected images, in original pixels.

        Args:
            images: Image ids; default: all images.
        """
        tables = [read_table(path, "truth") for path in self._sound()]
        # Shards of a second input size, or without a readable image, have no ground truth.
        parts = [table for table in tables if table]
        if not parts:
            raise HaloposeError(f"{self.folder} has no readable image: check the paths of the data set")
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
    """Parse the settings of a manifest; raises TypeError or ValueError if they are not valid."""
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
    """Return stored detections with the given covariances (n, K, 2, 2)."""
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
    """Return the path of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


def known_shards(folder: Place) -> set[str]:
    """Return the names of existing shards, by one listing of the folder."""
    found = folder.files() if isinstance(folder, Address) else folder.glob("shard-*.safetensors")
    return {path.name for path in found}


def missing_shards(folder: Place | str) -> str:
    """Return a text that lists the missing shards of a cache; empty if none is missing."""
    folder = to_place(folder)
    count, known = read_json(folder / "manifest.json")["shards"], known_shards(folder)
    paths = (shard_path(folder, number) for number in range(count))
    missing = [path.stem for path in paths if path.name not in known]
    named, more = ", ".join(missing[:NAMED]), len(missing) - NAMED
    return f"{len(missing)} missing: {named}{f' and {more} more' * (more > 0)}" if missing else ""


def _opened(path: Place, framework: str) -> Any:
    """Open a memory-mapped shard; a remote shard is downloaded first."""
    try:
        return safe_open(path.local() if isinstance(path, Address) else path, framework=framework)
    except (SafetensorError, OSError):
        raise HaloposeError(f"{path} is damaged: remove it and run the same `halopose collect` again") from None


def read_shard(path: Place, kind: str, levels: int) -> list[CachedCells]:
    """Read the memory-mapped cells of a shard by level."""
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
    """Read a table of a shard, such as ``truth``, as columns by name."""
    with _opened(path, "np") as file:
        prefix = f"{kind}."
        return {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


def shard_metadata(path: Place) -> dict[str, Any]:
    """Read the metadata of a shard: the states of its images and messages about unreadable ones."""
    try:
        content = read_content(path)
    except HaloposeError:
        content = None
    if not isinstance(content, dict) or not all(isinstance(content.get(k), list) for k in ("skipped", "views")):
        raise HaloposeError(f"{path} is damaged: remove it and run the same `halopose collect` again")
    return content
