"""Ultralytics YOLO-Pose: v8, 11, 12 (one-to-many with NMS) and 26 (one-to-many, or one-to-one end to end).

Only this folder imports ultralytics (AGPL-3.0, an optional extra). The model is loaded with safe loading, copied, fused
like in the framework's predictor, and never written to.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

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
    laid_in,
    refusal,
    sketch_of_head,
)
from halopose.hosts.decoded_cells import column_cells
from halopose.hosts.traceable import Traceable
from halopose.hosts.weight_sketch import backbone_sketch
from halopose.install_advice import install_command
from halopose.keypoints import Keypoints
from halopose.types import Array
from halopose.uncertainty.context_features import CellBoxes
from halopose.uncertainty.heads import ConvTemplate

try:
    from ultralytics.cfg import get_cfg
    from ultralytics.data.augment import LetterBox
    from ultralytics.engine.model import Model
    from ultralytics.nn.autobackend import AutoBackend
    from ultralytics.nn.modules import Conv
    from ultralytics.nn.modules.head import Pose, Pose26
    from ultralytics.nn.tasks import PoseModel, torch_safe_load
    from ultralytics.utils import ops
    from ultralytics.utils.downloads import attempt_download_asset
    from ultralytics.utils.loss import PoseLoss26, v8PoseLoss
    from ultralytics.utils.nms import non_max_suppression

    from halopose.hosts.ultralytics.assignment import assign_cells
    from halopose.hosts.ultralytics.traceable_yolo import TraceablePose
    from halopose.hosts.ultralytics.weights import read_model
except ImportError as error:
    raise HaloposeError(
        f"this needs the ultralytics extra ({error.name or error}): {install_command('ultralytics')}"
    ) from None


class UltralyticsHost(Host):
    """A frozen ``PoseModel``. ``end2end`` selects the head of a YOLO26 that has both."""

    def __init__(
        self,
        model: PoseModel,
        *,
        end2end: bool | None = None,
        device: torch.device | str | None = None,
        description: str = "",
    ) -> None:
        if isinstance(model, Model):  # YOLO("...") wraps what it loads
            model = model.model
        layers = getattr(model, "model", None)
        head = layers[-1] if isinstance(layers, nn.Sequential) else model
        if not isinstance(head, Pose):
            raise HaloposeError(f"{description or 'the model'} is not a pose model: its head is {type(head).__name__}")
        sigmas = getattr(model, "kpt_oks_sigmas", None)
        model = copy.deepcopy(model).float().eval().requires_grad_(False)
        head = model.model[-1]
        if end2end is not None and end2end != head.end2end:
            if end2end and getattr(head, "one2one_cv2", None) is None:
                raise HaloposeError("this model has no one-to-one head: leave end2end off")
            if not end2end and head.cv2 is None:
                raise HaloposeError("this model is fused to its one-to-one head: leave end2end on")
            head.end2end = end2end
        prints = [fingerprint(model.state_dict())]
        # Preparation for inference by the framework: fusing, memory format, device.
        prepared = AutoBackend(model=model, device=torch.device(device or "cpu"), fuse=True, verbose=False)
        self.model = prepared.backend.model
        prints.append(fingerprint(self.model.state_dict()))
        self.head = head = self.model.model[-1]
        self.end2end = bool(head.end2end)
        self.fingerprints: tuple[str, ...] = tuple(dict.fromkeys(f"{value}:{int(self.end2end)}" for value in prints))
        self.fingerprints += (
            sketch_of_head(self.pose_templates(), self._last_layers()),
            backbone_sketch(folded_convolutions(self.model.model[:-1])),
        )
        self.strides = tuple(int(stride) for stride in head.stride.tolist())
        count, self.dimensions = int(head.kpt_shape[0]), int(head.kpt_shape[1])
        names = _keypoint_names(model, count)
        self.layout = Keypoints.of(count, names=names, sigmas=sigmas, coco=self.dimensions == 3)
        self.class_names = tuple(str(name) for name in _names(model))
        self.description = description or str(getattr(model, "yaml_file", "ultralytics pose model"))
        self._criteria: dict[tuple[float, ...], Any] = {}
        self._device = next(self.model.parameters()).device

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        unsafe: bool = False,
        end2end: bool | None = None,
        device: torch.device | str | None = None,
    ) -> UltralyticsHost:
        """Load a ``.pt`` checkpoint. ``unsafe`` allows the file to run code: for trusted files only."""
        if not Path(path).is_file():
            raise HaloposeError(f"no checkpoint at {path}: give the path of a .pt file")
        model = load_model(str(path), unsafe)
        try:
            return cls(model, end2end=end2end, device=device, description=Path(path).name)
        except HaloposeError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # A damaged pickle can give a model with parts of wrong types.
            raise HaloposeError(f"{path} is damaged ({type(error).__name__}): get it again") from None

    @property
    def device(self) -> torch.device:
        return self._device

    def placer(self) -> Placer:
        return _Placer(max(self.strides[-1], 32))

    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        height, width = placed[0].shape[:2]
        pinned = self.device.type == "cuda"  # laid there at once rather than copied there
        batch = torch.empty((len(placed), 3, height, width), dtype=torch.uint8, pin_memory=pinned)
        for pixels, (red, green, blue) in zip(placed, batch.numpy(), strict=True):
            cv2.split(pixels, [blue, green, red])  # takes a third of the time of turning and reversing axes
        return batch.to(self.device, non_blocking=True).float().div_(255)

    @torch.inference_mode()
    def forward(self, batch: Tensor) -> HostOutput:
        with self.precision(self.head):
            decoded, predictions = self.model(batch)
        branch = predictions
        if "one2one" in predictions:
            branch = predictions["one2one" if self.end2end else "one2many"]
        if self.end2end:  # the framework's output holds the chosen rows, not all cells
            scores, keypoints = branch["scores"].sigmoid(), self.head.kpts_decode(branch["kpts"])
        else:
            _, scores, keypoints = decoded.split([4, len(self.class_names), branch["kpts"].shape[1]], dim=1)
        count = self.keypoint_count
        located = keypoints.unflatten(1, (count, self.dimensions))[:, :, :2].permute(0, 3, 1, 2)
        return HostOutput(
            features=tuple(branch["feats"]),
            scores=scores.amax(1),
            keypoints=located,
            raw=(decoded, branch),
        )

    @torch.inference_mode()
    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        counts = [len(target.boxes) for target in targets]
        if not sum(counts):
            empty = torch.zeros(0, dtype=torch.long, device=self.device)
            return Assignment(empty, empty, empty)
        batch = self._training_batch(output, targets, counts)
        return assign_cells(self._criterion(sigmas), output.raw[1], batch, output.keypoints, self.strides)

    def _criterion(self, sigmas: tuple[float, ...]) -> Any:
        """Return the framework's training criterion, made for a stand-in so that the model does not change."""
        if sigmas not in self._criteria:
            stand_in = SimpleNamespace(
                parameters=lambda: iter([torch.zeros(1, device=self.device)]),
                args=get_cfg(),
                model=[self.head],
                kpt_oks_sigmas=np.asarray(sigmas),
            )
            kind = PoseLoss26 if isinstance(self.head, Pose26) else v8PoseLoss
            topk = {"tal_topk": 7, "tal_topk2": 1} if self.head.end2end else {"tal_topk": 10}
            self._criteria[sigmas] = kind(stand_in, **topk)
        return self._criteria[sigmas]

    def _training_batch(self, output: HostOutput, targets: Sequence[Targets], counts: list[int]) -> dict[str, Tensor]:
        """Return targets in the form of the framework's criterion: concatenated and normalised."""
        height, width = (side * self.strides[0] for side in output.features[0].shape[2:])
        size = torch.tensor([width, height], dtype=torch.float32, device=self.device)
        boxes = torch.cat([target.boxes for target in targets]).to(self.device).float()
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        labelled = torch.cat([target.labelled for target in targets]).to(self.device)[..., None]
        keypoints = torch.cat([target.keypoints for target in targets]).to(self.device).float() / size
        return {
            "batch_idx": torch.repeat_interleave(torch.tensor(counts)).float().to(self.device),
            "cls": torch.cat([target.class_ids for target in targets]).to(self.device).float(),
            "bboxes": torch.cat([centres, boxes[:, 2:] - boxes[:, :2]], dim=1) / torch.cat([size, size]),
            "keypoints": torch.cat([keypoints.where(labelled, 0.0), labelled.float()], dim=2),
        }

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
        decoded, branch = output.raw
        kept, indices = non_max_suppression(
            decoded,
            conf,
            iou,
            max_det=max_detections,
            nc=len(self.class_names),
            end2end=self.end2end,
            return_idxs=True,
        )
        if self.end2end:
            # The framework's output is already top-k: compute the chosen cells again.
            scores = branch["scores"].sigmoid().permute(0, 2, 1)
            cells = self.head.get_topk_index(scores, self.head.max_det)[2]
            indices = [cells[number][index.long()] for number, index in enumerate(indices)]
        return [self._selection(rows, index) for rows, index in zip(kept, indices, strict=True)]

    def _selection(self, rows: Tensor, index: Tensor) -> Selection:
        keypoints = rows[:, 6:].unflatten(1, (self.keypoint_count, self.dimensions))
        return Selection(
            cell=index.reshape(-1).long(),
            boxes=rows[:, :4],
            scores=rows[:, 4],
            class_ids=rows[:, 5].long(),
            keypoints=keypoints[..., :2],
            visibility=keypoints[..., 2] if self.dimensions == 3 else None,
        )

    def cells(self, output: HostOutput) -> CellBoxes | None:
        if self.end2end:  # one cell per object: no overlapping boxes
            return None
        return column_cells(output.raw[0], len(self.class_names), (self.keypoint_count, self.dimensions))

    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        return Selection(
            cell=selection.cell,
            boxes=ops.scale_boxes(size, selection.boxes.clone(), letterbox.shape),
            scores=selection.scores,
            class_ids=selection.class_ids,
            keypoints=ops.scale_coords(size, selection.keypoints.clone(), letterbox.shape),
            visibility=selection.visibility,
        )

    def traceable(self) -> Traceable:
        return TraceablePose(self.model)

    def pose_templates(self) -> list[list[ConvTemplate]]:
        trunks = self.head.one2one_cv4 if self.end2end else self.head.cv4
        return [[_template(layer) for layer in trunk if isinstance(layer, Conv)] for trunk in trunks]

    def _last_layers(self) -> list[nn.Conv2d]:
        """The convolution of every level that gives the raw keypoints."""
        branch = "one2one_" if self.end2end else ""
        last = getattr(self.head, f"{branch}cv4_kpts", None)
        return list(last) if last is not None else [trunk[-1] for trunk in getattr(self.head, f"{branch}cv4")]


