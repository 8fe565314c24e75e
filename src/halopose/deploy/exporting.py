"""Export a model with heads, whatever its host is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halopose.deploy import added_heads, onnx_file
from halopose.deploy.end_to_end import build_end_to_end
from halopose.deploy.onnx_file import ExportSettings
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host
from halopose.hosts.onnx.onnx_host import OnnxHost

if TYPE_CHECKING:
    from onnx import ModelProto


def export_model(host: Host, artifact: Artifact, settings: ExportSettings | None = None) -> ModelProto:
    """Build one graph of model and heads: heads are added to an ONNX file; other models are traced with their heads.

    Args:
        host: Base model.
        artifact: Artifact of the base model.
        settings: Settings of the export.
    """
    settings = settings or ExportSettings()
    if settings.form == "end2end":
        return build_end_to_end(host, artifact, settings)
    if isinstance(host, OnnxHost):
        return added_heads.add_heads(host, artifact, settings)
    return onnx_file.build(host, artifact, settings)
