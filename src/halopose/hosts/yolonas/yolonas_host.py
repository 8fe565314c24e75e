"""YOLO-NAS-Pose (Nano, Small, Medium, Large) in LibreYOLO, the successor of SuperGradients.

Only this folder imports libreyolo (MIT, an optional extra). Checkpoints of both are loaded as plain weights. The model
runs as in LibreYOLO's predictor: unfused, square, on BGR images.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.serialization import safe_globals

from halopose.errors import HaloposeError
from halopose.hosts.base import (
    LOAD_ERRORS,
    Assignment,
    Host,
    HostOutput,
    Letterbox,
    Placer,
    Selection,
    Targets,
    check_checkpoint,
    check_weights,
    fingerprint,
    folded_convolutions,
    refusal,
    sketch_of_head,
)
from halopose.hosts.decoded_cells import decoded_cells
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.hosts.traceable import Traceable
from halopose.hosts.weight_sketch import backbone_sketch
from halopose.hosts.yolonas.traceable_yolonas import TraceableNAS
from halopose.install_advice import install_command
from halopose.keypoints import Keypoints
from halopose.types import Array
from halopose.uncertainty.context_features import CellBoxes
from halopose.uncertainty.heads import ConvTemplate

try:
    ensure_torchvision()
    from libreyolo.models.yolonas.loss import YoloNASPoseLoss
    from libreyolo.models.yolonas.model import LibreYOLONAS
    from libreyolo.models.yolonas.nn import ConvBNReLU, LibreYOLONASPoseModel
    from libreyolo.models.yolonas.utils import unwrap_yolonas_checkpoint
    from libreyolo.postprocess.yolonas import YOLO_NAS_POSE_RESIZE_SIZE, postprocess_pose
    from libreyolo.preprocess.yolonas import YOLO_NAS_POSE_PAD_VALUE, preprocess_numpy
except ImportError as error:
    raise HaloposeError(f"this needs the yolonas extra ({error.name or error}): {install_command('yolonas')}") from None


class YoloNASHost(Host):
    """A frozen ``LibreYOLONASPoseModel``. With ``oks_factor`` its assigner multiplies IoU by OKS, as in the training
    recipe.
    """

    def __init__(
        self,
        model: LibreYOLONASPoseModel,
        *,
        end2end: bool | None = None,
        device: torch.device | str | None = None,
        sigmas: Sequence[float] | Array | None = None,
        oks_factor: bool = True,
        class_names: Mapping[int, str] | Sequence[str] | None = None,
        description: str = "YOLO-NAS-Pose",
    ) -> None:
        if not isinstance(model, LibreYOLONASPoseModel):
            raise HaloposeError(f"{description} is not a YOLO-NAS pose model, but {type(model).__name__}")
        if end2end:
            raise HaloposeError("YOLO-NAS has no one-to-one head: leave end2end off")
        model = copy.deepcopy(model).float().eval().requires_grad_(False)
        prints = fingerprint(model.state_dict())
        self.model = model.to(device or "cpu")
        self.strides = tuple(int(stride) for stride in model.heads.fpn_strides)
        self.layout = Keypoints.of(int(model.num_keypoints), sigmas=sigmas)
        self.class_names = _class_names(class_names, int(model.num_classes), len(self.layout))
        self.description = description
        self.oks_factor = oks_factor
        self._templates = [[_template(block) for block in (head.pose_stem, *head.pose_convs)] for head in self._heads()]
        self._criteria: dict[tuple[float, ...], YoloNASPoseLoss] = {}
        lasts = [head.pose_pred for head in self._heads()]
        parts = folded_convolutions((self.model.backbone, self.model.neck), unused="rbr_reparam")
        self.fingerprints = (prints, sketch_of_head(self._templates, lasts), backbone_sketch(parts))

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        unsafe: bool = False,
        end2end: bool | None = None,
        device: torch.device | str | None = None,
        oks_factor: bool | None = None,
    ) -> YoloNASHost:
        """Load a checkpoint of SuperGradients or LibreYOLO; the averaged weights (EMA) if it has them.

        ``unsafe`` allows the file to run code: for trusted files only. Options that are not given come from the
        checkpoint, else from the framework's defaults.
        """
        if not Path(path).is_file():
            raise HaloposeError(f"no checkpoint at {path}: give the path of a YOLO-NAS-Pose checkpoint")
        checkpoint = _load_checkpoint(path, unsafe)
        recipe = checkpoint.get("config")
        if oks_factor is None:
            oks_factor = not isinstance(recipe, dict) or recipe.get("assigner_multiply_by_pose_oks") is not False
        return cls(
            _build(_weights(checkpoint, path), path),
            end2end=end2end,
            device=device,
            sigmas=checkpoint.get("oks_sigmas"),
            oks_factor=oks_factor,
            class_names=checkpoint.get("names"),
            description=Path(path).name,
        )

    def _heads(self) -> list[Any]:
        return [getattr(self.model.heads, f"head{level + 1}") for level in range(len(self.strides))]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def placer(self) -> Placer:
        return _YoloNASPlacer(self.strides[-1])

    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        # Concatenated channels last as in the framework: another order rounds differently.
        batch = torch.cat([torch.from_numpy(pixels)[None] for pixels in placed])
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def forward(self, batch: Tensor) -> HostOutput:
        with self.precision(self.model.heads):
            features = self.model.neck(self.model.backbone(batch))
            raw = self.model.heads(features)
        _, scores, keypoints, _ = raw[0]
        features = [maps.float() for maps in features]
        return HostOutput(features=tuple(features), scores=scores.amax(-1), keypoints=keypoints, raw=raw)

    @torch.inference_mode()
    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        rows, objects = self._training_batch(targets)
        if not rows.shape[1]:
            empty = torch.zeros(0, dtype=torch.long, device=self.device)
            return Assignment(empty, empty, empty)
        criterion = self._criterion(sigmas)
        logits, distances, keypoints, _, _, points, _, strides = output.raw[1]
        boxes, _ = criterion._bbox_decode(points / strides, distances)
        truth = criterion._unpack_padded_targets(rows)
        found = criterion.assigner(
            pred_scores=logits.sigmoid(),
            pred_bboxes=boxes * strides,
            pred_pose_coords=keypoints,
            anchor_points=points,
            gt_labels=truth["gt_class"],
            gt_bboxes=truth["gt_bbox"],
            gt_poses=truth["gt_poses"],
            gt_crowd=truth["gt_crowd"],
            pad_gt_mask=truth["pad_gt_mask"],
            bg_index=len(self.class_names),
        )
        image, cell = torch.nonzero(found.assigned_labels != len(self.class_names), as_tuple=True)
        place = found.assigned_gt_index[image, cell] - image * rows.shape[1]  # counted over the whole batch
        return Assignment(image, cell, objects[image, place])

    def _criterion(self, sigmas: tuple[float, ...]) -> YoloNASPoseLoss:
        if sigmas not in self._criteria:
            self._criteria[sigmas] = YoloNASPoseLoss(
                torch.tensor(sigmas, dtype=torch.float64),
                num_classes=len(self.class_names),
                assigner_multiply_by_pose_oks=self.oks_factor,
            ).to(self.device)
        return self._criteria[sigmas]

    def _training_batch(self, targets: Sequence[Targets]) -> tuple[Tensor, Tensor]:
        """Return rows (B, M, 5 + 3 K) for the criterion, padded with zeros, and the object of each row (B, M).

        The criterion takes as many rows as the image with most boxes of positive area, so other boxes must not be among
        them.
        """
        rows, objects = [], []
        for target in targets:
            corner, size = target.boxes[:, :2], target.boxes[:, 2:] - target.boxes[:, :2]
            labelled = target.labelled[..., None]
            poses = torch.cat([target.keypoints.where(labelled, 0.0), labelled.float()], dim=2)
            row = torch.cat([target.class_ids[:, None].float(), corner + size / 2, size, poses.flatten(1)], dim=1)
            sound = (size > 0).all(1) & torch.isfinite(row).all(1)
            rows.append(row[sound].float())
            objects.append(torch.nonzero(sound).flatten())
        return pad_sequence(rows, True).to(self.device), pad_sequence(objects, True).to(self.device)

    @torch.inference_mode()
    def select(
        self,
        output: HostOutput,
        *,
        conf: float,
        iou: float,
        max_detections: int = 300,
        letterboxes: Sequence[Letterbox] | None = None,
    ) -> list[Selection]:
        boxes, scores, keypoints, visibility = output.raw[0]
        height, width = (side * self.strides[0] for side in output.features[0].shape[2:])
        # Post-processing does not return the kept cells: pass their numbers through a keypoint's visibility.
        count = boxes.shape[1]
        numbers = torch.arange(count, dtype=torch.float32, device=boxes.device)[:, None]
        nowhere = boxes.new_zeros((count, 1, 2))
        selections = []
        for image in range(len(boxes)):
            shape = letterboxes[image].shape if letterboxes else None
            kept = postprocess_pose(
                (boxes[image], scores[image], nowhere, numbers),
                conf_thres=conf,
                iou_thres=iou,
                input_size=(height, width),
                original_size=shape and shape[::-1],
                post_nms_max_predictions=max_detections,
            )
            cell = kept["keypoints"][:, 0, 2].long().to(boxes.device)
            selections.append(
                Selection(
                    cell=cell,
                    boxes=boxes[image, cell],
                    scores=output.scores[image, cell],
                    class_ids=kept["classes"].to(boxes.device),
                    keypoints=keypoints[image, cell],
                    visibility=visibility[image, cell],
                )
            )
        return selections

    def cells(self, output: HostOutput) -> CellBoxes:
        boxes, _, keypoints, visibility = output.raw[0]
        return decoded_cells(boxes, keypoints, visibility)

    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        height, width = letterbox.shape
        boxes = selection.boxes / letterbox.gain[0]
        return Selection(
            cell=selection.cell,
            boxes=torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height])),
            scores=selection.scores,
            class_ids=selection.class_ids,
            keypoints=selection.keypoints / letterbox.gain[0],
            visibility=selection.visibility,
        )

    def traceable(self) -> Traceable:
        return TraceableNAS(self.model)

    def pose_templates(self) -> list[list[ConvTemplate]]:
        return self._templates


@dataclass(frozen=True)
class _YoloNASPlacer:
    """Preparation by the framework, for square inputs that are multiples of ``stride``."""

    stride: int

    def __call__(
        self, image: Array, imgsz: int, rectangular: bool, room: Array | None = None
    ) -> tuple[Array, Letterbox]:
        size = -(-imgsz // self.stride) * self.stride
        height, width = image.shape[:2]
        if min(height, width) * min(size, YOLO_NAS_POSE_RESIZE_SIZE) <= max(height, width) / 2:
            raise HaloposeError(f"an image of {width} x {height} vanishes at input size {size}: crop it first")
        pixels, ratio = preprocess_numpy(
            image, size, YOLO_NAS_POSE_PAD_VALUE, YOLO_NAS_POSE_RESIZE_SIZE, "bottom_right"
        )
        return pixels, Letterbox((height, width), (ratio, ratio), (0.0, 0.0))


def _template(block: ConvBNReLU) -> ConvTemplate:
    """Return a block's convolution with its batch norm folded in."""
    convolution, norm = block.seq.conv, block.seq.bn
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return ConvTemplate(
        (convolution.weight * scale[:, None, None, None]).float().cpu(),
        (norm.bias - norm.running_mean * scale).float().cpu(),
        "relu",
    )