@dataclass(frozen=True)
class _Placer:
    """The framework's letterbox, for inputs that are multiples of ``stride``."""

    stride: int

    def __call__(
        self, image: Array, imgsz: int, rectangular: bool, room: Array | None = None
    ) -> tuple[Array, Letterbox]:
        size = -(-imgsz // self.stride) * self.stride
        transform = LetterBox((size, size), auto=rectangular, stride=self.stride)
        params = transform.get_params({"img": image})
        return _letterboxed(image, transform, params, room), _letterbox(params)


def _letterboxed(image: Array, transform: LetterBox, params: dict[str, Any], room: Array | None) -> Array:
    """Apply ``LetterBox`` to an image (h, w, 3), resized directly to its place; the framework copies twice."""
    width, height = params["new_unpad"]
    top, left = params["top"], params["left"]
    pixels = laid_in(room, (top + height + params["bottom"], left + width + params["right"], 3))
    inner = pixels[top : top + height, left : left + width]
    for border in (pixels[:top], pixels[top + height :], pixels[:, :left], pixels[:, left + width :]):
        border[:] = transform.padding_value
    if image.shape == inner.shape:
        inner[:] = image
    else:
        cv2.resize(image, (width, height), dst=inner, interpolation=transform.interpolation)
    return pixels


def load_model(path: str, unsafe: bool) -> PoseModel:
    if path.endswith(".safetensors"):
        return read_model(path)
    check_checkpoint(path)
    try:
        checkpoint, _ = torch_safe_load(path, safe_only=not unsafe)
    except LOAD_ERRORS as error:
        raise refusal(path, error, unsafe) from None
    model = checkpoint.get("ema") or checkpoint.get("model") if isinstance(checkpoint, dict) else None
    if not isinstance(model, nn.Module):
        raise HaloposeError(f"{path} holds no model: give a trained YOLO pose checkpoint")
    try:
        check_weights(path, model.state_dict().values())
    except HaloposeError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError):  # damaged pickle: the host raises the error
        pass
    return model


