"""Write the web page that runs a model in the browser: static files, and ONNX Runtime from its npm package.

Any static server can serve the folder; the page sends no data.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from halopose.data.files import make_folder, write_bytes, write_json
from halopose.deploy.onnx_file import read_facts, write_model
from halopose.errors import HaloposeError
from halopose.hosts.model_zoo import cache_folder

if TYPE_CHECKING:
    from onnx import ModelProto

VERSION = "1.30.0"
PACKAGE = f"onnxruntime-web-{VERSION}.tgz"
SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
PAGE = ("index.html", "style.css", "app.js", "pose.js", "worker.js", "serve.py")
RUNTIME = (  # libraries for WASM and WebGPU with their binaries
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)


def write_page(folder: Path | str, model: ModelProto) -> None:
    """Write page, model, metadata and ONNX Runtime into a folder.

    Args:
        folder: Folder to write.
        model: Model of ``onnx_file.build``.
    """
    runtime = unpacked(runtime_package())
    folder = make_folder(folder)
    for name in PAGE:
        write_bytes(folder / name, (resources.files("halopose") / "deploy" / "web" / name).read_bytes())
    for name, content in runtime.items():
        write_bytes(folder / "ort" / name, content)
    write_model(model, folder / "model.onnx")
    write_json(folder / "facts.json", read_facts(model, "the model").__dict__)


def runtime_package() -> bytes:
    """Return the pinned npm package of ONNX Runtime, from the cache or from npm; its hash is checked."""
    path = cache_folder() / PACKAGE
    if path.is_file() and _sound(path.read_bytes()):
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        content = _packed(Path(folder))
    if content is None or not _sound(content):
        raise HaloposeError(
            f"cannot fetch onnxruntime-web {VERSION}, which the page needs: install npm and go online, "
            f"or put {PACKAGE} at {path}"
        )
    write_bytes(path, content)
    return content


def _packed(folder: Path) -> bytes | None:
    npm = shutil.which("npm")
    if npm is None:
        return None
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), f"onnxruntime-web@{VERSION}"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=folder)
    path = folder / PACKAGE
    return path.read_bytes() if done.returncode == 0 and path.is_file() else None


def _sound(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == SHA256


def unpacked(content: bytes) -> dict[str, bytes]:
    """Return the files of the package that the page needs, by name."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {name: archive.extractfile(f"package/dist/{name}") for name in RUNTIME}
        return {name: file.read() for name, file in files.items() if file is not None}