def _load_checkpoint(path: Path | str, unsafe: bool) -> dict[Any, Any]:
    check_checkpoint(path)
    try:
        with safe_globals(_plain_numpy()):
            checkpoint = torch.load(path, map_location="cpu", weights_only=not unsafe)
    except LOAD_ERRORS as error:
        raise refusal(path, error, unsafe) from None
    return checkpoint if isinstance(checkpoint, dict) else {}


def _plain_numpy() -> list[Any]:
    """Return the safe globals of pickled numpy arrays and numbers, under old and new names; SuperGradients
    stores some.
    """
    makers: list[Any] = [np.empty(0).__reduce__()[0], np.float64().__reduce__()[0]]
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = [(maker, f"{module}.{maker.__name__}") for maker in makers for module in modules]
    return [*named, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}]


def _weights(checkpoint: Mapping[Any, Any], path: Path | str) -> dict[str, Tensor]:
    state = unwrap_yolonas_checkpoint(checkpoint)
    weights = {str(name).removeprefix("module."): w for name, w in state.items() if isinstance(w, Tensor)}
    if not LibreYOLONAS.is_pose_state_dict(weights):
        raise HaloposeError(f"{path} holds no YOLO-NAS-Pose weights: give a trained pose checkpoint")
    check_weights(path, weights.values())
    return weights


