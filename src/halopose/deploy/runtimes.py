"""The choice of what runs a model: PyTorch, or ONNX Runtime or OpenVINO with a cached export of the model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from halopose import __version__
from halopose.data.bounded_text import read_yaml
from halopose.data.files import make_folder
from halopose.deploy.deployed_model import MODEL, Deployed
from halopose.deploy.exporting import export_model
from halopose.deploy.folder import write_folder
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import ExportSettings, require_onnx
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import cache_folder, sha256_of
from halopose.hosts.onnx.onnx_host import read_onnx
from halopose.hosts.onnx.pose_graph import GivenByHand
from halopose.install_advice import install_command
from halopose.runtime.predict import Run
from halopose.types import Array

log = logging.getLogger(__name__)

Runtime = Literal["auto", "torch", "onnx", "openvino"]
VARIABLE = "HALOPOSE_RUNTIME"
WINDOWS = 16  # cells per level with covariances, enough at the usual confidence
EVALUATED_WINDOWS = 32  # enough at confidence 0.01, where an evaluation keeps 20 detections of an image


def user_settings() -> Path:
    """The yaml file with the user's settings, ``settings.yaml`` in ``halopose`` in the user's configuration."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "halopose" / "settings.yaml"


def default_runtime() -> Runtime:
    """``$HALOPOSE_RUNTIME``, else ``runtime`` of the user's settings, else ``torch``."""
    path = user_settings()
    stated, where = os.environ.get(VARIABLE) or None, VARIABLE
    if stated is None and path.is_file():
        settings, where = read_yaml(path), str(path)
        unknown = sorted(set(map(str, settings)) - {"runtime"})
        if unknown:
            raise HaloposeError(f"{path}: unknown setting {unknown[0]!r}: the file may hold runtime")
        stated = settings.get("runtime")
    return "torch" if stated is None else checked_runtime(stated, where)


def checked_runtime(name: Any, where: str = "runtime") -> Runtime:
    """Return the name of a runtime if it is known, else raise ``HaloposeError``."""
    for known in get_args(Runtime):
        if name == known:
            return known
    raise HaloposeError(f"{where} is {name!r}: give one of {', '.join(get_args(Runtime))}")


def resolve_runtime(given: str | None, of_torch: Sequence[str] = ()) -> Literal["torch", "onnx", "openvino"]:
    """Return the runtime to use.

    Args:
        given: What the caller asks for; None for the user's default.
        of_torch: Options in use that only PyTorch has. They overrule ``auto`` and the user's default.

    Raises:
        HaloposeError: The runtime is unknown or not installed, or does not support an option.
    """
    wanted = default_runtime() if given is None else checked_runtime(given)
    if wanted == "torch" or (of_torch and (given is None or wanted == "auto")):
        return "torch"
    if of_torch:
        raise HaloposeError(f"runtime {wanted} does not support {', '.join(of_torch)}: leave them out, or use torch")
    if wanted == "auto":
        if find_spec("onnx") and find_spec("onnxruntime"):
            return "onnx"
        return "openvino" if find_spec("onnx") and find_spec("openvino") else "torch"
    if find_spec("onnxruntime" if wanted == "onnx" else "openvino") is None:
        raise HaloposeError(f"runtime {wanted} is not installed: {install_command(wanted)}")
    return wanted


def resolve_exported(given: str | None) -> Literal["onnx", "openvino"]:
    """Return the runtime for an exported folder, for which ``torch`` and ``auto`` mean the installed one."""
    wanted = default_runtime() if given is None else checked_runtime(given)
    found = resolve_runtime("auto" if wanted == "torch" else wanted)
    return "openvino" if found == "openvino" else "onnx"


def open_exported(folder: Path | str, runtime: str = "onnx", visibility: float | None = None) -> Deployed:
    """Open an exported folder or model file in a runtime.

    Args:
        folder: The folder or the file.
        runtime: ``onnx`` or ``openvino``.
        visibility: Visibility threshold of pruning; default that of the file, 0 for none.
    """
    run = None if runtime == "onnx" else openvino_run(Path(folder) / MODEL if Path(folder).is_dir() else Path(folder))
    return Deployed(folder, run, visibility)


def openvino_run(path: Path) -> Run:
    """Return the function that runs a model file in OpenVINO, in single precision."""
    import openvino

    try:
        core = openvino.Core()
        settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(core.read_model(path), "CPU", settings)
    except RuntimeError as error:
        raise HaloposeError(f"OpenVINO cannot load {path} ({' '.join(str(error).split())[:160]})") from None
    names = [value.get_any_name() for value in compiled.outputs]

    def run(*given: Array) -> dict[str, Array]:
        found = compiled(list(given))
        return {name: found[number] for number, name in enumerate(names)}

    return run


def cached_export(
    base: Path | str | nn.Module | Host,
    artifact: Path | str | Artifact,
    load: Callable[[], tuple[Host, Artifact]],
    *,
    end2end: bool | None = None,
    windows: int = WINDOWS,
) -> Path:
    """Return the folder with the exported model; export it if the cache does not hold it.

    Args:
        base: Base model.
        artifact: Artifact of the base model.
        load: Loads both; called only for an export.
        end2end: Head of a YOLO26 that has both.
        windows: Number of cells per level with covariances.
    """
    require_onnx()
    parts = [_identity(base), _identity(artifact), end2end, windows, __version__]
    folder = cache_folder() / "exported" / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
    if folder.is_dir():
        try:
            Deployed(folder)
            return folder
        except HaloposeError:  # damaged, or of an older format
            shutil.rmtree(folder, ignore_errors=True)
    settings = ExportSettings(topk=TopkSettings(max(TopkSettings().candidates, 4 * windows), windows))
    log.info("exporting the model for this runtime, once, into %s ...", folder.parent)
    host, heads = load()
    model = export_model(host, heads, settings)
    try:
        partial = Path(tempfile.mkdtemp(dir=make_folder(folder.parent), prefix="."))
        try:
            write_folder(partial, model, heads)
            if not folder.is_dir():  # another process may have been faster
                partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise HaloposeError(
            f"cannot write the exported model to {folder} ({error.strerror or error}): set HALOPOSE_CACHE to a folder "
            "that can be written to, or use runtime torch"
        ) from None
    return folder


def _identity(part: Path | str | nn.Module | Host | Artifact) -> list[str]:
    """What identifies a base model or an artifact: hashes of files or weights."""
    if isinstance(part, Artifact):
        return [part.digest]
    if isinstance(part, (nn.Module, Host)):
        return list(load_host(part).fingerprints)
    path = Path(part)
    if path.suffix.lower() == ".onnx":  # its weights and what was stated by hand may be in other files
        content = read_onnx(path).SerializeToString(deterministic=True)
        return [hashlib.sha256(content).hexdigest(), json.dumps(GivenByHand.beside(path).to_json())]
    return [sha256_of(path)]