def download(name: str) -> bytes | None:
    """Download a published checkpoint from the framework's server; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / name
        try:
            attempt_download_asset(target)
        except (OSError, RuntimeError, ValueError):
            return None
        return target.read_bytes() if target.is_file() else None


def _letterbox(params: dict[str, Any]) -> Letterbox:
    """Return the transform of LetterBox; it rounds each side to whole pixels, so the two gains differ slightly."""
    height, width = params["orig_shape"]
    inner_width, inner_height = params["new_unpad"]
    return Letterbox(
        shape=(int(height), int(width)),
        gain=(inner_width / width, inner_height / height),
        pad=(float(params["left"]), float(params["top"])),
    )


def _template(layer: Conv) -> ConvTemplate:
    activation = {nn.SiLU: "silu", nn.ReLU: "relu", nn.Identity: "identity"}.get(type(layer.act))
    if activation is None or layer.conv.groups != 1 or layer.conv.stride != (1, 1):
        raise HaloposeError(f"the pose head has a layer that cannot be mirrored: {' '.join(str(layer).split())}")
    return ConvTemplate(
        layer.conv.weight.detach().cpu().clone(),
        layer.conv.bias.detach().cpu().clone(),
        activation,  # type: ignore[arg-type]
    )


def _names(model: PoseModel) -> list[str]:
    names = getattr(model, "names", None) or {0: "object"}
    return list(names.values()) if isinstance(names, dict) else list(names)


def _keypoint_names(model: PoseModel, count: int) -> tuple[str, ...] | None:
    named = getattr(model, "kpt_names", None)
    first = next(iter(named.values()), None) if isinstance(named, dict) else named
    return tuple(str(name) for name in first) if first is not None and len(first) == count else None