def _build(weights: dict[str, Tensor], path: Path | str) -> LibreYOLONASPoseModel:
    """Build the model that fits the shapes of the weights, and load all of them."""
    size = LibreYOLONAS.detect_size(weights)
    if size is None:
        raise HaloposeError(f"{path} is no YOLO-NAS-Pose of size Nano, Small, Medium or Large")
    model = LibreYOLONASPoseModel(
        size,
        num_keypoints=LibreYOLONAS.detect_num_keypoints(weights),
        num_classes=LibreYOLONAS.detect_nb_classes(weights),
    )
    try:
        missing, unknown = model.load_state_dict(weights, strict=False)
    except RuntimeError:
        raise HaloposeError(f"{path} does not fit YOLO-NAS-Pose {size.upper()}: shapes differ") from None
    constants = {name for name, _ in model.named_buffers()}  # constant buffers that some versions saved
    if missing or set(unknown) - constants:
        name = next(iter([*missing, *sorted(set(unknown) - constants)]))
        raise HaloposeError(f"{path} does not fit YOLO-NAS-Pose {size.upper()}: look at {name}")
    return model


def _class_names(given: Mapping[int, str] | Sequence[str] | None, classes: int, keypoints: int) -> tuple[str, ...]:
    names = given.values() if isinstance(given, Mapping) else given or ()
    if len(names) == classes:
        return tuple(str(name) for name in names)
    return ("person" if keypoints == 17 else "object",) if classes == 1 else tuple(map(str, range(classes)))
