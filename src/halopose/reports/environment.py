"""Installed packages, models and devices, with advice on problems: the content of ``halopose doctor``."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from halopose import __version__
from halopose.display import has_screen, has_windows
from halopose.errors import HaloposeError
from halopose.hosts import model_zoo
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.install_advice import install_command
from halopose.plugins import load_plugins

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "ultralytics", "libreyolo", "onnxruntime", "halopose-models")
# Modules and use of each extra of the core.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "ultralytics": (("ultralytics",), "YOLOv8, YOLO11, YOLO12 and YOLO26 (AGPL-3.0)"),
    "models": (("halopose_models",), "the shipped heads and detectors (AGPL-3.0)"),
    "yolonas": (("libreyolo",), "YOLO-NAS-Pose"),
    "onnx": (("onnx", "onnxruntime"), "export, and prediction with exported models"),
    "openvino": (("openvino",), "prediction with --runtime openvino"),
    "plot": (("matplotlib",), "figures for papers"),
    "studies": (("pycocotools",), "AP and AR of fine-tuned models"),
    "ray": (("ray",), "collecting on a Ray cluster"),
    "hdf5": (("h5py",), "DeepLabCut's h5 and SLEAP's slp files"),
    "cloud": (("fsspec",), "data at s3, gs, az and https addresses"),
}


def all_extras() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return modules and use of each extra, of the core and of plug-ins."""
    of_plugins = (extra for plugin in load_plugins() for extra in plugin.extras)
    return EXTRAS | {extra.name: (extra.modules, extra.use) for extra in of_plugins}


@dataclass(frozen=True)
class ExtraStatus:
    """An extra of the package: its use, and the modules that are missing."""

    name: str
    use: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class ModelStatus:
    """Installation of a named model.

    Attributes:
        name: Name of the model.
        use: What the model is for.
        detail: State of its base model and artifact, or why it cannot be loaded.
        ready: Whether its files are installed.
    """

    name: str
    use: str
    detail: str
    ready: bool


@dataclass(frozen=True)
class Environment:
    """The installation, and problems with advice.

    Attributes:
        versions: Version by package; "missing" where it is not installed.
        devices: Devices that PyTorch can use.
        threads: PyTorch's threads, and processors of the machine.
        display: Whether live windows work, or why not.
        cache: Folder of downloaded checkpoints, and its files.
        models: Named models.
        extras: Extras of the package.
        problems: One line for each problem, with what to do.
    """

    versions: dict[str, str]
    devices: tuple[str, ...]
    threads: tuple[int, int]
    display: str
    cache: tuple[Path, tuple[str, ...]]
    models: tuple[ModelStatus, ...]
    extras: tuple[ExtraStatus, ...]
    problems: tuple[str, ...]


def check_environment() -> Environment:
    """Check packages, devices, weights and display. Nothing is downloaded."""
    versions = {"halopose": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    models = tuple(_model(model.name) for model in model_zoo.named_models())
    extras = tuple(
        ExtraStatus(name, use, tuple(module for module in modules if find_spec(module) is None))
        for name, (modules, use) in all_extras().items()
    )
    folder = model_zoo.cache_folder()
    cached = tuple(sorted(path.name for path in folder.iterdir() if path.is_file())) if folder.is_dir() else ()
    threads = torch.get_num_threads(), os.cpu_count() or 1
    display = _display()
    problems = tuple(_problems(extras, threads))
    return Environment(versions, _devices(), threads, display, (folder, cached), models, extras, problems)


def to_text(found: Environment) -> str:
    """Text for the terminal."""
    lines = [f"{name:16}{text}" for name, text in found.versions.items()]
    lines += [
        "",
        f"{'devices':16}{', '.join(found.devices)}",
        f"{'threads':16}{found.threads[0]} of {found.threads[1]}",
    ]
    folder, cached = found.cache
    lines += [f"{'live window':16}{found.display}", f"{'weights':16}{folder}: {', '.join(cached) or 'none yet'}", ""]
    lines += [f"{model.name:16}{model.use}: {model.detail}" for model in found.models]
    lines += ["", "extras"]
    for extra in found.extras:
        advice = f"missing {', '.join(extra.missing)}: {install_command(extra.name)}"
        state = advice if extra.missing else "installed"
        lines.append(f"{extra.name:16}{extra.use}: {state}")
    lines += ["", *(f"problem: {problem}" for problem in found.problems or ())]
    return "\n".join(lines + ["no problems found"] * (not found.problems))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _devices() -> tuple[str, ...]:
    found = ["cpu"]
    found += [f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return tuple(found)


def _display() -> str:
    if not has_windows():
        return "no: this OpenCV has no windows (pip uninstall opencv-python-headless, then pip install opencv-python)"
    return "yes" if has_screen() else "no: there is no screen"


def _model(name: str) -> ModelStatus:
    """Whether the files of a named model are installed. A checkpoint that would be downloaded counts as missing."""
    model = next(each for each in model_zoo.named_models() if each.name == name)
    try:
        artifact = model.artifact()
    except HaloposeError as error:
        return ModelStatus(name, model.about, str(error), False)
    cached = f"{name}.pt" not in model_zoo.KNOWN or (model_zoo.cache_folder() / f"{name}.pt").is_file()
    base = "base model here" if cached else "base model is downloaded when first used"
    return ModelStatus(name, model.about, f"{base}, heads {artifact.name}", cached)


def _problems(extras: tuple[ExtraStatus, ...], threads: tuple[int, int]) -> list[str]:
    missing = {extra.name for extra in extras if extra.missing}
    problems = []
    if {"ultralytics", "yolonas"} <= missing:
        problems.append(f"no pose framework is installed: {install_command('ultralytics')}")
    elif "models" in missing:
        problems.append("the shipped heads are missing: pip install halopose-models, or ./models in a clone")
    if find_spec("torchvision") is not None:
        try:
            if ensure_torchvision():
                problems.append(
                    f"torchvision {_version('torchvision')} was built for another PyTorch than {torch.__version__}: "
                    "halopose replaces what it needs of it, but other packages may fail; install both from one index, "
                    "as in pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu"
                )
        except (ImportError, RuntimeError, OSError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"torchvision cannot be imported ({line}): install it again beside PyTorch")
    if threads[0] == 1 < threads[1]:
        problems.append(f"PyTorch uses 1 of {threads[1]} processors: unset OMP_NUM_THREADS to use all of them")
    cuda = getattr(torch.version, "cuda", None)
    if cuda and not torch.cuda.is_available() and sys.platform.startswith("linux"):
        problems.append(
            f"PyTorch was built for CUDA {cuda}, but there is no usable GPU: the CPU build is 5 GB smaller, "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    return problems
