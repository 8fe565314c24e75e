"""The artifact: trained heads, calibrations, regions, correlation, pruning threshold and OOD model in one file.

It stores the fingerprint of the base model that it was made for, and rejects other models. Its card records the data,
the splits by image id, the settings and the measured metrics.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from halopose.calibration.calibrators import LARGEST_TAU, Calibrations, GaussianCalibration, StudentTCalibration
from halopose.calibration.correlation import Correlation
from halopose.calibration.split_student_t import SplitStudentT
from halopose.data.tensors import check_seal, read_content, write_tensors
from halopose.errors import HaloposeError
from halopose.fitting.card import Card
from halopose.hosts.base import Host, fingerprint
from halopose.hosts.loading import load_host
from halopose.hosts.weight_sketch import same_model
from halopose.keypoints import Keypoints
from halopose.protocol import CovarianceKind
from halopose.uncertainty.heads import Activation, ConvTemplate, HeadSettings, ProbabilisticHeads
from halopose.uncertainty.novelty import Novelty
from halopose.uncertainty.regions import Regions

FORMAT = "halopose-artifact-2"


def round_to_stored(heads: ProbabilisticHeads) -> ProbabilisticHeads:
    """Round trained heads, in place, to the half precision they are stored in; do so before calibrating."""
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(parameter.half())
    return heads


@dataclass(frozen=True, repr=False)
class Artifact:
    """Everything that a frozen base model needs to predict uncertainty.

    Attributes:
        heads: Trained heads.
        calibrations: Fitted calibrations.
        base: Fingerprints of the base model.
        layout: Keypoints.
        imgsz: Input size.
        card: Data, splits, settings and metrics.
        novelty: Out-of-distribution model; None if none was fitted.

    Example:
        >>> from halopose.hosts.model_zoo import shipped_artifact
        >>> artifact = Artifact.load(shipped_artifact())
        >>> artifact.imgsz, artifact.card.images.counts()
        (640, {'calibration': 1000, 'choosing': 400, 'evaluation': 600, 'heads': 49230})
    """

    heads: ProbabilisticHeads
    calibrations: Calibrations
    base: tuple[str, ...]
    layout: Keypoints
    imgsz: int
    card: Card = field(default_factory=Card)
    novelty: Novelty | None = None

    def __repr__(self) -> str:
        state = "calibrated" if self.calibrated else "not calibrated"
        base = self.card.base or "an unnamed base"
        return f"Artifact({len(self.layout)} keypoints of {base}, {state}, input {self.imgsz})"

    @property
    def calibrated(self) -> bool:
        """Whether a calibration was fitted; ``halopose train`` writes heads without one."""
        return bool((self.calibrations.gaussian.effective_samples_ > 0).any())

    def fits(self, host: Host) -> bool:
        """Return whether this artifact was made for the host's model."""
        return same_model(self.base, host.fingerprints)

    def check(self, host: Host) -> None:
        """Raise a HaloposeError unless the artifact was made for the host's model."""
        if not self.fits(host):
            raise HaloposeError(
                f"the artifact was made for another base model than {host.description}: "
                "fit this model with `halopose fit`, or give the model that the artifact was made for"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that predictions depend on: the content of the file without the card."""
        content = {name: value for name, value in self._content().items() if name != "card"}
        return hashlib.sha256((fingerprint(self._tensors()) + json.dumps(content)).encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the file atomically; equal artifacts give identical bytes."""
        write_tensors(path, self._tensors(), self._content())

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"heads.{_stored_name(name)}": value.half() for name, value in self.heads.state_dict().items()}
        fitted = self.calibrations
        tensors |= {f"gaussian.{name}": value for name, value in fitted.gaussian.state_dict().items()}
        tensors |= {f"student.{name}": value for name, value in fitted.student.state_dict().items()}
        if fitted.offset is not None:
            tensors["offset"] = fitted.offset
        if fitted.split_student is not None:
            parts = (("kept", fitted.split_student.kept), ("pruned", fitted.split_student.pruned))
            tensors |= {
                f"{part}.{name}": value
                for part, distribution in parts
                for name, value in distribution.state_dict().items()
            }
        if self.novelty is not None:
            tensors |= {f"novelty.{name}": _stored(name, value) for name, value in self.novelty.to_tensors().items()}
        return tensors

    def _content(self) -> dict[str, Any]:
        fitted = self.calibrations
        content = {
            "format": FORMAT,
            "base": list(self.base),
            "layout": self.layout.to_json(),
            "strides": list(self.heads.strides),
            "head": self.heads.settings.to_json(),
            "templates": [
                [[list(layer.weight.shape), activation] for layer, activation in level.layers]
                for level in self.heads.by_level
            ],
            "threshold": fitted.threshold if fitted.threshold > float("-inf") else None,
            "visibility_threshold": fitted.visibility_threshold,
            "imgsz": self.imgsz,
            "covariance": fitted.student.covariance,
            "card": self.card.to_json(),
        }
        if fitted.regions is not None:
            content["regions"] = fitted.regions.to_json()
        if fitted.correlation is not None:
            content["correlation"] = fitted.correlation.to_json()
        return content

    @classmethod
    def load(cls, path: Path | str) -> Artifact:
        """Read and validate an artifact.

        Raises:
            HaloposeError: The file is missing, damaged, or no artifact.
        """
        if not Path(path).is_file():
            raise HaloposeError(f"no artifact at {path}: make one with `halopose fit`")
        try:
            content = read_content(path)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise HaloposeError(f"{path} is not a halopose artifact: make one with `halopose fit`")
            check_seal(path)
            return cls._parse(content, load_file(path))
        except HaloposeError as error:
            advice = "" if "halopose fit" in str(error) else ": make it again with `halopose fit`"
            raise HaloposeError(f"{error}{advice}") from None
        except (
            SafetensorError,
            OSError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            ArithmeticError,
            AttributeError,
        ):
            raise HaloposeError(f"{path} is damaged: make it again with `halopose fit`") from None

    @classmethod
    def _parse(cls, content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Artifact:
        layout = Keypoints.from_json(content["layout"])
        keypoints = len(layout)
        settings = HeadSettings.from_json(content["head"])
        templates = [
            [ConvTemplate(torch.zeros(shape), torch.zeros(shape[0]), activation) for shape, activation in level]
            for level in content["templates"]
        ]
        heads = ProbabilisticHeads(templates, content["strides"], keypoints, settings)
        activations = {activation for level in content["templates"] for _, activation in level}
        if len(content["strides"]) != len(templates):
            raise ValueError("levels and strides differ in number")
        if not activations <= set(get_args(Activation)) or content["covariance"] not in get_args(CovarianceKind):
            raise ValueError("unknown activation or covariance")
        gaussian = GaussianCalibration(keypoints)
        students = {
            name: StudentTCalibration(keypoints, covariance=content["covariance"])
            for name in ("student", "kept", "pruned")
            if f"{name}.nu_" in tensors
        }
        modules: dict[str, torch.nn.Module] = {"heads": heads, "gaussian": gaussian, **students}
        for name, module in modules.items():
            prefix = f"{name}."
            state = {
                _module_name(key[len(prefix) :]): value for key, value in tensors.items() if key.startswith(prefix)
            }
            if any(not torch.isfinite(value).all() for value in state.values()):
                raise ValueError("values are not finite")
            module.load_state_dict(state)
        distributions = students.values()
        for tau in (
            gaussian.tau_,
            *(distribution.tau_ for distribution in distributions),
            *(distribution.moment_tau_ for distribution in distributions),
        ):
            if not bool(((tau > 0) & (tau < LARGEST_TAU)).all()):
                raise ValueError("a temperature is out of range")
        threshold, visible = content["threshold"], content["visibility_threshold"]
        if any(value is not None and not math.isfinite(value) for value in (threshold, visible)):
            raise ValueError("a threshold is not finite")
        calibrations = Calibrations(
            gaussian,
            students["student"],
            float("-inf") if threshold is None else float(threshold),
            None if visible is None else float(visible),
            Regions.from_json(content["regions"], keypoints) if "regions" in content else None,
            Correlation.from_json(content["correlation"], keypoints) if "correlation" in content else None,
            SplitStudentT(students["kept"], students["pruned"]) if "kept" in students else None,
            _offset(tensors.get("offset"), keypoints),
        )
        novel = {name[8:]: value for name, value in tensors.items() if name.startswith("novelty.")}
        return cls(
            heads=heads.eval(),
            calibrations=calibrations,
            base=tuple(content["base"]),
            layout=layout,
            imgsz=int(content["imgsz"]),
            card=Card.from_json(content["card"]),
            novelty=Novelty.from_tensors(novel) if novel else None,
        )


def host_for(
    artifact: Artifact,
    base: Path | str | nn.Module | Host,
    *,
    device: torch.device | str | None = None,
    unsafe: bool = False,
    end2end: bool | None = None,
) -> Host:
    """Load the base model that an artifact was made for.

    Args:
        artifact: The artifact.
        base: Path of a checkpoint, a model, or a host.
        device: Torch device, such as "cpu" or "cuda:0".
        unsafe: Allow checkpoints that may run code when they are loaded; for trusted files only.
        end2end: Head of a YOLO26 that has a one-to-many and a one-to-one head; default: the artifact's.

    Raises:
        HaloposeError: The artifact was made for another base model.
    """
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    if end2end is None and not artifact.fits(host):
        with suppress(HaloposeError):
            host = load_host(base, device=device, unsafe=unsafe, end2end=True)
    artifact.check(host)
    return host


def _stored_name(name: str) -> str:
    """Return the name in the file of a tensor of the heads."""
    return name.replace("context_head.overlaps", "beyond.claims").replace("context_head.", "beyond.")


def _module_name(name: str) -> str:
    """Return the tensor's name in the heads; the inverse of ``_stored_name``."""
    return name.replace("beyond.claims", "context_head.overlaps").replace("beyond.", "context_head.")


def _offset(given: torch.Tensor | None, keypoints: int) -> torch.Tensor | None:
    """Validate mean residuals (K, 2) of a file."""
    if given is not None and (given.shape != (keypoints, 2) or not bool(torch.isfinite(given).all())):
        raise ValueError("an offset is not finite, or has another number of keypoints")
    return given


def _stored(name: str, value: torch.Tensor) -> torch.Tensor:
    """Convert the OOD model's parameters to half precision; its reference values stay exact."""
    return value if name.startswith("known") else value.half()
